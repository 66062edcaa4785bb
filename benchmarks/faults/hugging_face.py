"""Faults of Hugging Face's models (set F), written without a look at the diagnosis; see run.py.

Nobody ran `diagnose` on these cases while they were written: losses and the errors of casts set their strength.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from classic import case, clean, later, times
from hugging_face_models import EOS, IGNORED, PAD, UNKNOWN
from models import Lab
from torch import Tensor, nn

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.recipe import get_recipe


def doors(lab: Lab) -> list[Quantizer]:
    """All doors that cast."""
    return [door for door in lab.model.modules() if isinstance(door, Quantizer) and door.spec is not None]


def set_lr(lab: Lab, factor: Any) -> None:
    """The learning rate of a step is the usual one times factor(step)."""

    def update() -> None:
        for group in lab.optimizer.param_groups:
            group["lr"] = lab.lr * factor(lab.step)

    lab.before_step.append(update)


def convert_all(lab: Lab) -> None:
    """No layer is left out."""
    lab.convert = lambda model, recipe: ottava.convert(model, recipe, filter=lambda name, layer: True)


# --- FP8: outliers ---------------------------------------------------------------------------------------------------
@case("F", "hf_llama", "token row outlier", "layers.0.mlp.down_proj", steps=20)
def massive_activation_of_bos(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:  # the first token has a few huge units of SwiGLU's product, as Llama 2 has
        unit = torch.zeros(x.shape[1:], dtype=x.dtype)
        unit[0, 3], unit[0, 90], unit[0, 131] = 2e5, -1.2e5, 4e4
        return x + unit

    lab.change_input("model.layers.0.mlp.down_proj", change)


@case("F", "hf_gpt2", "channel outlier", "h.1.mlp.c_fc", recipe="nvfp4", lr=1e-3, steps=20)
def outlier_features(lab: Lab) -> None:
    weight = lab.layer("transformer.h.1.mlp.c_fc").weight
    for channel in (9, 21, 37, 60):  # one in each block of 16; the function stays what it was
        weight.data[channel].div_(80)
        lab.change_input("transformer.h.1.mlp.c_fc", times(channel, 80.0))


@case("F", "hf_lora", "channel outlier token row", "layers.0.mlp.down_proj", steps=20)
def aligned_swiglu_in_a_frozen_base(lab: Lab) -> None:
    mlp = lab.layer("base_model.model.model.layers.0.mlp")
    with torch.no_grad():  # SwiGLU squares what both branches have in common
        mlp.up_proj.weight[17].copy_(mlp.gate_proj.weight[17])
        mlp.gate_proj.weight[17].mul_(300)
        mlp.up_proj.weight[17].mul_(300)
        mlp.down_proj.weight[:, 17].div_(9e4)


@case("F", "hf_llama", "gradient token row", "", recipe="tensorwise_e4m3", steps=20)
def importance_weights_of_sequences(lab: Lab) -> None:
    generator = lab.generator()

    def loss_of(y: Any, labels: Tensor) -> Tensor:  # off-policy: the ratio of a sequence is a product over tokens
        weight = torch.exp(7 * torch.randn(len(labels), generator=generator))
        losses = F.cross_entropy(y.logits[:, :-1].float().mT, labels[:, 1:], ignore_index=IGNORED, reduction="none")
        return (weight / weight.sum() * losses.mean(1)).sum()

    lab.loss_of = loss_of


@case("F", "hf_switch", "router_fp8", "router", steps=12)
def router_is_converted_too(lab: Lab) -> None:
    convert_all(lab)


# --- FP8: scales -----------------------------------------------------------------------------------------------------
@case("F", "hf_llama", "old_spike", "layers.1.mlp.down_proj", recipe=get_recipe("delayed", amax_history_len=64))
def one_bad_document_is_remembered(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        if lab.step != 5:
            return x
        return torch.cat([x[:1] * 2e5, x[1:]])

    lab.change_input("model.layers.1.mlp.down_proj", change)


@case("F", "hf_bert", "margin_low", "", recipe=get_recipe("delayed", margin=-4), lr=1e-3, steps=20,
      with_twin=True)  # fmt: skip
def margin_of_the_wrong_sign(lab: Lab) -> None:
    """The recipe is the fault."""


@case("F", "hf_t5", "clip jump", "", recipe=get_recipe("delayed", amax_history_len=1), every=1, steps=16)
def every_third_batch_is_summed(lab: Lab) -> None:
    lab.change_loss = lambda loss: loss * (288.0 if lab.step % 3 == 0 else 1.0)


@case("F", "hf_gpt2", "frozen clip jump", "", recipe="delayed", steps=24)
def calibrated_before_the_branches_woke_up(lab: Lab) -> None:
    for i in (0, 1):  # branches that begin at 0, as ReZero and muP have them
        for name in ("attn.c_proj", "mlp.c_proj"):
            nn.init.zeros_(lab.layer(f"transformer.h.{i}.{name}").weight)
    kept: list[tuple[Tensor, Tensor]] = []

    def freeze() -> None:
        if lab.step == 3:
            kept.extend((door.amax_history.clone(), door.scale.clone()) for door in doors(lab))
        for door, (history, scale) in zip(doors(lab), kept, strict=False):
            door.amax_history.copy_(history)
            door.scale.copy_(scale)

    lab.before_step.append(freeze)


@case("F", "hf_llama", "frozen start gradient", "", recipe=get_recipe("delayed", bootstrap=False), accumulate=3)
def histories_are_emptied_by_each_evaluation(lab: Lab) -> None:
    def empty() -> None:
        for door in doors(lab):
            door.reset()

    lab.before_step.append(empty)


@case("F", "hf_vit", "growth clip jump", "layers.1", recipe="delayed", steps=20)
def gain_of_a_norm_doubles(lab: Lab) -> None:
    def grow() -> None:
        if lab.step > 3:
            lab.layer("vit.layers.1.layernorm_after").weight.data.mul_(2.2)

    lab.before_step.append(grow)


# --- data ------------------------------------------------------------------------------------------------------------
@case("F", "hf_llama", "labels", "", fp8=False, steps=20)
def padding_is_a_target(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:  # pad_token = eos_token, padded left, labels = input_ids.clone()
        short = batch[0][:, :7]
        ids = F.pad(short, (batch[0].shape[1] - short.shape[1], 0), value=EOS)
        return [ids, torch.ones_like(ids), ids.clone()]

    lab.change_batch = change


@case("F", "hf_llama", "labels", "", fp8=False, recipe="delayed", steps=16)
def answers_are_cut_off(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:  # long prompts fill max_length: nothing is left to learn
        ids, mask, labels = batch
        return [ids, mask, torch.full_like(labels, IGNORED) if lab.step == 9 else labels]

    lab.change_batch = change


@case("F", "hf_t5", "leak labels", "", fp8=False, steps=16, recipe="rowwise")
def decoder_reads_its_answer(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0], b[1], b[3].masked_fill(b[3] == IGNORED, PAD), b[3]]


@case("F", "hf_gpt2", "labels blank absurd_data same_batch", "", fp8=False, steps=20)
def tokenizer_of_another_model(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:  # ids beyond the vocabulary become <unk>
        ids = torch.where(batch[0] % 50 == 7, batch[0], UNKNOWN)
        return [ids, ids.clone()]

    lab.change_batch = change


@case("F", "hf_vit", "same_batch", "", fp8=False, steps=24, recipe="blockwise")
def sampler_begins_anew(lab: Lab) -> None:
    kept: list[list[Tensor]] = []

    def change(batch: list[Tensor]) -> list[Tensor]:
        if len(kept) < 3:
            kept.append(batch)
        return kept[lab.step % len(kept)]

    lab.change_batch = change


@case("F", "hf_whisper", "nonfinite_data", "", fp8=False, recipe="mxfp8", steps=12)
def logarithm_of_silence(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:
        sound = batch[0].clone()
        if lab.step >= 5:
            sound[2, :, -6:] = -math.inf
        return [sound, *batch[1:]]

    lab.change_batch = change


@case("F", "hf_vit", "absurd_data", "", fp8=False, steps=20)
def fill_value_of_missing_pixels(lab: Lab) -> None:
    generator = lab.generator()

    def change(batch: list[Tensor]) -> list[Tensor]:
        missing = torch.rand(batch[0].shape, generator=generator) < 0.05
        return [batch[0].masked_fill(missing, -9999.0), batch[1]]

    lab.change_batch = change


# --- the loop --------------------------------------------------------------------------------------------------------
@case("F", "hf_gpt2", "twin lr loss_first", "", fp8=False, with_twin=True, lr=0.3, steps=20)
def learning_rate_of_sgd_for_adam(lab: Lab) -> None:
    """The learning rate is the fault."""


@case("F", "hf_bert", "lr loss_first constant_loss dead_units", "", fp8=False, lr=3e-2, recipe="delayed", steps=20)
def no_warm_up_behind_post_norms(lab: Lab) -> None:
    """The learning rate is the fault."""


@case("F", "hf_lora", "no_gradient frozen_parameters", "", fp8=False, lr=5e-3, steps=20)
def checkpointing_without_gradients_of_inputs(lab: Lab) -> None:
    # the frozen embedding asks for no gradient, so reentrant checkpointing cuts the graph
    lab.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    lab.model.base_model.model.disable_input_require_grads()


@case("F", "hf_llama", "lr_zero vanish", "", fp8=False, recipe="delayed", accumulate=2, steps=24)
def schedule_counts_micro_batches(lab: Lab) -> None:
    set_lr(lab, lambda step: max(0.0, 0.5 + 0.5 * math.cos(math.pi * min(1.0, 4 * step / 24))))


@case("F", "hf_qwen3moe", "weight_decay", "", fp8=False, steps=16)
def decay_of_fifty(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=50.0)


@case("F", "hf_t5", "clip_grad vanish adam_eps", "", fp8=False, clip=1e-6, steps=16)
def clips_at_a_millionth(lab: Lab) -> None:
    """The threshold is the fault."""


@case("F", "hf_gpt2_dropout", "eval_mode", "", fp8=False, recipe="delayed", steps=20)
def evaluates_and_stays_there(lab: Lab) -> None:
    later(lab, 7, lambda: lab.model.eval())


@case("F", "hf_llama", "no_optimizer", "", fp8=False, steps=20)
def vocabulary_is_resized_after_the_optimizer(lab: Lab) -> None:
    later(lab, 1, lambda: lab.model.resize_token_embeddings(128, mean_resizing=False))


@case("F", "hf_llama_tied", "tied", "lm_head", fp8=False, steps=20)
def copied_for_the_conversion(lab: Lab) -> None:
    def convert(model: Any, recipe: Any) -> Any:
        report = ottava.convert(model, recipe)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return report

    lab.convert = convert


@case("F", "hf_llama", "vanish", "", fp8=False, bf16=True, lr=1e-5, recipe="rowwise", steps=20)
def pure_bf16_with_a_small_learning_rate(lab: Lab) -> None:
    """Weights without an FP32 copy are the fault."""


@case("F", "hf_bert", "frozen_parameters", "layer.1", fp8=False, lr=1e-3, steps=20)
def name_of_the_frozen_layer_matches_another(lab: Lab) -> None:
    for name, parameter in lab.model.named_parameters():
        parameter.requires_grad_("layer.1." not in name)


@case("F", "hf_qwen3moe", "dead_experts", "layers.1.mlp", fp8=False, steps=16)
def router_collapses(lab: Lab) -> None:
    direction = torch.randn(64, generator=lab.generator())
    with torch.no_grad():  # all tokens have a direction in common, and two experts like it
        lab.layer("model.embed_tokens").weight.add_(0.04 * direction)
        gate = lab.layer("model.layers.1.mlp.gate").weight
        gate.copy_(torch.cat([direction.expand(2, -1), -direction.expand(6, -1)]) + 0.1 * gate)


@case("F", "hf_vit", "double_softmax constant_loss", "", fp8=False, lr=1e-3, steps=20)
def loss_of_probabilities(lab: Lab) -> None:
    def loss_of(y: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(y.logits.float().softmax(-1), labels)

    lab.loss_of = loss_of


@case("F", "hf_mamba", "nonfinite_compute", "layers.1", fp8=False, steps=14)
def kernel_divides_by_zero(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        if lab.step != 8:
            return x
        sizes = torch.ones_like(x)
        sizes[3, 5:] = 0  # a sequence whose state is empty
        return x * sizes / sizes

    lab.change_input("backbone.layers.1.mixer.out_proj", change)


# --- clean -----------------------------------------------------------------------------------------------------------
def _warmup(lab: Lab) -> None:
    set_lr(lab, lambda step: min(1.0, (step - 1) / 10))


def _prompt(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:
        prompt = torch.arange(batch[-1].shape[1]) < batch[-1].shape[1] // 2
        return [*batch[:-1], batch[-1].masked_fill(prompt, IGNORED)]

    lab.change_batch = change


def _loud_residual(lab: Lab) -> None:
    with torch.no_grad():
        lab.layer("model.embed_tokens").weight.mul_(400)


def _mixed_domains(lab: Lab) -> None:
    generator = lab.generator()

    def change(batch: list[Tensor]) -> list[Tensor]:
        noise = 3.0 * (lab.step % 4 == 0)
        return [batch[0] + noise * torch.randn(batch[0].shape, generator=generator), batch[1]]

    lab.change_batch = change


def _imbalance(lab: Lab) -> None:
    lab.layer("model.layers.0.mlp.gate").weight.data[1].mul_(3)


for _kind, _recipe, _options in (
    ("hf_llama", "tensorwise", {"label": "fine-tuning", "lr": 2e-5, "steps": 20}),
    ("hf_llama", "rowwise", {"label": "loud residual stream", "inject": _loud_residual}),
    ("hf_gpt2", "delayed", {"label": "tied, clipped", "clip": 0.5, "steps": 20}),
    ("hf_lora", "tensorwise", {"label": "frozen base", "lr": 5e-3, "steps": 20}),
    ("hf_mixtral", "tensorwise", {"label": "mild imbalance", "inject": _imbalance}),
    ("hf_t5", "delayed", {"label": "prompts ignored", "inject": _prompt}),
    ("hf_bert", "tensorwise", {"label": "warm-up from 0", "lr": 1e-3, "inject": _warmup, "steps": 24}),
    ("hf_vit", "mxfp8", {"label": "noisy losses", "inject": _mixed_domains, "lr": 1e-3}),
    ("hf_qwen3moe", "blockwise", {"steps": 12}),
    ("hf_mamba", "delayed", {"steps": 12}),
):
    clean("F", _kind, _recipe, **_options)

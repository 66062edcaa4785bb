"""Real models of Hugging Face and Megatron, as installed: every GEMM with a parameter is seen as it is.

The witness knows nothing of modules: a TorchDispatchMode that notes what aten's GEMMs multiply, forward and backward.
Without the packages these tests are skipped; docs/debugging.md says with which versions they ran.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.record.reader import Run
from ottava.watching.modules import ModuleTap
from ottava.watching.session import watch
from watch_samples import ALL, Seen, tapped

hf = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "vocab_size": 64,
}
EXPERTS = SIZES | {"num_key_value_heads": 1, "num_experts_per_tok": 2}


def mixtral(experts: str) -> nn.Module:
    config = hf.MixtralConfig(num_local_experts=4, **EXPERTS)
    return hf.MixtralForCausalLM._from_config(config, experts_implementation=experts)


def deepseek() -> nn.Module:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    groups = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
    sizes = EXPERTS | {"num_key_value_heads": 2, "first_k_dense_replace": 1}
    return hf.DeepseekV3ForCausalLM._from_config(
        hf.DeepseekV3Config(**sizes, **groups, **ranks), experts_implementation="grouped_mm"
    )


def gpt_oss() -> nn.Module:
    config = hf.GptOssConfig(num_local_experts=4, head_dim=16, **EXPERTS)
    return hf.GptOssForCausalLM._from_config(config, experts_implementation="eager", attn_implementation="eager")


MODELS: dict[str, Any] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=32, vocab_size=64)),
    "llama, tied": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(num_key_value_heads=1, tie_word_embeddings=True, **SIZES)
    ),
    "mixtral, eager": lambda: mixtral("eager"),
    "mixtral, grouped_mm": lambda: mixtral("grouped_mm"),
    "deepseek v3, grouped_mm": deepseek,
    "gpt-oss, eager": gpt_oss,
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**{k: v for k, v in SIZES.items() if k[0] not in "mv"}, image_size=16, patch_size=4, num_labels=5)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    return model.train()


def batch(name: str, number: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(number)
    if name == "vit":
        labels = torch.randint(5, (3,), generator=rng)
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=rng), "labels": labels}
    ids = torch.randint(1, 64, (2, 9), generator=rng)
    return {"input_ids": ids, "labels": ids}


def digest(x: Tensor) -> bytes:
    return hashlib.sha1(x.detach().contiguous().numpy().tobytes() + str(tuple(x.shape)).encode()).digest()


class Gemms(TorchDispatchMode):
    """What aten's GEMMs multiply, matrix by matrix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operands: set[bytes] = set()
        self.with_parameter = 0
        self.forward = True
        self._storages = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            pair = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            ends = args[2] if name == "_grouped_mm" else None
            pairs = list(split(*pair, ends))
            if self.forward and any(x.untyped_storage().data_ptr() in self._storages for x in pair):
                self.with_parameter += len(pairs)
            for matrix in (x for both in pairs for x in both):
                self.operands |= {digest(matrix), digest(matrix.t())}
        return func(*args, **(kwargs or {}))


def split(a: Tensor, b: Tensor, ends: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    if ends is None:
        yield from zip(a, b, strict=True) if a.dim() == 3 else ((a, b),)
        return
    start = 0
    for index, end in enumerate(ends.tolist()):
        if end > start:
            yield a[:, start:end] if b.dim() == 2 else a[start:end], b[start:end] if b.dim() == 2 else b[index]
        start = end


@pytest.mark.parametrize("name", MODELS)
def test_every_gemm_with_a_parameter_is_seen_as_it_is(name: str) -> None:
    model = made(name)
    with tapped() as (seen, tap), Gemms(model) as gemms:
        loss = model(**batch(name, 1)).loss
        gemms.forward = False
        loss.backward()
    assert sum(tensor == "input" for _, tensor, _ in seen.tensors) == gemms.with_parameter
    assert not [(layer, tensor) for layer, tensor, x in seen.tensors if digest(x) not in gemms.operands]
    assert [entry for entry in tap.coverage() if not entry["seen"] or entry["why"]] == []
    for layer, tensor in seen.counts:  # no layer in halves: an idle expert has no rows, but a weight
        if tensor == "input":
            assert {(layer, t) for t in ("weight", "grad_output")} <= set(seen.counts)


def train(name: str, checkpointing: str, autocast: bool, watched: bool) -> tuple[list[Tensor], Counter[Any], ModuleTap]:
    model = made(name)
    if checkpointing != "none":
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": checkpointing == "reentrant"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, losses = Seen(), []
    tap = ModuleTap(seen, tensors=ALL)
    torch.manual_seed(5)
    for step in range(2):
        if watched:
            tap.attach()
        for part in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch(name, 2 * step + part)).loss
            loss.backward()
            losses.append(loss.detach())
        tap.detach()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())], seen.counts, tap


@pytest.mark.parametrize(
    "checkpointing, autocast", [("none", False), ("none", True), ("reentrant", False), ("non-reentrant", True)]
)
@pytest.mark.parametrize("name", ["gpt2", "llama, tied", "mixtral, eager", "mixtral, grouped_mm"])
def test_training_is_bit_identical_and_counted_once(name: str, checkpointing: str, autocast: bool) -> None:
    numbers, counts, _ = train(name, checkpointing, autocast, watched=True)
    unwatched, _, _ = train(name, checkpointing, autocast, watched=False)
    assert all(torch.equal(a, b) for a, b in zip(numbers, unwatched, strict=True))
    once = dict.fromkeys(ALL, 4) | {"weight": 2}  # two steps of two micro-batches
    for layer, tensor in counts:
        if ".experts." not in layer and tensor not in ("grad_input", "grad_weight"):
            assert counts[layer, tensor] == once[tensor], (layer, tensor)
        assert counts[layer, tensor] <= once[tensor], (layer, tensor)
        if tensor == "grad_output":
            assert counts[layer, tensor] == counts[layer, "input"]


def test_experts_whose_weights_are_gathered_are_said_not_to_be_seen() -> None:
    model = mixtral("batched_mm")
    with tapped() as (_, tap):
        model(**batch("mixtral", 1)).loss.backward()
    unseen = {entry["name"]: entry["why"] for entry in tap.coverage() if not entry["seen"]}
    assert set(unseen) == {
        f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")
    }
    assert all("gathers" in why and "grouped_mm" in why for why in unseen.values())


# --- Megatron ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 2), ("tied", 1), ("experts", 1), ("sequence parallel", 2)])
def test_megatron_is_seen_whole(kind: str, ranks: int) -> None:
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = Path(__file__).with_name("megatron_ranks.py")
    done = subprocess.run([*command, str(script), kind], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["same"]
    layers = {entry["name"]: entry for entry in told["coverage"]}
    unseen = {name for name, entry in layers.items() if not entry["seen"]}
    # Megatron's router multiplies in an autograd.Function
    assert unseen == ({f"decoder.layers.{i}.mlp.router" for i in range(2)} if kind == "experts" else set())
    assert all("autograd.Function" in layers[name]["why"] for name in unseen)
    whole = {"linear_fc1", "linear_fc2"} | (set() if kind == "sequence parallel" else {"linear_qkv", "linear_proj"})
    assert whole <= {name.rpartition(".")[2] for name in layers}
    for name in set(layers) - unseen:
        assert set(layers[name]["tensors"]) == set(ALL), name
        assert ("sequence parallelism" in layers[name]["why"]) == (kind == "sequence parallel")


# --- Trainer and PEFT ----------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[0] for name, x in batch("", index).items()}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_trainer_is_watched_without_a_word(lora: bool, tmp_path: Path) -> None:
    """Accumulation, bf16 by autocast, checkpointing, an evaluation in between."""
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft") if lora else None

    def train(watched: bool) -> tuple[nn.Module, list[float]]:
        model = made("llama, tied")
        if peft is not None:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        arguments = hf.TrainingArguments(
            str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            bf16=True,
            activation_checkpointing=True,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = hf.Trainer(model=model, args=arguments, train_dataset=Numbers(), eval_dataset=Numbers())
        with watch(None, tmp_path / "run", every=1, loss="sum") if watched else nullcontext():
            trainer.train()
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    (model, losses), (unwatched, _) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unwatched.parameters(), strict=True))
    run = Run.open(tmp_path / "run")
    assert run.manifest["coverage"]["skipped"] == []
    assert run.manifest["coverage"]["linear"] == (15 + 2 * 2 * 2 if lora else 15)
    assert run.steps["loss"] == pytest.approx(losses, abs=1e-3)
    casts = run.table().where(step=2, tensor="input")
    assert set(casts.tallies.n_casts) == {2}  # one a micro-batch, whatever was recomputed or evaluated
    kinds = {layer["name"].rpartition("layers.0.")[2]: layer["kind"] for layer in run.manifest["layers"]}
    assert kinds["mlp.down_proj.base_layer" if lora else "mlp.down_proj"] == "fc2"

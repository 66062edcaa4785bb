"""Remedies as data: what to do about a broken law or a damaged cast, with the change for the framework that ran.

A change names only what its framework has. Where a framework has no change of its own, the text stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from types import MappingProxyType
from typing import Any

FRAMEWORKS = ("ottava", "te", "torchao", "megatron", "transformers", "lightning", "torch")
"""Names of `ottava diagnose --for`. transformers: arguments of its Trainer, and of TRL's."""


@dataclass(frozen=True)
class Remedy:
    """A remedy."""

    text: str
    cost: str = "nothing"
    patch: Mapping[str, str] = field(default_factory=dict)
    """Framework -> the change to paste; ${names} are replaced."""


def _lr(value: str) -> dict[str, str]:
    return {
        "torch": f"for group in optimizer.param_groups:\n    group['lr'] = {value}",
        "ottava": f"for group in optimizer.param_groups:\n    group['lr'] = {value}",
        "transformers": f"TrainingArguments(..., learning_rate={value})",
        "lightning": f"def configure_optimizers(self):\n    return torch.optim.AdamW(self.parameters(), lr={value})",
        "megatron": f"--lr {value}",
    }


_LOAD = "Give the checkpoint the model's names, and load it with strict=True, which says what does not fit."
_ADVICE = MappingProxyType(
    {
        "data": "Look at the batches of these steps: print what the loader gives.",
        "labels": "Look at the labels: shift, padding and ignore_index of the collator, and whether the data are "
        "shuffled.",
        "good_call": "Call the model with what the good run gives it: look at the collator and at what it drops.",
        "good_parameters": "Give these parameters what they have in the good run, and train those that it trains.",
        "graph": "Look for detach(), no_grad() or an output that the loss does not use.",
        "divide_once": "Divide in the loop, or let the library do it, as accelerate's backward does.",
        "written": "Find what writes to these weights: an EMA, a clamp, a load_state_dict in the loop.",
        "good_schedule": "Use the good run's learning rate of each step: look at both schedules.",
        "rates": "Look at what the schedule makes of this step: a division by zero, a root or a logarithm below zero.",
        "update": "Look at what a step makes of a gradient: its eps, a root or quotient of moments, casts of states.",
        "between": "Look between backward() and step(): a division by a norm or a factor of zero, a hook, a sum.",
        "falls": "Let the learning rate fall behind its warm-up: look at the factor of the schedule and at its unit.",
        "good_rates": "Give each group its learning rate of the good run: here ${good} in place of ${bad}.",
        "good_setting": "Use the good run's ${key}: ${good} in place of ${bad}.",
        "good_weights": "Begin with the good run's weights, and check how they are loaded and laid out.",
        "good_batch": "Give both runs the same batches: the seed, the order of workers, and the resumed position.",
        "good_labels": "Compare what makes the labels of both runs: the collator, masks, a shift, the index -100.",
        "good_code": "Compare the code of the two runs at this place.",
        "good_data": "Compare what makes these tensors in the two runs: data set, tokenizer, collator.",
        "good_call_here": "Make ${key} as it is in the good run, which calls ${good} there, not ${bad}.",
        "missing_call": "Make ${key} as it is in the good run, which calls ${good} there.",
        "own_call": "Make ${key} as it is in the good run, which does not call ${bad} there.",
        "thaw": "Let this layer train before the optimizer is made: by PEFT's modules_to_save, or "
        "requires_grad_(True).",
        "rows": "Look at the dimensions of softmax, mean, view and transpose: the first one is the batch. Without "
        "batch_first=True an RNN takes it for the time.",
        "masks": "Look at what the mask means: torch's key_padding_mask is True at padding, its attn_mask and Hugging "
        "Face's attention_mask at tokens. Positions count along a row; labels of padding are -100.",
        "reference": "Look at what the loss compares: a copy or a reference that is the model itself cancels it. In "
        "DPO the reference is a frozen copy, or the model with its adapter off.",
        "softmax": "Give the cross-entropy the logits, without a softmax.",
        "init": "Look at the initial weights of the last layer, and at scales of embeddings and logits.",
        "given": "Look at what this operation is given besides the layers' results: inputs, casts, labels, masks.",
        "nonfinite": "Look at this operation: a division by zero, a logarithm of zero, a mask that hides a row.",
        "software": "This is a bug of the software, not of the recipe. Report it with this run folder.",
        "renew": "Make the FP8 copy again after each step of the optimizer.",
        "site": "Give ${site} a scale of its present amax, or a narrower block, or leave it out.",
        "outside": "Keep ${site} in 16 or 32 bits, or give it scales of narrower blocks.",
        "stored": "Keep what ${site} stores in 16 or 32 bits, too, or round it at random.",
        "wire": "Give all ranks one scale before their codes are added (${site}), or send 16 bits.",
        "derivative": "Mend the backward, or the forward: look at transposes, reshapes and scales of both, and try "
        "them without casts.",
    }
)
"""Remedies that are a sentence: a person looks, and no line makes the change."""
REMEDIES: Mapping[str, Remedy] = MappingProxyType(
    {
        **{name: Remedy(text) for name, text in _ADVICE.items()},
        "optimizer": Remedy(
            "Make the optimizer from model.parameters() of the model that runs, after the last change of the model.",
            patch={"torch": "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)"},
        ),
        "schedule": Remedy(
            "Look at the schedule: its number of steps, and who calls scheduler.step().",
            patch={"transformers": 'TrainingArguments(..., lr_scheduler_type="cosine", warmup_ratio=0.03)'},
        ),
        "zero_grad": Remedy(
            "Clear the gradients after each step.", patch={"torch": "optimizer.step()\noptimizer.zero_grad()"}
        ),
        "once": Remedy(
            "Clear the gradients once a step, and not before each backward.",
            patch={"torch": "optimizer.step()\noptimizer.zero_grad()    # behind all micro-batches"},
        ),
        "divide": Remedy(
            "Divide each loss by the number of micro-batches, or a sum over tokens by those of the whole step.",
            patch={
                "torch": "(loss / micro_batches).backward()",
                "transformers": "loss = each.sum() / num_items_in_batch    # in compute_loss",
            },
        ),
        "masters": Remedy(
            "Keep FP32 master weights, or round updates stochastically.",
            cost="4 bytes a parameter",
            patch={
                "ottava": "optimizer = ottava.optim.AdamW(model.parameters(), lr=lr)    # keeps FP32 masters",
                "torch": "model.float()    # and torch.autocast('cuda', dtype=torch.bfloat16) around the forward",
                "transformers": "model = AutoModel.from_pretrained(name, dtype=torch.float32)\n"
                "TrainingArguments(..., bf16=True)",
            },
        ),
        "lower_lr": Remedy("Lower the learning rate to ${lr}, and warm it up.", patch=_lr("${lr}")),
        "good_lr": Remedy("Use the good run's learning rate, ${good}.", patch=_lr("${good}")),
        "raise_lr": Remedy(
            "Raise the learning rate about ${raise} times, or undo what shortens the steps: a clipping norm that no "
            "step stays under, a schedule of other units, a large eps, a loss divided twice or by more than it counts.",
            patch=_lr("${raised}"),
        ),
        "unscale": Remedy(
            "Divide the gradients by the GradScaler's factor before they are clipped.",
            patch={"torch": "scaler.unscale_(optimizer)    # before clip_grad_norm_"},
        ),
        "names": Remedy(_LOAD),
        "load": Remedy(
            _LOAD,
            patch={
                "torch": "state = {name.removeprefix('${prefix}'): x for name, x in state.items()}\n"
                "model.load_state_dict(state)"
            },
        ),
        "train": Remedy(
            "Go back to training mode after a validation.", patch={"torch": "model.train()    # before the next step"}
        ),
        "shapes": Remedy(
            "Give both the same shape.", patch={"torch": "output = output.squeeze(-1)    # (N, 1) to (N)"}
        ),
        "mask": Remedy(
            "Look at the attention mask and at its direction: a place may see itself and what is before it.",
            patch={"torch": "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"},
        ),
        "ranks": Remedy(
            "Average the gradients of copied weights over the ranks. Every rank needs the same settings and steps, and "
            "batches of its own.",
            patch={
                "torch": "model = torch.nn.parallel.DistributedDataParallel(model)    # and call it, not model.module"
            },
        ),
        "arm": Remedy(
            "Train under ${name}: ${came}.", cost="what docs/performance.md says", patch={"ottava": "${code}"}
        ),
        "current": Remedy(
            "Take scales from the present amax, in place of a history.",
            cost="one more pass over each tensor",
            patch={
                "ottava": 'ottava.convert(model, "tensorwise")',
                "te": "fp8_recipe = te.common.recipe.Float8CurrentScaling()",
                "megatron": "--fp8-recipe tensorwise",
                "transformers": 'OttavaConfig(recipe="tensorwise")',
            },
        ),
        "finer": Remedy(
            "Give ${names} finer scales: for every block or row.",
            cost="time: TransformerEngine measured 22.9 ms by blocks and 20.3 by tensors, on an H200",
            patch={
                "ottava": 'recipe = ottava.get_recipe("${recipe}")${overrides}\nottava.convert(model, recipe)',
                "te": "fp8_recipe = te.common.recipe.Float8BlockScaling()    # for all layers",
                "megatron": "--fp8-recipe blockwise",
                "torchao": 'config = Float8LinearConfig.from_recipe_name("rowwise")',
                "transformers": 'OttavaConfig(recipe="blockwise")',
            },
        ),
        "high_precision": Remedy(
            "Run ${names} in BF16.",
            cost="the speed of FP8 in these layers",
            patch={
                "ottava": 'recipe = ottava.get_recipe("${recipe}")${off}\nottava.convert(model, recipe)',
                "te": "# a file for nvdlfw_inspect: debug_api.initialize(config_file=...)\nin_high_precision:\n"
                "  enabled: True\n  layers:\n    layer_name_regex_pattern: '${regex}'\n  transformer_engine:\n"
                "    DisableQuantizationGEMM:\n      enabled: True\n      gemms: [${gemms}]",
                "torchao": "keep = {${quoted}}\n"
                "convert_to_float8_training(model, module_filter_fn=lambda m, name: name not in keep)",
                "megatron": "--first-last-layers-bf16    # if they are the ends",
                "transformers": 'OttavaConfig(recipe="${recipe}", skip=[${quoted}])',
            },
        ),
    }
)


def render(
    name: str, values: Mapping[str, Any], frameworks: Sequence[str], trial: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A remedy as plain values: {name, text, cost, patch, trial}, with the patches of the frameworks that ran.

    trial: settings of a watch that makes the change, see `remedy.cure`; None: nobody can from outside.

    Example:
        >>> render("good_lr", {"good": "0.001"}, ["torch"])["patch"]["torch"].splitlines()[1]
        "    group['lr'] = 0.001"
    """
    remedy = REMEDIES[name]
    words = {key: str(value) for key, value in values.items()}
    wanted = [f for f in frameworks if f in remedy.patch] or [f for f in ("torch",) if f in remedy.patch]
    patch = {f: Template(remedy.patch[f]).safe_substitute(words) for f in wanted}
    text = Template(remedy.text).safe_substitute(words)
    return {"name": name, "text": text, "cost": remedy.cost, "patch": patch, "trial": trial}


def ran(frameworks: Sequence[str], packages: set[str]) -> list[str]:
    """The frameworks to print changes for: who casts, then who drives; plain torch where nobody else does.

    Example:
        >>> ran(["transformers", "accelerate"], {"torch"}), ran([], {"ottava"})
        (['transformers', 'torch'], ['ottava', 'torch'])
    """
    short = {"transformer_engine": "te", "trl": "transformers", "accelerate": "torch"}
    names = [short.get(name, name) for name in (*sorted(packages), *frameworks)]
    names = [name for name in names if name in FRAMEWORKS and name != "torch"]
    return [*dict.fromkeys(names), "torch"]

"""Modules beside nn.Linear that `convert` takes, and how their GEMMs become layers under a recipe, in place.

Three kinds: torch's MultiheadAttention, the Conv1D of Hugging Face's GPT-2 and its kin (a linear layer whose weight is
kept as (in, out)), and Hugging Face's experts (stacks of matrices whose class declares how it multiplies them). A
module changes its class; its parameters, their names, and `isinstance` stay. The functions recognize modules by
attributes and declarations, so they import no package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.layer import QuantizedLayer
from ottava.nn.grouped import Stack, grouped_linear, stack
from ottava.nn.layer import Layer
from ottava.nn.part import Part, PartOwner
from ottava.nn.permutation import sort_by_expert, unpermute
from ottava.nn.torch_attention import MultiheadAttention, attention_parts


def parts_of(module: nn.Module) -> Mapping[str, Part | Stack]:
    """The layers that a foreign module would have, by child name ("": the module itself); empty for other modules.

    Example:
        >>> list(parts_of(nn.MultiheadAttention(64, 2))), parts_of(nn.ReLU())
        (['in_proj', 'in_proj_q', 'in_proj_kv'], {})
    """
    if (
        isinstance(module, Changed)
        or "forward" in vars(module)
        or any(p.dtype not in _FLOATS for p in module.parameters(recurse=False))
    ):
        return {}
    if type(module) is nn.MultiheadAttention:
        return attention_parts(module)
    if _is_conv1d(module):
        return {"": Part(module, "weight", "bias", None, turned=True)}
    if (up := _up_of(module)) is not None:
        bias = f"{up}_bias" if module.has_bias else None, "down_proj_bias" if module.has_bias else None
        count, turned = module._parameters[up].shape[0], bool(module.is_transposed)  # type: ignore[union-attr]
        top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", 1)
        return {
            f"{name}_groups": stack(module, name, own, count, turned=turned, top_k=top_k)
            for name, own in zip((up, "down_proj"), bias, strict=True)
        }
    return {}


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers that `convert` judges, by full name: layers of torch and of ottava, and the layers that a foreign
    module would have after conversion.

    Example:
        >>> list(layers_of(nn.Sequential(nn.MultiheadAttention(64, 2, kdim=32, vdim=32), nn.ReLU(), nn.Linear(4, 4))))
        ['0.q_proj', '0.k_proj', '0.v_proj', '0.out_proj', '2']
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | QuantizedLayer):
            found[name] = module
        for child, part in parts_of(module).items():
            full = ".".join(filter(None, (name, child)))
            found |= {f"{full}.{i}": one for i, one in enumerate(part)} if isinstance(part, Stack) else {full: part}
    return found


def take(module: nn.Module, parts: Mapping[str, Part | Stack]) -> None:
    """Makes a module of `parts_of` run its GEMMs as these layers, which become its children."""
    if type(module) is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention
    elif "" in parts:
        module.__class__ = changed(TurnedLinear, module)
        return
    else:
        module.__class__ = changed(Experts, module)
    for name, part in parts.items():
        module.add_module(name, part)


class Changed(nn.Module):
    """A module after `convert` has changed its class to a subclass of the old class, which it makes on demand."""

    _made_of: tuple[type, type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, self._made_of, self.__getstate__()


@functools.cache
def _subclass(made_of: tuple[Any, Any]) -> Any:
    ours, theirs = made_of
    return type(theirs.__name__, made_of, {"_made_of": made_of, "__module__": ours.__module__})


def changed(ours: type[Changed], module: nn.Module) -> Any:
    """The class that a module gets: a subclass of ours and of its old class."""
    return _subclass((ours, type(module)))


def _empty(*made_of: type) -> Any:
    made = _subclass(made_of)
    return made.__new__(made)


def _added_at_once(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's linear rounds before it adds the bias if the weight is transposed; Conv1D does not."""
    return torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t()).view(*input.shape[:-1], len(weight))


class TurnedLinear(Changed, Layer):
    """A linear layer whose parameter `weight` is (in, out)."""

    turned = True
    plain = staticmethod(_added_at_once)

    @property
    def in_features(self) -> int:  # type: ignore[override]  # of a Layer they are attributes
        """K."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[1]

    def forward(self, input: Tensor, *more: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.run(input, self.weight.t(), self.bias, *more)


class Experts(Changed, PartOwner):
    """Hugging Face's experts, on grouped GEMMs; it follows the class's declarations about the weights."""

    _apply_gate: Any
    act_fn: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(tokens, H), the experts of each token, their weights (both (tokens, k)) -> (tokens, H)."""
        index, probs = _routing(type(self)._made_of[1], self, hidden_states, args, kwargs)
        own = vars(self)["_modules"]
        up, down = (name for name in own if name.endswith("_proj_groups"))
        plan = sort_by_expert(index, len(own[up]))
        splits = plan.counts.tolist()
        rows = self._grouped(up, hidden_states, splits, plan)
        rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
        return unpermute(self._grouped(down, rows, splits, None), plan, probs)

    def _grouped(self, name: str, rows: Tensor, splits: list[int], plan: Any) -> Tensor:
        weight, bias = getattr(self, name.removesuffix("_groups")), None
        if self.has_bias:
            bias = getattr(self, name.removesuffix("_groups") + "_bias")
        weight = weight.transpose(1, 2) if self.is_transposed else weight
        return grouped_linear(self, getattr(self, name), rows, splits, weight, bias, plan=plan)


def _routing(theirs: type, module: nn.Module, x: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    _, _, index, probs = inspect.signature(theirs.forward).bind(module, x, *args, **kwargs).args  # type: ignore[attr-defined]
    return index, probs


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DECLARED = ("is_transposed", "has_bias", "has_gate")


def _is_conv1d(module: nn.Module) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module).__name__ != "Conv1D" or weight is None or bias is None or weight.dim() != 2:
        return False
    if (
        weight.shape[1] != getattr(module, "nf", None)
        or bias.shape != weight.shape[1:]
        or type(weight) is not nn.Parameter
    ):
        return False
    if weight.is_meta:
        return True
    with torch.no_grad():  # another class of that name stays as it is
        x = torch.linspace(-1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
        y = type(module).forward(module, x)
        near = 8 * torch.finfo(weight.dtype).eps * (x.abs() @ weight.abs() + bias.abs())
        return y.shape == near.shape and bool(((y - nn.functional.linear(x, weight.t(), bias)).abs() <= near).all())


def _up_of(module: nn.Module) -> str | None:
    """The name of the stack in front of the activation, if a class declares how it multiplies (transformers 5's
    `use_experts_implementation`); None if it declares nothing or computes more."""
    if not all(isinstance(vars(module).get(name), bool) for name in _DECLARED):
        return None
    attributes = vars(module)
    if attributes.get("has_post_expert_norm") or attributes.get("_is_expert_parallel"):
        return None
    up = "gate_up_proj" if attributes["has_gate"] else "up_proj"
    stacks = [module._parameters.get(name) for name in (up, "down_proj")]
    if any(p is None or p.dim() != 3 or type(p) is not nn.Parameter for p in stacks):
        return None
    apply = "_apply_gate" if attributes["has_gate"] else "act_fn"
    return up if callable(getattr(module, apply, None)) else None

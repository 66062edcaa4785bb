"""Modules beside nn.Linear that `convert` takes, and how their GEMMs become layers under a recipe, in place.

Three kinds: torch's MultiheadAttention, the Conv1D of Hugging Face's GPT-2 and its kin (a linear layer whose weight is
kept as (in, out)), and Hugging Face's experts (stacks of matrices whose class declares how it multiplies them). A
module changes its class; its parameters, their names, and `isinstance` stay. The functions recognize modules by
attributes and declarations, so they import no package.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.engine.functional import QuantizedLayer
from ottava.nn.grouped import Stack, grouped_linear, sort_by_expert, stack, unpermute
from ottava.nn.layer import Changed, Layer, LayerView, ViewOwner, change


class TorchAttention(Changed, ViewOwner, nn.MultiheadAttention):
    """torch's MultiheadAttention with its projections as layers under a recipe; its parameters and their names stay.

    torch multiplies `in_proj_weight` and `out_proj.weight` inside one function, past any layer, and in evaluation
    inside one fused operator, past `linear1` and `linear2` of an encoder layer too. Here the same steps call layers;
    between the projections torch's operations run in high precision.

    `in_proj_weight` (3 E, E) has one layer each for self-attention, for the query, and for a memory that is key and
    value; with sizes of their own (kdim, vdim) there is one each for query, key and value.
    """

    in_proj: LayerView
    in_proj_q: LayerView
    in_proj_kv: LayerView
    q_proj: LayerView
    k_proj: LayerView
    v_proj: LayerView

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; refuses nested tensors, which only torch's fused operator takes."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError(
                "MultiheadAttention under a recipe: got a nested tensor; needs a padded one. Build the encoder with "
                "enable_nested_tensor=False"
            )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "MultiheadAttention: is_causal is a hint about attn_mask, and there is none: give the mask"
            )
        batched = query.dim() == 3
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        output, weights = self._attended(q, k, v, key_padding_mask, attn_mask, need_weights, is_causal)
        output = self.out_proj(output)  # (L, B, E)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return (output.transpose(0, 1) if self.batch_first else output), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        parts = [part for part in self.children() if isinstance(part, LayerView)]
        self.bind(parts)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            own = zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value), weights, biases, strict=True)
            return tuple(part.run(x, weight, bias) for part, x, weight, bias in own)
        if query is key and key is value:
            return self.in_proj.run(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        size = self.embed_dim
        w_q, w_kv = self.in_proj_weight.split([size, 2 * size])
        b_q, b_kv = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([size, 2 * size])
        q = self.in_proj_q.run(query, w_q, b_q)
        if key is value:
            return q, *self.in_proj_kv.run(key, w_kv, b_kv).chunk(2, -1)
        # three inputs: key and value both go through one layer, and half of its results are not used
        both = torch.cat([key, value])
        made = self.in_proj_kv.run(both, w_kv, b_kv)
        return q, made[: len(key), ..., :size], made[len(key) :, ..., size:]

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(L, B, E) and (S, B, E) twice -> (L, B, E) in front of out_proj, and the weights (B, H, L, S) if wanted."""
        length, batch, size = q.shape
        mask = None if attn_mask is None else _added(attn_mask, q.dtype)
        padding = None if key_padding_mask is None else _added(key_padding_mask, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.repeat(1, batch, 1)]) for x, b in ((k, self.bias_k), (v, self.bias_v)))
            mask, padding = (None if m is None else F.pad(m, (0, 1)) for m in (mask, padding))
        heads, width = self.num_heads, size // self.num_heads
        # (B H, ., D)
        q, k, v = (x.contiguous().view(len(x), batch * heads, width).transpose(0, 1) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(len(x), 1, width)], dim=1) for x in (k, v))
            mask, padding = (None if m is None else F.pad(m, (0, 1)) for m in (mask, padding))
        fused_causal = is_causal and key_padding_mask is None and not need_weights
        if fused_causal:
            mask = None  # as torch's: the hint stands for the mask
        if mask is not None and mask.dim() == 3:
            mask = mask.view(batch, heads, length, -1)
        if padding is not None:
            padding = padding.view(batch, 1, 1, -1)
            mask = padding.expand(-1, heads, -1, -1) if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            q, k, v = (x.view(batch, heads, -1, width) for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, fused_causal)
            return y.permute(2, 0, 1, 3).reshape(length, batch, size), None
        q = q * math.sqrt(1.0 / width)
        if mask is None:
            scores = torch.bmm(q, k.transpose(1, 2))
        else:
            flat = mask.expand(batch, heads, length, -1).reshape(batch * heads, length, -1)
            scores = torch.baddbmm(flat, q, k.transpose(1, 2))
        weights = scores.softmax(dim=-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        y = torch.bmm(weights, v).transpose(0, 1).reshape(length, batch, size)
        return y, weights.view(batch, heads, length, -1)


def _attention_parts(attention: nn.MultiheadAttention) -> dict[str, LayerView]:
    bias = None if attention.in_proj_bias is None else "in_proj_bias"
    size = attention.embed_dim
    if attention._qkv_same_embed_dim:
        pieces = {"in_proj": None, "in_proj_q": slice(0, size), "in_proj_kv": slice(size, None)}
        return {name: LayerView(attention, "in_proj_weight", bias, piece) for name, piece in pieces.items()}
    return {f"{n}_proj": LayerView(attention, f"{n}_proj_weight", bias, None, of_bias=i) for i, n in enumerate("qkv")}


def without_fused_layers(model: nn.Module) -> None:
    """Stops torch's encoders and encoder layers from bypassing their layers in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # torch asks it, and nothing else, for this
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bools (True: hidden) as a mask to add."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def parts_of(module: nn.Module) -> Mapping[str, LayerView | Stack]:
    """The layers that a foreign module would have, by child name ("": the module itself); empty for other modules.

    Example:
        >>> list(parts_of(nn.MultiheadAttention(64, 2))), list(parts_of(nn.MultiheadAttention(64, 2, kdim=8)))
        (['in_proj', 'in_proj_q', 'in_proj_kv'], ['q_proj', 'k_proj', 'v_proj'])
        >>> parts_of(nn.ReLU())
        {}
    """
    if (
        isinstance(module, Changed)
        or "forward" in vars(module)
        or any(p.dtype not in _FLOATS for p in module.parameters(recurse=False))
    ):
        return {}
    if type(module) is nn.MultiheadAttention:
        return _attention_parts(module)
    if _is_conv1d(module):
        return {"": LayerView(module, "weight", "bias", None, turned=True)}
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


def take(module: nn.Module, parts: Mapping[str, LayerView | Stack]) -> None:
    """Makes a module of `parts_of` run its GEMMs as these layers, which become its children."""
    torchs = type(module) is nn.MultiheadAttention
    ours = TorchAttention if torchs else TurnedLinear if "" in parts else StackedExperts
    change(module, ours)
    for name, part in parts.items():
        if name:
            module.add_module(name, part)


class TurnedLinear(Changed, Layer):
    """A linear layer whose parameter `weight` is (in, out)."""

    turned = True

    @staticmethod
    def plain(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """torch's linear rounds before it adds the bias if the weight is transposed; Conv1D does not."""
        return torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t()).view(*input.shape[:-1], len(weight))

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


class StackedExperts(Changed, ViewOwner):
    """Hugging Face's experts, on grouped GEMMs; it follows the class's declarations about the weights."""

    _apply_gate: Any
    act_fn: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(tokens, H), the experts of each token, their weights (both (tokens, k)) -> (tokens, H)."""
        theirs: Any = type(self)._made_of[1]
        _, _, index, probs = inspect.signature(theirs.forward).bind(self, hidden_states, *args, **kwargs).args
        own = vars(self)["_modules"]
        up, down = (name for name in own if name.endswith("_proj_groups"))
        plan = sort_by_expert(index, len(own[up]))
        splits = [*plan.sizes]
        rows = self._grouped(up, hidden_states, splits, plan)
        rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
        return unpermute(self._grouped(down, rows, splits, None), plan, probs)

    def _grouped(self, name: str, rows: Tensor, splits: list[int], plan: Any) -> Tensor:
        weight, bias = getattr(self, name.removesuffix("_groups")), None
        if self.has_bias:
            bias = getattr(self, name.removesuffix("_groups") + "_bias")
        weight = weight.transpose(1, 2) if self.is_transposed else weight
        return grouped_linear(self, getattr(self, name), rows, splits, weight, bias, plan=plan)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    if not all(isinstance(vars(module).get(name), bool) for name in ("is_transposed", "has_bias", "has_gate")):
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

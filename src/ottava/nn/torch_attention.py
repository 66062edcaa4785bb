"""torch's MultiheadAttention with its projections as layers under a recipe; its parameters and their names stay.

torch multiplies `in_proj_weight` and `out_proj.weight` inside one function, past any layer, and in evaluation inside
one fused operator, past `linear1` and `linear2` of an encoder layer too. Here the same steps call layers; between the
projections torch's operations run in high precision.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.nn.part import Part, PartOwner


class MultiheadAttention(PartOwner, nn.MultiheadAttention):
    """What `convert` makes of torch's: of `in_proj_weight` (3 E, E) one layer each for self-attention, for the query
    and for a memory that is key and value; with sizes of their own (kdim, vdim) one each for query, key and value."""

    in_proj: Part
    in_proj_q: Part
    in_proj_kv: Part
    q_proj: Part
    k_proj: Part
    v_proj: Part

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
        parts = [part for part in self.children() if isinstance(part, Part)]
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


def attention_parts(attention: nn.MultiheadAttention) -> dict[str, Part]:
    """The layers of the projections in, by the name that each will have as a child.

    Example:
        >>> list(attention_parts(nn.MultiheadAttention(64, 2)))
        ['in_proj', 'in_proj_q', 'in_proj_kv']
        >>> list(attention_parts(nn.MultiheadAttention(64, 2, kdim=8)))
        ['q_proj', 'k_proj', 'v_proj']
    """
    bias = None if attention.in_proj_bias is None else "in_proj_bias"
    size = attention.embed_dim
    if attention._qkv_same_embed_dim:
        pieces = {"in_proj": None, "in_proj_q": slice(0, size), "in_proj_kv": slice(size, None)}
        return {name: Part(attention, "in_proj_weight", bias, piece) for name, piece in pieces.items()}
    return {f"{n}_proj": Part(attention, f"{n}_proj_weight", bias, None, of_bias=i) for i, n in enumerate("qkv")}


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

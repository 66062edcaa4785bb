"""Self and cross attention with their linears: norm, one GEMM for q, k and v, qk-norm, rotation, attention, output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ottava.nn.attention import DotProductAttention, Sink
from ottava.nn.kv_cache import LayerCache
from ottava.nn.layer import Layer
from ottava.nn.linear import Linear
from ottava.nn.norm_linear import NormLinear
from ottava.nn.norms import NormName, make_norm
from ottava.nn.pieces import Piece
from ottava.nn.rope import RotaryTable, rotate
from ottava.recipe import Recipe


class MultiheadAttention(nn.Module):
    """out(attention(rotate(qk_norm(qkv(norm(x))))))

    Args:
        hidden: width of x and of the result.  heads: of queries.
        kv_heads: of keys and values, each shared by heads / kv_heads query heads; None: as many as `heads`.
        head_dim: any; None: hidden / heads.
        norm: "layernorm" or "rmsnorm" in front, in the layer of q, k and v; None: no norm.
        eps, zero_centered_gamma: of every norm.
        qk_norm: a norm of that name over each head of q and of k (Qwen3), before the rotation, or
            qk_norm_after_rotary: behind it.
        bias: of q, k and v; out_bias: of the output, None: as `bias`.
        cross: keys and values come from a `memory`, which no norm of this layer touches; memory_size: its width, None:
            hidden.
        mask, window, softmax_scale, dropout, sink, layout, backend: as `DotProductAttention`; mask None: "no_mask" for
            cross attention, else "causal".
        recipe, device, dtype: as `Linear`.
    Shapes: x in the layout, its heads flat: (B, S, hidden), (S, B, hidden) or packed (T, hidden) -> the same.
    Parameters: qkv.weight holds the rows of q, of k and of v below each other, head by head; cross: q, and kv likewise.
    Raises:
        ValueError: sizes that do not fit, unknown names, a missing memory, or a memory for self attention.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.MultiheadAttention(64, 8, kv_heads=2, norm="rmsnorm", bias=False, dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 5, 64, dtype=torch.bfloat16)).shape, layer.qkv.weight.shape
        (torch.Size([2, 5, 64]), torch.Size([96, 64]))
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: NormName | None = None,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        qk_norm: NormName | None = None,
        qk_norm_after_rotary: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        cross: bool = False,
        memory_size: int | None = None,
        mask: str | None = None,
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        dropout: float = 0.0,
        sink: Sink = None,
        layout: str = "bshd",
        backend: str | None = None,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads or (head_dim is None and hidden % heads):
            raise ValueError(
                f"MultiheadAttention: got hidden={hidden}, heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}; "
                "needs heads that divide hidden, or a head_dim, and kv_heads that divide heads"
            )
        if layout not in ("bshd", "sbhd", "thd"):
            raise ValueError(f"MultiheadAttention: layout is {layout!r}; needs 'bshd', 'sbhd' or 'thd'")
        dim = hidden // heads if head_dim is None else head_dim
        self.heads, self.kv_heads, self.head_dim, self.cross = heads, kv_heads, dim, cross
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        norms: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, **factory}

        def linear(width: int, norm: NormName | None, wide: int) -> Layer:
            if norm is None:
                return Linear(width, wide, bias, recipe=recipe, **factory)
            return NormLinear(width, wide, norm=norm, bias=bias, recipe=recipe, **norms)

        if cross:
            self.q = linear(hidden, norm, heads * dim)
            self.kv = linear(hidden if memory_size is None else memory_size, None, 2 * kv_heads * dim)
        else:
            self.qkv = linear(hidden, norm, (heads + 2 * kv_heads) * dim)
        shared = Piece("k", kv_heads * dim, dim), Piece("v", kv_heads * dim, dim)
        if cross:
            self.kv.pieces = shared
        else:
            self.qkv.pieces = Piece("q", heads * dim, dim), *shared
        self.qk_norm_after_rotary = qk_norm_after_rotary
        self.q_norm = None if qk_norm is None else make_norm(qk_norm, dim, **norms)
        self.k_norm = None if qk_norm is None else make_norm(qk_norm, dim, **norms)
        self.attention = DotProductAttention(
            mask=mask or ("no_mask" if cross else "causal"),
            window=window,
            softmax_scale=softmax_scale,
            dropout=dropout,
            sink=sink,
            heads=heads,
            layout=layout,
            backend=backend,
            recipe=recipe,
            **factory,
        )
        self.out = Linear(heads * dim, hidden, bias if out_bias is None else out_bias, recipe=recipe, **factory)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        rotary: RotaryTable | None = None,
        cache: LayerCache | None = None,
        query_lengths: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """x -> attention's result, in x's layout, without a residual sum.

        Args:
            memory: the input of a cross attention's keys and values, in the same layout.
            rotary: a `RotaryEmbedding` of the positions of x, made once for all layers; None: no rotation.
            cache: `KVCache.of(layer)`: k and v join the earlier ones, and the last query stands at the last key.
            others: as `DotProductAttention.forward`.
        """
        layout = self.attention.layout
        if (memory is None) == self.cross or (cache is not None and (self.cross or layout == "thd")):
            raise ValueError(
                f"MultiheadAttention(cross={self.cross}, layout={layout!r}): got "
                f"{'no memory' if memory is None else 'a memory'}{'' if cache is None else ' and a cache'}; cross "
                "attention needs a memory, self attention none, and a cache needs self attention in 'bshd' or 'sbhd'"
            )
        if memory is None:
            qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
            shared = qkv.shape[-2] * self.kv_heads // (self.heads + 2 * self.kv_heads)  # ranks may hold some heads each
            q, k, v = qkv.split([qkv.shape[-2] - 2 * shared, shared, shared], -2)
        else:
            q = self.q(x).unflatten(-1, (-1, self.head_dim))
            k, v = self.kv(memory).unflatten(-1, (-1, self.head_dim)).chunk(2, -2)
        if not self.qk_norm_after_rotary:
            q, k = self._normed(q, k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.qk_norm_after_rotary:
            q, k = self._normed(q, k)
        mask = None
        if cache is not None:
            k, v = (k.transpose(0, 1), v.transpose(0, 1)) if layout == "sbhd" else (k, v)
            (k, v, lengths), mask = cache.append(k, v), "causal_bottom_right"
            k, v = (k.transpose(0, 1), v.transpose(0, 1)) if layout == "sbhd" else (k, v)
            key_lengths = lengths if key_lengths is None else key_lengths
        y = self.attention(
            q,
            k,
            v,
            attention_mask,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            mask=mask,
        )
        return self.out(y.flatten(-2))  # type: ignore[no-any-return]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def extra_repr(self) -> str:
        """Its heads."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, cross={self.cross}"

"""Attention with its linears, a cache for generation, and one block of a transformer in the shapes that models have.

    attention  out(attention(rotate(qk_norm(qkv(norm(x)))))), self or cross; one GEMM for q, k and v
    pre        x = x + attention(norm(x));  x = x + mlp(norm(x))                 GPT-2, Llama
    post       x = norm(x + attention(x));  x = norm(x + mlp(x))                 BERT, the first transformer
    parallel   x = x + attention(norm(x)) + mlp(norm'(x))                        GPT-NeoX; with one norm for both GPT-J

A decoder has cross attention between the two. Dropout and stochastic depth act on the branch before the sum.

A `KVCache` holds the keys and values of the tokens that a model has read, so that generation computes only new tokens.
It allocates all memory at once. Lengths are Python numbers, one a sequence: prompts of a batch may differ in length,
and nothing waits for a GPU. Under grouped-query attention it keeps only the shared heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.base.errors import need_known
from ottava.nn.activations import Activation
from ottava.nn.attention import DotProductAttention, Sink
from ottava.nn.layer import Linear, Projection
from ottava.nn.mlp import NormMLP, Save
from ottava.nn.norms import NormName, make_norm, normed_linear
from ottava.nn.rope import RotaryTable, rotate
from ottava.recipe import Recipe


class Cached(NamedTuple):
    """The keys and values that a layer attends to."""

    keys: Tensor
    """(B, S, G, D), S: the longest sequence so far; a view of the cache."""
    values: Tensor
    """(B, S, G, Dv)."""
    lengths: Tensor | None
    """int64 (B,): the number of real positions; None: all."""


class LayerCache(NamedTuple):
    """A layer's part of a cache, which attention modules take."""

    cache: KVCache
    layer: int
    counts: Sequence[int] | None = None

    def append(self, k: Tensor, v: Tensor) -> Cached:
        """As `KVCache.append`."""
        return self.cache.append(self.layer, k, v, self.counts)


class KVCache:
    """Preallocated keys and values of every layer.

    Args:
        layers: how many.  batch: the most sequences.  length: the most positions of a sequence.
        heads: of keys and values (G).  head_dim: of keys (D).  value_dim: of values, if another.
    Usage: in each forward of n new tokens turn by `positions(n)`, give each layer `of(i)`, and `advance(n)` at the end.
    Raises:
        ValueError: a size that is not positive.

    Example:
        >>> cache = KVCache(layers=1, batch=2, length=16, heads=4, head_dim=8)
        >>> k = v = torch.ones(2, 3, 4, 8)
        >>> cache.append(0, k, v).keys.shape, cache.advance(3), cache.lengths, cache.positions(1)
        (torch.Size([2, 3, 4, 8]), None, [3, 3], tensor([3]))
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        length: int,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if min(layers, batch, length, heads, head_dim) < 1:
            raise ValueError(
                f"KVCache: got layers={layers}, batch={batch}, length={length}, heads={heads}, head_dim={head_dim}; "
                "each needs 1 or more"
            )
        shape = (layers, batch, length, heads)
        self.keys = torch.zeros(*shape, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, head_dim if value_dim is None else value_dim, device=device, dtype=dtype)
        self.lengths = [0] * batch
        """Positions read so far, a sequence each."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` tokens: int64 (new,) if all sequences have one length, else (B, new)."""
        rows = torch.tensor(self.lengths, device=self.keys.device)[:, None] + torch.arange(new, device=self.keys.device)
        return rows[0] if self._even else rows

    def of(self, layer: int, counts: Sequence[int] | None = None) -> LayerCache:
        """The cache of one layer, as its attention takes it; counts: of `append`."""
        return LayerCache(self, layer, counts)

    @property
    def _even(self) -> bool:
        return len(set(self.lengths)) == 1

    def append(self, layer: int, k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> Cached:
        """Writes the keys (B, n, G, D) and values of n new tokens behind those of a layer; returns all of them.

        Args:
            counts: how many of the n are real, of each sequence; the rest is padding and is not written. None: all.
        Raises:
            ValueError: another shape than the cache was made for, or more tokens than it has room for.
        """
        batch, new = len(self.lengths), k.shape[1]
        own_k, own_v = self.keys[layer, :batch], self.values[layer, :batch]
        for what, got, own in (("keys", k, own_k), ("values", v, own_v)):
            if got.shape != (batch, new, *own.shape[2:]) or got.dtype != own.dtype:
                raise ValueError(
                    f"KVCache.append: got {what} {tuple(got.shape)} {got.dtype}; needs "
                    f"({batch}, new, {own.shape[2]}, {own.shape[3]}) {own.dtype}, as the cache was made"
                )
        counts = [new] * batch if counts is None else counts
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if (end := max(ends)) > own_k.shape[1]:
            raise ValueError(
                f"KVCache: {end - max(self.lengths)} tokens behind {max(self.lengths)} need {end} positions; the cache "
                f"has {own_k.shape[1]}. Make it with length={end} or more"
            )
        if self._even and set(counts) == {new}:
            own_k[:, self.lengths[0] : end], own_v[:, self.lengths[0] : end] = k, v
            return Cached(own_k[:, :end], own_v[:, :end], None)
        real = [(b, i, self.lengths[b] + i) for b, count in enumerate(counts) for i in range(count)]
        rows, news, places = torch.tensor(real, device=k.device).view(-1, 3).unbind(1)
        own_k[rows, places], own_v[rows, places] = k[rows, news], v[rows, news]
        return Cached(own_k[:, :end], own_v[:, :end], torch.tensor(ends, device=k.device))

    def select(self, rows: Sequence[int | None]) -> None:
        """Goes on with these of its sequences, in this order; None begins an empty one.

        Raises:
            ValueError: more than the cache was made for, or one that it does not have.

        Example:
            >>> cache = KVCache(layers=1, batch=3, length=4, heads=1, head_dim=1)
            >>> cache.advance([1, 2, 3]), cache.select([2, None]), cache.lengths       # two are finished, one is new
            (None, None, [3, 0])
        """
        most, has = self.keys.shape[1], len(self.lengths)
        if not 0 < len(rows) <= most or any(row is not None and not 0 <= row < has for row in rows):
            raise ValueError(f"KVCache.select: got {list(rows)}; needs 1 to {most} of its {has} sequences, or None")
        if list(rows) != list(range(len(rows))):
            kept = torch.tensor([row or 0 for row in rows], device=self.keys.device)
            for own in (self.keys, self.values):
                own[:, : len(rows)] = own[:, kept]
        self.lengths = [0 if row is None else self.lengths[row] for row in rows]

    def advance(self, new: int | Sequence[int]) -> None:
        """Call it after all layers: adds the number of tokens read, one number or one a sequence. (Padded prompts: the
        next tokens overwrite the padding behind a prompt.)"""
        news = [new] * len(self.lengths) if isinstance(new, int) else list(new)
        if len(news) != len(self.lengths) or min(news) < 0:
            raise ValueError(f"KVCache.advance: got {new}; needs a count for each of {len(self.lengths)} sequences")
        self.lengths = [old + more for old, more in zip(self.lengths, news, strict=True)]

    def reset(self) -> None:
        """Forgets all; the memory stays."""
        self.lengths = [0] * len(self.lengths)


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

        settings: dict[str, Any] = {"bias": bias, "recipe": recipe}
        shared = Projection("k", kv_heads * dim, dim), Projection("v", kv_heads * dim, dim)
        if cross:
            self.q = normed_linear(norm, hidden, heads * dim, **settings, **norms)
            read = hidden if memory_size is None else memory_size
            self.kv = Linear(read, 2 * kv_heads * dim, **settings, **factory)
            self.kv.projections = shared
        else:
            self.qkv = normed_linear(norm, hidden, (heads + 2 * kv_heads) * dim, **settings, **norms)
            self.qkv.projections = Projection("q", heads * dim, dim), *shared
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


# --- a block ----------------------------------------------------------------------------------------------------------


Arrangement = Literal["pre", "post", "parallel", "parallel_one_norm"]
ARRANGEMENTS = ("pre", "post", "parallel", "parallel_one_norm")


class TransformerLayer(nn.Module):
    """Attention and an MLP, each added to the stream.

    Args:
        hidden, ffn_hidden, heads: H, F and query heads.
        arrangement: "pre", "post", "parallel" or "parallel_one_norm", see the module.
        activation, save: of the MLP, see `NormMLP`.
        norm, eps, zero_centered_gamma: of every norm.
        kv_heads, head_dim, qk_norm, qk_norm_after_rotary, attention_dropout, sink, layout, backend: of self attention.
        mask, window, softmax_scale: as of `MultiheadAttention`; mask="no_mask" makes an encoder.
        bias: of the MLP's linears, and of attention unless attention_bias and out_bias are given.
        cross: cross attention to a `memory` of width memory_size, in the same heads.
        dropout: of each branch before the sum, while training.
        drop_path: the chance to leave out a sample's branch while training (stochastic depth); a branch that stays is
            divided by the chance to stay.
        recipe, device, dtype: as `Linear`.
    Shapes: (B, S, H), (S, B, H) or packed (T, H), as the layout says -> the same.
    Raises:
        ValueError: unknown names, sizes or chances that do not fit, drop_path for packed sequences, cross attention
            beside a parallel MLP.

    Example:
        >>> import ottava
        >>> llama = ottava.nn.TransformerLayer(
        ...     64, 96, 8, kv_heads=2, norm="rmsnorm", activation="swiglu", bias=False, dtype=torch.bfloat16
        ... )
        >>> table = ottava.nn.RotaryEmbedding(8)(torch.arange(5))
        >>> llama(torch.ones(2, 5, 64, dtype=torch.bfloat16), rotary=table).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        heads: int,
        *,
        arrangement: Arrangement = "pre",
        activation: Activation | str = "gelu",
        save: Save = "bf16",
        norm: NormName = "layernorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: NormName | None = None,
        qk_norm_after_rotary: bool = False,
        mask: str = "causal",
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        sink: Sink = None,
        layout: str = "bshd",
        backend: str | None = None,
        bias: bool = True,
        attention_bias: bool | None = None,
        out_bias: bool | None = None,
        cross: bool = False,
        memory_size: int | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._check(arrangement, dropout, drop_path, layout, cross)
        norms: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma}
        norms |= {"device": device, "dtype": dtype}
        inside = norms | {"norm": norm if arrangement in ("pre", "parallel") else None, "recipe": recipe}
        attention = partial(
            MultiheadAttention,
            hidden,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qk_norm_after_rotary=qk_norm_after_rotary,
            softmax_scale=softmax_scale,
            dropout=attention_dropout,
            layout=layout,
            backend=backend,
            bias=bias if attention_bias is None else attention_bias,
            out_bias=out_bias,
            **inside,
        )
        self.attention = attention(mask=mask, window=window, sink=sink)
        self.cross = attention(cross=True, memory_size=memory_size) if cross else None
        self.mlp = NormMLP(hidden, ffn_hidden, activation=activation, save=save, bias=bias, **inside)
        self.norms = nn.ModuleList(
            make_norm(norm, hidden, **norms)
            for _ in range({"post": 2 + cross, "parallel_one_norm": 1}.get(arrangement, 0))
        )
        self.arrangement, self.dropout, self.drop_path = arrangement, dropout, drop_path
        self.batch_dim = 1 if layout == "sbhd" else 0

    @staticmethod
    def _check(arrangement: str, dropout: float, drop_path: float, layout: str, cross: bool) -> None:
        need_known("TransformerLayer", "arrangement", arrangement, ARRANGEMENTS)
        if not (0 <= dropout < 1 and 0 <= drop_path <= 1):
            raise ValueError(
                f"TransformerLayer: dropout is {dropout}, drop_path {drop_path}; needs 0 to 1 each, dropout below 1"
            )
        if drop_path and layout == "thd":
            raise ValueError("TransformerLayer: drop_path leaves out samples, and packed sequences ('thd') have none")
        if cross and arrangement.startswith("parallel"):
            raise ValueError(
                "TransformerLayer: cross attention follows self attention; needs arrangement 'pre' or 'post'"
            )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        memory_cu_seqlens: Tensor | None = None,
        **attention: Any,
    ) -> Tensor:
        """x -> x after this layer.

        Args:
            memory: the input of cross attention; its mask, lengths (B,), or, packed, the limits of its sequences.
            attention_mask, and attention (rotary, cache, query_lengths, key_lengths, cu_seqlens): of self attention,
                see `MultiheadAttention.forward`.
        """
        if (memory is None) != (self.cross is None):
            raise ValueError(
                f"TransformerLayer: got {'no' if memory is None else 'a'} memory; the layer was made with "
                f"cross={self.cross is not None}"
            )
        if self.arrangement.startswith("parallel"):
            rows = self.norms[0](x) if self.norms else x
            beside = self._dropped(self.attention(rows, None, attention_mask, **attention))
            return self._dropped(self.mlp(rows)) + beside + x
        x = self._added(0, x, self.attention(x, None, attention_mask, **attention))
        if self.cross is not None:
            read = self.cross(
                x,
                memory,
                memory_mask,
                key_lengths=memory_lengths,
                query_lengths=attention.get("query_lengths"),
                cu_seqlens=attention.get("cu_seqlens"),
                cu_seqlens_k=memory_cu_seqlens,
            )
            x = self._added(1, x, read)
        return self._added(-1, x, self.mlp(x))

    def _added(self, norm: int, x: Tensor, branch: Tensor) -> Tensor:
        x = x + self._dropped(branch)
        return self.norms[norm](x) if self.norms else x

    def _dropped(self, branch: Tensor) -> Tensor:
        branch = F.dropout(branch, self.dropout, self.training) if self.dropout else branch
        if not (self.drop_path and self.training):
            return branch
        shape = [branch.shape[d] if d == self.batch_dim else 1 for d in range(branch.dim())]
        stays = torch.rand(shape, dtype=torch.float32, device=branch.device) >= self.drop_path
        # a chance of 1 divides by nothing: the gradient of what is left out would be 0 * infinity
        return torch.where(stays, branch / ((1 - self.drop_path) or 1.0), 0.0)

    def extra_repr(self) -> str:
        """Its arrangement."""
        return f"arrangement={self.arrangement}, dropout={self.dropout}, drop_path={self.drop_path}"

"""Keys and values of the tokens that a model has read, so that generation computes only new tokens.

It allocates all memory at once. Lengths are Python numbers, one a sequence: prompts of a batch may differ in length,
and nothing waits for a GPU. Under grouped-query attention it keeps only the shared heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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

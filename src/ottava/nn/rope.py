"""Rotary position embedding: it turns pairs of a head's entries by angles that grow with the position.

A table is a `RotaryEmbedding` (numbers only, no buffers, so that neither `.bfloat16()` nor `to_empty` can hurt it)
applied to positions; a model makes it once a forward and hands it to all layers. The scaling for long contexts is data:
`RotaryScaling` has Hugging Face's field names, so it takes a model's `rope_parameters`.
Sources: RoFormer (2104.09864); NTK-aware interpolation; YaRN (2309.00071); Llama 3.1's scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.base.errors import RefusesUnknownFields, need_known
from ottava.engine.autocast import ambient, in_tiles
from ottava.kernels.gate import is_plain
from ottava.kernels.native import pointwise


@dataclass(frozen=True)
class RotaryScaling(RefusesUnknownFields):
    """Makes angles smaller for contexts longer than in pre-training; the names are Hugging Face's.

    Raises:
        ValueError: unknown rope_type, a factor below 1, or no original_max_position_embeddings where it is needed.

    Example:
        >>> RotaryScaling(rope_type="linear", factor=4.0).frequencies(4, 10_000.0)
        tensor([0.2500, 0.0025])
    """

    rope_type: str = "default"
    """"default", "linear", "ntk", "yarn" or "llama3". Hugging Face's "dynamic" is "ntk" with a factor that changes with
    the length, so that older and newer keys of a cache would have different angles: give a fixed factor instead."""
    factor: float = 1.0
    """How many times longer the context is."""
    original_max_position_embeddings: int = 0
    """Length of the context in pre-training; yarn and llama3 need it."""
    low_freq_factor: float = 1.0
    """llama3: the factor divides the frequency of waves longer than the context / this."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than the context / this stay."""
    beta_fast: float = 32.0
    """yarn: entries that turn more often than this in the context stay."""
    beta_slow: float = 1.0
    """yarn: the factor divides the frequency of entries that turn less often than this."""
    mscale: float | None = None
    """yarn: numerator of the attention factor (DeepSeek)."""
    mscale_all_dim: float | None = None
    """yarn: denominator of the attention factor."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None: 0.1 ln(factor) + 1, or the quotient of both mscales."""
    truncate: bool = True
    """yarn: the ramp begins and ends at whole entries."""

    def __post_init__(self) -> None:
        need_known("RotaryScaling", "rope_type", self.rope_type, _FREQUENCIES)
        if not self.factor >= 1:
            raise ValueError(f"RotaryScaling: factor is {self.factor}; needs 1 or more: how many times longer")
        if self.rope_type in ("yarn", "llama3") and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"RotaryScaling: {self.rope_type!r} needs original_max_position_embeddings, the length of the context "
                f"in pre-training; got {self.original_max_position_embeddings}"
            )

    def frequencies(self, dim: int, base: float, device: torch.device | None = None) -> Tensor:
        """Radians a position for each pair, fp32 (dim / 2)."""
        return _FREQUENCIES[self.rope_type](self, dim, base, device)

    @property
    def amplitude(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor)


def _mscale(factor: float, by: float = 1.0) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _powers(dim: int, base: float, device: torch.device | None) -> Tensor:
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return powers


def _plain(_: RotaryScaling, dim: int, base: float, device: torch.device | None) -> Tensor:
    return 1.0 / _powers(dim, base, device)


def _linear(scaling: RotaryScaling, dim: int, base: float, device: torch.device | None) -> Tensor:
    return _plain(scaling, dim, base, device) / scaling.factor


def _ntk(scaling: RotaryScaling, dim: int, base: float, device: torch.device | None) -> Tensor:
    # the slowest pair is slowed by the factor, the fastest not at all
    return _plain(scaling, dim, base * scaling.factor ** (dim / (dim - 2)) if dim > 2 else base, device)


def _yarn(scaling: RotaryScaling, dim: int, base: float, device: torch.device | None) -> Tensor:
    def entry(turns: float) -> float:  # the pair that turns so often within the context of pre-training
        context = scaling.original_max_position_embeddings
        return (dim * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = entry(scaling.beta_fast), entry(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    powers, kept = _powers(dim, base, device), 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(scaling: RotaryScaling, dim: int, base: float, device: torch.device | None) -> Tensor:
    fast = _plain(scaling, dim, base, device)
    waves = 2 * math.pi / fast
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (context / waves - low) / (high - low)
    between = (1 - smooth) * fast / scaling.factor + smooth * fast
    found = torch.where(waves > context / low, fast / scaling.factor, between)
    return torch.where(waves < context / high, fast, found)


_FREQUENCIES: Mapping[str, Callable[[RotaryScaling, int, float, torch.device | None], Tensor]] = MappingProxyType(
    {"default": _plain, "linear": _linear, "ntk": _ntk, "yarn": _yarn, "llama3": _llama3}
)


class RotaryTable(NamedTuple):
    """Angles of some positions, see `RotaryEmbedding`; `rotate` applies them."""

    cos: Tensor
    """(..., 1, dim): the 1 stands for the heads."""
    sin: Tensor
    """(..., 1, dim), with the sign of the turn in it."""
    interleaved: bool
    """Whether neighbours are a pair; see `RotaryEmbedding`."""


class RotaryEmbedding(nn.Module):
    """Positions -> the table that `rotate` applies. It has no parameters and no buffers.

    Args:
        dim: the number of entries of a head that turn: all of head_dim, or fewer (the first dim).  Even.
        base: theta; pair i turns by base ** (-2i / dim) radians a position.
        interleaved: True: entries 2i and 2i + 1 are a pair (GPT-J, RoFormer). False: i and i + dim / 2 (Llama, NeoX).
        scaling: for longer contexts, a `RotaryScaling` or a mapping of its fields.
        dtype: of cos and sin, and of the arithmetic if it is wider than the heads: float32 (as TransformerEngine), or
            the model's (as Hugging Face: BF16 rounds each product).
    Raises:
        ValueError: dim is not even and positive.

    Example:
        >>> table = RotaryEmbedding(4)(torch.arange(3))
        >>> table.cos.shape, rotate(torch.ones(2, 3, 8, 4), table).shape       # (batch, positions, heads, head_dim)
        (torch.Size([3, 1, 4]), torch.Size([2, 3, 8, 4]))
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10_000.0,
        interleaved: bool = False,
        scaling: RotaryScaling | Mapping[str, object] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim is {dim}; needs an even number: entries turn in pairs")
        self.dim, self.base, self.interleaved, self.dtype = dim, base, interleaved, dtype
        self.scaling = scaling if isinstance(scaling, RotaryScaling) else RotaryScaling(**(scaling or {}))  # type: ignore[arg-type]

    def forward(self, positions: Tensor) -> RotaryTable:
        """Positions of any shape that broadcasts against the heads' leading dimensions: (S,) or (B, S) for
        (B, S, H, D), (S, 1) for (S, B, H, D), (T,) for (T, H, D). Angles are computed in fp32, as Hugging Face does."""
        frequencies = self.scaling.frequencies(self.dim, self.base, positions.device)
        angles = positions[..., None, None].float() * frequencies
        alone = ambient().batch_invariant  # else torch computes the last positions by other code than those before
        cos, sin = (
            (in_tiles(f, angles) if alone else f(angles)) * self.scaling.amplitude for f in (torch.cos, torch.sin)
        )
        axis = -1 if self.interleaved else -2
        cos, sin = torch.stack((cos, cos), axis).flatten(-2), torch.stack((-sin, sin), axis).flatten(-2)
        return RotaryTable(cos.to(self.dtype), sin.to(self.dtype), self.interleaved)

    def extra_repr(self) -> str:
        """Its settings."""
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}, scaling={self.scaling.rope_type}"


def rotate(x: Tensor, table: RotaryTable, dtype: torch.dtype | None = None) -> Tensor:
    """Turns heads x (..., heads, head_dim); entries past the table's dim stay.

    It computes in the widest dtype of x, table and result, and rounds once. On a CPU one pass of C++ does it, with the
    bits of the lines in torch, where the result is fp32 or needs no gradient.

    Args:
        dtype: of the result; None: that of x.
    Raises:
        ValueError: a head has fewer entries than the table turns.
    """
    dim, dtype = table.cos.shape[-1], dtype or x.dtype
    if x.shape[-1] < dim:
        raise ValueError(f"rotate: got heads of {x.shape[-1]} entries; the table turns {dim} of them")
    settings = *table, dtype, False
    if torch.compiler.is_compiling() or not x.is_cpu or not is_plain(x) or table.cos.requires_grad:
        return _lines(x, *settings)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _turned(x, *settings)
    # Autograd rounds each product to the dtype of x, so one rounding would change gradients in 16 bits.
    one_rounding = x.dtype == torch.float32 or dtype == table.cos.dtype == torch.float32
    y: Tensor = _Turned.apply(x, *settings) if one_rounding else _lines(x, *settings)
    return y


def _other(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair's other entry."""
    pairs = (-1, 2) if interleaved else (2, -1)
    other: Tensor = x.unflatten(-1, pairs).flip(-1 if interleaved else -2).flatten(-2)
    return other


def _lines(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, back: bool) -> Tensor:
    """The rotation in torch, or with `back` its gradient."""
    dim, x = cos.shape[-1], x.to(torch.promote_types(x.dtype, dtype))
    turned = x if dim == x.shape[-1] else x[..., :dim]
    y = (turned * cos + _other(turned, interleaved) * (_other(sin, interleaved) if back else sin)).to(dtype)
    return y if dim == x.shape[-1] else torch.cat((y, x[..., dim:].to(dtype)), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, back: bool) -> Tensor:
    y = pointwise.rotate(x, cos, sin, dtype, interleaved=interleaved, back=back)
    return _lines(x, cos, sin, interleaved, dtype, back) if y is None else y


class _Turned(torch.autograd.Function):
    """Its gradient is a rotation by the other angles, with derivatives of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, back: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.settings = interleaved, dtype, back, x.dtype
        return _turned(x, cos, sin, interleaved, dtype, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        interleaved, _, back, dtype = ctx.settings
        return _Turned.apply(grads[0], *ctx.saved_tensors, interleaved, dtype, not back), *([None] * 5)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return _turned(tangents[0], *ctx.saved_tensors, *ctx.settings[:3])


def packed_positions(cu_seqlens: Tensor) -> Tensor:
    """Positions of packed sequences: each begins at 0.

    Args:
        cu_seqlens: int (B + 1,): where each sequence begins, and the end of the last.
    Returns:
        int64 (T,).

    Example:
        >>> packed_positions(torch.tensor([0, 3, 5]))
        tensor([0, 1, 2, 0, 1])
    """
    begins = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return torch.arange(begins.shape[0], device=cu_seqlens.device) - begins

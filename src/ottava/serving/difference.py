"""Whether two checkpoints hold the same weights: each number against the error that its cast may make.

A cast to nearest moves a number x by at most half a step: 2^-(m + 1) |x|, m the bits of the mantissa, or half the
smallest subnormal times its scale. A number that lies further away was not made by the cast: a scale or a code is
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import progress
from ottava.numerics.scaling import PER_ROW, amax
from ottava.numerics.tensor import QuantizedTensor
from ottava.serving.formula import formula_causes
from ottava.serving.source import Source, Weight, same_numbers

_BF16 = 2.0**-8  # half a step of BF16, relative to the number
_SLACK = 1.01  # for products and quotients in fp32
_UNRELATED, _ALIKE = 0.5, 0.98
_FACTOR, _MANY = 0.02, 1024
_MOST = 0.9


@dataclass(frozen=True)
class Difference:
    """One tensor that both checkpoints have."""

    name: str
    cast_a: str
    """Spec of the codes; "" in high precision."""
    cast_b: str
    activation_a: str
    """Spec of the cast of its input; "" in high precision."""
    activation_b: str
    linear: bool
    same_codes: bool | None
    """Whether codes and scales stand for the same numbers; None: one has none."""
    outside: float
    """Share of the numbers that lie further apart than their casts may put them."""
    factor: float
    """Least squares: B is about factor x A."""
    correlation: float
    """Cosine of the angle between A and B."""
    inverse: bool
    """Whether B fits A with the inverse of its scales."""
    places: tuple[int, int] = (0, 0)
    """Blocks of B's cast (rows, in high precision) with such a number, and all."""

    @property
    def wrong(self) -> str:
        """What is wrong with the numbers; "" if casts explain the difference.

        Example:
            >>> Difference("w", "", "", "", "", True, None, 1.0, 2.0, 0.99, False).wrong
            'B holds 2 times the numbers of A: a scale is wrong'
        """
        if not self.outside:
            return ""
        bad, places = self.places
        if self.inverse:
            return "B's scales fit when inverted: the inverse scale was stored or taken"
        if self.outside > 1 / 2 and self.correlation > _ALIKE and abs(self.factor - 1) > _FACTOR:
            return f"B holds {self.factor:.3g} times the numbers of A: a scale is wrong"
        if self.correlation < _UNRELATED:
            return f"B holds other numbers (correlation {self.correlation:.2f}): another tensor, order or checkpoint"
        if bad < _MOST * places:
            what = "scales" if self.cast_b else "numbers"
            return f"the {what} of {bad:,} of its {places:,} {'blocks' if self.cast_b else 'rows'} are wrong"
        return f"{self.outside:.0%} of its numbers lie too far from A (correlation {self.correlation:.3f})"


@dataclass(frozen=True)
class Differences:
    """Two checkpoints, tensor by tensor."""

    tensors: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    config: tuple[str, ...]
    """Keys of config.json that decide the formula and differ, with both values."""

    @property
    def wrong(self) -> list[Difference]:
        """Tensors with numbers that no cast explains."""
        return [one for one in self.tensors if one.wrong]

    @property
    def elsewhere(self) -> bool:
        """Whether most tensors that no side casts differ, too: another step, or another training."""
        plain = [one for one in self.tensors if not one.cast_a and not one.cast_b]
        return len(plain) > 2 and len([one for one in plain if one.wrong]) > len(plain) / 2

    @property
    def linears(self) -> list[Difference]:
        """Those of linears."""
        return [one for one in self.tensors if one.linear]


def differences(a: Source, b: Source) -> Differences:
    """Compares the tensors of two checkpoints under the same name, one at a time; a tied head may be absent.

    Raises:
        ValueError: they share no linear, or a tensor has another shape.

    Example:
        >>> from ottava.serving.source import Weight
        >>> x = torch.randn(64, 64).bfloat16()
        >>> a, b = (Source((Weight("up.weight", values, linear=True),), {}) for values in (x, 2 * x))
        >>> [one.factor for one in differences(a, b).wrong]
        [2.0]
    """
    ours, theirs = ({weight.name: weight for weight in source.weights} for source in (a, b))
    shared = [name for name in ours if name in theirs]
    if not any(ours[name].linear for name in shared):
        raise ValueError("the two checkpoints have no linear of one name in common: they are other models")
    for name in shared:
        if ours[name].shape != theirs[name].shape:
            raise ValueError(
                f"{name} has shape {ours[name].shape} in A and {theirs[name].shape} in B: they are other models"
            )
    only_a, only_b = (
        tuple(name for name in one if name not in other and not name.endswith("lm_head.weight"))
        for one, other in ((ours, theirs), (theirs, ours))
    )
    fields = formula_causes(a.config, b.config, sides=("in A", "in B"))
    config = tuple(said for cause, said in fields if cause == "formula" and not said.startswith("dtype "))
    return Differences(
        tuple(compare(ours[n], theirs[n]) for n in progress(shared, "comparing weights")), only_a, only_b, config
    )


def compare(a: Weight, b: Weight) -> Difference:
    """One tensor of A and of B, which have one shape."""
    cast_a, cast_b = a.cast, b.cast
    x, y = _multiplied(a, cast_a), _multiplied(b, cast_b)
    magnitude = torch.maximum(x.abs(), y.abs())
    if cast_b is not None:
        magnitude = x.abs()  # a wrong scale of B must not widen its own bound
    allowed = _SLACK * (_bound(magnitude, cast_a) + _bound(magnitude, cast_b))
    apart = (y - x).abs() > allowed
    outside = float(apart.double().mean()) if apart.numel() else 0.0
    normal = allowed <= 0.5 * magnitude  # a cast may flush smaller numbers, which pulls the factor down
    factor, correlation = _fit(x, y)
    if not outside and int(normal.sum()) >= _MANY and abs(_fit(x[normal], y[normal])[0] - 1) > _FACTOR:
        outside = 1.0  # every number is near enough, and yet all lie on one side
    inverse = bool(outside) and cast_b is not None and _fits_inverted(x, cast_a, cast_b)
    return Difference(
        a.name,
        _text(cast_a and cast_a.spec),
        _text(cast_b and cast_b.spec),
        _text(a.input_spec),
        _text(b.input_spec),
        a.linear or b.linear,
        None if cast_a is None or cast_b is None else same_numbers(cast_a, cast_b),
        outside,
        factor,
        correlation,
        inverse,
        _places(apart, cast_b),
    )


def _places(apart: Tensor, cast: QuantizedTensor | None) -> tuple[int, int]:
    if apart.dim() != 2:
        return int(apart.sum()), apart.numel()
    size = cast.spec.granularity if cast is not None and cast.scale_inv.numel() > 1 else PER_ROW
    blocks = amax(apart.float(), size)
    return int(blocks.sum()), blocks.numel()


def _fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The least-squares factor from x to y, and their cosine; 1 for zeros."""
    dot, xx, yy = (float((u.double() * v.double()).sum()) for u, v in ((x, y), (x, x), (y, y)))
    return (dot / xx if xx else 1.0), (dot / (xx * yy) ** 0.5 if xx * yy else float(xx == yy))


def _multiplied(weight: Weight, cast: QuantizedTensor | None) -> Tensor:
    return (weight.tensor if cast is None else cast.dequantize(torch.float32)).detach().float().cpu()


def _bound(magnitude: Tensor, cast: QuantizedTensor | None) -> Tensor:
    """How far a cast, from BF16 or to BF16, may move numbers of these magnitudes."""
    near = _BF16 * magnitude
    if cast is None:
        return near
    spec = cast.spec
    steps = 2.0 if spec.rounding == "stochastic" else 1.0
    scale_inv = cast.scale_inv if cast.scale_inv.dtype != torch.uint8 else cast.scale_inv.view(torch.float8_e8m0fnu)
    shape = (cast.shape[0], cast.shape[1])
    floor = spec.granularity.expand(scale_inv.float().cpu(), shape) * spec.format.min_subnormal / 2
    bound = near + steps * torch.maximum(2.0 ** -(spec.format.mantissa_bits + 1) * magnitude, floor)
    top = spec.granularity.expand(scale_inv.float().cpu(), shape) * spec.format.max
    clipped = cast.dequantize(torch.float32).cpu().abs() >= top
    # A scale that is rounded down clips up to an eighth (OCP MX: 512 to 448); one from older steps clips anything.
    return torch.where(clipped, bound.maximum(magnitude / 8) if not spec.predicted else torch.inf, bound)


def _fits_inverted(x: Tensor, cast_a: QuantizedTensor | None, cast: QuantizedTensor) -> bool:
    other = QuantizedTensor(cast.data, 1 / cast.scale_inv.float(), cast.spec, cast.dtype)
    y = other.dequantize(torch.float32).cpu()
    magnitude = x.abs()
    return bool(((y - x).abs() <= _SLACK * (_bound(magnitude, cast_a) + _bound(magnitude, other))).all())


def _text(spec: Any) -> str:
    return "" if spec is None else str(spec)

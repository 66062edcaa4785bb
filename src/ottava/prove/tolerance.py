"""How far apart two right programs may be: what one rounding of everything moves a tensor.

The law is TTrace's (arXiv 2506.09280): run the reference again with its tensors moved by one unit of rounding, and see
how far every other tensor goes. Here weights, data, what each innermost module gives and the gradient of that move, and
the operands of a layer that casts by the unit of its format. A tensor of the other program may be FACTOR times as far
from the reference as the farthest of some draws. Four distances are held against four limits:

    whole      |a - b| / |a|, Euclidean
    row        the worst part along the last dimension, over the root mean square of those parts
    column     the worst part across it
    element    the worst element, over the root mean square

so that one wrong row among thousands still shows. A sum of 256 terms may be added in any order: the unit of FP32 and
FP64 is 16 eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.experiments.program import tree_map
from ottava.weights.parameter import local

FACTOR = 4.0
"""Times the largest movement of the draws."""
_FLOOR = 64 * torch.finfo(torch.float32).eps
_SUMS = 16
"""eps of a sum of a few hundred terms in another order."""
_SMALL = 1e-6
"""Of the usual size of its kind: a tensor below it is zero but for rounding."""


class Distance(NamedTuple):
    """Of one tensor from another; inf where only one of them is finite."""

    whole: float
    row: float
    column: float
    element: float


def distance(a: Tensor, b: Tensor, usual: float = 0.0) -> Distance:
    """How far b is from a.

    Args:
        a, b: one shape, any dtypes.
        usual: root mean square of tensors of this kind; one that is far below it counts as zero.
    Returns:
        Four ratios; see the docstring of the module. 0 for equal tensors, NaN at equal places counts as equal.

    Example:
        >>> distance(torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 2.0]])).element
        1.0
    """
    if a.numel() == 0 or (a.dtype == b.dtype and torch.equal(a, b)):
        return Distance(*[0.0] * 4)
    x, y = a.double().reshape(-1, a.shape[-1] if a.dim() else 1), b.double().reshape(-1, b.shape[-1] if b.dim() else 1)
    same = (x == y) | (x.isnan() & y.isnan())
    if not bool((same | (x.isfinite() & y.isfinite())).all()):
        return Distance(*[math.inf] * 4)
    apart = torch.where(same, 0.0, x - y)
    x = torch.where(same & ~x.isfinite(), 0.0, x)
    size = max(float(x.square().mean().sqrt()), _SMALL * usual)
    if size == 0:
        return Distance(*[math.inf if bool(apart.any()) else 0.0] * 4)
    squares = apart.square()
    row, column = (float(squares.mean(dim).max().sqrt()) / size for dim in (1, 0))
    return Distance(float(squares.mean().sqrt()) / size, row, column, float(apart.abs().max()) / size)


def unit(dtype: torch.dtype) -> float:
    """The unit by which a nudge moves a tensor of this dtype; 0 for whole numbers."""
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return float(eps * (_SUMS if torch.finfo(dtype).bits >= 32 else 1))


@dataclass
class Nudge:
    """Moves the tensors of a program by one unit of rounding, up or down by chance.

    Args:
        seed: of the draw.
        least: a unit for every tensor, where its dtype's is smaller: that of the other program.
        casts: path of a module that casts in either program -> unit of its operands, and of its gradient.

    Example:
        >>> x = torch.ones(1000)
        >>> 0 < float((Nudge(0).data(x) - x).abs().max()) <= unit(torch.float32)
        True
    """

    seed: int
    least: float = 0.0
    casts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self._casting: dict[int, tuple[float, float]] = {}

    def at(self, *place: int) -> None:
        """The draws that follow are those of this place of the program, as often as it is asked."""
        self._random.manual_seed(hash((self.seed, *place)) & 0x7FFFFFFF)

    def _move(self, x: Any, size: float = 0.0) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.itemsize < 2:
            return x
        by = torch.rand((own := local(x)).shape, generator=self._random, dtype=torch.float32) * 2 - 1
        if own is not x:
            return x  # DTensors: the draws are made on one rank
        by = by.to(x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return (x * (1 + by * max(unit(x.dtype), self.least, size))).to(x.dtype)

    def weights(self, root: nn.Module, name_of: Callable[[nn.Module], str]) -> None:
        """Moves the parameters of a model in place."""
        with torch.no_grad():
            for module in root.modules():
                cast = self.casts.get(name_of(module)) if self.casts else None
                if cast is not None:
                    self._casting[id(module)] = cast
                for parameter in module._parameters.values():
                    if parameter is not None and type(parameter) is nn.Parameter:
                        parameter.copy_(self._move(parameter, cast[0] if cast else 0.0))

    def data(self, tree: Any) -> Any:
        """What a model gets, or an innermost module gives."""
        return tree_map(self._move, tree)

    def entering(self, module: nn.Module, tree: Any) -> Any:
        """The operands of a layer that casts."""
        cast = self._casting.get(id(module))
        return tree if cast is None else tree_map(lambda x: self._move(x, cast[0]), tree)

    def gradient(self, module: nn.Module, gradient: Tensor) -> Tensor:
        """The gradient of that."""
        cast = self._casting.get(id(module))
        moved: Tensor = self._move(gradient, cast[1] if cast else 0.0)
        return moved


def limits(moved: list[Distance], unit_of_both: float) -> Distance:
    """The farthest that a right program may be.

    Args:
        moved: distances of the draws from the reference.
        unit_of_both: the larger unit of the two tensors' dtypes: an element may round the other way.
    """
    floor = _FLOOR + unit_of_both
    return Distance(
        *(FACTOR * max((m[i] for m in moved), default=0.0) + floor * (1 if i == 0 else 8) for i in range(4))
    )

"""What an operand becomes before its cast, as data: a cell of a recipe may name one. A new transform is one class here.

A GEMM contracts both operands over their last dimension, so a rotation of that dimension, the same on both sides,
leaves the product as it is: (x H) (w H).T = x w.T. Other transforms set a part of low rank aside, which the GEMM adds
in high precision. `ops.quantize` applies a transform and any kernel casts the result. The numbers that a transform took
from a tensor (means, factors, a seed) travel with the codes as `QuantizedTensor.aside`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import RefusesUnknownFields, need_known, need_type, unknown_name
from ottava.numerics.rounding import draw_seed, floor_log2, power_of_two, random_bits
from ottava.numerics.scaling import Granularity, amax

SignRule = Literal["nvidia", "none", "fresh"]
Signs = int | SignRule
Tokens = Literal["rows", "columns"]

_NVIDIA_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_MOST_OCTAVES = 60  # of a factor: its square and its inverse are fp32 numbers
_LARGEST_HADAMARD = 1024


class LowRank(NamedTuple):
    """A part of x (R, C), set aside: left @ right.T."""

    left: Tensor
    """fp32 (R, r)."""
    right: Tensor
    """fp32 (C, r)."""


@dataclass(frozen=True)
class OneRank:
    """How the numbers of `Transform.prepare` become those of the whole tensor: this rank has all of it. `ops.agreed`
    has the other answer, for ranks with a shard each.

    dim: the dimension of x along which the numbers were taken.
    """

    def sum(self, numbers: Tensor, dim: int) -> Tensor:
        """The sums of all ranks, if these split `dim`."""
        return numbers

    def largest(self, numbers: Tensor, dim: int) -> Tensor:
        """The largest of all ranks, if these split `dim`."""
        return numbers

    def same(self, drawn: Tensor) -> Tensor:
        """What one rank has drawn for all."""
        return drawn


ONE_RANK = OneRank()


@dataclass(frozen=True)
class Transform(RefusesUnknownFields):
    """The interface of a transform. Frozen, hashable; its fields are its parameters."""

    kind: ClassVar[str]
    """Its name in a recipe."""
    paired: ClassVar[bool] = False
    """Whether both operands of a GEMM must have it, with equal parameters."""
    each_column: ClassVar[bool] = False
    """Whether `prepare` gives a number for each column, which a rank needs for its columns of both operands."""

    @property
    def group(self) -> int | None:
        """Columns that are transformed together; None: no column mixes with others."""
        return None

    @property
    def draws(self) -> bool:
        """Whether `prepare` takes a number from torch's generator."""
        return False

    @property
    def centred(self) -> bool:
        """Whether the rest times `low_rank(...).right` is 0 but for rounding."""
        return False

    def prepare(self, x: Tensor, other: Tensor | None, ranks: OneRank = ONE_RANK) -> Tensor | None:
        """The numbers that `apply` needs of x (R, C).

        Args:
            other: those of the other operand, if that was cast before.
            ranks: who has the rest of x.
        """
        return None

    def apply(self, x: Tensor, aside: Tensor | None) -> Tensor:
        """x (R, C) -> the matrix to cast, contiguous; columns may be padded with zeros to whole groups."""
        raise NotImplementedError

    def low_rank(self, aside: Tensor | None, shape: tuple[int, int]) -> LowRank | None:
        """The part of x that `apply` has left out, and the GEMM adds; None: nothing."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON and YAML values, without fields at their default."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"kind": self.kind, **values}

    def __str__(self) -> str:
        return " ".join(map(str, self.to_dict().values()))


@dataclass(frozen=True)
class Hadamard(Transform):
    """A random Hadamard transform: each group of `size` columns times diag(signs) @ H / sqrt(size).

    It spreads an outlier over its group and keeps lengths and products. The sums are fp64, which is exact for BF16, by
    butterflies whose distance doubles; then comes one product with 1 / sqrt(size).

    Raises:
        ValueError: the size is no power of two, or unknown signs.
    Source: TransformerEngine's nvfp4_tensor.py: 16 fixed signs, the result rounded to BF16. Quartet II's
        quartet_2.py: fresh signs for each pair of operands, in fp32.

    Example:
        >>> x = torch.tensor([[8.0] + [0.0] * 15])
        >>> Hadamard().apply(x, None)[0, :6]
        tensor([2., 2., 2., 2., 2., 2.])
    """

    kind: ClassVar[str] = "hadamard"
    paired: ClassVar[bool] = True

    size: int = 16
    """Columns of a group, a power of two."""
    signs: Signs = "nvidia"
    """"nvidia": the 16 signs of TransformerEngine. "none": no sign changes. "fresh": a new seed from torch's generator
    for each pair of operands. A number: a fixed seed."""
    rounded: bool = True
    """Whether a BF16 tensor is rounded to BF16 again, as TransformerEngine does; False: the result is fp32."""

    def __post_init__(self) -> None:
        need_type("Hadamard: size", self.size, int)
        if not 2 <= self.size <= _LARGEST_HADAMARD or self.size & (self.size - 1):
            raise ValueError(f"Hadamard: size is {self.size}; needs a power of two from 2 to {_LARGEST_HADAMARD}")
        if isinstance(self.signs, bool) or not (isinstance(self.signs, int) or self.signs in get_args(SignRule)):
            known = (*get_args(SignRule), "or a seed")
            raise ValueError(f"Hadamard: {unknown_name('signs', self.signs, known)}")
        if self.signs == "nvidia" and self.size != len(_NVIDIA_SIGNS):
            raise ValueError(
                f"Hadamard: signs 'nvidia' are {len(_NVIDIA_SIGNS)}; give a seed or 'fresh' for {self.size}"
            )
        need_type("Hadamard: rounded", self.rounded, bool)

    @property
    def group(self) -> int:
        """Its size."""
        return self.size

    @property
    def draws(self) -> bool:
        """Whether its signs are fresh."""
        return self.signs == "fresh"

    def __str__(self) -> str:
        signs = "" if self.signs == "nvidia" else f", signs {self.signs}"
        return f"hadamard {self.size}{signs}{'' if self.rounded else ', fp32'}"

    def prepare(self, x: Tensor, other: Tensor | None, ranks: OneRank = ONE_RANK) -> Tensor | None:
        """The seed of fresh signs, int64 (); that of the other operand, if there is one."""
        if self.signs != "fresh":
            return None
        return ranks.same(draw_seed(x.device)) if other is None else other

    def apply(self, x: Tensor, aside: Tensor | None) -> Tensor:
        """The rotated matrix."""
        rows, cols = x.shape
        numbers = nn.functional.pad(x.detach().to(torch.float64), (0, -cols % self.size))
        turned = numbers.reshape(-1, self.size) * self.diagonal(aside, x.device)
        apart = 1
        while apart < self.size:
            first, second = turned.view(-1, self.size // (2 * apart), 2, apart).unbind(2)
            turned = torch.stack([first + second, first - second], 2)
            apart *= 2
        rotated = turned.mul_(self.factor).add_(0.0).view(rows, numbers.shape[1]).to(torch.float32)  # -0 becomes 0
        return rotated.to(x.dtype) if self.narrows(x.dtype) else rotated

    @property
    def factor(self) -> float:
        """1 / sqrt(size)."""
        return 1 / math.sqrt(self.size)

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether the result of a tensor of that dtype is BF16; else it is fp32."""
        return self.rounded and dtype == torch.bfloat16

    def diagonal(self, aside: Tensor | None, device: torch.device) -> Tensor:
        """The signs, fp64 (size,)."""
        return _fixed_signs(self.size, self.signs, device) if aside is None else _signs(aside, self.size)


@functools.lru_cache(maxsize=16)
def _fixed_signs(size: int, signs: Signs, device: torch.device) -> Tensor:
    if isinstance(signs, str):
        fixed = {"nvidia": _NVIDIA_SIGNS, "none": (1,) * size}  # fresh ones come with their operands
        return torch.tensor(fixed[signs], dtype=torch.float64, device=device)
    return _signs(torch.tensor(signs, device=device), size)


def _signs(seed: Tensor, size: int) -> Tensor:
    """+1 or -1 by the lowest random bit of each place, fp64 (size,)."""
    return (1 - 2 * (random_bits(seed, size) & 1)).to(torch.float64)


@dataclass(frozen=True)
class Mean(Transform):
    """Subtracts the mean over tokens, in fp32; the GEMM adds its product in high precision.

    With x = 1 mu.T + R: y = Q(R) Q(w).T + 1 (mu.T Q(w).T), and dw = Q(R_dy).T Q(R_x) + tokens * mu_dy mu_x.T, because
    the rests have no mean. A mean that is not finite counts as 0.

    Source: Averis (arXiv 2603.10444).

    Example:
        >>> x = torch.tensor([[100.0, 1.0], [102.0, -1.0]])
        >>> mean = Mean().prepare(x, None)
        >>> mean, Mean().apply(x, mean)
        (tensor([[101.,   0.]]), tensor([[-1.,  1.],
                [ 1., -1.]]))
    """

    kind: ClassVar[str] = "mean"

    tokens: Tokens = "rows"
    """Where the tokens are: "rows" in x and dy, "columns" in x.T and dy.T."""

    def __post_init__(self) -> None:
        need_known("Mean", "tokens", self.tokens, get_args(Tokens))

    @property
    def centred(self) -> bool:
        """Whether the mean is along the contracted dimension."""
        return self.tokens == "columns"

    def prepare(self, x: Tensor, other: Tensor | None, ranks: OneRank = ONE_RANK) -> Tensor:
        """The mean, summed in fp64: fp32 (1, C) or (R, 1)."""
        dim = 0 if self.tokens == "rows" else 1
        sums = x.detach().sum(dim, keepdim=True, dtype=torch.float64)
        both = ranks.sum(torch.cat([sums.reshape(-1), sums.new_full((1,), x.shape[dim])]), dim)
        mean = (both[:-1] / both[-1].clamp(min=1)).view_as(sums).to(torch.float32)
        return torch.where(mean.isfinite(), mean, 0.0)

    def apply(self, x: Tensor, aside: Tensor | None) -> Tensor:
        """x without its mean, fp32."""
        assert aside is not None
        return (x.detach().to(torch.float32) - aside).contiguous()

    def low_rank(self, aside: Tensor | None, shape: tuple[int, int]) -> LowRank:
        """Ones and the mean."""
        assert aside is not None
        if self.tokens == "rows":
            return LowRank(aside.new_ones(shape[0], 1), aside.t())
        return LowRank(aside, aside.new_ones(shape[1], 1))


@dataclass(frozen=True)
class Smooth(Transform):
    """Divides each column of one operand by a power of two, and multiplies the other operand's column by it.

    The operand that is cast first gives the factor, 2**round(strength * floor(log2(amax of the column))): the input
    before the weight, x.T and w.T before the gradient. Powers of two change no significand.

    Raises:
        ValueError: the strength is not above 0, or above 1.
    Source: SmoothQuant (arXiv 2211.10438), with factors from one operand and powers of two.

    Example:
        >>> x, w = torch.tensor([[1.0, 4096.0]]), torch.tensor([[1.0, 0.5]])
        >>> factor = Smooth().prepare(x, None)
        >>> Smooth().apply(x, factor), Smooth().apply(w, Smooth().prepare(w, factor))
        (tensor([[ 1., 64.]]), tensor([[ 1., 32.]]))
    """

    kind: ClassVar[str] = "smooth"
    paired: ClassVar[bool] = True
    each_column: ClassVar[bool] = True

    strength: float = 0.5
    """The share of a column's octaves that moves to the other operand."""

    def __post_init__(self) -> None:
        if isinstance(self.strength, bool) or not isinstance(self.strength, int | float):
            raise TypeError(f"Smooth: strength is {self.strength!r}; needs a number above 0, at most 1")
        if not 0 < self.strength <= 1 or math.isnan(self.strength):
            raise ValueError(f"Smooth: strength is {self.strength}; needs a number above 0, at most 1")

    def prepare(self, x: Tensor, other: Tensor | None, ranks: OneRank = ONE_RANK) -> Tensor:
        """The divisors, fp32 (1, C); the inverses of the other operand's, if there is one."""
        if other is not None:
            return other.reciprocal()
        largest = ranks.largest(amax(x.detach(), Granularity(None, 1)), 0)
        usable = (largest > 0) & largest.isfinite()
        octaves = (floor_log2(torch.where(usable, largest, 1.0)) * self.strength).round().to(torch.int64)
        return power_of_two(octaves.clamp(-_MOST_OCTAVES, _MOST_OCTAVES)).to(torch.float32)

    def apply(self, x: Tensor, aside: Tensor | None) -> Tensor:
        """x over its divisors, fp32."""
        assert aside is not None
        return (x.detach().to(torch.float32) * aside.reciprocal()).contiguous()


@dataclass(frozen=True)
class Hot(Transform):
    """Sets the channels of the largest sums of squares aside, in fp32; the GEMM adds their product in high precision.

    With x = Z + H, where H has the hot channels alone: y = Q(Z) Q(w).T + H Q(w).T. They are chosen anew in each cast,
    so a channel that stays hot is chosen each time. No channel with a NaN or an infinity is chosen.

    Raises:
        ValueError: fewer than 1 channel, or a tensor that is split over ranks.
    Source: the hot channels of CHON (arXiv 2602.02047), which adds the residuals behind their casts to the product.
        Here no residual is left, and such a channel does not raise the scales of its neighbours.

    Example:
        >>> x = torch.tensor([[100.0, 1.0], [102.0, -1.0]])
        >>> hot = Hot(channels=1)
        >>> hot.apply(x, hot.prepare(x, None)), hot.low_rank(hot.prepare(x, None), (2, 2)).left
        (tensor([[ 0.,  1.],
                [ 0., -1.]]), tensor([[100.],
                [102.]]))
    """

    kind: ClassVar[str] = "hot"

    tokens: Tokens = "rows"
    """As that of `Mean`."""
    channels: int = 8
    """How many; all, if the tensor has fewer."""

    def __post_init__(self) -> None:
        need_known("Hot", "tokens", self.tokens, get_args(Tokens))
        need_type("Hot: channels", self.channels, int)
        if self.channels < 1:
            raise ValueError(f"Hot: channels is {self.channels}; needs 1 or more")

    def prepare(self, x: Tensor, other: Tensor | None, ranks: OneRank = ONE_RANK) -> Tensor:
        """fp32 (r, 1 + tokens): a row for each hot channel, which begins with its place."""
        if ranks is not ONE_RANK:
            raise ValueError("hot channels are chosen among all, and this tensor is split over ranks; leave out 'hot'")
        numbers = (x.t() if self.tokens == "rows" else x).detach().to(torch.float32)
        size = numbers.double().square_().sum(1, keepdim=True)
        size = torch.where(size.isfinite(), size, -1.0)
        place = size[:, 0].argsort(descending=True, stable=True)[: self.channels]
        return torch.cat([place[:, None].to(torch.float32), torch.where(size[place] < 0, 0.0, numbers[place])], 1)

    def apply(self, x: Tensor, aside: Tensor | None) -> Tensor:
        """x with zeros in its hot channels, in its own dtype."""
        part = self.low_rank(aside, (x.shape[0], x.shape[1]))
        return (x.detach() - (part.left @ part.right.t()).to(x.dtype)).contiguous()

    def low_rank(self, aside: Tensor | None, shape: tuple[int, int]) -> LowRank:
        """The channels and their places."""
        assert aside is not None
        rows = self.tokens == "rows"
        place = nn.functional.one_hot(aside[:, 0].to(torch.int64), shape[rows]).to(torch.float32).t()
        return LowRank(aside[:, 1:].t(), place) if rows else LowRank(place, aside[:, 1:].t())


TRANSFORMS: Mapping[str, type[Transform]] = MappingProxyType(
    {kind.kind: kind for kind in (Hadamard, Mean, Smooth, Hot)}
)
"""The registered transforms, by kind."""


def get_transform(transform: Transform | str | Mapping[str, Any]) -> Transform:
    """A Transform passes through; a kind gives it with its defaults, a mapping with its fields.

    Raises:
        ValueError: unknown kind, or a value that it refuses.  TypeError: neither of them, or an unknown field.

    Example:
        >>> get_transform({"kind": "hadamard", "size": 32, "signs": 7})
        Hadamard(size=32, signs=7, rounded=True)
    """
    if isinstance(transform, Transform):
        return transform
    values = {"kind": transform} if isinstance(transform, str) else transform
    if not isinstance(values, Mapping):
        raise TypeError(f"transform: got {transform!r}; needs a Transform, its kind, or a mapping with its fields")
    values = dict(values)
    kind: Any = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in TRANSFORMS:
        raise ValueError(unknown_name("transform", kind, TRANSFORMS))
    return TRANSFORMS[kind](**values)

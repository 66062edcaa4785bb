"""The cases: shapes x layouts x operands, in memory that nobody has written.

A case holds the tensors of one call. Each input lies in a larger storage full of NaN, so a kernel that reads past its
end, or takes a slice for contiguous, finds NaN. Buffers for results hold NaN, too, with NaN before and behind them.
Cases are made from a seed, one after the other, and each is gone before the next is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.formats import Format, dtype_name, get_format
from ottava.numerics.rounding import code_values, encode
from ottava.numerics.tensor import QuantizationSpec
from ottava.prove.codes import DTYPES, dtype_of, on_grid
from ottava.prove.judge import block_amax, cast_spec, gemm_specs, scale_inv_of, spread, stored, stored_shape
from ottava.recipe import get_recipe

GUARD = 256
"""Elements before and behind a tensor that nobody may touch."""
LAYOUTS = ("contiguous", "offset", "transposed", "sliced", "columns", "broadcast")


@dataclass(frozen=True, eq=False)
class KernelCase:
    """The tensors of one call."""

    name: str
    inputs: Mapping[str, Any]
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    plain: bool = True
    """Whether an adapter that raises is at fault: ragged blocks are often refused, and aloud."""
    before: Mapping[str, Any] | None = None
    """Numbers of an earlier call, in the same memory."""


# --- memory ----------------------------------------------------------------------------------------------------------


def filled(count: int, dtype: torch.dtype, device: torch.device, value: str) -> Tensor:
    """Memory of NaN ("nan"; bytes of 0xFF for codes) or of zeros ("zero")."""
    if value == "zero":
        return torch.zeros(count, dtype=dtype, device=device)
    if dtype.itemsize == 1:
        return torch.full((count,), 0xFF, dtype=torch.uint8, device=device).view(dtype)
    return torch.full((count,), math.nan, dtype=dtype, device=device)


def placed(x: Tensor, layout: str = "contiguous", around: str = "nan") -> Tensor:
    """The same numbers in a larger storage, with the strides of a layout."""
    if x.dtype in (torch.int32, torch.int64) or (layout == "broadcast" and (x.dim() != 2 or not x.numel())):
        return x.clone()
    if x.dim() != 2 or not x.numel():
        layout = "offset" if layout == "offset" else "contiguous"
    start = 0 if layout == "contiguous" else GUARD
    count = len(x) if x.dim() else 1
    if layout == "broadcast":
        x = x[:1]
    rows, cols = x.shape if x.dim() == 2 else (1, x.numel())
    wide, step = (cols + 8 if layout == "sliced" else cols), (2 if layout == "columns" else 1)
    memory = filled(start + rows * wide * step + GUARD, x.dtype, x.device, around)
    flat = memory[start:]
    if layout == "transposed":
        view = flat[: rows * cols].view(cols, rows).t()
    elif layout in ("sliced", "columns"):
        view = flat[: rows * wide * step].view(rows, wide * step)[:, : cols * step : step]
    else:
        view = flat[: x.numel()].view(x.shape)
    held = (view.view(torch.uint8), x.view(torch.uint8)) if x.dtype.itemsize == 1 else (view, x)
    held[0].copy_(held[1])
    return view.expand(count, cols) if layout == "broadcast" else view


def buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: str = "nan"
) -> tuple[Tensor, Tensor]:
    """(a tensor that nobody has written, its storage with the guards)."""
    count = math.prod(shape)
    memory = filled(count + 2 * GUARD, dtype, device, fill)
    return memory[GUARD : GUARD + count].view(shape), memory


# --- numbers ---------------------------------------------------------------------------------------------------------


def _onehot(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if x.numel():
        at = torch.arange(x.shape[0], device=x.device) % x.shape[1]
        y[torch.arange(x.shape[0], device=x.device), at] = x.abs().amax(1) + 1
    return y


def _blocks(x: Tensor) -> Tensor:
    """Another magnitude in every block of 16 x 16."""
    rows, cols = (torch.arange(n, device=x.device) // 16 for n in x.shape)
    return x * torch.exp2(((rows[:, None] * 5 + cols[None] * 3) % 13 - 6).float())


def _with(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    if x.numel():
        x[x.shape[0] // 2, x.shape[1] // 3] = value
    return x


def _peak(top: float, way: int = 0) -> Callable[[Tensor], Tensor]:
    """Small numbers and one large one, or the FP32 number beside that."""
    return lambda x: _with(x.clamp(-3.5, 3.5), top * (1 + way * 2.0**-22))


OPERANDS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "normal": lambda x: x,
        "positive": lambda x: x.abs(),
        "blocks of other sizes": _blocks,
        "one large number": lambda x: _with(x, 3e4),
        "small whole numbers": lambda x: (x * 2).round().clamp(-4, 4),
        "ties": lambda x: (x * 8).round() + 0.5,
        "cancelling": lambda x: torch.cat(
            [x[:, : x.shape[1] // 2], -x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 * 2 :]], 1
        ),
        "one hot": _onehot,
        "zeros": torch.zeros_like,
        "negative zeros": lambda x: -torch.zeros_like(x),
        "amax a power of two": _peak(4.0),
        "amax just above a power of two": _peak(4.03125),
        "amax at the largest code": _peak(-448.0),
        "FP32 amax just above the largest code": _peak(448.0, 1),
        "FP32 amax just below the largest code": _peak(-448.0, -1),
        "FP32 amax just above 6": _peak(6.0, 1),
        "FP32 amax just below a power of two": _peak(4.0, -1),
        # log2 in FP32 takes these for a power of two
        "FP32 amax just below 7 x 2^-14": lambda x: _peak(7.0, -1)(x) * 2.0**-14,
        "FP32 amax just above 7 x 2^-14": lambda x: _peak(7.0, 1)(x) * 2.0**-14,
        "FP32 amax just below 6 x 2^-20": lambda x: _peak(6.0, -1)(x) * 2.0**-20,
        "tiny": lambda x: x * 2.0**-17,
        "huge": lambda x: x * 2.0**60,
        "wide": lambda x: x * torch.exp2((x * 1e4).fmod(1).abs() * 30 - 15),
        "a row of NaN": lambda x: torch.cat([x[:1] * math.nan, x[1:]]),
        "one NaN": lambda x: _with(x, math.nan),
        "one infinity": lambda x: _with(x, -math.inf),
        "subnormal": lambda x: x * 2.0**-130,
    }
)
"""Kinds of numbers, made from normal ones (R, C)."""


class Draws:
    """Numbers from a seed."""

    def __init__(self, seed: int, device: torch.device, listed: bool = True) -> None:
        self.generator, self.device, self.listed = torch.Generator().manual_seed(seed), device, listed

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers, fp32."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def operand(self, kind: str, rows: int, cols: int) -> Tensor:
        """A matrix of a kind, fp32."""
        return OPERANDS[kind](self.normal(rows, cols))

    def choose(self, values: Sequence[Any]) -> Any:
        """One of them."""
        return values[int(torch.randint(len(values), (), generator=self.generator))]


# --- the list of each kind -------------------------------------------------------------------------------------------

_MATRICES = (
    (128, 256), (32, 64), (1, 1), (3, 5), (17, 33), (5, 300), (130, 257), (1, 4096), (0, 64), (64, 0), (256, 128),
    (2070, 32), (3, 9000),
)  # fmt: skip
_PRODUCTS = (
    (128, 128, 256), (32, 48, 64), (1, 1, 1), (3, 5, 7), (17, 33, 65), (16, 16, 32), (5, 130, 100), (130, 16, 129),
    (1, 64, 128), (32, 256, 256), (16, 384, 256), (2, 3, 4096), (0, 16, 32), (16, 0, 32), (256, 64, 384),
    (1030, 16, 16), (3, 2070, 32), (2, 3, 9000),
)  # fmt: skip
_GROUPS = (
    (16, 16, 16),
    (5, 0, 3),
    (0, 4, 0),
    (1,),
    (44, 0, 0, 88),
    (0, 0),
    (7, 128, 1),
    (2, 3, 4, 5, 6),
    (3,) * 17,
    (2, 541),
)
_LAYERS = (
    ((32,), 48, 64), ((2, 16), 128, 256), ((128,), 128, 128), ((3, 5), 7, 33), ((1,), 16, 32), ((130,), 96, 160),
    ((256,), 64, 384), ((2, 520), 16, 32), ((16,), 1040, 16),
)  # fmt: skip
_ATTENTIONS = (
    (1, 2, 16, 8, 8), (2, 1, 33, 16, 16), (1, 2, 7, 4, 6), (1, 1, 1, 8, 8), (1, 2, 130, 16, 16), (2, 3, 64, 32, 32),
    (1, 1, 5, 64, 24), (1, 1, 280, 16, 16), (1, 5, 20, 128, 128),
)  # fmt: skip
_STEPPED = ((5,), (7, 3), (1,), (128, 130), (4, 256), (2, 3, 5), (270, 250))
_PLAIN = ("contiguous",)
_ALONE = ("cancelling", "one NaN", "a row of NaN", "one infinity", "one hot")
"""Kinds of numbers for one operand of a GEMM: the other one is positive."""


def combinations(
    shapes: Sequence[Any], layouts: Sequence[str], operands: Sequence[str], source: Draws, count: int
) -> Iterator[tuple[Any, str, str]]:
    """(shape, layout, operands): each once beside ordinary ones, then drawn, no shape twice."""
    listed = [(shape, layouts[0], operands[0]) for shape in shapes]
    listed += [(shapes[0], layouts[0], kind) for kind in operands[1:]]
    listed += [(shapes[i], layout, operands[0]) for layout in layouts[1:] for i in (0, 1, 4)]
    listed = listed if source.listed else []
    yield from listed[: max(count, 0)]
    seen = set(shapes)
    for _ in range(count - len(listed)):
        like = source.choose(shapes)
        shape = next((new for _ in range(99) if (new := _drawn(like, source)) not in seen), like)
        seen.add(shape)
        yield shape, source.choose(layouts), source.choose(operands)


def _drawn(shape: Any, source: Draws) -> Any:
    """Other sizes, up to twice those of a listed shape: anywhere, or at a multiple of a power of two, or beside one."""
    sizes = []
    for size in shape:
        if isinstance(size, tuple):
            sizes.append(_drawn(size, source))
            continue
        most = 2 * size if size <= 512 else size
        step = source.choose((1, 1, 8, 16, 32, 64, 128))
        near = step * int(source.choose(range(most // step + 1))) + source.choose((0, 0, -1, 1))
        sizes.append(max(0, near))
    return tuple(sizes)


def cases(kind: str, what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    """`count` cases of a kind; the first ones are the same for every count."""
    return {
        "encode": _encode, "decode": _decode, "cast": _cast, "gemm": _gemm, "grouped": _grouped,
        "linear": _linear, "attention": _attention, "optimizer": _optimizer,
    }[kind](what, count, source)  # fmt: skip


def edges(fmt: Format) -> Tensor:
    """Every number of a format, every middle between two, and the fp32 numbers beside them; both signs."""
    values = code_values(fmt)
    values = values[values.isfinite() & (values >= 0)].unique()
    ends = [fmt.clip, 2 * fmt.clip - fmt.max, 2 * fmt.max, 3e38, 1e-30, 2.0**-149, 0.0, fmt.min_subnormal / 4]
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor(ends)])
    points = torch.cat([points, *(points.nextafter(torch.tensor(end)) for end in (math.inf, 0.0))])
    special = torch.tensor([math.nan, math.inf])
    return torch.cat([points, -points, special, -special])


def _encode(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    fmt = get_format(what.get("format", "e4m3"))
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bf16, points = bits.view(torch.bfloat16).view(256, 256).to(source.device), edges(fmt).to(source.device)
    if not fmt.signed:  # a scale has no sign, and no zero
        bf16, points = (torch.where(x > 0, x, 1.0) for x in (bf16, points))
    named = [
        ("all BF16 numbers", bf16),
        ("all BF16 numbers in FP32", bf16.float()),
        ("numbers and middles of the format", points),
    ]
    for name, x in named[:count]:
        yield KernelCase(name, {"x": placed(x)})
    shapes = ((7,), (), (0,), (2, 3, 5), (1, 1), (3, 1, 17))
    top = fmt.max / 4
    drawn = combinations(_MATRICES, LAYOUTS, tuple(OPERANDS), source, count - 3 - len(shapes))
    for i, (shape, layout, operands) in enumerate(drawn):
        dtype = (torch.float32, torch.bfloat16, torch.float32)[i % 3]
        x = source.operand(operands, *shape) * top
        x = x.to(dtype) if fmt.signed else x.abs().clamp(min=2.0**-140).to(dtype)
        yield KernelCase(f"{_size(shape)} {dtype_name(dtype)}, {layout}, {operands}", {"x": placed(x, layout)})
    for odd in shapes[: max(0, count - 3)]:
        x = source.normal(*odd) * top
        yield KernelCase(f"shape {odd}", {"x": x if fmt.signed else x.abs() + 1e-30})


def _decode(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    fmt = get_format(what.get("format", "e4m3"))
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8 if fmt.bits <= 8 else torch.int32).to(source.device)
    codes = codes.view(fmt.storage_dtype) if fmt.dtype is not None else codes
    yield KernelCase("all codes", {"codes": placed(codes)})
    for shape, layout, _ in combinations(_MATRICES, LAYOUTS, ("",), source, count - 1):
        drawn = torch.randint(1 << fmt.bits, shape, generator=source.generator).to(torch.uint8).to(source.device)
        yield KernelCase(f"{_size(shape)}, {layout}", {"codes": placed(drawn.view(fmt.storage_dtype), layout)})


def _cast(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    spec = cast_spec(what)
    assert spec is not None
    width, kind = spec.granularity.cols or 1, torch.uint8 if spec.scale_format.startswith("e8m0") else torch.float32

    def case(name: str, x: Tensor, layout: str = "contiguous", plain: bool = True) -> KernelCase:
        held = stored_shape(spec.granularity.grid_shape((x.shape[0], x.shape[1])), spec)
        buffers = {"data": (tuple(x.shape), spec.format.storage_dtype), "scale_inv": (held, kind)}
        return KernelCase(name, {"x": placed(x, layout)}, buffers, plain)

    for i, (shape, layout, operands) in enumerate(combinations(_MATRICES, LAYOUTS, tuple(OPERANDS), source, count - 2)):
        dtype = torch.float32 if operands.startswith("FP32") else (torch.bfloat16, torch.float32)[i % 2]
        x = source.operand(operands, *shape).to(dtype)
        yield case(f"{_size(shape)} {dtype_name(dtype)}, {layout}, {operands}", x, layout, shape[1] % width == 0)
    for factor in (2.0**6, 2.0**-6)[: max(count - 2, 0)]:
        x, before = (source.normal(*_MATRICES[1]).to(torch.bfloat16) for _ in range(2))
        name = f"{_size(_MATRICES[1])} after a call on numbers {factor:g} times as large"
        yield replace(case(name, x), before={"x": before * factor})


def codes_of(x: Tensor, spec: QuantizationSpec, fmt: Format) -> Tensor:
    """Codes that fill a format, whatever the numbers' own sizes; zeros and whole numbers up to 4 stay."""
    amax = block_amax(x.nan_to_num(0.0, 0.0, 0.0), spec.granularity)
    scale = spread(scale_inv_of(amax, spec, fmt.max), spec, tuple(x.shape)) if x.numel() else 1.0
    return encode(on_grid(x.double() / scale, fmt).float(), fmt)


def _side(source: Draws, kind: str, rows: int, k: int, spec: QuantizationSpec, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes (rows, K) and scales in memory's layout; another scale for every block."""
    x = source.operand(kind, rows, k)
    whole = kind in ("small whole numbers", "one hot", "zeros", "negative zeros")
    as_they_are = whole or kind in ("one NaN", "one infinity", "subnormal", "tiny")
    codes = encode(x.clamp(-fmt.max, fmt.max), fmt) if as_they_are else codes_of(x, spec, fmt)
    grid = spec.granularity.grid_shape((rows, k))
    drawn = torch.rand(grid, generator=source.generator).to(source.device)
    powers = whole or spec.scale_format != "fp32"  # sums of such products are exact
    scale = torch.exp2((drawn * 4 - 3).floor()) if powers else drawn * 0.9 + 0.05
    return codes, stored(scale.float(), spec)


def _formats(what: Mapping[str, Any], source: Draws) -> tuple[Format, Format]:
    recipe = get_recipe(what.get("recipe", "tensorwise"))
    row = getattr(recipe, source.choose(("fprop", "fprop", "dgrad")))
    return row.lhs.format, row.rhs.format


def _width(specs: tuple[QuantizationSpec, QuantizationSpec]) -> int:
    """K in whole blocks of both operands."""
    return math.lcm(*(spec.granularity.cols or 1 for spec in specs))


def _gemm(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    specs, dtype = gemm_specs(what), dtype_of(what, "out")
    kinds = tuple(name for name in OPERANDS if name not in ("huge", "ties") and "FP32" not in name)
    ends = (0, 255) if specs[0].scale_format.startswith("e8m0") else ()
    for byte in ends[: max(count - 1, 0)]:
        rows, k = 16, 64
        one, two = (_side(source, "positive", rows, k, spec, spec.format) for spec in specs)
        scale = one[1].clone()
        scale[1:3] = byte  # 2^-127 or NaN; scales of 2^100 bring the products back
        inputs = _operands((one[0], scale), (two[0], torch.full_like(two[1], 227)))
        yield KernelCase(f"{rows} x {rows} x {k}, scale bytes of {byte} in a", inputs, {"out": ((rows, rows), dtype)})
    for (m, n, k), layout, operands in combinations(_PRODUCTS, LAYOUTS[:4], kinds, source, count - len(ends)):
        a_format, b_format = _formats(what, source)
        a = _side(source, operands, m, k, specs[0], a_format)
        b = _side(source, "positive" if operands in _ALONE else operands, n, k, specs[1], b_format)
        name = f"{m} x {n} x {k} {a_format} x {b_format}, {layout}, {operands}"
        yield KernelCase(name, _operands(a, b, layout, layout), {"out": ((m, n), dtype)}, k % _width(specs) == 0)


def _operands(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *layouts: str) -> dict[str, Any]:
    of_a, of_b = layouts or ("contiguous", "contiguous")
    codes = {"a": placed(a[0], of_a), "b": placed(b[0], of_b)}
    return codes | {"scale_inv_a": placed(a[1]), "scale_inv_b": placed(b[1])}


def _grouped(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    (lhs, rhs), dtype = gemm_specs(what), dtype_of(what, "out")
    numbers = ("normal", "small whole numbers", "positive", "blocks of other sizes")
    kinds = (*numbers, "one NaN", "a row of NaN", "zeros", "wide")
    width, high = _width((lhs, rhs)), rhs.granularity.rows or 1
    for i, (sizes, layout, operands) in enumerate(combinations(_GROUPS, LAYOUTS[:2], kinds, source, count)):
        n, k = ((32, 64), (128, 128), (16, 256), (256, 256), (128, 384), (80, 128), (144, 64))[i % 7]
        whole = i % 7 < 5  # whole blocks of b's scales
        n, k = -(-n // high) * high if whole else n, -(-k // width) * width
        beyond = 4 if i % 4 == 3 else 0  # rows of no group
        a_format, b_format = _formats(what, source)
        a, scale_a = _side(source, operands, sum(sizes) + beyond, k, lhs, a_format)
        usual = "normal" if operands in ("one NaN", "a row of NaN") else operands
        sides = [_side(source, usual, n, k, rhs, b_format) for _ in sizes]
        b = torch.stack([codes.view(torch.uint8) for codes, _ in sides]).view(b_format.storage_dtype)
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32).to(source.device)
        a.view(torch.uint8)[sum(sizes) :] = 0xFF
        scale_b = torch.stack([scale for _, scale in sides])
        inputs = _operands((a, scale_a), (b, scale_b), layout, "contiguous") | {"ends": ends}
        rest = " and 4 rows of none" if beyond else ""
        name = f"groups {sizes}{rest}, N {n}, K {k}, {layout}, {operands}"
        yield KernelCase(name, inputs, {"out": ((sum(sizes) + beyond, n), dtype)}, n % high == 0)


def _linear(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    dtype = dtype_of(what, "dtype")
    numbers = ("normal", "positive", "blocks of other sizes", "one large number", "wide", "tiny", "one hot", "zeros")
    kinds = (*numbers, "one NaN", "weight of wide range")
    layouts = ("contiguous", "offset", "transposed", "sliced", "broadcast")
    listed = combinations(_LAYERS, layouts, kinds, source, count - 2)
    for (lead, n, k), layout, operands in listed:
        rows, n, k = math.prod(lead), max(n, 1), max(k, 1)  # a layer without features is none
        wide = operands == "weight of wide range"
        x, w = source.operand("normal" if wide else operands, rows, k).to(dtype), source.normal(n, k)
        # beside large columns small ones lose bits if blocks run along K; along N they have scales of their own
        w = (w * torch.exp2(-2.5 * (torch.arange(k, device=w.device) % 8)) if wide else w).to(dtype)
        grad = source.operand(operands if operands != "one NaN" and not wide else "normal", rows, n).to(dtype) * 2.0**-8
        whole = layout in ("contiguous", "offset")
        x = placed(x.view(*lead, k) if whole else x, "contiguous" if layout == "broadcast" else layout)
        grad = placed(grad, "broadcast" if layout == "broadcast" else "contiguous")
        grad = grad.view(*lead, n) if whole and len(lead) > 1 else grad
        inputs = {"x": x, "weight": placed(w), "grad": grad}
        name = f"x {tuple(x.shape)}, weight {(n, k)}, {layout}, {operands}"
        yield KernelCase(name, inputs, plain=not ({n % 16, k % 16, rows % 16} - {0}))
    for factor in (4.0, 0.25)[: max(count - 2, 0)]:
        inputs = {"x": source.normal(32, 64), "weight": source.normal(48, 64), "grad": source.normal(32, 48)}
        before = {key: source.normal(*x.shape).to(dtype) * factor for key, x in inputs.items()}
        inputs = {key: placed(x.to(dtype)) for key, x in inputs.items()}
        yield KernelCase("32 x 48 x 64, in place of the numbers of the step before", inputs, before=before)


def _attention(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    kinds = ("normal", "positive", "one large number", "small whole numbers", "zeros", "peaked", "one hot")
    for i, (shape, _, operands) in enumerate(combinations(_ATTENTIONS, _PLAIN, kinds, source, count)):
        b, h, s, d, dv = (max(size, 1) for size in shape)
        dtype = DTYPES.get(str(what.get("dtype"))) or (torch.float32, torch.bfloat16)[i % 2]
        inputs = {}
        for name, width in (("q", d), ("k", d), ("v", dv), ("grad", dv)):
            ordinary = name == "grad" or operands in ("one large number", "peaked")
            x = source.operand("normal" if ordinary else operands, b * h * s, width)
            if name in "qk":
                x = _with(x, 30.0) if operands == "one large number" else x * 4 if operands == "peaked" else x
            inputs[name] = placed(x.to(dtype).view(b, h, s, width))
        yield KernelCase(f"B {b}, H {h}, S {s}, D {d}, Dv {dv} {dtype_name(dtype)}, {operands}", inputs)


def _optimizer(what: Mapping[str, Any], count: int, source: Draws) -> Iterator[KernelCase]:
    dtype = DTYPES.get(str(what.get("dtype")), torch.float32)
    kinds = ("normal", "tiny", "positive", "wide", "zeros", "one hot", "small whole numbers", "one large number")
    for i, (shape, _, operands) in enumerate(combinations(_STEPPED, _PLAIN, kinds, source, count)):
        steps, size = (6, 3, 12, 6, 40)[i % 5], math.prod(shape)
        drawn = [source.operand(operands, 1, size).reshape(shape) * (1 + t % 3) for t in range(steps)]
        parameter = (source.normal(*shape) * (10.0 if i % 2 else 0.1)).to(dtype)
        inputs = {"parameter": placed(parameter), "grad": placed(torch.stack(drawn).to(dtype))}
        yield KernelCase(f"shape {shape}, {steps} steps, {operands}", inputs)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))

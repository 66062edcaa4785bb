"""Random calls of every C++ kernel, with all memory between pages that nobody may touch, against the reference.

`python fuzz.py SEED CASES` makes that many calls of each kernel; `python fuzz.py SEED 1 gemm` repeats
one, with tests/ on the path.
What is about to run is printed before it runs: one element read or written too far ends the process, and the last line
says where. Operands, scales and results each end right before such a page or begin right after one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor

from kernels.native.test_measure import assert_same as assert_same_tally
from ottava.engine.quantizer import Quantizer
from ottava.kernels import reference
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native import measure as native_measure
from ottava.kernels.native import pointwise as native_sums
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.measure import Look
from ottava.measure.sample import squares_of
from ottava.measure.tally import DETAILS
from ottava.measure.walk import measure_all, survey
from ottava.numerics import scaling
from ottava.numerics.formats import E2M1, FORMATS
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import BLOCK_1X16, TE_FOUR_OVER_SIX, Granularity, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor, refuse_pair
from ottava.numerics.transforms import Hadamard

NATIVE = (native_quantize, native_gemm, native_measure, native_sums)
SMALL = tuple(fmt for fmt in FORMATS.values() if fmt.bits <= 8 and fmt.signed)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 97, 127, 128, 129, 130, 191, 192, 255, 256, 257)
GRANULARITIES = tuple(value for value in vars(scaling).values() if isinstance(value, Granularity))
GRANULARITIES += tuple(map(Granularity.parse, ("*x1", "128x1", "32x1", "3x5", "*x4", "48x5", "2x64", "1x2")))


class Fence:
    """Memory that ends right before a page that nobody may touch, or begins right after one; and torch's way to it."""

    def __init__(self, at_end: bool) -> None:
        self.at_end, self.maps = at_end, list[tuple[int, int]]()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_strided(self, shape: Any, strides: Any, *, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(self._take(count * dtype.itemsize))
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def empty(self, *shape: Any, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        shape = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return self.empty_strided(shape, strides, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return self.empty(*shape, dtype=dtype).zero_()

    def empty_like(self, x: Tensor, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Tensor:
        return self.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype)

    def copy(self, x: Tensor) -> Tensor:
        """x with its strides; of a tensor that was expanded each element is there once."""
        copy = self.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        whole = x.as_strided((extent(x),), (1,))
        copy.as_strided((extent(x),), (1,)).view(bits_of(x.dtype)).copy_(whole.view(bits_of(x.dtype)))
        return copy

    def _take(self, size: int) -> int:
        page = mmap.PAGESIZE
        inside = -(-size // page) * page
        base = self.libc.mmap(None, inside + 2 * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        assert self.libc.mprotect(base + page, inside, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        ctypes.memset(base + page, 0xFF, inside)  # NaN in every dtype, for what is not written
        self.maps.append((base, inside + 2 * page))
        return base + page + (inside - size if self.at_end else 0)

    @contextmanager
    def around(self, *modules: Any) -> Iterator[None]:
        """What these modules ask torch for lies there."""
        for module in modules:
            module.torch = self
        try:
            yield
        finally:
            for module in modules:
                module.torch = torch

    def drop(self) -> None:
        for base, size in self.maps:
            self.libc.munmap(base, size)
        self.maps.clear()


def extent(x: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def bits_of(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def size(rng: random.Random, most: int = 300) -> int:
    """Nearly always small, often on an edge, sometimes large enough for threads and bands."""
    if rng.random() < 0.04:
        return rng.randint(300, 1500)
    return min(rng.choice(EDGES) if rng.random() < 0.5 else rng.randint(1, 300), most)


def numbers(rng: random.Random, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Rows, columns or tiles of very different magnitude, zeros, subnormals, what is not finite, all alike."""
    octaves = rng.choice((0, 3, 12, 40, 120))
    height, width = rng.choice(((1, cols), (rows, 1), (8, 8), (1, 32), (rows, cols), (1, 128), (128, 128), (1, 1)))
    exponents = torch.randint(-octaves, octaves + 1, (-(-rows // height), -(-cols // width))).double()
    factors = torch.exp2(exponents).repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]
    kind = rng.choice(("normal", "normal", "normal", "equal", "integers", "ties"))
    if kind == "normal":
        x = torch.randn(rows, cols, dtype=torch.float64)
    elif kind == "equal":
        x = torch.full((rows, cols), rng.choice((1.0, -1.75, 448.0, 0.0, 1e-30)), dtype=torch.float64)
    else:
        x = torch.randint(-40, 41, (rows, cols)).double() / (1 if kind == "integers" else 32)
    x = (x * factors).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    specials = (0.0, -0.0, tiny / 2, -tiny / 4, math.inf, -math.inf, math.nan, -math.nan, torch.finfo(dtype).max)
    for special in rng.sample(specials, rng.choice((0, 0, 1, 2, 4))):
        x[torch.rand(rows, cols) < rng.choice((0.5 / x.numel(), 0.02, 0.3))] = special
    if rng.random() < 0.3:  # blocks of zeros
        x[rng.randrange(rows) :, rng.randrange(cols) :][:: rng.choice((1, 3)), : rng.choice((16, 32, 128, 300))] = 0
    return x


LAYOUTS = ("rows", "rows", "columns", "columns", "wide rows", "wide columns", "offset", "steps")
LAYOUTS += ("one row", "one column")


def lay(rng: random.Random, x: Tensor, layout: str) -> Tensor:
    """The numbers of x (some of them, where one row or column stands for all) in another layout."""
    rows, cols = x.shape
    gap = rng.choice((1, 3, 64))
    match layout:
        case "columns":
            return x.t().contiguous().t()
        case "wide rows" | "offset":
            return torch.empty_strided((rows, cols), (cols + gap, 1), dtype=x.dtype).copy_(x)
        case "wide columns":
            return torch.empty_strided((rows, cols), (1, rows + gap), dtype=x.dtype).copy_(x)
        case "steps":
            return torch.empty_strided((rows, cols), (2 * cols * gap + 1, 2 * gap), dtype=x.dtype).copy_(x)
        case "one row":
            return x[:1].clone().expand(rows, cols)
        case "one column":
            return x[:, :1].clone().expand(rows, cols)
    return x.contiguous()


class Case:
    """One call: random choices, and memory with a fence."""

    def __init__(self, kernel: str, seed: int) -> None:
        self.rng = random.Random(f"{kernel} {seed}")
        torch.manual_seed(self.rng.getrandbits(32))
        self.fence = Fence(self.rng.random() < 0.7)
        self.name = f"{kernel} {seed}"

    def say(self, *what: object) -> None:
        print(self.name, "end" if self.fence.at_end else "begin", *what, flush=True)

    def threads(self) -> None:
        torch.set_num_threads(self.rng.choice((1, 1, 2, 3, 4)))

    def matrix(self, dtype: torch.dtype | None = None, most: int = 300) -> Tensor:
        dtype = dtype or self.rng.choice(DTYPES)
        layout = self.rng.choice(LAYOUTS)
        x = self.fence.copy(lay(self.rng, numbers(self.rng, size(self.rng, most), size(self.rng, most), dtype), layout))
        self.layout = f"{str(dtype)[6:]} {tuple(x.shape)} {x.stride()}"
        return x

    def spec(self, **fixed: Any) -> QuantizationSpec:
        granularity = self.rng.choice(GRANULARITIES)
        formats = [f for f in get_args(ScaleFormat) if not (f == "e4m3" and granularity == scaling.PER_TENSOR)]
        scale_format = self.rng.choice(formats)
        chosen = {"format": self.rng.choice(SMALL), "granularity": granularity, "scale_format": scale_format}
        return QuantizationSpec(**chosen | {"margin": self.rng.choice((0, 0, 0, 1, -2, 20))} | fixed)


def same(ours: Tensor, truth: Tensor, what: str) -> None:
    """Bits, but for those of NaN, whose sign torch loses at the end of an fp16 row, and the sign of an amax of zero."""
    if what == "amax":
        ours, truth = ours.abs(), truth.abs()
    if ours.is_floating_point():
        nan, wanted = (t.to(torch.float32).isnan() for t in (ours, truth))
        assert torch.equal(nan, wanted), f"{what}: NaN elsewhere"
        a, b = (t.contiguous().view(bits_of(t.dtype)).masked_fill(nan, 0) for t in (ours, truth))
    else:
        a, b = ours, truth
    if not torch.equal(a, b):
        at = tuple((a != b).nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int((a != b).sum())} of {a.numel()} differ, {ours[at]} and {truth[at]} at {at}")


def quantize(case: Case) -> None:
    x, scale, staged, spec = case.matrix(), None, None, case.spec()
    if case.rng.random() < 0.4:
        kind = case.rng.choice(("delayed", "guarded", "current"))
        fixed = {"granularity": scaling.PER_TENSOR, "scale_format": case.rng.choice(("fp32", "pow2"))}
        spec = case.spec(**fixed, scaling=kind)
        given = torch.tensor(case.rng.choice((0.0, 1.0, 64.0, 0.37, 2.0**-120, 2.0**120)))
        if case.rng.random() < 0.5 and float(x.abs().amax()) > 0:
            given = spec.format.max / x.abs().amax().float()
        scale = case.fence.copy(given.clamp_max(torch.finfo(torch.float32).max))
        staged = case.fence.copy(torch.tensor([0.5, 0.0, 0.0])) if case.rng.random() < 0.5 else None
    case.threads()
    case.say(spec, f"margin {spec.margin}", case.layout, scale, staged)
    assert native_quantize.supports_quantize(x, spec, scale) is None
    truth = reference.quantize(x, spec, scale)
    with case.fence.around(native_quantize):
        ours = native_quantize.plan_quantize(x, spec)(x, scale, staged)
    for name in ("data", "scale_inv", "amax"):
        same(getattr(ours, name), getattr(truth, name), name)
    if staged is not None and scale is not None:
        door = Quantizer()
        door.prepare(replace(spec, scaling="delayed") if spec.scaling == "current" else spec)
        door.scale.fill_(float(scale))
        door.staged.copy_(torch.tensor([0.5, 0.0, 0.0]))
        door._see(truth.amax, truth.scale_inv, True)
        same(staged, door.staged, "staged")


def both(case: Case) -> None:
    x, specs = case.matrix(), (case.spec(), case.spec())
    while native_quantize.supports_quantize_both(x, *specs) is not None:
        x, specs = case.matrix(), (case.spec(), case.spec())
    case.threads()
    case.say(*specs, case.layout)
    with case.fence.around(native_quantize):
        ours = native_quantize.plan_quantize_both(x, *specs)(x)
    for cast, operand, spec in zip(ours, (x, x.t()), specs, strict=True):
        truth = reference.quantize(operand, spec)
        for name in ("data", "scale_inv", "amax"):
            same(getattr(cast, name), getattr(truth, name), name)


def drawn(case: Case, x: Tensor, spec: QuantizationSpec, seed: int) -> None:
    case.threads()
    case.say(spec, case.layout)
    torch.manual_seed(seed)
    truth = reference.quantize(x, spec)
    torch.manual_seed(seed)
    with case.fence.around(native_quantize):
        ours = native_quantize.plan_quantize(x, spec)(x, None, None)
    for name in ("data", "scale_inv", "amax"):
        same(getattr(ours, name), getattr(truth, name), name)


def stochastic(case: Case) -> None:
    x, spec, seed = case.matrix(), case.spec(rounding="stochastic"), case.rng.getrandbits(30)
    drawn(case, x, spec, seed)


def rule(case: Case) -> None:
    """Scales of blocks by a rule, and codes."""
    x, seed, blocks = case.matrix(), case.rng.getrandbits(30), case.rng.choice(("1x16", "16x16", "3x5", "1x2", "48x5"))
    rule = case.rng.choice(("four_over_six", *TE_FOUR_OVER_SIX))
    spec = QuantizationSpec(E2M1, Granularity.parse(blocks), "e4m3", block_scale=rule)
    if case.rng.random() < 0.5:
        rotation = Hadamard(case.rng.choice((16, 64, 128)), "fresh")
        spec = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", block_scale="ms_eden", transform=rotation)
    drawn(case, x, spec, seed)


def rotate(case: Case) -> None:
    x, size = case.matrix(), 1 << case.rng.randint(1, 9)
    rotation = Hadamard(size, case.rng.choice((3, "fresh")), case.rng.random() < 0.5)
    case.threads()
    case.say(rotation, case.layout)
    aside = rotation.prepare(x, None)
    with case.fence.around(native_quantize):
        ours = native_quantize.plan_transform(x, rotation)(x, aside)
    same(ours, rotation.apply(x, aside), "numbers")


def codes(case: Case, rows: int, cols: int, spec: QuantizationSpec, layout: str) -> QuantizedTensor:
    """All codes there are, or those of a cast; scales of any layout."""
    if case.rng.random() < 0.3:
        data = torch.randint(0, 1 << spec.format.bits, (rows, cols), dtype=torch.uint8).view(spec.format.storage_dtype)
        x_q = QuantizedTensor(data, torch.rand(spec.granularity.grid_shape((rows, cols))) + 0.5, spec, torch.bfloat16)
    else:
        x = numbers(case.rng, rows, cols, torch.float32)
        x_q = QuantizedTensor(*reference.quantize(x, spec)[:2], spec, torch.bfloat16)
    scales = x_q.scale_inv.t().contiguous().t() if case.rng.random() < 0.3 else x_q.scale_inv
    return replace(x_q, data=case.fence.copy(lay(case.rng, x_q.data, layout)), scale_inv=case.fence.copy(scales))


def dequantize(case: Case) -> None:
    spec, layout = case.spec(), case.rng.choice(LAYOUTS)
    x_q = codes(case, size(case.rng), size(case.rng), spec, layout)
    out = case.rng.choice((torch.float32, torch.bfloat16))
    case.threads()
    case.say(spec, tuple(x_q.shape), x_q.data.stride(), out)
    with case.fence.around(native_quantize):
        same(native_quantize.plan_dequantize(x_q, out)(x_q), x_q.dequantize(out), "numbers")


@functools.cache
def levels() -> tuple[int, ...]:
    assert native_gemm.levels(), native_gemm.fastest().built.reason
    return native_gemm.levels()


def step_of(a: QuantizationSpec, b: QuantizationSpec, k: int) -> int:
    """How many k no scale changes over."""
    return math.gcd(*(spec.granularity.cols for spec in (a, b) if (spec.granularity.cols or k) < k)) or k


def gemm(case: Case) -> None:
    rng = case.rng
    m, n, k = size(rng), size(rng), size(rng)
    while True:
        pair = case.spec(), case.spec()
        if rng.random() < 0.6:  # sums that fp32 holds: the bits of the reference
            pair = tuple(replace(s, format=FORMATS[rng.choice(("E2M1", "E2M3"))], margin=0) for s in pair)
        step = step_of(*pair, k)
        if refuse_pair(*pair) is None and "e4m3" not in {s.scale_format for s in pair} and (step == k or step % 2 == 0):
            break
    a, b = (codes(case, rows, k, s, rng.choice(LAYOUTS)) for rows, s in zip((m, n), pair, strict=True))
    level, out = rng.choice(levels()), rng.choice((torch.float32, torch.bfloat16, torch.float16))
    bias = case.fence.copy(numbers(rng, 1, n, rng.choice(DTYPES))[0]) if rng.random() < 0.5 else None
    case.threads()
    where = a.data.stride(), b.data.stride(), a.scale_inv.stride(), b.scale_inv.stride()
    case.say(*pair, (m, n, k), *where, out, "" if bias is None else bias.dtype, native_gemm.LEVELS[level])
    with case.fence.around(native_gemm):
        y, mode = native_gemm.run(a, b, out, bias, level)
    judge(a, b, bias, y, mode)
    torch.set_num_threads(1)
    same(native_gemm.run(a, b, out, bias, level)[0], y, "one thread")


def judge(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, y: Tensor, mode: str) -> None:
    """The bits of the reference where sums are exact, else the rounding of an fp32 accumulation around fp64's."""
    short = {a.spec.format.name, b.spec.format.name} <= {"E2M1", "E2M3"} and a.shape[1] <= 300
    folds = a.scale_inv.shape[1] > 1 or b.scale_inv.shape[1] > 1
    folds = folds and "fp32" not in (a.spec.scale_format, b.spec.scale_format)
    step = step_of(a.spec, b.spec, a.shape[1])
    if short and not folds and (mode == "plain" or a.shape[1] % step == 0):
        same(y + 0.0, reference.gemm(a, b, y.dtype, bias) + 0.0, f"{mode} sums")  # either zero
        return
    lhs, rhs = (
        decode(t.data, t.spec.format).double() * t.spec.granularity.expand(t.scale_inv, t.shape) for t in (a, b)
    )
    truth, magnitude = lhs @ rhs.t(), lhs.abs() @ rhs.abs().t()
    if bias is not None:
        truth, magnitude = truth + bias.double(), magnitude + bias.double().abs()
    info, roundings = torch.finfo(y.dtype), a.shape[1] + 6
    bound = roundings * (2.0**-24 * magnitude + 2.0**-149) + info.eps * (truth.abs() + info.smallest_normal)
    calm = magnitude < 0.9 * min(info.max, 2.0**126)
    scales = torch.cat([t.scale_inv.flatten() for t in (a, b)])
    if float(scales.min()) < 2.0**-50 or float(scales.max()) > 2.0**60:
        return  # a sum times one scale may leave fp32, though not times both; 0 times an infinite one is NaN
    lost = lhs.isnan().any(1)[:, None] | rhs.isnan().any(1) | (False if bias is None else bias.isnan())
    assert y[lost].isnan().all(), f"{mode}: numbers from NaN"
    off = ((y.double() - truth).abs() > bound) & calm
    assert not off.any(), f"{mode}: {int(off.sum())} of {off.numel()} off at {off.nonzero()[0].tolist()}"
    quiet = lhs.isfinite().all(1)[:, None] & rhs.isfinite().all(1) & (True if bias is None else bias.isfinite())
    assert not y[quiet & calm].isnan().any(), f"{mode}: NaN from numbers"


def sums(case: Case) -> None:
    x = case.matrix()
    case.threads()
    case.say(case.layout)
    with case.fence.around(native_sums):
        ours = native_sums.column_sums(x)
        hashes = {native_sums.checksum(x) for _ in range(2)}
    values = x.double().nan_to_num(0.0, 0.0, 0.0) if not x.isfinite().all() else x.double()
    finite = x.isfinite().all(0) & (x.double().abs().sum(0) < 2.0**127)
    bound = (x.shape[0] + 1) * 2.0**-24 * values.abs().sum(0) + x.shape[0] * 2.0**-149
    assert ((ours.double() - values.sum(0)).abs() <= bound)[finite].all()
    assert ours[x.isnan().any(0)].isnan().all()
    torch.set_num_threads(1)
    same(native_sums.column_sums(x), ours, "one thread")
    assert hashes == {native_sums.checksum(x.clone(memory_format=torch.contiguous_format))}
    at = case.rng.randrange(x.shape[0]), case.rng.randrange(x.shape[1])
    x.view(bits_of(x.dtype))[at] ^= 1 << case.rng.randrange(8 * x.element_size() - 1)
    assert hashes != {native_sums.checksum(x)}


def look(case: Case) -> None:
    """`survey`, `take` and `measure`."""
    x, spec = case.matrix(), case.spec()
    target = case.rng.choice((None, *DTYPES))
    case.threads()
    case.say(spec, case.layout, target)
    with case.fence.around(native_measure):
        ours = native_measure.survey(x, target)
    y = (x if target is None else x.to(target)).double()
    finite = y[y.isfinite()].abs()
    largest = float(finite.amax()) if finite.numel() else 0.0
    told = torch.tensor([float(y.abs().amax()), largest, y.numel() - finite.numel(), y.numel()], dtype=torch.float64)
    same(ours, told, "survey")
    x_q = QuantizedTensor(*reference.quantize(x, spec)[:2], spec, x.dtype)
    x_q = replace(x_q, data=case.fence.copy(lay(case.rng, x_q.data, case.rng.choice(LAYOUTS[:8]))))
    take(case, x, x_q.data)
    if not torch.isfinite(x_q.scale_inv).all():
        return
    found = case.fence.copy(survey(x))
    with case.fence.around(native_measure):
        assert_same_tally(x, replace(x_q, scale_inv=case.fence.copy(x_q.scale_inv)), found, case.rng.choice(DETAILS))
        made, to_make = (measure_all([Look(x, c, found)]) for c in (x_q, spec))
    assert torch.equal(made[0], to_make[0]), "measure: another cast"


def take(case: Case, *matrices: Tensor) -> None:
    """Rows of some bands, and of numbers the amaxes of the blocks that they lie in."""
    rows, step = matrices[0].shape[0], case.rng.choice((1, 1, 2, 8))
    first = case.rng.sample(range(rows), min(rows, case.rng.choice((1, 3))))
    bands = [range(start, min(start // 128 * 128 + 128, rows), step) for start in first]
    for matrix in matrices:
        if native_measure.supports_take(matrix) is not None:
            continue
        squares = torch.empty(len(bands), -(-matrix.shape[1] // 128)) if matrix.dtype in DTYPES else None
        with case.fence.around(native_measure):
            taken = native_measure.take(matrix, bands, squares)
        truth = torch.cat([matrix.view(bits_of(matrix.dtype))[list(band)] for band in bands])
        same(taken.view(bits_of(matrix.dtype)), truth, "take")
        if squares is not None:
            same(squares, squares_of(matrix, bands), "squares")


KERNELS: MappingProxyType[str, Callable[[Case], None]] = MappingProxyType(
    {f.__name__: f for f in (quantize, both, stochastic, rule, rotate, dequantize, gemm, sums, look)}
)


def run(kernel: str, seed: int) -> None:
    """One case; what lies between fences is given back."""
    case = Case(kernel, seed)
    KERNELS[kernel](case)
    case.fence.drop()


def main(seed: int, cases: int, *kernels: str) -> None:
    """Runs them; goes on after a wrong number, and ends with 1 if there was one."""
    wrong = 0
    for at in range(seed, seed + cases):
        for kernel in kernels or KERNELS:
            try:
                run(kernel, at)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG {kernel} {at}: {error}", flush=True)
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

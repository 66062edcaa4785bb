"""Shows that each wrong kernel of public.json is wrong on some ordinary input, and that no right one is on any: `python self_check.py [NAME ...]`.

The oracle takes nothing from yard10.py and no conversion of torch's. A format is the list of its numbers, from their formula; a number goes
to the nearer of its two neighbours in the list, a tie to the even place. Amaxes are reduced by numpy along the edges of the blocks, and of
three powers of two the smallest that holds an amax is taken. Attention's gradients are finite algebra on einsum, the optimizer a loop of its
own. All in fp64. A kernel must also leave its operands and the memory around its results alone, and it is called again with new numbers in
the same memory. Printed are the cases that differ of all that ran, and the first two. Exit code 1: some entry is not as it says.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
Array = np.ndarray
Case = tuple[str, bool]
Run = Callable[..., Any]
NAN, INF = math.nan, math.inf
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}


class Numbers:
    """The numbers of a format without sign, in the order of their codes, and what each byte means."""

    def __init__(self, exponents: int, bits: int, last: int, behind: tuple[float, ...] = ()) -> None:
        bias = 2 ** (exponents - 1) - 1
        every = [math.ldexp(c if c < 2**bits else 2**bits + c % 2**bits, max(c >> bits, 1) - bias - bits) for c in range(last + 1)]
        self.list, self.top = np.array(every), every[-1]
        half = every + list(behind)
        self.table = np.array(half + [-h for h in half])

    def round(self, x: Array) -> Array:
        size = np.minimum(np.nan_to_num(np.abs(x), nan=0.0, posinf=self.top), self.top)
        low = np.clip(np.searchsorted(self.list, size, "right") - 1, 0, len(self.list) - 2)
        below, above = size - self.list[low], self.list[low + 1] - size
        up = (above < below) | ((above == below) & (low % 2 == 1))
        return np.where(np.isnan(x), NAN, np.copysign(self.list[low + up], x))

    def means(self, data: Tensor) -> Array:
        return self.table[data.contiguous().view(torch.uint8).numpy()]


FORMATS = {"e4m3": Numbers(4, 3, 126, (NAN,)), "e5m2": Numbers(5, 2, 123, (INF, NAN, NAN, NAN)), "e2m1": Numbers(2, 1, 7)}
# recipe: format, rows of a block (0: all), rows of a weight's, columns, scales
RECIPES = {
    "tensorwise": ("e4m3", 0, 0, 0, "fp32"), "rowwise": ("e4m3", 1, 1, 0, "pow2"), "blockwise": ("e4m3", 1, 128, 128, "pow2"), "blockwise_fp32": ("e4m3", 1, 128, 128, "fp32"),
    "mxfp8": ("e4m3", 1, 1, 32, "byte"), "mxfp4": ("e2m1", 1, 1, 32, "byte"), "nvfp4": ("e2m1", 1, 16, 16, "nv"),
}


def wide(x: Tensor) -> Array:
    return x.detach().to(torch.float64).numpy().copy()


def same(a: Array, b: Array) -> Array:
    return (a == b) | (np.isnan(a) & np.isnan(b))


class Blocks:
    """The blocks of an operand."""

    def __init__(self, recipe: str, role: str, shape: tuple[int, ...]) -> None:
        name, rows, of_weight, columns, self.scale = RECIPES[recipe]
        self.name = "e5m2" if recipe == "tensorwise" and role == "grad" else name
        self.form, self.single, self.shape = FORMATS[self.name], columns == 0 and rows == 0, shape
        rows = of_weight if role == "weight" else rows
        self.i = np.arange(shape[0]) // (rows or shape[0] or 1)
        self.j = np.arange(shape[1]) // (columns or shape[1] or 1)
        self.grid = (-(-shape[0] // rows) if rows else 1, -(-shape[1] // columns) if columns else 1)

    def amax(self, x: Array) -> Array:
        if x.size == 0:
            return np.zeros(self.grid)
        down, across = (np.flatnonzero(np.diff(index, prepend=-1)) for index in (self.i, self.j))
        return np.maximum.reduceat(np.maximum.reduceat(np.abs(x), down, 0), across, 1)

    def each(self, grid: Array) -> Array:
        return grid.reshape(self.grid)[self.i[:, None], self.j[None, :]] if math.prod(self.shape) else np.zeros(self.shape)


def power(amax: Array, top: float) -> Array:
    """The smallest power of two s from 2**-127 on with amax <= top * s; 1 where there is no scale."""
    usual = (amax > 0) & (amax < INF)
    guess = np.ceil(np.log2(np.where(usual, amax, top) / top)).astype(int)
    found = np.ldexp(1.0, guess + 1)
    for lower in (guess, guess - 1):
        found = np.where(np.where(usual, amax, top) <= top * np.ldexp(1.0, lower), np.ldexp(1.0, lower), found)
    return np.where(usual, np.maximum(found, 2.0**-127), 1.0)


def scales(scale: Tensor) -> Array:
    if scale.dtype == torch.float32:
        return wide(scale)
    byte = scale.view(torch.uint8).numpy().astype(int)
    return np.where(byte == 255, NAN, np.ldexp(1.0, byte - 127))


def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A buffer of bytes 255 between two bands of them, and whether the bands still are."""
    size, band = math.prod(shape) * dtype.itemsize, 4096
    memory = torch.full((size + 2 * band,), 255, dtype=torch.uint8)
    return memory[band : band + size].view(dtype).view(shape), lambda: bool((memory[:band] == 255).all() and (memory[band + size :] == 255).all())


def judge(got: Tensor, right: Array, bound: Array, dtype: torch.dtype) -> bool:
    """Within the bound and one rounding."""
    low, high = (wide(torch.tensor(right + s * bound).float().to(dtype)) for s in (-1, 1))
    mine = wide(got)
    return got.dtype == dtype and mine.shape == right.shape and bool((((mine >= low) & (mine <= high)) | same(mine, right)).all())


def untouched(tensors: tuple[Tensor, ...]) -> Callable[[], bool]:
    """Whether the bytes of the operands are as they were."""

    def dense(t: Tensor) -> Tensor:
        return t.detach().reshape(t.shape or (1,)).clone(memory_format=torch.contiguous_format).view(torch.uint8)

    before = [dense(t) for t in tensors]
    return lambda: all(bool((b == dense(t)).all()) for b, t in zip(before, tensors))


# --- encode, decode ---


def check_encode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    f = FORMATS[what["format"]]
    if what.get("rounding") == "stochastic":
        yield from check_draws(run, f)
        return
    for name, x in numbers(f):
        given, intact = wide(x), untouched((x,))
        out = run(x)
        got, right = f.means(out), f.round(given)
        free = np.isnan(given) if what["format"] == "e2m1" else np.isinf(given) & (np.isnan(got) | (np.abs(got) >= f.top))
        signs = (np.signbit(got) == np.signbit(given)) | np.isnan(given) | np.isnan(got)
        yield name, got.shape == given.shape and out.dtype in (DTYPES[what["format"]], torch.uint8) and bool(((same(got, right) | free) & signs).all()) and intact()


def numbers(f: Numbers) -> Iterator[tuple[str, Tensor]]:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "all BF16", every
    yield "all BF16 in FP32, transposed", every.float().view(512, 128).t()
    middle = torch.tensor((f.list[1:] + f.list[:-1]) / 2, dtype=torch.float32)
    for name, to in (("middles", None), ("just below", 0.0), ("just above", 9e9)):
        x = middle if to is None else middle.nextafter(torch.tensor(to))
        yield name, torch.stack([x, -x], 1)
    yield "its own numbers", torch.tensor([f.list, -f.list], dtype=torch.float32)
    torch.manual_seed(71)
    for scale in (3e-5, 1e-3, 0.02, 0.7, 5.0, 90.0, 2e4, 1e15):
        yield f"normal times {scale:g}", torch.randn(29, 53) * scale
        yield f"uniform times {scale:g}", (torch.rand(3, 5, 70)[:, 1:, ::2] - 0.5) * scale
    yield "one row for all", torch.randn(1, 9).expand(4, 9)
    yield "a scalar", torch.tensor(-2.7)
    yield "nothing", torch.zeros(3, 0)


def check_draws(run: Run, f: Numbers) -> Iterator[Case]:
    torch.manual_seed(72)
    for share in (0.05, 0.3, 0.5, 0.8, 0.95):
        for index in (0, 2, 7, 15, 33, 62, len(f.list) - 2):
            for sign in (1, -1):
                low, high = f.list[index], f.list[index + 1]
                x = torch.full((100, 200), low + share * (high - low), dtype=torch.float32)
                got = f.means(run(sign * x)) * sign
                z = float(((got == high).sum() - share * got.size) / math.sqrt(got.size * share * (1 - share)))
                fine = bool(((got == low) | (got == high)).all())
                yield f"{sign * float(x[0, 0]):g}: neighbours {fine}, z {z:.1f}", fine and abs(z) < 5
    yield "its own numbers", bool((f.means(run(torch.tensor(f.list, dtype=torch.float32))) == f.list).all())
    yield "NaN", bool(np.isnan(f.means(run(torch.tensor([NAN, -NAN])))).all())
    yield "beyond", bool((f.means(run(torch.tensor([1e6, -1e6, 1e30]))) == f.top * np.array([1, -1, 1])).all())
    yield "nothing", run(torch.zeros(0, 3)).shape == (0, 3)


def check_decode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    f, dtype = FORMATS[what["format"]], DTYPES[what["format"]]
    every = torch.arange(len(f.table), dtype=torch.int32).to(torch.uint8)
    for name, t in (("all codes", every), ("backwards", every.flip(0)), ("transposed", every.view(2, -1).t()), ("every second", every[::2]), ("nothing", every[:0])):
        got, right = wide(run(t.view(dtype))), f.means(t)
        yield name, got.shape == right.shape and bool((same(got, right) & ((np.signbit(got) == np.signbit(right)) | np.isnan(right))).all())


# --- casts ---


def matrices() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(73)
    for m, k in ((16, 128), (3, 40), (37, 150), (130, 272), (256, 512), (1, 1), (0, 32), (4, 0), (19, 33), (260, 140)):
        yield f"normal {m} x {k}", torch.randn(m, k)
        yield f"BF16 {m} x {k}", (torch.randn(m, k) * 0.02).bfloat16()
        yield f"another magnitude in each row and column {m} x {k}", torch.randn(m, k) * (torch.randn(m, 1) * 2).exp2() * (torch.randn(1, k) * 2).exp2()
        yield f"transposed {m} x {k}", torch.randn(k, m).t()
        yield f"columns of a wider one {m} x {k}", torch.randn(m, k + 50)[:, 20 : 20 + k]
        yield f"every second column {m} x {k}", torch.randn(m, 2 * k)[:, ::2]
        yield f"one row for all {m} x {k}", torch.randn(1, k).expand(m, k)
    yield "positive", torch.rand(20, 288) + 0.01
    yield "negative", -torch.rand(20, 288) - 0.01
    yield "one-hot", torch.eye(48, 160) * 3
    yield "rows of zeros", torch.randn(6, 256) * torch.tensor([1.0, 0, 0, 1, -1, 0])[:, None]
    yield "zeros", torch.zeros(3, 70)
    for special in (NAN, INF, -INF):
        x = torch.randn(24, 300)
        x[5, 11] = special
        yield f"one {special}", x
    for factor in (1e-8, 1e-4, 1e3, 1e20):
        yield f"normal times {factor:g}", torch.randn(20, 256) * factor
    yield "whole numbers", torch.randint(-12, 13, (32, 256)).float()
    for top in (448.0, 449.0, 447.0, 6.0, 6.01, 5.99, 1.0, 0.75, 24.02, 23.98):
        x = (torch.rand(32, 256) - 0.5) * top
        x[:, 7::16] = top
        yield f"amax {top:g}", x


def check_cast(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    for name, x in matrices():
        yield name, judge_cast(run, x, what)
    x = torch.randn(32, 256)
    first = judge_cast(run, x, what)
    x.numpy()[:] = x.numpy()[::-1] * 0.3 + 0.1
    yield "new numbers in the same memory", first and judge_cast(run, x, what)


def judge_cast(run: Run, x: Tensor, what: dict[str, Any]) -> bool:
    cut = Blocks(what["recipe"], what["operand"], tuple(x.shape))
    f, given, intact = cut.form, wide(x), untouched((x,))
    data, whole = dirty(tuple(x.shape), DTYPES[cut.name])
    scale_inv, around = dirty(() if cut.single else cut.grid, torch.uint8 if cut.scale == "byte" else torch.float32)
    got = run(x, data, scale_inv)
    data, scale_inv = (data, scale_inv) if got is None else got
    inverse, amax = scales(scale_inv).reshape(cut.grid), cut.amax(given)
    usual = (amax > 0) & np.isfinite(amax)
    if cut.scale == "nv":
        usual &= bool(np.isfinite(amax).all())
        tensor = (amax.max() if amax.size and amax.max() > 0 else 1.0) / 2688
        close = np.zeros(amax.shape, dtype=bool)
        for slack in (0, 2.0**-22, -(2.0**-22)):
            right = FORMATS["e4m3"].round(amax / 6 / tensor * (1 + slack)) * tensor
            close |= np.abs(inverse - right) <= 2.0**-21 * right
    elif cut.scale == "fp32":
        close = np.abs(inverse - amax / f.top) <= 2.0**-21 * amax / f.top
    else:
        close = inverse == power(amax, f.top)
    per, codes = cut.each(inverse), f.means(data)
    y = np.divide(given, per, out=np.zeros_like(given), where=per > 0)
    fine = cut.each(usual.astype(float)) == 0
    for slack in (0, 2.0**-22, -(2.0**-22)):
        fine |= same(codes, f.round(y * (1 + slack)))
    zero = (cut.each((amax == 0).astype(float)) > 0) & (codes != 0)
    lost = np.isnan(given) & ~np.isnan(codes * per)
    return bool((close | ~usual).all() and fine.all() and not zero.any() and not lost.any()) and whole() and around() and intact()


# --- products ---


def draw(rows: int, columns: int, recipe: str, role: str, special: str) -> tuple[Tensor, Tensor, Array]:
    """Codes, scales, and what they mean."""
    cut = Blocks(recipe, role, (rows, columns))
    f, half = cut.form, 8 if cut.name == "e2m1" else 128
    if special == "whole":
        code = np.searchsorted(f.list, np.random.randint(0, 5, (rows, columns)).astype(float))
    else:
        code = np.random.randint(0, 8 if half == 8 else 100, (rows, columns))
    if special != "positive":
        code = code + half * np.random.randint(0, 2, (rows, columns))
    if special == "NaN" and role == "x" and rows and columns and half == 128:
        code[rows // 2, columns // 2] = 127
    data = torch.tensor(code.astype(np.uint8)).view(DTYPES[cut.name])
    if cut.scale == "byte":
        scale = torch.tensor(np.random.randint(120, 134, cut.grid).astype(np.uint8))
        if special in ("255", "0") and role == "x" and scale.numel():
            scale[rows // 2] = int(special)
    elif cut.scale == "pow2":
        scale = torch.tensor(np.ldexp(1.0, np.random.randint(-7, 5, cut.grid)), dtype=torch.float32)
    elif cut.scale == "nv":
        scale = torch.tensor(FORMATS["e4m3"].round(np.random.rand(*cut.grid) * 300 + 50), dtype=torch.float32) * 0.0013
    else:
        scale = torch.tensor(np.random.rand(*cut.grid) * 0.05 + 0.002, dtype=torch.float32)
    return data, scale.reshape(()) if cut.single else scale, f.means(data) * cut.each(scales(scale))


def limit(x: Array, y: Array) -> Array:
    return (x.shape[1] + 4) * 2.0**-24 * (np.nan_to_num(np.abs(x)) @ np.nan_to_num(np.abs(y)).T)


def check_gemm(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    np.random.seed(74)
    shapes = ((32, 48, 64), (11, 23, 40), (65, 80, 256), (36, 140, 290), (48, 64, 512), (40, 33, 1152), (2, 9, 31), (280, 130, 320), (1, 1, 1), (6, 3, 0), (0, 8, 64), (8, 0, 32), (20, 20, 16))
    for m, n, k in shapes:
        for special in ("plain", "positive", "whole", "NaN", "255", "0", "layouts"):
            a, scale_a, x = draw(m, k, recipe, "x", special)
            b, scale_b, y = draw(n, k, recipe, "weight", special)
            if special == "layouts":
                a = torch.cat([a.view(torch.uint8), a.view(torch.uint8)], 1).view(a.dtype)[:, :k]
                b = b.view(torch.uint8).t().contiguous().t().view(b.dtype)
            intact = untouched((a, b, scale_a, scale_b))
            for call in (1, 2):
                out, around = dirty((m, n), dtype)
                got = run(a, b, scale_a, scale_b, out)
                yield f"{m} x {n} x {k} {special}, call {call}", judge(out if got is None else got, x @ y.T, limit(x, y), dtype) and around() and intact()


def check_grouped(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    np.random.seed(75)
    for ends in ([32, 64, 96], [7, 30, 71], [0, 25, 60], [18, 18, 50], [50, 50], [1, 2, 3, 40], [64, 192, 192, 256], [9], [0, 0, 12], [0, 0]):
        for n, k, special in ((128, 128, "plain"), (80, 320, "plain"), (144, 96, "whole"), (50, 200, "positive"), (20, 32, "NaN"), (1, 3, "plain")):
            a, scale_a, x = draw(ends[-1], k, recipe, "x", special)
            weights = [draw(n, k, recipe, "weight", "plain") for _ in ends]
            b, scale_b = torch.stack([w[0].view(torch.uint8) for w in weights]).view(weights[0][0].dtype), torch.stack([w[1] for w in weights])
            last = torch.tensor(ends, dtype=torch.int32)
            out, around = dirty((ends[-1], n), dtype)
            intact = untouched((a, b, scale_a, scale_b, last))
            got = run(a, b, scale_a, scale_b, last, out)
            pieces = [(x[s:e], w[2]) for s, e, w in zip([0, *ends], ends, weights)]
            right, bound = (np.concatenate(list(parts)) for parts in ((p @ w.T for p, w in pieces), (limit(p, w) for p, w in pieces)))
            yield f"ends {ends}, {n} x {k} {special}", judge(out if got is None else got, right, bound, dtype) and around() and intact()


# --- layers ---


def cast(x: Array, recipe: str, role: str) -> Array:
    cut = Blocks(recipe, role, x.shape)
    amax = cut.amax(x)
    if cut.scale == "fp32":
        scale = np.divide(np.float32(cut.form.top), amax.astype(np.float32), out=np.ones(amax.shape, np.float32), where=amax > 0)
        inverse = (np.float32(1) / scale).astype(float)
        return cut.form.round((x.astype(np.float32) * cut.each(scale).astype(np.float32)).astype(float)) * cut.each(inverse)
    per = cut.each(power(amax, cut.form.top))
    return cut.form.round(x / per) * per


def check_linear(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(76)
    dtype = getattr(torch, what["dtype"])
    for tokens, k, n in ((64, 96, 128), (144, 272, 160), (32, 64, 48), (19, 40, 64), (6, 5, 2), (0, 16, 32), (32, 0, 16)):
        x = (torch.randn(tokens, k) * (torch.randn(k) * 2).exp2()).to(dtype)
        w = (torch.randn(n, k) * 0.1 * (torch.randn(n, 1) * 2).exp2()).to(dtype)
        g = (torch.randn(tokens, n) * 1e-4 * (torch.randn(tokens, 1) * 2).exp2()).to(dtype)
        yield f"{tokens} x {k} x {n}", judge_linear(run, x, w, g, what)
        yield f"{tokens} x {k} x {n} transposed", judge_linear(run, x.t().contiguous().t(), w.t().contiguous().t(), g.t().contiguous().t(), what)
        yield f"{tokens} x {k} x {n}, one token for all", judge_linear(run, x[:1].expand(tokens, k), w, g, what)
        if tokens % 4 == 0:
            yield f"2 x 2 x {tokens // 4} x {k} x {n}", judge_linear(run, x.view(2, 2, tokens // 4, k), w, g.view(2, 2, tokens // 4, n), what)
    x, w, g = (torch.randn(s).to(dtype) for s in ((48, 64), (80, 64), (48, 80)))
    first = judge_linear(run, x, w, g, what)
    raw = w.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    raw[:] = raw[::-1].copy()
    yield "a new weight in the same memory", first and judge_linear(run, x, w, g, what)


def judge_linear(run: Run, x: Tensor, w: Tensor, g: Tensor, what: dict[str, Any]) -> bool:
    recipe, intact = what["recipe"], untouched((x, w, g))
    a, b, c = (wide(t.reshape(math.prod(t.shape[:-1]), t.shape[-1])) for t in (x, w, g))
    pairs = (
        (cast(a, recipe, "x"), cast(b, recipe, "weight")),
        (cast(c, recipe, "grad"), cast(b.T, recipe, "weight")),
        (cast(c.T, recipe, "grad"), cast(a.T, recipe, "x")),
    )
    got, shapes = run(x, w, g), (g.shape, x.shape, w.shape)
    fine = all(t.shape == s and judge(t.reshape(len(p), len(q)), p @ q.T, limit(p, q), x.dtype) for t, s, (p, q) in zip(got, shapes, pairs))
    return fine and intact()


def check_attention(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(77)
    dtype = getattr(torch, what["dtype"])
    for s, d, of_v, factor in ((32, 16, 16, 1.0), (64, 32, 32, 1.0), (45, 24, 40, 2.0), (97, 16, 16, 0.3), (128, 32, 16, 1.5), (1, 8, 8, 1.0), (0, 16, 16, 1.0), (3, 4, 4, 1.0), (64, 32, 32, 1.0)):
        given = [(torch.randn(2, 2, s, width) * f).to(dtype) for width, f in ((d, factor), (d, factor), (of_v, 2.0), (of_v, 0.01))]
        intact = untouched(tuple(given))
        q, k, v, g = (wide(t) for t in given)
        logits = np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)
        if what["causal"]:
            logits = np.where(np.arange(s)[:, None] >= np.arange(s)[None, :], logits, -INF)
        e = np.exp(logits - logits.max(-1, keepdims=True)) if s else logits
        p = e / e.sum(-1, keepdims=True)
        dp = np.einsum("bhid,bhjd->bhij", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
        right = (p @ v, ds @ k, np.swapaxes(ds, 2, 3) @ q, np.swapaxes(p, 2, 3) @ g)
        got, fine = run(*given), []
        for a, b in zip(got, right):
            error, size = wide(a) - b, np.abs(b)
            if what["recipe"] == "fp8":  # rough: casts change a tensor by far less than a third of its norm
                close = np.linalg.norm(error.ravel()) <= np.linalg.norm(size.ravel()) / 3 + 1e-9
            else:
                unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
                close = (np.abs(error) <= unit * size + 2.0**-20 * size.max(initial=0.0) + 1e-12).all()
            fine.append(a.dtype == dtype and error.shape == b.shape and bool(close))
        yield f"S {s} D {d} times {factor:g}: o dq dk dv {fine}", all(fine) and intact()


def check_optimizer(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(78)
    (b1, b2), lr, eps, decay = what["betas"], what["lr"], what["eps"], what["weight_decay"]
    dtype = getattr(torch, what["dtype"])
    for shape, factor in (((24, 32), 1.0), ((24, 32), 0.01), ((9, 11), 1.0), ((50, 40), 1e-4), ((3, 4, 5), 30.0), ((1,), 1.0), ((0, 7), 1.0)):
        p, state = torch.randn(shape).to(dtype), {}
        m = v = np.zeros(shape)
        for step in range(1, 11):
            g = (torch.randn(shape) * factor).to(dtype)
            before, up, intact = wide(p), wide(g), untouched((g,))
            run(p, g, state, step)
            m, v = b1 * m + (1 - b1) * up, b2 * v + (1 - b2) * up**2
            update = lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
            bound = np.abs(update) * 2.0**-15 + lr * 2.0**-18 + np.abs(before) * 2.0**-22
            yield f"{shape} times {factor:g}, step {step}", judge(p, before * (1 - lr * decay) - update, bound, dtype) and intact()


CHECKS = {
    "encode": check_encode, "decode": check_decode, "cast": check_cast, "gemm": check_gemm, "grouped": check_grouped,
    "linear": check_linear, "attention": check_attention, "optimizer": check_optimizer,
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.utils.deterministic.fill_uninitialized_memory = True
    sys.path.insert(0, str(HERE))
    bad = 0
    entries = json.loads((HERE / "public.json").read_text())
    for entry in entries:
        if names and entry["name"] not in names:
            continue
        file, function = entry["adapter"].split(":")
        run = getattr(importlib.import_module(Path(file).stem), function)
        cases: list[Case] = []
        raised = ""
        try:
            cases.extend(CHECKS[entry["kind"]](run, entry["what"]))
        except Exception as error:
            raised = f" RAISES {type(error).__name__}: {error}"
        differ = [name for name, fine in cases if not fine]
        good = not raised and bool(differ) != entry["clean"]
        bad += not good
        word = "right" if entry["clean"] else "wrong"
        print(f"{'ok ' if good else 'BAD'} {entry['name']:9s} {word} {len(differ):3d} of {len(cases):3d} differ{raised}: {'; '.join(differ[:2])}", flush=True)
    wrong = sum(not e["clean"] for e in entries)
    print(f"{wrong} wrong, {len(entries) - wrong} right; {bad} not as they say")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

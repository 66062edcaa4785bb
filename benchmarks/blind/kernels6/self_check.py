"""Shows that each wrong kernel of public.json is wrong on some ordinary input, and that no right one is on any: `python self_check.py [NAME ...]`.

The oracle takes nothing from slate6.py and no conversion of torch's. A format is the list of its numbers, and a number goes to the nearest
of the list by their middles; blocks are cut out one after the other; powers of two are found by trying; gradients of attention are
autograd's. All in fp64. Printed are the cases that differ of all that ran, and the first two of them. Exit code 1: some entry is not as it
says.
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
NAN = math.nan


class Format:
    """The numbers of a format from 0 on, the middles between them, and what each byte means."""

    def __init__(self, exponents: int, bits: int, special: str) -> None:
        bias, count = 2 ** (exponents - 1) - 1, 1 << (exponents + bits)
        self.mask = 2 * count - 1
        half = []
        for code in range(count):
            e, m = code >> bits, code & ((1 << bits) - 1)
            half.append((m if e == 0 else m + (1 << bits)) * 2.0 ** (max(e, 1) - bias - bits))
        finite = {"fn": count - 1, "ieee": count - (1 << bits), "all": count}[special]
        for code in range(finite, count):
            half[code] = math.inf if special == "ieee" and code == finite else NAN
        self.list = np.array(half[:finite])
        self.middles = (self.list[1:] + self.list[:-1]) / 2
        self.top = self.list[-1]
        self.table = np.array(half + [-h for h in half])

    def nearest(self, x: Array) -> Array:
        """Saturating; ties go to the even code; NaN stays."""
        size = np.minimum(np.where(np.isnan(x), 0.0, np.abs(x)), self.top)
        low, high = np.searchsorted(self.middles, size, "left"), np.searchsorted(self.middles, size, "right")
        index = np.where(low == high, low, np.where(low % 2 == 0, low, high))
        return np.where(np.isnan(x), NAN, np.copysign(self.list[index], x))

    def means(self, data: Tensor) -> Array:
        byte = data.contiguous().view(torch.uint8).numpy()
        return np.where(byte > self.mask, NAN, self.table[byte & self.mask])


FORMATS = {"e4m3": Format(4, 3, "fn"), "e5m2": Format(5, 2, "ieee"), "e2m1": Format(2, 1, "all")}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}
# recipe: format, rows and columns of a block (0: all), rows of a weight's, kind of scales
RECIPES = {
    "tensorwise": ("e4m3", 0, 0, 0, "fp32"), "rowwise": ("e4m3", 1, 0, 1, "pow2"), "blockwise": ("e4m3", 1, 128, 128, "pow2"), "nvfp4": ("e2m1", 1, 16, 16, "nv"),
    "blockwise_fp32": ("e4m3", 1, 128, 128, "fp32"), "mxfp8": ("e4m3", 1, 32, 1, "byte"), "mxfp4": ("e2m1", 1, 32, 1, "byte"),
}


def wide(x: Tensor) -> Array:
    return x.detach().to(torch.float64).numpy().copy()


def same(a: Array, b: Array) -> Array:
    return (a == b) | (np.isnan(a) & np.isnan(b))


class Cut:
    """How an operand of a recipe is cut into blocks."""

    def __init__(self, recipe: str, operand: str, shape: tuple[int, ...]) -> None:
        name, rows, columns, of_weight, self.scale = RECIPES[recipe]
        self.name = "e5m2" if recipe == "tensorwise" and operand == "grad" else name
        self.format, self.whole = FORMATS[self.name], rows == 0
        self.rows, self.columns = (of_weight if operand == "weight" else rows) or max(shape[0], 1), columns or max(shape[1], 1)
        self.grid = (1 if self.whole else -(-shape[0] // self.rows), -(-shape[1] // self.columns) if columns else 1)
        self.shape = shape

    def amax(self, x: Array) -> Array:
        found = np.zeros(self.grid)
        for i, j in np.ndindex(*self.grid):
            piece = x[i * self.rows : (i + 1) * self.rows, j * self.columns : (j + 1) * self.columns]
            found[i, j] = np.abs(piece).max() if piece.size else 0.0
        return found

    def each(self, grid: Array) -> Array:
        full = np.repeat(np.repeat(grid.reshape(self.grid), self.rows, 0), self.columns, 1)
        return full[: self.shape[0], : self.shape[1]]


def power(amax: Array, top: float) -> Array:
    """The smallest power of two s from 2**-127 on with amax <= top s; 1 where there is no scale."""
    found = np.ones_like(amax)
    for at, a in np.ndenumerate(amax):
        if 0 < a < math.inf:
            e = max(math.ceil(math.log2(a / top)) - 2, -127)
            while a > math.ldexp(top, e):
                e += 1
            found[at] = math.ldexp(1.0, e)
    return found


def scale_of(scale: Tensor) -> Array:
    if scale.dtype == torch.float32:
        return wide(scale)
    byte = scale.view(torch.uint8).numpy().astype(float)
    return np.where(byte == 255, NAN, 2.0 ** (byte - 127))


def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A buffer of bytes 255 between two bands of them, and whether the bands still are."""
    size, band = math.prod(shape) * dtype.itemsize, 4096
    memory = torch.full((size + 2 * band,), 255, dtype=torch.uint8)
    return memory[band : band + size].view(dtype).view(shape), lambda: bool((memory[:band] == 255).all() and (memory[band + size :] == 255).all())


# --- encode, decode ---


def inputs(kind: str) -> Iterator[tuple[str, Tensor]]:
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    f = FORMATS[kind]
    yield "all BF16", bf16
    yield "all BF16 as FP32", bf16.float().view(256, 256)
    middles = torch.tensor(f.middles, dtype=torch.float32)
    for name, t in (("ties", middles), ("below ties", middles.nextafter(torch.zeros(()))), ("above ties", middles.nextafter(torch.tensor(9e9)))):
        yield name, torch.cat([t, -t])
    yield "numbers of the format", torch.tensor(np.concatenate([f.list, -f.list]), dtype=torch.float32)
    torch.manual_seed(61)
    for scale in (1e-4, 2e-3, 0.03, 1.0, 60.0, 3e4, 1e20):
        yield f"normal times {scale:g}", torch.randn(41, 37) * scale
    yield "transposed", torch.randn(9, 14).t()
    yield "every second column", torch.randn(9, 14)[:, ::2]
    yield "a broadcast row", torch.randn(1, 14).expand(5, 14)
    yield "a scalar", torch.tensor(1.3)
    yield "three dimensions", torch.randn(2, 3, 5)
    yield "empty", torch.zeros(0, 5)


def check_encode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    f = FORMATS[what["format"]]
    if what.get("rounding") == "stochastic":
        yield from check_draws(run, f)
        return
    for name, x in inputs(what["format"]):
        given, before = wide(x), x.clone()
        got, right = f.means(run(x)), f.nearest(given)
        free = np.isnan(given) if what["format"] == "e2m1" else np.isinf(given) & (np.isnan(got) | (np.abs(got) == f.top))
        signs = (np.signbit(got) == np.signbit(given)) | np.isnan(given) | np.isnan(got)
        kept = bool(same(wide(x), wide(before)).all())
        yield name, got.shape == given.shape and bool(((same(got, right) | free) & signs).all()) and kept


def check_draws(run: Run, f: Format) -> Iterator[Case]:
    torch.manual_seed(62)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        for index in (0, 1, 5, 20, 60, len(f.list) - 2):
            for sign in (1, -1):
                low, high = f.list[index], f.list[index + 1]
                x = torch.full((20000,), low + share * (high - low), dtype=torch.float32)
                got = f.means(run(sign * x)) * sign
                fine = bool(((got == low) | (got == high)).all())
                z = float(((got == high).sum() - share * 20000) / math.sqrt(20000 * share * (1 - share)))
                yield f"{sign * float(x[0]):g}: neighbours {fine}, z {z:.1f}", fine and abs(z) < 5
    yield "numbers of the format", bool((f.means(run(torch.tensor(f.list, dtype=torch.float32))) == f.list).all())
    yield "NaN", bool(np.isnan(f.means(run(torch.tensor([NAN, -NAN])))).all())
    yield "far beyond", bool((f.means(run(torch.tensor([1e6, -1e6, 1e30]))) == f.top * np.array([1, -1, 1])).all())
    yield "empty", run(torch.zeros(0, 3)).shape == (0, 3)


def check_decode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    data = torch.arange(FORMATS[kind].mask + 1, dtype=torch.int32).to(torch.uint8).view(DTYPES[kind])
    for name, t in (("all codes", data), ("backwards", data.view(torch.uint8).flip(0).view(DTYPES[kind])), ("as a matrix", data.view(2, -1).t()), ("empty", data[:0])):
        got, right = wide(run(t)), FORMATS[kind].means(t)
        yield name, got.shape == right.shape and bool((same(got, right) & ((np.signbit(got) == np.signbit(right)) | np.isnan(right))).all())


# --- casts ---


def matrices() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(63)
    for m, k in ((4, 64), (5, 130), (33, 200), (200, 264), (256, 384), (1, 1), (0, 64), (8, 0), (17, 15), (130, 96)):
        yield f"normal {m} x {k}", torch.randn(m, k)
        yield f"BF16 {m} x {k}", torch.randn(m, k).bfloat16()
        yield f"spread {m} x {k}", torch.randn(m, k) * (torch.randn(m, 1) * 3).exp2() * (torch.randn(1, k) * 2).exp2()
        yield f"transposed {m} x {k}", torch.randn(k, m).t()
        yield f"columns of a wider matrix {m} x {k}", (torch.randn(m, k + 96) * 1e3)[:, 40 : 40 + k]
        yield f"every second column {m} x {k}", torch.randn(m, 2 * k)[:, ::2]
        yield f"a broadcast row {m} x {k}", torch.randn(1, k).expand(m, k)
    yield "positive", torch.rand(16, 256) + 0.1
    yield "one-hot", torch.eye(40, 160)
    yield "rows of zeros", torch.randn(8, 256) * torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])[:, None]
    yield "zeros", torch.zeros(5, 40)
    for special in (NAN, -math.inf):
        x = torch.randn(20, 256)
        x[2, 7] = special
        yield f"one {special}", x
    for factor in (1e-7, 1e-3, 1e9, 1e28):
        yield f"normal times {factor:g}", torch.randn(16, 256) * factor
    yield "whole numbers", torch.randint(-448, 449, (16, 256)).float()
    for top in (448.0, 6.0, 449.0, 2.0**0.5, 447.99997, 448.00003, 5.9999995, 6.0000005):
        x = (torch.rand(16, 256) - 0.5) * top
        x[:, ::16] = -top
        yield f"amax {top:g}", x


def check_cast(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    for name, x in matrices():
        yield name, judge_cast(run, x, what)
    x = torch.randn(32, 256)
    first = judge_cast(run, x, what)
    x.numpy()[:] = x.numpy()[::-1] * 0.3 + 0.1
    yield "new numbers in the same memory", first and judge_cast(run, x, what)


def judge_cast(run: Run, x: Tensor, what: dict[str, Any]) -> bool:
    cut = Cut(what["recipe"], what["operand"], tuple(x.shape))
    f, given = cut.format, wide(x)
    data, whole = dirty(tuple(x.shape), DTYPES[cut.name])
    scale_inv, around = dirty(() if cut.whole else cut.grid, torch.uint8 if cut.scale == "byte" else torch.float32)
    got = run(x, data, scale_inv)
    data, scale_inv = (data, scale_inv) if got is None else got
    inverse, amax = scale_of(scale_inv).reshape(cut.grid), cut.amax(given)
    usual = (amax > 0) & np.isfinite(amax)
    if cut.scale == "nv":
        usual &= bool(np.isfinite(amax).all())
        tensor = (amax.max() if amax.size and amax.max() > 0 else 1.0) / 2688
        close = np.zeros(amax.shape, dtype=bool)
        for slack in (0, 2.0**-22, -(2.0**-22)):
            right = FORMATS["e4m3"].nearest(amax / 6 / tensor * (1 + slack)) * tensor
            close |= np.abs(inverse - right) <= 2.0**-21 * right
    elif cut.scale == "fp32":
        close = np.abs(inverse - amax / f.top) <= 2.0**-21 * amax / f.top
    else:
        close = inverse == power(amax, f.top)
    per, codes = cut.each(inverse), f.means(data)
    y = np.divide(given, per, out=np.zeros_like(given), where=per > 0)
    fine = cut.each(usual.astype(float)) == 0
    for slack in (0, 2.0**-22, -(2.0**-22)):
        fine |= same(codes, f.nearest(y * (1 + slack)))
    zero = (cut.each((amax == 0).astype(float)) > 0) & (codes != 0)
    lost = np.isnan(given) & ~np.isnan(codes * per)
    kept = bool(same(wide(x), given).all())
    return bool((close | ~usual).all() and fine.all() and not zero.any() and not lost.any()) and whole() and around() and kept


# --- products ---


def judge(got: Tensor, right: Array, bound: Array, dtype: torch.dtype) -> bool:
    """Within the bound and one rounding."""
    low, high = (wide(torch.tensor(right + s * bound).float().to(dtype)) for s in (-1, 1))
    mine = wide(got)
    return got.dtype == dtype and mine.shape == right.shape and bool((((mine >= low) & (mine <= high)) | same(mine, right)).all())


def draw(rows: int, columns: int, recipe: str, side: str, special: str) -> tuple[Tensor, Tensor, Array]:
    """Codes, scales, and what they mean."""
    cut = Cut(recipe, side, (rows, columns))
    f, four = cut.format, cut.name == "e2m1"
    codes = np.searchsorted(f.list, np.abs(np.random.randn(rows, columns)) * (2 if four else 60)).clip(max=len(f.list) - 1)
    if special != "positive":
        codes = codes + (8 if four else 128) * (np.random.rand(rows, columns) < 0.5)
    if special == "NaN" and side == "x" and rows > 2 and columns and not four:
        codes[rows // 2, columns // 2] = 0x7F
    data = torch.tensor(codes.astype(np.uint8)).view(DTYPES[cut.name])
    if cut.scale == "byte":
        scale = torch.tensor(np.random.randint(117, 136, cut.grid).astype(np.uint8))
        if special in ("255", "0") and side == "x" and scale.numel():
            scale[rows // 2] = int(special)
    elif cut.scale == "pow2":
        scale = torch.tensor(2.0 ** np.random.randint(-6, 6, cut.grid), dtype=torch.float32)
    elif cut.scale == "nv":
        scale = torch.tensor(FORMATS["e4m3"].nearest(np.random.rand(*cut.grid) * 400 + 20), dtype=torch.float32) * 0.003
    else:
        scale = torch.tensor(np.random.rand(*cut.grid) * 0.02 + 0.001, dtype=torch.float32)
    return data, scale.reshape(()) if cut.whole else scale, f.means(data) * cut.each(scale_of(scale))


def limit(x: Array, y: Array) -> Array:
    return (x.shape[1] + 4) * 2.0**-24 * (np.nan_to_num(np.abs(x)) @ np.nan_to_num(np.abs(y)).T)


def check_gemm(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    np.random.seed(64)
    shapes = ((16, 32, 64), (13, 21, 48), (70, 96, 256), (33, 130, 300), (64, 64, 384), (100, 65, 1024), (3, 7, 33), (300, 140, 640), (1, 1, 1), (5, 6, 0), (0, 4, 32), (4, 0, 16), (2, 400, 130))
    for m, n, k in shapes:
        for special in ("normal", "positive", "NaN", "255", "0", "layouts"):
            a, scale_a, x = draw(m, k, recipe, "x", special)
            b, scale_b, y = draw(n, k, recipe, "weight", special)
            if special == "layouts":
                a = torch.cat([a.view(torch.uint8), a.view(torch.uint8)], 1).view(a.dtype)[:, :k]
                b = b.view(torch.uint8).t().contiguous().t().view(b.dtype)
            out, around = dirty((m, n), dtype)
            got = run(a, b, scale_a, scale_b, out)
            yield f"{m} x {n} x {k} {special}", judge(out if got is None else got, x @ y.T, limit(x, y), dtype) and around()


def check_grouped(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    np.random.seed(65)
    cuts = ([16, 48, 64], [5, 40, 67], [0, 20, 53], [20, 20, 64], [3, 35, 35], [1, 2, 80], [64, 128, 160, 160, 192], [7], [0, 0, 9], [0, 0])
    for ends in cuts:
        for n, k, special in ((144, 160, "normal"), (64, 128, "normal"), (96, 96, "normal"), (200, 300, "positive"), (33, 64, "NaN"), (1, 5, "normal")):
            a, scale_a, x = draw(ends[-1], k, recipe, "x", special)
            weights = [draw(n, k, recipe, "weight", "normal") for _ in ends]
            b = torch.stack([w[0].view(torch.uint8) for w in weights]).view(weights[0][0].dtype)
            out, around = dirty((ends[-1], n), dtype)
            got = run(a, b, scale_a, torch.stack([w[1] for w in weights]), torch.tensor(ends, dtype=torch.int32), out)
            pieces = [x[s:e] for s, e in zip([0, *ends], ends)]
            right = np.concatenate([p @ w[2].T for p, w in zip(pieces, weights)])
            bound = np.concatenate([limit(p, w[2]) for p, w in zip(pieces, weights)])
            yield f"ends {ends}, {n} x {k} {special}", judge(out if got is None else got, right, bound, dtype) and around()


# --- layers ---


def recast(x: Array, recipe: str, operand: str) -> Array:
    cut = Cut(recipe, operand, x.shape)
    amax, top = cut.amax(x), cut.format.top
    if cut.scale == "fp32":
        scale = np.divide(np.float32(top), amax.astype(np.float32), out=np.ones(amax.shape, np.float32), where=amax > 0)
        inverse = (np.float32(1) / scale).astype(float)
        return cut.format.nearest((x.astype(np.float32) * cut.each(scale)).astype(float)) * cut.each(inverse)
    per = cut.each(power(amax, top))
    return cut.format.nearest(x / per) * per


def check_linear(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(66)
    dtype = getattr(torch, what["dtype"])
    for tokens, k, n in ((32, 64, 96), (160, 256, 384), (48, 144, 272), (17, 64, 32), (5, 3, 7), (0, 32, 64), (16, 0, 32)):
        x = (torch.randn(tokens, k) * (torch.randn(k) * 2).exp2()).to(dtype)
        w = (torch.randn(n, k) * (torch.randn(n, 1) * 2).exp2()).to(dtype)
        g = (torch.randn(tokens, n) * (torch.randn(tokens, 1) * 2).exp2() * 1e-3).to(dtype)
        yield f"{tokens} x {k} x {n}", judge_linear(run, x, w, g, what)
        yield f"{tokens} x {k} x {n} transposed", judge_linear(run, x.t().contiguous().t(), w.t().contiguous().t(), g, what)
        yield f"{tokens} x {k} x {n} broadcast", judge_linear(run, x[:1].expand(tokens, k), w, g, what)
        if tokens % 2 == 0:
            yield f"2 x {tokens // 2} x {k} x {n}", judge_linear(run, x.view(2, tokens // 2, k), w, g.view(2, tokens // 2, n), what)
    x, w, g = (t.to(dtype) for t in (torch.randn(32, 64), torch.randn(96, 64), torch.randn(32, 96)))
    first = judge_linear(run, x, w, g, what)
    raw = w.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    raw[:] = raw[::-1].copy()
    yield "a new weight in the same memory", first and judge_linear(run, x, w, g, what)


def judge_linear(run: Run, x: Tensor, w: Tensor, g: Tensor, what: dict[str, Any]) -> bool:
    recipe = what["recipe"]
    a, b, c = (wide(t.reshape(math.prod(t.shape[:-1]), t.shape[-1])) for t in (x, w, g))
    pairs = (
        (recast(a, recipe, "x"), recast(b, recipe, "weight").T),
        (recast(c, recipe, "grad"), recast(b.T, recipe, "weight").T),
        (recast(c.T, recipe, "grad"), recast(a.T, recipe, "x").T),
    )
    got = run(x, w, g)
    shapes = (g.shape, x.shape, w.shape)
    fine = all(t.shape == s and judge(t.reshape(p.shape[0], q.shape[1]), p @ q, limit(p, q.T), x.dtype) for t, s, (p, q) in zip(got, shapes, pairs))
    return fine and all(bool((wide(t).reshape(before.shape) == before).all()) for t, before in ((x, a), (w, b), (g, c)))


def check_attention(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(67)
    dtype = getattr(torch, what["dtype"])
    for s, d, of_v, factor in ((64, 32, 32, 1.0), (37, 16, 16, 1.0), (80, 64, 48, 0.1), (130, 16, 16, 3.0), (1, 8, 8, 1.0), (0, 8, 8, 1.0), (2, 24, 24, 2.0)):
        given = [(torch.randn(2, 3, s, width) * f).to(dtype) for width, f in ((d, factor), (d, factor), (of_v, 3.0), (of_v, 0.1))]
        q, k, v = (t.to(torch.float64).requires_grad_() for t in given[:3])
        weights = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)
        if what["causal"]:
            weights = weights.masked_fill(~torch.ones(s, s).tril().bool(), -math.inf)
        o = torch.einsum("bhij,bhjd->bhid", weights.softmax(-1), v)
        right = (o.detach(), *torch.autograd.grad(o, (q, k, v), given[3].to(torch.float64)))
        got = run(*given)
        if what["recipe"] == "fp8":  # rough: casts change a tensor by far less than a third of its norm
            fine = [a.dtype == dtype and a.shape == b.shape and bool((a.double() - b).norm() <= b.norm() / 3 + 1e-9) for a, b in zip(got, right)]
        else:
            unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
            fine = [a.dtype == dtype and a.shape == b.shape and bool(((a.double() - b).abs() <= unit * b.abs() + 2.0**-20 * b.abs().amax() + 1e-12).all()) if b.numel() else a.shape == b.shape
                    for a, b in zip(got, right)]
        yield f"S {s} D {d} times {factor:g}: o dq dk dv {fine}", all(fine)


def check_optimizer(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(68)
    (b1, b2), lr, eps, decay = what["betas"], what["lr"], what["eps"], what["weight_decay"]
    dtype = getattr(torch, what["dtype"])
    for shape, factor in (((16, 32), 1.0), ((16, 32), 0.1), ((7, 13), 1.0), ((64, 60), 1e-3), ((40, 30), 1e-7), ((1,), 1.0), ((0, 4), 1.0)):
        p, state = torch.randn(shape).to(dtype), {}
        m = v = np.zeros(shape)
        for step in range(1, 13):
            g = (torch.randn(shape) * factor).to(dtype)
            before, up = wide(p), wide(g)
            run(p, g, state, step)
            m, v = b1 * m + (1 - b1) * up, b2 * v + (1 - b2) * up**2
            update = lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
            rough = what["moments"] != "float32"  # moments in fewer bits: within a quarter of the step
            bound = np.abs(update) * (0.25 if rough else 2.0**-15) + lr * (0.05 if rough else 2.0**-18) + np.abs(before) * 2.0**-22
            yield f"{shape} times {factor:g}, step {step}", judge(p, before * (1 - lr * decay) - update, bound, dtype) and bool((wide(g) == up).all())


CHECKS = {
    "encode": check_encode, "decode": check_decode, "cast": check_cast, "gemm": check_gemm, "grouped": check_grouped,
    "linear": check_linear, "attention": check_attention, "optimizer": check_optimizer,
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.utils.deterministic.fill_uninitialized_memory = True
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

"""Shows that each wrong kernel of public.json is wrong on some ordinary input, and that no right one is on any: `python self_check.py [NAME ...]`.

The oracle takes nothing from flint5.py and no conversion of torch's: formats are listed by their formula in numpy, the nearest number is
found in that list, blocks are cut out one after the other, gradients of attention are autograd's, all in fp64. Printed are the cases that
differ of all that ran, and the first two of them. Exit code 1: some entry is not as it says.
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


def listing(bits: int, low: int, top: float) -> Array:
    """A format's numbers from 0 to top, by their formula."""
    found = [m * 2.0 ** (low - bits) for m in range(1 << bits)]
    e = low
    while found[-1] < top:
        found += [(1 + m / (1 << bits)) * 2.0**e for m in range(1 << bits) if (1 + m / (1 << bits)) * 2.0**e <= top]
        e += 1
    return np.array(found)


LIST = {"e4m3": listing(3, -6, 448.0), "e5m2": listing(2, -14, 57344.0), "e2m1": listing(1, 0, 6.0)}
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}
TABLE = {}
for _name, _list in LIST.items():
    _rest = [math.inf] if _name == "e5m2" else []
    _half = np.concatenate([_list, _rest, np.full((8 if _name == "e2m1" else 128) - len(_list) - len(_rest), NAN)])
    TABLE[_name] = np.concatenate([_half, -_half])

# recipe: rows and columns of a block (0: all), rows of one of a weight, format, kind of scales
RECIPES = {
    "tensorwise": (0, 0, 0, "e4m3", "fp32"), "rowwise": (1, 0, 1, "e4m3", "pow2"), "blockwise": (1, 128, 128, "e4m3", "pow2"),
    "blockwise_fp32": (1, 128, 128, "e4m3", "fp32"), "mxfp8": (1, 32, 1, "e4m3", "byte"), "mxfp4": (1, 32, 1, "e2m1", "byte"),
    "nvfp4": (1, 16, 16, "e2m1", "nv"),
}


def wide(x: Tensor) -> Array:
    return x.detach().to(torch.float64).numpy().copy()


def number(data: Tensor, kind: str) -> Array:
    """What codes mean."""
    byte = data.contiguous().view(torch.uint8).numpy()
    if kind == "e2m1":
        return np.where(byte > 15, NAN, TABLE[kind][byte & 15])
    return TABLE[kind][byte]


def nearest(x: Array, kind: str) -> Array:
    """The nearest number of a format, ties to even codes, saturating."""
    numbers, size = LIST[kind], np.nan_to_num(np.abs(x), nan=0.0, posinf=1e300)
    up = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    low, high = size - numbers[up - 1], numbers[up] - size
    index = np.where((low < high) | ((low == high) & (up % 2 == 1)), up - 1, up)
    return np.where(np.isnan(x), NAN, np.copysign(numbers[index], x))


def same(a: Array, b: Array) -> Array:
    return (a == b) | (np.isnan(a) & np.isnan(b))


class Block:
    """How an operand of a recipe is cut."""

    def __init__(self, recipe: str, operand: str, shape: tuple[int, ...]) -> None:
        rows, columns, of_weight, kind, self.how = RECIPES[recipe]
        self.kind = "e5m2" if recipe == "tensorwise" and operand == "grad" else kind
        self.one = rows == 0
        self.rows = (of_weight if operand == "weight" else rows) or max(shape[0], 1)
        self.columns = columns or max(shape[1], 1)
        self.grid = (1 if self.one else math.ceil(shape[0] / self.rows), math.ceil(shape[1] / self.columns) if columns else 1)
        self.shape = shape

    def amax(self, x: Array) -> Array:
        grid = np.zeros(self.grid)
        for i in range(self.grid[0]):
            for j in range(self.grid[1]):
                piece = np.abs(x[i * self.rows : (i + 1) * self.rows, j * self.columns : (j + 1) * self.columns])
                grid[i, j] = piece.max() if piece.size else 0.0
        return grid

    def each(self, grid: Array) -> Array:
        i, j = (np.arange(n) // size for n, size in zip(self.shape, (self.rows, self.columns)))
        return grid.reshape(self.grid)[i][:, j]


def sizes(amax: Array, top: float) -> Array:
    """The smallest power of two s, from 2**-127 on, with amax <= top s; 1 where an amax is 0 or not finite."""
    found = np.ones_like(amax)
    for at, a in np.ndenumerate(amax):
        if a > 0 and math.isfinite(a):
            e = -127
            while a > top * 2.0**e:
                e += 1
            found[at] = 2.0**e
    return found


def scale_of(scale: Tensor) -> Array:
    if scale.dtype == torch.float32:
        return wide(scale)
    byte = scale.view(torch.uint8).numpy().astype(float)
    return np.where(byte == 255, NAN, 2.0 ** (byte - 127))


def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A buffer of bytes 255 between two bands of them, and whether the bands still are."""
    size, band = math.prod(shape) * dtype.itemsize, 2048
    whole = torch.full((size + 2 * band,), 255, dtype=torch.uint8)
    return whole[band : band + size].view(dtype).view(shape), lambda: bool((whole[:band] == 255).all() and (whole[band + size :] == 255).all())


# --- encode, decode ---


def inputs(kind: str) -> Iterator[tuple[str, Tensor]]:
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "all BF16", bf16
    yield "all BF16 as FP32", bf16.float().view(256, 256)
    middles = torch.tensor((LIST[kind][1:] + LIST[kind][:-1]) / 2, dtype=torch.float32)
    for name, t in (("ties", middles), ("below ties", middles.nextafter(torch.zeros(()))), ("above ties", middles.nextafter(torch.tensor(9e9)))):
        yield name, torch.cat([t, -t])
    yield "numbers of the format", torch.tensor(np.concatenate([LIST[kind], -LIST[kind]]), dtype=torch.float32)
    torch.manual_seed(51)
    for scale in (1e-3, 0.03, 1.0, 60.0, 3e4):
        yield f"normal times {scale:g}", torch.randn(41, 37) * scale
    yield "transposed", torch.randn(9, 14).t()
    yield "every second column", torch.randn(9, 14)[:, ::2]
    yield "a broadcast row", torch.randn(1, 14).expand(5, 14)
    yield "a scalar", torch.tensor(1.3)
    yield "empty", torch.zeros(0, 5)


def check_encode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    if what.get("rounding") == "stochastic":
        yield from check_draws(run, kind)
        return
    for name, x in inputs(kind):
        given, before = wide(x), x.clone()
        got, right = number(run(x), kind), nearest(wide(x), kind)
        free = np.isnan(given) if kind == "e2m1" else np.isinf(given) & (np.isnan(got) | (np.abs(got) == LIST[kind][-1]))
        signs = (np.signbit(got) == np.signbit(given)) | np.isnan(given) | np.isnan(got)
        kept = bool(same(wide(x), wide(before)).all())
        yield name, got.shape == given.shape and bool(((same(got, right) | free) & signs).all()) and kept


def check_draws(run: Run, kind: str) -> Iterator[Case]:
    torch.manual_seed(52)
    numbers = LIST[kind]
    for scale in (numbers[-1] * 0.9, 1.0, numbers[1] * 9, numbers[1] * 0.7):
        x = torch.rand(40000) * scale
        given = wide(x)
        index = np.clip(np.searchsorted(numbers, given, side="right") - 1, 0, len(numbers) - 2)
        low, high = numbers[index], numbers[index + 1]
        for sign in (1, -1):
            got = number(run(sign * x), kind) * sign
            share = (given - low) / (high - low)
            fine = bool(((got == low) | (got == high)).all())
            z = float((((got - low) / (high - low)) - share).sum() / np.sqrt((share * (1 - share)).sum()))
            yield f"up to {sign * scale:g}: neighbours {fine}, z {z:.1f}", fine and abs(z) < 5
    yield "numbers of the format", bool((number(run(torch.tensor(numbers, dtype=torch.float32)), kind) == numbers).all())
    yield "NaN", bool(np.isnan(number(run(torch.tensor([NAN, -NAN])), kind)).all())
    yield "far beyond", bool((number(run(torch.tensor([1e6, -1e6, 1e30])), kind) == numbers[-1] * np.array([1, -1, 1])).all())
    yield "empty", run(torch.zeros(0, 3)).shape == (0, 3)


def check_decode(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    data = torch.arange(16 if kind == "e2m1" else 256, dtype=torch.int32).to(torch.uint8).view(DTYPE[kind])
    for name, t in (("all codes", data), ("backwards", data.view(torch.uint8).flip(0).view(DTYPE[kind])), ("as a matrix", data.view(2, -1).t()), ("empty", data[:0])):
        got, right = wide(run(t)), number(t, kind)
        yield name, got.shape == right.shape and bool((same(got, right) & ((np.signbit(got) == np.signbit(right)) | np.isnan(right))).all())


# --- casts ---


def matrices() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(53)
    for m, k in ((4, 64), (5, 130), (33, 200), (200, 264), (256, 384), (1, 1), (0, 64), (8, 0), (17, 15)):
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
    block = Block(what["recipe"], what["operand"], tuple(x.shape))
    kind, given = block.kind, wide(x)
    data, whole = dirty(tuple(x.shape), DTYPE[kind])
    scale_inv, around = dirty(() if block.one else block.grid, torch.uint8 if block.how == "byte" else torch.float32)
    got = run(x, data, scale_inv)
    data, scale_inv = (data, scale_inv) if got is None else got
    inverse, amax = scale_of(scale_inv).reshape(block.grid), block.amax(given)
    usual = (amax > 0) & np.isfinite(amax)
    if block.how == "nv":
        usual &= bool(np.isfinite(amax).all())
        top = amax.max() if amax.size else 1.0
        ratio = amax * 448 / (top if top > 0 else 1.0)
        close = np.zeros(amax.shape, dtype=bool)
        for slack in (0, 2.0**-22, -(2.0**-22)):
            right = nearest(ratio * (1 + slack), "e4m3") * top / 2688
            close |= np.abs(inverse - right) <= 4 * 2.0**-23 * right
    elif block.how == "fp32":
        close = np.abs(inverse - amax / LIST[kind][-1]) <= 4 * 2.0**-23 * amax / LIST[kind][-1]
    else:
        close = inverse == sizes(amax, LIST[kind][-1])
    per = block.each(inverse)
    y = np.divide(given, per, out=np.zeros_like(given), where=per > 0)
    codes = number(data, kind)
    fine = block.each(usual.astype(float)) == 0
    for slack in (0, 2.0**-22, -(2.0**-22)):
        fine |= same(codes, nearest(y * (1 + slack), kind))
    zero = (block.each((amax == 0).astype(float)) > 0) & (codes != 0)
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
    block = Block(recipe, side, (rows, columns))
    codes = np.searchsorted(LIST[block.kind], np.abs(np.random.randn(rows, columns)) * (2 if block.kind == "e2m1" else 60)).clip(max=len(LIST[block.kind]) - 1)
    sign = 8 if block.kind == "e2m1" else 128
    if special != "positive":
        codes = codes + sign * (np.random.rand(rows, columns) < 0.5)
    if special == "NaN" and side == "x" and rows > 2 and columns and block.kind != "e2m1":
        codes[rows // 2, columns // 2] = 0x7F
    data = torch.tensor(codes.astype(np.uint8)).view(DTYPE[block.kind])
    if block.how == "byte":
        scale = torch.tensor(np.random.randint(117, 136, block.grid).astype(np.uint8))
        if special in ("255", "0") and side == "x" and scale.numel():
            scale[rows // 2] = int(special)
    elif block.how == "pow2":
        scale = torch.tensor(2.0 ** np.random.randint(-6, 6, block.grid), dtype=torch.float32)
    elif block.how == "nv":
        scale = torch.tensor(nearest(np.random.rand(*block.grid) * 400 + 20, "e4m3"), dtype=torch.float32) * 0.003
    else:
        scale = torch.tensor(np.random.rand(*block.grid) * 0.02 + 0.001, dtype=torch.float32)
    return data, scale.reshape(()) if block.one else scale, number(data, block.kind) * block.each(scale_of(scale))


def limit(x: Array, y: Array) -> Array:
    return (x.shape[1] + 4) * 2.0**-24 * (np.nan_to_num(np.abs(x)) @ np.nan_to_num(np.abs(y)).T)


def check_gemm(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    np.random.seed(54)
    shapes = ((16, 32, 64), (13, 21, 48), (70, 96, 256), (33, 130, 300), (64, 64, 384), (100, 65, 1024), (3, 7, 33), (300, 140, 640), (1, 1, 1), (5, 6, 0), (0, 4, 32), (4, 0, 16))
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
    np.random.seed(55)
    cuts = ([16, 48, 64], [5, 40, 67], [0, 20, 53], [20, 20, 64], [3, 35, 35], [1, 2, 80], [64, 128, 160, 160, 192], [7], [0, 0, 9], [0, 0])
    for ends in cuts:
        for n, k, special in ((144, 160, "normal"), (64, 128, "normal"), (200, 300, "positive"), (33, 64, "NaN"), (1, 5, "normal")):
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
    block = Block(recipe, operand, x.shape)
    amax, top = block.amax(x), LIST[block.kind][-1]
    if block.how == "fp32":
        scale = np.divide(np.float32(top), amax.astype(np.float32), out=np.ones(amax.shape, np.float32), where=amax > 0)
        inverse = (np.float32(1) / scale).astype(float)
        return nearest((x.astype(np.float32) * block.each(scale)).astype(float), block.kind) * block.each(inverse)
    per = block.each(sizes(amax, top))
    return nearest(x / per, block.kind) * per


def check_linear(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(56)
    dtypes = (torch.float32, torch.bfloat16) if "dtype" not in what else (getattr(torch, what["dtype"]),)
    for tokens, k, n in ((32, 64, 96), (160, 256, 384), (48, 144, 272), (17, 64, 32), (5, 3, 7), (0, 32, 64), (16, 0, 32)):
        for dtype in dtypes:
            x = (torch.randn(tokens, k) * (torch.randn(k) * 2).exp2()).to(dtype)
            w = (torch.randn(n, k) * (torch.randn(n, 1) * 2).exp2()).to(dtype)
            g = (torch.randn(tokens, n) * (torch.randn(tokens, 1) * 2).exp2() * 1e-3).to(dtype)
            yield f"{tokens} x {k} x {n} {str(dtype)[6:]}", judge_linear(run, x, w, g, what)
            yield f"{tokens} x {k} x {n} transposed", judge_linear(run, x.t().contiguous().t(), w.t().contiguous().t(), g, what)
            yield f"{tokens} x {k} x {n} broadcast", judge_linear(run, x[:1].expand(tokens, k), w, g, what)
    x, w, g = (t.to(dtypes[0]) for t in (torch.randn(32, 64), torch.randn(96, 64), torch.randn(32, 96)))
    first = judge_linear(run, x, w, g, what)
    if dtypes[0] == torch.float32:
        w.numpy()[:] = w.numpy()[::-1] * 0.3
    yield "a new weight in the same memory", first and judge_linear(run, x, w, g, what)


def judge_linear(run: Run, x: Tensor, w: Tensor, g: Tensor, what: dict[str, Any]) -> bool:
    recipe = what["recipe"]
    a, b, c = wide(x), wide(w), wide(g)
    pairs = (
        (recast(a, recipe, "x"), recast(b, recipe, "weight").T),
        (recast(c, recipe, "grad"), recast(b.T, recipe, "weight").T),
        (recast(c.T, recipe, "grad"), recast(a.T, recipe, "x").T),
    )
    fine = all(judge(t, p @ q, limit(p, q.T), x.dtype) for t, (p, q) in zip(run(x, w, g), pairs))
    return fine and all(bool((wide(t) == before).all()) for t, before in ((x, a), (w, b), (g, c)))


def check_attention(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(57)
    dtype = getattr(torch, what["dtype"])
    for s, d, of_v, factor in ((64, 32, 32, 1.0), (37, 16, 16, 1.0), (80, 64, 48, 0.1), (130, 16, 16, 3.0), (1, 8, 8, 1.0), (0, 8, 8, 1.0)):
        given = [(torch.randn(2, 3, s, width) * f).to(dtype) for width, f in ((d, factor), (d, factor), (of_v, 3.0), (of_v, 0.1))]
        q, k, v = (t.to(torch.float64).requires_grad_() for t in given[:3])
        weights = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)
        if what["causal"]:
            weights = weights.masked_fill(~torch.ones(s, s).tril().bool(), -math.inf)
        o = torch.einsum("bhij,bhjd->bhid", weights.softmax(-1), v)
        right = (o.detach(), *torch.autograd.grad(o, (q, k, v), given[3].to(torch.float64)))
        got = run(*given)
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
        fine = [a.dtype == dtype and a.shape == b.shape and bool(((a.double() - b).abs() <= unit * b.abs() + 2.0**-20 * b.abs().sum() + 1e-12).all())
                for a, b in zip(got, right)]
        yield f"S {s} D {d} times {factor:g}: o dq dk dv {fine}", all(fine)


def check_optimizer(run: Run, what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(58)
    (b1, b2), lr, eps, decay = what["betas"], what["lr"], what["eps"], what["weight_decay"]
    dtype = getattr(torch, what.get("dtype", "float32"))
    for shape, factor in (((16, 32), 1.0), ((7, 13), 1.0), ((64, 60), 1e-3), ((40, 30), 1e-7), ((1,), 1.0), ((0, 4), 1.0)):
        p, state = torch.randn(shape).to(dtype), {}
        m = v = np.zeros(shape)
        for step in range(1, 13):
            g = (torch.randn(shape) * factor).to(dtype)
            before, up = wide(p), wide(g)
            run(p, g, state, step)
            m, v = b1 * m + (1 - b1) * up, b2 * v + (1 - b2) * up**2
            update = lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
            bound = np.abs(update) * 2.0**-15 + lr * 2.0**-18 + np.abs(before) * 2.0**-22
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
        print(f"{'ok ' if good else 'BAD'} {entry['name']:8s} {word} {len(differ):3d} of {len(cases):3d} differ{raised}: {'; '.join(differ[:2])}", flush=True)
    wrong = sum(not e["clean"] for e in entries)
    print(f"{wrong} wrong, {len(entries) - wrong} right; {bad} not as they say")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

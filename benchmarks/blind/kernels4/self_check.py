"""Shows that each wrong kernel of public.json is wrong on some ordinary input, and that no right one is on any: `python self_check.py [NAME ...]`.

The oracle is this file's own and takes nothing from stones4.py: numbers of a format are listed by torch (E2M1: by hand), the nearest is
found in that list, blocks are cut out one after the other, attention's gradients are autograd's, all in fp64. Printed are the cases that
differ of all that ran, and the first of them. Exit code 1: some entry is not as it says.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
F64 = torch.float64
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}
FOUR = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=F64)
LIST = {kind: torch.arange(128, dtype=torch.uint8).view(DTYPE[kind]).float().to(F64) for kind in ("e4m3", "e5m2")}
LIST = {kind: t[t.isfinite()] for kind, t in LIST.items()} | {"e2m1": FOUR}
TOP = {kind: float(t[-1]) for kind, t in LIST.items()}
# recipe: rows and columns of a block (0: all), rows of one of a weight, format, kind of scales
RECIPES = {
    "tensorwise": (0, 0, 0, "e4m3", "fp32"), "rowwise": (1, 0, 1, "e4m3", "pow2"), "blockwise": (1, 128, 128, "e4m3", "pow2"),
    "blockwise_fp32": (1, 128, 128, "e4m3", "fp32"), "mxfp8": (1, 32, 1, "e4m3", "byte"), "mxfp4": (1, 32, 1, "e2m1", "byte"),
    "nvfp4": (1, 16, 16, "e2m1", "nv"),
}
Case = tuple[str, bool]


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

    def amax(self, x: Tensor) -> Tensor:
        grid = torch.zeros(self.grid, dtype=F64)
        for i in range(self.grid[0]):
            for j in range(self.grid[1]):
                cut = x[i * self.rows : (i + 1) * self.rows, j * self.columns : (j + 1) * self.columns].to(F64).abs()
                grid[i, j] = cut.amax() if cut.numel() else 0.0
        return grid

    def each(self, grid: Tensor) -> Tensor:
        i, j = (torch.arange(n) // size for n, size in zip(self.shape, (self.rows, self.columns)))
        return grid.reshape(self.grid)[i][:, j]


def nearest(x: Tensor, kind: str, saturate: bool = True) -> Tensor:
    """The nearest number of a format's list, ties to even codes."""
    numbers, size = LIST[kind], x.to(F64).abs().nan_to_num(0.0).contiguous()
    after = 2 * numbers[-1] - numbers[-2]
    middles = (numbers + torch.cat([numbers[1:], after[None]])) / 2
    index = torch.searchsorted(middles, size)
    index = index + ((index % 2 == 1) & (index < len(middles)) & (middles[index.clamp(max=len(middles) - 1)] == size)).long()
    got = torch.cat([numbers, torch.tensor([math.inf], dtype=F64)])[index]
    got = got.clamp(max=TOP[kind]) if saturate else got
    return torch.where(x.isnan(), math.nan, torch.where(torch.signbit(x), -got, got))


def value(data: Tensor, kind: str) -> Tensor:
    if kind != "e2m1":
        return data.contiguous().view(torch.uint8).view(DTYPE[kind]).float().to(F64)
    byte = data.contiguous().view(torch.uint8).long()
    return torch.where(byte > 15, math.nan, torch.cat([FOUR, -FOUR])[byte & 15])


def same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def sizes(amax: Tensor, top: float) -> Tensor:
    """The smallest power of two s with amax <= top s, found by search."""
    s = torch.ones_like(amax)
    for _ in range(300):
        s = torch.where(amax > top * s, s * 2, torch.where(amax <= top * s / 2, s / 2, s))
    return s


def scale_of(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float32:
        return scale.to(F64)
    byte = scale.view(torch.uint8)
    return torch.where(byte == 255, math.nan, torch.pow(torch.tensor(2.0, dtype=F64), byte.to(F64) - 127))


def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A buffer of bytes 255 between two bands of them, and whether the bands still are."""
    size, band = math.prod(shape) * dtype.itemsize, 4096
    whole = torch.full((size + 2 * band,), 255, dtype=torch.uint8)
    return whole[band : band + size].view(dtype).view(shape), lambda: bool((whole[:band] == 255).all() and (whole[band + size :] == 255).all())


def beside(x: Tensor) -> Tensor:
    """The same numbers as columns of a wider matrix of large ones."""
    wide = torch.randn(x.shape[0], x.shape[1] + 96) * 1e3
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


# --- encode, decode ---


def inputs(kind: str) -> Iterator[tuple[str, Tensor]]:
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "all BF16", bf16
    yield "all BF16 as FP32", bf16.float().view(256, 256)
    middles = ((LIST[kind][1:] + LIST[kind][:-1]) / 2).float()
    for name, t in (("ties", middles), ("below ties", middles.nextafter(torch.zeros(()))), ("above ties", middles.nextafter(torch.tensor(9e9)))):
        yield name, torch.cat([t, -t])
    torch.manual_seed(41)
    for scale in (1e-3, 0.03, 1.0, 60.0, 3e4):
        yield f"normal times {scale:g}", torch.randn(41, 37) * scale
    yield "transposed", torch.randn(9, 14).t()
    yield "a scalar", torch.tensor(1.3)
    yield "empty", torch.zeros(0, 5)


def check_encode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    if what.get("rounding") == "stochastic":
        yield from check_draws(run, kind)
        return
    ends = what.get("overflow", "saturate")
    for name, x in inputs(kind):
        wide = x.to(F64)
        got, right = value(run(x), kind), nearest(wide, kind, ends == "saturate")
        if kind == "e2m1":
            wide_ok = wide.isnan()
        else:
            wide_ok = wide.isinf() & (got.isnan() | (got.abs() == TOP[kind]) | (ends == "inf") & (got == wide))
        signs = (torch.signbit(got) == torch.signbit(wide)) | wide.isnan() | got.isnan()
        yield name, got.shape == wide.shape and bool(((same(got, right) | wide_ok) & signs).all())


def check_draws(run: Callable[..., Any], kind: str) -> Iterator[Case]:
    torch.manual_seed(42)
    numbers = LIST[kind]
    for scale in (400.0, 1.0, 0.02):
        x = torch.rand(40000) * scale
        index = (torch.searchsorted(numbers, x.to(F64), right=True) - 1).clamp(max=len(numbers) - 2)
        low, high = numbers[index], numbers[index + 1]
        for sign in (1, -1):
            got = value(run(sign * x), kind) * sign
            share = (x.to(F64) - low) / (high - low)
            fine = bool(((got == low) | (got == high)).all())
            z = float((((got - low) / (high - low)) - share).sum() / (share * (1 - share)).sum().sqrt())
            yield f"{sign * scale:g}: neighbours {fine}, z {z:.1f}", fine and abs(z) < 5
    yield "numbers of the format", bool((value(run(numbers.float()), kind) == numbers).all())
    yield "NaN", bool(value(run(torch.tensor([math.nan, -math.nan])), kind).isnan().all())
    far = torch.tensor([1e6, -1e6, 1e30])
    yield "far beyond", bool((value(run(far), kind) == far.sign() * TOP[kind]).all())


def check_decode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    data = torch.arange(16 if kind == "e2m1" else 256, dtype=torch.int32).to(torch.uint8).view(DTYPE[kind])
    for name, t in (("all codes", data), ("backwards", data.view(torch.uint8).flip(0).view(DTYPE[kind])), ("as a matrix", data.view(2, -1).t())):
        got, right = run(t).to(F64), value(t, kind)
        yield name, got.shape == right.shape and bool((same(got, right) & ((torch.signbit(got) == torch.signbit(right)) | right.isnan())).all())


# --- casts ---


def matrices() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(43)
    for shape in ((4, 64), (5, 130), (33, 200), (200, 264), (256, 384), (1, 1), (0, 64), (8, 0)):
        x = torch.randn(shape)
        yield f"normal {shape}", x
        yield f"BF16 {shape}", x.bfloat16()
        yield f"spread {shape}", x * (torch.randn(shape[0], 1) * 3).exp2() * (torch.randn(1, shape[1]) * 2).exp2()
        yield f"transposed {shape}", torch.randn(shape[1], shape[0]).t()
        yield f"beside {shape}", beside(torch.randn(shape))
    yield "positive", torch.rand(16, 256) + 0.1
    yield "rows of zeros", torch.randn(8, 256) * torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])[:, None]
    for special in (math.nan, -math.inf):
        x = torch.randn(20, 256)
        x[2, 7] = special
        yield f"one {special}", x
    for factor in (1e-7, 1e-3, 1e9, 1e28):
        yield f"normal times {factor:g}", torch.randn(16, 256) * factor
    yield "whole numbers", torch.randint(-448, 449, (16, 256)).float()
    for top in (448.0, 6.0, 449.0, 2.0**0.5):
        x = torch.rand(16, 256) * top
        x[:, ::16] = top
        yield f"amax {top:g}", x


def check_cast(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    for name, x in matrices():
        yield name, judge_cast(run, x, what)
    x = torch.randn(32, 256)
    first = judge_cast(run, x, what)
    x.numpy()[:] = x.numpy()[::-1] * 0.3 + 0.1
    yield "new numbers in the same memory", first and judge_cast(run, x, what)


def judge_cast(run: Callable[..., Any], x: Tensor, what: dict[str, Any]) -> bool:
    block = Block(what["recipe"], what["operand"], tuple(x.shape))
    kind, before = block.kind, x.to(F64).clone()
    data, whole = dirty(tuple(x.shape), DTYPE[kind])
    scale_inv, around = dirty(() if block.one else block.grid, torch.uint8 if block.how == "byte" else torch.float32)
    got = run(x, data, scale_inv)
    data, scale_inv = (data, scale_inv) if got is None else got
    inverse, amax = scale_of(scale_inv).reshape(block.grid), block.amax(before)
    plain = (amax > 0) & amax.isfinite()
    if block.how == "nv":
        plain &= bool(amax.isfinite().all())
        right = nearest(amax * 448 / amax.amax(), "e4m3") * amax.amax() / 2688 if amax.numel() else amax
    elif block.how == "fp32":
        right = amax / TOP[kind]
    else:
        right = sizes(torch.where(plain, amax, 1.0), TOP[kind])
    slack = 4 * 2.0**-23 * right if block.how in ("fp32", "nv") else 0.0 * right
    close = ((inverse - right).abs() <= slack) | ~plain
    if block.how == "nv" and close.numel():  # a tie of a block's scale may fall to either side
        close = close | (close.double().mean() > 0.98)
    per = block.each(inverse)
    y = torch.where(per > 0, before / per, 0.0)
    number = value(data, kind)
    fine = torch.zeros_like(y, dtype=torch.bool)
    for z in (y, y * (1 - 2.0**-22), y * (1 + 2.0**-22)):
        fine |= same(number, nearest(z, kind))
    fine |= block.each(plain.double()) == 0
    zero = (block.each((amax == 0).double()) > 0) & (number != 0)
    lost = before.isnan() & ~(number * per).isnan()
    stays = bool(same(x.to(F64), before).all())
    return bool(close.all() and fine.all() and not zero.any() and not lost.any()) and whole() and around() and stays


# --- products ---


def judge(got: Tensor, right: Tensor, bound: Tensor, dtype: torch.dtype) -> bool:
    """Within the bound and one rounding."""
    low, high = ((right + s * bound).float().to(dtype).to(F64) for s in (-1, 1))
    got = got.to(F64)
    return got.shape == right.shape and bool((((got >= low) & (got <= high)) | same(got, right)).all())


def draw(rows: int, columns: int, recipe: str, side: str, special: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they mean."""
    block = Block(recipe, side, (rows, columns))
    y = torch.randn(rows, columns) * (2 if block.kind == "e2m1" else 60)
    y = y.abs() if special == "positive" else y
    if block.kind == "e2m1":
        data = ((nearest(y, "e2m1").abs()[..., None] > FOUR).sum(-1) | torch.where(torch.signbit(y), 8, 0)).to(torch.uint8)
    else:
        data = y.clamp(-448, 448).to(DTYPE[block.kind])
        if special == "NaN" and side == "x" and rows > 2 and columns:
            data.view(torch.uint8)[rows // 2, columns // 2] = 0x7F
    if block.how == "byte":
        scale = torch.randint(117, 136, block.grid).to(torch.uint8)
        if special == "255" and side == "x" and scale.numel():
            scale[rows // 2, 0] = 255
    elif block.how == "pow2":
        scale = torch.randint(-6, 6, block.grid).float().exp2()
    elif block.how == "nv":
        scale = nearest(torch.rand(block.grid, dtype=F64) * 400 + 20, "e4m3").float() * 0.003
    else:
        scale = torch.rand(block.grid) * 0.02 + 0.001
    meaning = value(data, block.kind) * block.each(scale_of(scale))
    return data, scale.reshape(()) if block.one else scale, meaning


def limit(x: Tensor, y: Tensor) -> Tensor:
    return (x.shape[1] + 4) * 2.0**-24 * (x.abs().nan_to_num(0.0) @ y.abs().nan_to_num(0.0).t())


def check_gemm(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(44)
    shapes = ((16, 32, 64), (13, 21, 48), (70, 96, 256), (33, 130, 300), (64, 64, 384), (100, 65, 1024), (3, 7, 33), (300, 140, 640), (1, 1, 1), (5, 6, 0), (0, 4, 32))
    for m, n, k in shapes:
        for special in ("normal", "positive", "NaN", "255", "beside"):
            a, scale_a, x = draw(m, k, recipe, "x", special)
            b, scale_b, y = draw(n, k, recipe, "weight", special)
            if special == "beside":
                a = torch.cat([a.view(torch.uint8), a.view(torch.uint8)], 1).view(a.dtype)[:, :k]
                b = b.view(torch.uint8).t().contiguous().t().view(b.dtype)
            out, around = dirty((m, n), dtype)
            got = run(a, b, scale_a, scale_b, out)
            yield f"{m} x {n} x {k} {special}", judge(out if got is None else got, x @ y.t(), limit(x, y), dtype) and around()


def check_grouped(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(45)
    cuts = ([16, 48, 64], [5, 40, 67], [0, 20, 53], [20, 20, 64], [3, 35, 35], [1, 2, 80], [64, 128, 160, 160, 192], [7], [0, 0, 9])
    for ends in cuts:
        for n, k, special in ((144, 160, "normal"), (64, 128, "normal"), (200, 300, "positive"), (33, 64, "NaN")):
            a, scale_a, x = draw(ends[-1], k, recipe, "x", special)
            weights = [draw(n, k, recipe, "weight", "normal") for _ in ends]
            b = torch.stack([w[0].view(torch.uint8) for w in weights]).view(weights[0][0].dtype)
            out, around = dirty((ends[-1], n), dtype)
            got = run(a, b, scale_a, torch.stack([w[1] for w in weights]), torch.tensor(ends, dtype=torch.int32), out)
            pieces = [x[s:e] for s, e in zip([0, *ends], ends)]
            right = torch.cat([p @ w[2].t() for p, w in zip(pieces, weights)])
            bound = torch.cat([limit(p, w[2]) for p, w in zip(pieces, weights)])
            yield f"ends {ends}, {n} x {k} {special}", judge(out if got is None else got, right, bound, dtype) and around()


# --- layers ---


def recast(x: Tensor, recipe: str, operand: str) -> Tensor:
    block = Block(recipe, operand, tuple(x.shape))
    amax = block.amax(x)
    if block.how == "fp32":
        scale = torch.where(amax > 0, torch.tensor(TOP[block.kind]) / amax.float(), 1.0)
        return nearest(x.float() * block.each(scale), block.kind) * block.each((1 / scale).to(F64))
    per = block.each(sizes(torch.where(amax > 0, amax, 1.0), TOP[block.kind]))
    return nearest(x.to(F64) / per, block.kind) * per


def check_linear(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(46)
    for tokens, k, n in ((32, 64, 96), (160, 256, 384), (48, 144, 272), (17, 64, 32), (0, 32, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(tokens, k) * (torch.randn(k) * 2).exp2()).to(dtype)
            w = (torch.randn(n, k) * (torch.randn(n, 1) * 2).exp2()).to(dtype)
            g = (torch.randn(tokens, n) * (torch.randn(tokens, 1) * 2).exp2() * 1e-3).to(dtype)
            yield f"{tokens} x {k} x {n} {str(dtype)[6:]}", judge_linear(run, x, w, g, what)
    x, w, g = torch.randn(32, 64), torch.randn(96, 64), torch.randn(32, 96)
    first = judge_linear(run, x, w, g, what)
    w.numpy()[:] = w.numpy()[::-1] * 0.3
    yield "a new weight in the same memory", first and judge_linear(run, x, w, g, what)


def judge_linear(run: Callable[..., Any], x: Tensor, w: Tensor, g: Tensor, what: dict[str, Any]) -> bool:
    recipe = what["recipe"]
    pairs = (
        (recast(x, recipe, "x"), recast(w, recipe, "weight").t()),
        (recast(g, recipe, "grad"), recast(w.t(), recipe, "weight").t()),
        (recast(g.t(), recipe, "grad"), recast(x.t(), recipe, "x").t()),
    )
    return all(t.dtype == x.dtype and judge(t, a @ b, limit(a, b.t()), x.dtype) for t, (a, b) in zip(run(x, w, g), pairs))


def check_attention(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(47)
    for s, d, factor in ((64, 32, 1.0), (37, 16, 1.0), (80, 64, 0.1), (130, 16, 3.0), (1, 8, 1.0)):
        for dtype in (torch.float32, torch.bfloat16):
            given = [(torch.randn(2, 3, s, d) * f).to(dtype) for f in (factor, factor, 3.0, 0.1)]
            q, k, v = (t.to(F64).requires_grad_() for t in given[:3])
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)
            if what["causal"]:
                scores = scores.masked_fill(~torch.ones(s, s).tril().bool(), -math.inf)
            o = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
            right = (o.detach(), *torch.autograd.grad(o, (q, k, v), given[3].to(F64)))
            got = run(*given)
            if what["recipe"] == "fp8":
                yield f"S {s} D {d}", all(float((a.to(F64) - b).norm() / b.norm().clamp(min=1e-9)) < 0.3 for a, b in zip(got[:1], right))
                continue
            unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
            fine = [a.dtype == dtype and bool(((a.to(F64) - b).abs() <= unit * b.abs() + 2.0**-20 * b.abs().amax() + 1e-7).all()) for a, b in zip(got, right)]
            yield f"S {s} D {d} times {factor:g} {str(dtype)[6:]}: o dq dk dv {fine}", all(fine)


def check_optimizer(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(48)
    (b1, b2), lr, eps, decay = what["betas"], what["lr"], what["eps"], what["weight_decay"]
    dtype = getattr(torch, what.get("dtype", "float32"))
    for shape, factor in (((16, 32), 1.0), ((7, 13), 1.0), ((64, 60), 1e-3), ((40, 30), 1e-7), ((1,), 1.0)):
        p, state = torch.randn(shape).to(dtype), {}
        m = v = torch.zeros(shape, dtype=F64)
        for step in range(1, 13):
            g = (torch.randn(shape) * factor).to(dtype)
            before = p.to(F64)
            run(p, g, state, step)
            m, v = b1 * m + (1 - b1) * g.to(F64), b2 * v + (1 - b2) * g.to(F64) ** 2
            update = lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
            bound = update.abs() * 2.0**-15 + lr * 2.0**-18 + before.abs() * 2.0**-22
            yield f"{shape} times {factor:g}, step {step}", judge(p, before * (1 - lr * decay) - update, bound, dtype)


CHECKS = {
    "encode": check_encode, "decode": check_decode, "cast": check_cast, "gemm": check_gemm, "grouped": check_grouped,
    "linear": check_linear, "attention": check_attention, "optimizer": check_optimizer,
}


def main(names: list[str]) -> int:
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

"""Shows that each wrong kernel of public.json is wrong on some ordinary input, and that no right one is on any: `python self_check.py [NAME ...]`.

The oracle is this file's own and takes nothing from the blocks that the kernels stand on: codes are rounded by rint on the step of
their exponent and decoded by torch (E2M1: a list), blocks are sliced one after the other, attention's gradients are autograd's in
fp64. Printed are the cases that differ of all that ran, and the first ones. Exit code 1: one entry is not as it says.
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
# mantissa bits, smallest exponent, largest number, dtype
KINDS = {"e4m3": (3, -6, 448.0, torch.float8_e4m3fn), "e5m2": (2, -14, 57344.0, torch.float8_e5m2), "e2m1": (1, 0, 6.0, torch.uint8)}
FOUR = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Case = tuple[str, bool]


def ldexp(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, dtype=F64), exponent)


def snap(y: Tensor, kind: str, saturate: bool = True) -> Tensor:
    """Nearest numbers of a format, ties to even, fp64."""
    bits, low, top, _ = KINDS[kind]
    y = y.to(F64)
    step = ldexp((torch.frexp(y.nan_to_num(0.0, 0.0, 0.0))[1] - 1).clamp(min=low) - bits)
    q = torch.round(y / step) * step
    return q.clamp(-top, top) if saturate else q


def value(codes: Tensor, kind: str) -> Tensor:
    """The numbers of codes, fp64."""
    bits = codes.contiguous().view(torch.uint8)
    if kind == "e2m1":
        return torch.tensor(FOUR + [-n for n in FOUR], dtype=F64)[(bits & 15).long()].where(bits < 16, torch.tensor(math.nan, dtype=F64))
    return bits.view(KINDS[kind][3]).to(torch.float32).to(F64)


def equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A buffer of 0xFF amid bands of 0xFF."""
    size, band = math.prod(shape), 2048
    whole = torch.full(((size + 2 * band) * dtype.itemsize,), 255, dtype=torch.uint8)

    def stands() -> bool:
        edge = band * dtype.itemsize
        return bool((whole[:edge] == 255).all() and (whole[edge + size * dtype.itemsize :] == 255).all())

    return whole.view(dtype)[band : band + size].view(shape), stands


# --- encode, decode ---


def numbers() -> Iterator[tuple[str, Tensor]]:
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "all BF16", bf16
    yield "all BF16 in FP32", bf16.float()
    for kind in KINDS:
        n = value(torch.arange(0, 8 if kind == "e2m1" else 128, dtype=torch.uint8), kind)
        n = n[n.isfinite()]
        middles = ((n[1:] + n[:-1]) / 2).float()
        for name, t in (("middles", middles), ("below middles", middles.nextafter(torch.tensor(0.0))), ("above middles", middles.nextafter(torch.tensor(9e9)))):
            yield f"{name} of {kind}", torch.cat([t, -t])
    torch.manual_seed(11)
    for scale in (1e-3, 1.0, 30.0, 1e4):
        yield f"normal times {scale:g}", torch.randn(37, 53) * scale
    yield "transposed", torch.randn(7, 12).t()


def check_encode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    if what.get("rounding") == "stochastic":
        yield from check_drawn(run, kind)
        return
    top, ends = KINDS[kind][2], what.get("overflow", "saturate")
    for name, x in numbers():
        wide = x.to(F64)
        got = value(run(x), kind)
        right = snap(wide, kind, ends == "saturate")
        fine = equal(got, right)
        if ends == "inf":
            fine |= (right.abs() > top) & (got == torch.where(right > 0, math.inf, -math.inf))
        fine |= wide.isinf() & (got.isnan() | (got == right.clamp(-top, top)) | (ends == "inf") & (got == wide))
        fine = torch.where(wide.isnan(), torch.full_like(fine, True) if kind == "e2m1" else got.isnan(), fine)
        signs = (torch.signbit(got) == torch.signbit(wide)) | got.isnan() | wide.isnan()
        yield name, bool((fine & signs).all())


def check_drawn(run: Callable[..., Any], kind: str) -> Iterator[Case]:
    torch.manual_seed(12)
    bits, low, top, _ = KINDS[kind]
    for scale in (1.0, 0.01, 100.0):
        x = (torch.rand(20000) * scale).clamp(1e-4, 400)
        step = ldexp((torch.frexp(x.to(F64))[1] - 1).clamp(min=low) - bits)
        floor = (x.to(F64) / step).floor() * step
        got = value(run(x), kind)
        near = bool(((got == floor) | (got == floor + step)).all())
        share = (x.to(F64) - floor) / step
        z = float(((got - floor) / step - share).sum() / (share * (1 - share)).sum().sqrt())
        yield f"draws below {scale:g}: neighbours {near}, z {z:.1f}", near and abs(z) < 6
    yield "NaN", bool(value(run(torch.tensor([math.nan])), kind).isnan().all())
    exact = value(torch.arange(127, dtype=torch.uint8), kind)
    yield "numbers of the format", bool((value(run(exact.float()), kind) == exact).all())


def check_decode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    kind = what["format"]
    codes = torch.arange(16 if kind == "e2m1" else 256, dtype=torch.int32).to(torch.uint8).view(KINDS[kind][3])
    right = value(codes, kind)
    got = run(codes).to(F64)
    yield "all codes", bool((equal(got, right) & ((torch.signbit(got) == torch.signbit(right)) | right.isnan())).all())


# --- casts ---


def shape_of(recipe: str, operand: str) -> tuple[int | None, int | None, str, str]:
    """Rows and columns of a block, format, kind of scales."""
    square = operand == "weight"
    return {
        "tensorwise": (None, None, "e5m2" if operand == "grad" else "e4m3", "fp32"),
        "rowwise": (1, None, "e4m3", "pow2"),
        "blockwise": (128 if square else 1, 128, "e4m3", "pow2"),
        "blockwise_fp32": (128 if square else 1, 128, "e4m3", "fp32"),
        "mxfp8": (1, 32, "e4m3", "byte"),
        "mxfp4": (1, 32, "e2m1", "byte"),
        "nvfp4": (16 if square else 1, 16, "e2m1", "two"),
    }[recipe]


def grid_of(shape: tuple[int, int], rows: int | None, columns: int | None) -> tuple[int, int]:
    return (-(-shape[0] // rows) if rows else 1, -(-shape[1] // columns) if columns else 1)


def tops(x: Tensor, rows: int | None, columns: int | None) -> Tensor:
    grid = grid_of((x.shape[0], x.shape[1]), rows, columns)
    r, c = rows or x.shape[0], columns or x.shape[1]
    cells = [x[i * r : (i + 1) * r, j * c : (j + 1) * c].to(F64).abs().amax() for i in range(grid[0]) for j in range(grid[1])]
    return torch.stack(cells).reshape(grid)


def grow(grid: Tensor, shape: tuple[int, int], rows: int | None, columns: int | None) -> Tensor:
    i = torch.arange(shape[0]) // (rows or max(shape[0], 1))
    j = torch.arange(shape[1]) // (columns or max(shape[1], 1))
    return grid.to(F64).reshape(grid_of(shape, rows, columns))[i][:, j]


def octave(amax: Tensor, top: float) -> Tensor:
    """The smallest e with amax <= top 2**e."""
    e = torch.frexp(amax / top)[1]
    e = torch.where(amax <= top * ldexp(e - 1), e - 1, e)
    return torch.where(amax > top * ldexp(e), e + 1, e)


def scale_value(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return torch.where(scale == 255, math.nan, ldexp(scale.to(torch.int64) - 127))
    return scale.to(F64)


def matrices() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(13)
    for shape in ((4, 64), (5, 130), (33, 200), (200, 264), (256, 384)):
        x = torch.randn(shape)
        yield f"normal {shape}", x
        yield f"BF16 {shape}", x.bfloat16()
        yield f"spread {shape}", x * (torch.randn(shape[0], 1) * 3).exp2() * (torch.randn(1, shape[1]) * 2).exp2()
        yield f"transposed {shape}", torch.randn(shape[1], shape[0]).t()
        wide = torch.randn(shape[0], shape[1] + 160)
        wide[:, shape[1] :] *= 100
        yield f"columns of a wider matrix {shape}", wide[:, : shape[1]]
    yield "negative", -torch.rand(8, 256) - 0.1
    hole = torch.randn(8, 256)
    hole[3] = 0
    yield "a row of zeros", hole
    for value in (math.nan, math.inf):
        one = torch.randn(8, 256)
        one[2, 7] = value
        yield f"one {value}", one
    for factor in (1e-8, 1e-3, 1e10, 1e30):
        yield f"normal times {factor:g}", torch.randn(8, 256) * factor
    yield "whole numbers", torch.randint(-448, 449, (8, 256)).float()
    for top in (448.0, 6.0, 1.0):
        x = torch.rand(8, 256) * top
        x[:, ::16] = top
        yield f"amax {top:g}", x


def check_cast(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    for name, x in matrices():
        yield name, judge_cast(run, x, what)
    x = torch.randn(16, 256)
    first = judge_cast(run, x, what)
    x.numpy()[:] = x.numpy()[::-1] * 0.3 + 0.1
    yield "new numbers in the same memory", first and judge_cast(run, x, what)


def judge_cast(run: Callable[..., Any], x: Tensor, what: dict[str, Any]) -> bool:
    rows, columns, kind, scales = shape_of(what["recipe"], what["operand"])
    shape, top = (x.shape[0], x.shape[1]), KINDS[kind][2]
    grid = grid_of(shape, rows, columns)
    data, whole = dirty(shape, KINDS[kind][3])
    scale_inv, around = dirty(() if rows is None else grid, torch.uint8 if scales == "byte" else torch.float32)
    before = x.clone()
    got = run(x, data, scale_inv)
    data, scale_inv = (data, scale_inv) if got is None else got
    amax, inverse = tops(x, rows, columns), scale_value(scale_inv).reshape(grid)
    if scales == "two":
        total = amax.nan_to_num(0.0, 0.0).amax()
        right = snap(amax / 6 * 2688 / total, "e4m3") * total / 2688
    else:
        right = ldexp(octave(amax.where(amax > 0, torch.ones_like(amax)).nan_to_num(1.0, 1.0), top)) if scales != "fp32" else amax / top
    plain = (amax > 0) & amax.isfinite()
    if scales == "two":
        plain &= amax.isfinite().all()
    slack = 4 * 2.0**-23 if scales in ("fp32", "two") else 0.0
    close = ((inverse - right).abs() <= slack * right) | ~plain
    if scales == "two":  # a tie of the E4M3 scale may fall to either side
        if float(close.double().mean()) < 0.98:
            return False
    elif not bool(close.all()):
        return False
    wide = x.to(F64)
    per = grow(inverse, shape, rows, columns)
    y = torch.where(per > 0, wide / per, 0.0)
    codes = value(data, kind)
    loose = 2.0**-21 if slack else 0.0
    fine = torch.zeros_like(wide, dtype=torch.bool)
    for z in (y, y * (1 - loose), y * (1 + loose)):
        fine |= equal(codes, snap(z, kind))
    known = grow(plain.to(F64), shape, rows, columns) > 0
    zero = (grow((amax == 0).to(F64), shape, rows, columns) > 0) & (codes != 0)
    lost = wide.isnan() & ~(codes * per).isnan()
    return bool((fine | ~known).all() and not zero.any() and not lost.any() and whole() and around() and equal(x.double(), before.double()).all())


# --- products ---


def rounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(torch.float32).to(dtype).to(F64)


def judge(got: Tensor, right: Tensor, bound: Tensor, dtype: torch.dtype) -> bool:
    """Between the roundings of both ends of the bound."""
    low, high, got = rounded(right - bound, dtype), rounded(right + bound, dtype), got.to(F64)
    return got.shape == right.shape and bool((((got >= low) & (got <= high)) | equal(got, right)).all())


def operand(rows: int, columns: int, recipe: str, side: str, special: str) -> tuple[Tensor, Tensor]:
    r, c, kind, scales = shape_of(recipe, side)
    y = torch.randn(rows, columns) * (2 if kind == "e2m1" else 60)
    if special == "positive":
        y = y.abs()
    if kind == "e2m1":
        index = (snap(y, kind).abs()[..., None] == torch.tensor(FOUR, dtype=F64)).to(torch.int64).argmax(-1)
        codes = (index | torch.where(torch.signbit(y), 8, 0)).to(torch.uint8)
    else:
        codes = y.clamp(-448, 448).to(KINDS[kind][3])
    if special == "NaN" and side == "x" and rows > 2 and kind != "e2m1":
        codes.view(torch.uint8)[rows // 2, columns // 2] = 0x7F
    grid = grid_of((rows, columns), r, c)
    if scales == "byte":
        scale = torch.randint(118, 134, grid).to(torch.uint8)
        if special == "255" and side == "x":
            scale[rows // 2, 0] = 255
    elif scales == "pow2":
        scale = torch.randint(-6, 6, grid).float().exp2()
    elif scales == "two":
        scale = snap(torch.rand(grid) * 400 + 20, "e4m3").float() * 0.003
    else:
        scale = torch.rand(grid) * 0.02 + 0.001
    return codes, scale.reshape(()) if r is None else scale


def numbers_of(codes: Tensor, scale: Tensor, recipe: str, side: str) -> Tensor:
    r, c, kind, _ = shape_of(recipe, side)
    return value(codes, kind) * grow(scale_value(scale), (codes.shape[0], codes.shape[1]), r, c)


def check_gemm(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(14)
    for m, n, k in ((16, 32, 64), (13, 21, 48), (70, 96, 256), (33, 130, 300), (100, 65, 1024), (3, 7, 33), (130, 140, 640)):
        for special in ("normal", "positive", "NaN", "255"):
            a, scale_a = operand(m, k, recipe, "x", special)
            b, scale_b = operand(n, k, recipe, "weight", special)
            out, around = dirty((m, n), dtype)
            got = run(a, b, scale_a, scale_b, out)
            got = out if got is None else got
            x, y = numbers_of(a, scale_a, recipe, "x"), numbers_of(b, scale_b, recipe, "weight")
            bound = (k + 4) * 2.0**-24 * (x.abs().nan_to_num(0.0) @ y.abs().nan_to_num(0.0).t())
            yield f"{m} x {n} x {k} {special}", judge(got, x @ y.t(), bound, dtype) and around()


def check_grouped(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(15)
    for ends in ([16, 48, 64], [5, 40, 67], [0, 20, 53], [20, 20, 64], [3, 35, 35], [1, 2, 80], [64, 128, 160, 160, 192]):
        for special in ("normal", "NaN"):
            total, n, k = ends[-1], 144, 160
            a, scale_a = operand(total, k, recipe, "x", special)
            pairs = [operand(n, k, recipe, "weight", "normal") for _ in ends]
            b = torch.stack([c.view(torch.uint8) for c, _ in pairs]).view(pairs[0][0].dtype)
            scale_b = torch.stack([s for _, s in pairs])
            out, around = dirty((total, n), dtype)
            got = run(a, b, scale_a, scale_b, torch.tensor(ends, dtype=torch.int32), out)
            got = out if got is None else got
            x, start, right, bound = numbers_of(a, scale_a, recipe, "x"), 0, [], []
            for (codes, scale), end in zip(pairs, ends):
                y = numbers_of(codes, scale, recipe, "weight")
                right.append(x[start:end] @ y.t())
                bound.append((k + 4) * 2.0**-24 * (x[start:end].abs().nan_to_num(0.0) @ y.abs().t()))
                start = end
            yield f"ends {ends} {special}", judge(got, torch.cat(right), torch.cat(bound), dtype) and around()


# --- layers ---


def recast(x: Tensor, recipe: str, side: str) -> Tensor:
    """A tensor behind its cast, fp64; the products of fp32 scales are fp32's."""
    r, c, kind, scales = shape_of(recipe, side)
    shape, top = (x.shape[0], x.shape[1]), KINDS[kind][2]
    amax = tops(x, r, c)
    if scales == "fp32":
        scale = (torch.tensor(top) / amax.float()).float()
        return snap(x.float() * grow(scale, shape, r, c).float(), kind) * grow((1 / scale).to(F64), shape, r, c)
    per = grow(ldexp(octave(amax, top)), shape, r, c)
    return snap(x.to(F64) / per, kind) * per


def check_linear(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe = what["recipe"]
    torch.manual_seed(16)
    for tokens, k, n in ((32, 64, 96), (160, 256, 384), (48, 144, 272), (32, 64, 96), (160, 256, 384)):
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(tokens, k) * (torch.randn(k) * 2).exp2()).to(dtype)
            w = (torch.randn(n, k) * (torch.randn(n, 1) * 2).exp2()).to(dtype)
            g = (torch.randn(tokens, n) * (torch.randn(tokens, 1) * 2).exp2() * 1e-3).to(dtype)
            pairs = (
                (recast(x, recipe, "x"), recast(w, recipe, "weight").t()),
                (recast(g, recipe, "grad"), recast(w.t(), recipe, "weight").t()),
                (recast(g.t(), recipe, "grad"), recast(x.t(), recipe, "x").t()),
            )
            got = run(x, w, g)
            fine = [judge(r, a @ b, (a.shape[1] + 8) * 2.0**-24 * (a.abs() @ b.abs()), dtype) for r, (a, b) in zip(got, pairs)]
            yield f"{tokens} x {k} x {n} {str(dtype)[6:]}: y dx dw {fine}", all(fine) and all(t.dtype == dtype for t in got)


def check_attention(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(17)
    for s, d, factor in ((64, 32, 1.0), (37, 16, 1.0), (80, 64, 0.1), (48, 16, 3.0)):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v, g = ((torch.randn(2, 3, s, d) * f).to(dtype) for f in (factor, factor, 3.0, 0.1))
            leaves = [t.to(F64).requires_grad_() for t in (q, k, v)]
            scores = leaves[0] @ leaves[1].transpose(-1, -2) / math.sqrt(d)
            if what["causal"]:
                scores = scores + torch.full((s, s), -math.inf, dtype=F64).triu(1)
            o = scores.softmax(-1) @ leaves[2]
            right = (o.detach(), *torch.autograd.grad(o, leaves, g.to(F64)))
            got = run(q, k, v, g)
            if what["recipe"] == "fp8":
                yield f"S {s} D {d}", float((got[0].to(F64) - right[0]).norm() / right[0].norm()) < 0.25
                continue
            unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20 * (8 + float(scores.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax()))
            fine = [bool(((a.to(F64) - b).abs() <= unit * b.abs().amax()).all()) and a.dtype == dtype for a, b in zip(got, right)]
            yield f"S {s} D {d} times {factor} {str(dtype)[6:]}: o dq dk dv {fine}", all(fine)


def check_optimizer(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(18)
    (b1, b2), lr, eps, decay = what["betas"], what["lr"], what["eps"], what["weight_decay"]
    dtype = getattr(torch, what.get("dtype", "float32"))
    short = what["moments"] == "bfloat16"
    for shape, factor in (((16, 32), 1.0), ((7, 13), 1.0), ((64, 60), 1e-3)):
        p, state = torch.randn(shape).to(dtype), {}
        m = v = torch.zeros(shape, dtype=F64)
        for step in range(1, 2 if short else 13):
            g = (torch.randn(shape) * factor).to(dtype)
            before = p.to(F64)
            run(p, g, state, step)
            m, v = b1 * m + (1 - b1) * g.to(F64), b2 * v + (1 - b2) * g.to(F64) ** 2
            update = lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
            right = before * (1 - lr * decay) - update
            bound = update.abs() * (1.1 * (2.0**-8 + 2.0**-9) if short else 2.0**-15) + lr * 2.0**-18 + before.abs() * 2.0**-22
            yield f"{shape} times {factor:g}, step {step}", judge(p, right, bound, dtype)


CHECKS = {
    "encode": check_encode, "decode": check_decode, "cast": check_cast, "gemm": check_gemm, "grouped": check_grouped,
    "linear": check_linear, "attention": check_attention, "optimizer": check_optimizer,
}


def main(names: list[str]) -> int:
    wrong = 0
    entries = json.loads((HERE / "public.json").read_text())
    for entry in entries:
        if names and entry["name"] not in names:
            continue
        file, function = entry["adapter"].split(":")
        run = getattr(importlib.import_module(Path(file).stem), function)
        cases: list[Case] = []
        try:
            cases.extend(CHECKS[entry["kind"]](run, entry["what"]))
            raised = ""
        except Exception as error:
            raised = f" RAISES {type(error).__name__}: {error}"
        differ = [name for name, fine in cases if not fine]
        good = not raised and bool(differ) != entry["clean"]
        wrong += not good
        word = "right" if entry["clean"] else "wrong"
        print(f"{'ok ' if good else 'BAD'} {entry['name']:9s} {word} {len(differ):3d} of {len(cases):3d} differ{raised}: {'; '.join(differ[:2])}", flush=True)
    counts = [sum(e["clean"] is c for e in entries) for c in (False, True)]
    print(f"{counts[0]} wrong, {counts[1]} right; {wrong} not as they say")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Shows that each mutant of public.json is wrong on some input, and that no clean adapter is: `python self_check.py [NAME ...]`.

Every adapter runs on inputs made here and is compared with the right functions of `blocks`. Codes, scales and decoded
numbers must be equal (signs and payloads of NaN apart). Products must lie within (K + 8) 2**-24 sum |a b| and half an
ulp of the output; linear layers and attention within about 2**-18 of the largest result (their casts are equal, scores count in fp32), AdamW
within 2**-16 of the update and 2**-22 of the weight a step. Buffers are dirty (NaN) with guard bands of NaN, inputs are compared with
copies. Printed are the cases that differ of all that ran, and the first one. Exit code 1: a clean adapter differs
somewhere, or a mutant nowhere.
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
from blocks import (
    E2M1, E4M3, E5M2, adamw, attention, cast, cell, codes_of, decode, encode, grouped, linear, operands, product,
    round_to, scaled, scales_of, short_sum, amax_of,
)
from torch import Tensor

HERE = Path(__file__).resolve().parent
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
Case = tuple[str, bool]


def same(got: Tensor, right: Tensor) -> bool:
    """Equal numbers; NaN equals NaN."""
    got, right = got.double(), right.double()
    return got.shape == right.shape and bool(((got == right) | (got.isnan() & right.isnan())).all())


def near(got: Tensor, right: Tensor, bound: Tensor) -> bool:
    """Within the bound; what is not finite is equal."""
    got, right = got.double(), right.double()
    if got.shape != right.shape:
        return False
    close = (got - right).abs() <= bound
    return bool((close | (got == right) | (got.isnan() & right.isnan())).all())


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A dirty buffer amid guard bands, and whether they still stand."""
    size, band = math.prod(shape), 4096
    bits = torch.full((size + 2 * band, dtype.itemsize), 0xFF, dtype=torch.uint8)
    whole = bits.view(dtype).reshape(-1)

    def stands() -> bool:
        return bool((bits[:band] == 0xFF).all() and (bits[band + size :] == 0xFF).all())

    return whole[band : band + size].view(shape), stands


# --- encode, decode ---


def inputs_of_encode() -> Iterator[tuple[str, Tensor]]:
    """All numbers of 16 bits, ties and their neighbours, odd sizes, other layouts."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    yield "all float16", patterns.view(torch.float16)
    yield "all bfloat16", patterns.view(torch.bfloat16)
    yield "all bfloat16 as float32", patterns.view(torch.bfloat16).float()
    for name, fmt in FORMATS.items():
        numbers = decode(torch.arange(fmt.sign, dtype=torch.uint8), fmt)
        numbers = numbers[numbers.isfinite()]
        middles = ((numbers[1:] + numbers[:-1]) / 2).float()
        around = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(math.inf))])
        yield f"ties of {name}", torch.cat([around, -around])
    torch.manual_seed(1)
    yield "negative NaN", torch.tensor([0xFFC00000 - 2**32, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    yield "beyond 464", torch.tensor([449.0, 463.0, 464.0, 465.0, 500.0, 600.0, 57000.0, 61439.0, 61440.0, 1e6, 1e38, -1e9])
    yield "23 elements", torch.randn(23)
    yield "16 elements", torch.randn(16)
    yield "transposed", torch.randn(6, 9).t()
    yield "every second", torch.randn(6, 20)[:, ::2]
    yield "bfloat16", torch.randn(1000).bfloat16()


def right_encode(x: Tensor, what: dict[str, Any]) -> Tensor:
    """Right codes, as numbers."""
    fmt, beyond = FORMATS[what["format"]], what.get("overflow", "saturate")
    if beyond == "saturate":
        codes = encode(x, fmt) if fmt is not E2M1 else codes_of(x.float(), fmt)
        return decode(codes, fmt)
    end, code = (464.0, 0x7F) if fmt is E4M3 else (61440.0, 0x7C)
    out = x.abs().double() > end if fmt is E4M3 else x.abs().double() >= end
    codes = torch.where(out, code, round_to(x, fmt))
    codes = torch.where(x.isnan(), 0x7F, codes) | torch.where(torch.signbit(x), 0x80, 0)
    return decode(codes.to(torch.uint8), fmt)


def check_encode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    for name, x in inputs_of_encode():
        fmt, before = FORMATS[what["format"]], x.clone()
        right = right_encode(x, what)
        if fmt is E2M1:  # no NaN: what becomes of it is not compared
            right = torch.where(x.isfinite(), right, 0.0)
        got = decode(run(x).view(torch.uint8), fmt)
        got = torch.where(x.isfinite(), got, 0.0) if fmt is E2M1 else got
        signs = bool((torch.signbit(got) == torch.signbit(x))[x.isfinite() & ~got.isnan()].all())
        yield name, same(got, right) and same(x, before) and signs


def check_decode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    fmt = FORMATS[what["format"]]
    codes = torch.arange(2 * fmt.sign, dtype=torch.int32).to(torch.uint8)
    yield "all codes", same(run(codes.view(fmt.dtype)), decode(codes, fmt))


# --- cast ---


def inputs_of_cast() -> Iterator[tuple[str, Tensor]]:
    """Matrices of several shapes, layouts, magnitudes, and with elements of several kinds."""
    torch.manual_seed(2)
    for shape in ((1, 32), (5, 130), (16, 64), (7, 128), (130, 300), (200, 264), (256, 256)):
        x = torch.randn(shape)
        yield f"normal {shape}", x
        yield f"bfloat16 {shape}", x.bfloat16()
        yield f"outliers {shape}", x * torch.randn(shape[0], 1).mul(4).exp2() * torch.randn(shape[1]).mul(3).exp2()
        yield f"column-major {shape}", torch.randn(shape[1], shape[0]).t()
        wide = torch.randn(shape[0], shape[1] + 200)
        wide[:, shape[1] :] *= 1000
        yield f"columns of a wider one {shape}", wide[:, : shape[1]]
    x = torch.randn(6, 256)
    for factor in (1e-6, 1e-30, 1e-38, 1e-41, 1e30):
        yield f"times {factor:g}", x * factor
    yield "zeros", torch.zeros(4, 256)
    holes = torch.randn(6, 256)
    holes[2], holes[3, :128] = 0.0, 0.0
    yield "zero row and block", holes
    for value in (math.nan, math.inf, -math.inf):
        one = torch.randn(6, 256)
        one[2, 5] = value
        yield f"one {value}", one
        yield f"one {value} in bfloat16", one.bfloat16()
    for top in (448.0, 6.0, 57344.0, 1.0, 240.0, 1.75 * (1 + 2.0**-23), 448 * (1 + 2.0**-23), 7 * (1 + 2.0**-10), 6.0001):
        for octaves in (0, -7, 5, 30):
            exact = torch.rand(4, 256) * top * 2.0**octaves * 0.9
            exact[:, ::32] = top * 2.0**octaves
            yield f"amax {top:g} * 2**{octaves}", exact
    yield "negative", -torch.rand(4, 256) - torch.arange(256) / 100
    ties = torch.arange(-448, 448).float().reshape(7, 128) / 2
    ties[:, 0] = 448.0
    yield "ties", ties


def right_cast(x: Tensor, what: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The right cast, by another way than the adapters: fp64 products, where that is exact."""
    return cast(x, cell(what["recipe"], what["operand"]))


def check_cast(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    how = cell(what["recipe"], what["operand"])
    drawn = what["recipe"] == "mxfp4" and what["operand"] == "grad"
    for name, x in inputs_of_cast():
        right, scales = right_cast(x, what)
        data, data_stands = guarded(right.shape, right.dtype)
        scale_inv, scales_stand = guarded(tuple(scales.shape), scales.dtype)
        before = x.clone()
        got = run(x, data, scale_inv)
        codes, inverse = (data, scale_inv) if got is None else got
        fine = same(inverse, scales) and inverse.dtype == scales.dtype and data_stands() and scales_stand() and same(x, before)
        if drawn:
            yield name, fine and (not name.startswith("outliers (256") or unbiased(run, x, how))
        else:
            yield name, fine and codes.dtype == right.dtype and same(decode(codes, how.fmt), decode(right, how.fmt))


def unbiased(run: Callable[..., Any], x: Tensor, how: Any) -> bool:
    """Whether the mean over 64 stochastic casts is x within 6 of its standard errors, and each a neighbour of x."""
    scale, inverse = scales_of(amax_of(x, how), how)
    y = scaled(x, scale, how).double()
    casts = torch.stack([decode(run(x, None, None)[0], how.fmt) for _ in range(64)])
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    sure = bool(((casts - y).abs() < step).all())
    error = (casts - y).mean() / (step.square().sum().sqrt() / y.numel() / 8 / 2)
    return sure and abs((casts - y).mul(y.sign()).mean() / (step.square().sum().sqrt() / y.numel() / 16)) < 6 and abs(error) < 6


# --- products ---


def half_ulp(right: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a step of the dtype at each number."""
    bits = 8 if dtype == torch.bfloat16 else 24
    return torch.ldexp(torch.ones_like(right), torch.frexp(right.abs().nan_to_num(0.0, 0.0, 0.0))[1] - bits - 1) * 1.0001


def codes_for(rows: int, columns: int, kind: str, grad: bool = False) -> Tensor:
    """Codes of a random matrix."""
    fmt = E5M2 if grad else E4M3
    x = torch.randn(rows, columns) * (60 if kind != "tiny" else 2.0**-7)
    if kind == "positive":
        x = x.abs()
    if kind == "large":
        x = x * 4
    codes = encode(x.clamp(-fmt.top, fmt.top), fmt)
    if kind == "nan":
        codes.view(torch.uint8)[rows // 2, columns // 2] = 0x7F
    return codes


def scales_for(rows: int, columns: int, recipe: str, weight: bool) -> Tensor:
    """Random scales in the layout of the recipe."""
    how = cell(recipe, "weight" if weight else "x")
    grid = (-(-rows // how.rows) if how.rows else 1, -(-columns // how.cols) if how.cols else 1)
    if recipe == "mxfp8":
        return torch.randint(120, 134, grid).to(torch.uint8)
    if how.scales == "pow2":
        return torch.randint(-5, 5, grid).float().exp2()
    scales = torch.rand(grid) * 0.01 + 0.001
    return scales.reshape(()) if how.rows is None else scales


def check_gemm(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(3)
    for m, n, k in ((16, 16, 64), (20, 70, 130), (17, 17, 96), (5, 40, 1000), (64, 128, 256), (33, 129, 384), (20, 20, 2048)):
        for kind in ("normal", "positive", "tiny", "large", "nan", "again", "E5M2", "lowest"):
            if (kind == "E5M2" and recipe != "tensorwise") or (kind == "lowest" and recipe != "mxfp8"):
                continue
            if short(what) and (k > 300 or kind == "E5M2"):
                continue
            a, b = codes_for(m, k, kind, kind == "E5M2"), codes_for(n, k, "normal" if kind == "nan" else kind)
            scale_a, scale_b = scales_for(m, k, recipe, False), scales_for(n, k, recipe, True)
            if kind == "lowest":
                scale_a[:, 0], scale_a[:, 1:], scale_b[:] = 0, 0, 254
            given = [t.clone() for t in (a, b, scale_a, scale_b)]
            out, stands = guarded((m, n), dtype)
            got = run(a, b, scale_a, scale_b, out)
            got = out if got is None else got
            right = product(a, b, scale_a, scale_b, recipe)
            if short(what):
                right = short_sum(decode(a), decode(b)) * scale_a.double() * scale_b.double()
            x, y = operands(a, b, scale_a, scale_b, recipe)
            bound = (k + 8) * 2.0**-24 * (x.abs().nan_to_num(0.0) @ y.abs().nan_to_num(0.0).t())
            if short(what):
                bound = right.abs() * 2.0**-22
            fine = near(got, right, bound + half_ulp(right, dtype)) and got.dtype == dtype and stands()
            kept = all(same(new, old) for new, old in zip((a, b, scale_a, scale_b), given))
            yield f"{m} x {n} x {k} {kind}", fine and kept


def short(what: dict[str, Any]) -> bool:
    """Whether the adapter promises the sums of a tensor core."""
    return what.get("accumulator", "fp32") != "fp32"


def check_grouped(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(4)
    lists = ([16, 32, 48], [5, 40, 64], [0, 20, 40], [20, 20, 64], [64, 64, 64], [3, 35, 35], [16, 32, 48], [30, 40, 64], [1, 2, 64])
    for ends in lists:
        for kind in ("normal", "nan"):
            t, n, k = ends[-1], 48, 160
            a = codes_for(t, k, kind)
            b = torch.stack([codes_for(n, k, "normal").view(torch.uint8) for _ in ends]).view(torch.float8_e4m3fn)
            scale_a = scales_for(t, k, recipe, False)
            scale_b = torch.stack([scales_for(n, k, recipe, True) for _ in ends])
            last = torch.tensor(ends, dtype=torch.int32)
            out, stands = guarded((t, n), dtype)
            got = run(a, b, scale_a, scale_b, last, out)
            got = out if got is None else got
            right = grouped(a, b, scale_a, scale_b, last, recipe)
            scale = (right.abs().nan_to_num(0.0).amax() * 30 + 1) * (k + 8) * 2.0**-24
            yield f"ends {ends} {kind}", near(got, right, half_ulp(right, dtype) + scale) and stands()


# --- layers, optimizers ---


def check_linear(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(5)
    for tokens, k, n in (((32,), 64, 96), ((20,), 130, 70), ((2, 24), 128, 256), ((160,), 256, 128), ((32,), 64, 96)):
        for dtype in (torch.float32, torch.bfloat16):
            x, w, dy = (torch.randn(*s).to(dtype) for s in ((*tokens, k), (n, k), (*tokens, n)))
            x, w, dy = x * torch.randn(k).mul(2).exp2().to(dtype), w * torch.randn(k).mul(4).exp2().to(dtype), dy * 1e-3
            before = [t.clone() for t in (x, w, dy)]
            got, right = run(x, w, dy), linear(x, w, dy, what["recipe"])
            fine = all(near(g, r, r.double().abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-20) + r.abs().double().amax() * 2.0**-18) for g, r in zip(got, right))
            yield f"{tokens} {k} {n} {dtype}", fine and all(same(new, old) for new, old in zip((x, w, dy), before))


def check_attention(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(6)
    for s, d, e, factor in ((64, 32, 32, 1), (37, 16, 16, 1), (48, 32, 16, 1), (16, 8, 8, 12), (48, 16, 16, 1e-2)):
        q, k, v, g = (torch.randn(2, 3, s, width) for width in (d, d, e, e))
        q, k = q * factor, k * factor
        got, right = run(q, k, v, g), attention(q, k, v, g, what["causal"])
        bound = 2.0**-20 * (4 + float((q @ k.transpose(-1, -2)).abs().amax()) / math.sqrt(d))
        yield f"S {s} D {d} {e} times {factor}", all(near(a, b, b.double().abs().amax() * bound) for a, b in zip(got, right))


def check_optimizer(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[Case]:
    torch.manual_seed(7)
    rule = {name: what[name] for name in ("lr", "betas", "eps", "weight_decay")}
    if what["moments"] == "int8":
        yield from check_eight_bits(run, rule)
        return
    for kind, factor in (("normal", 1.0), ("small", 1e-6), ("zeros", 1.0)):
        weight = torch.randn(40, 30)
        right, state, own = weight.clone(), {}, {}
        for step in range(1, 31):
            grad = torch.randn(40, 30) * factor
            if kind == "zeros" and step % 2 == 0:
                grad[::2] = 0
            before, given = right.clone(), grad.clone()
            run(weight, grad, own, step)
            adamw(right, given, state, step, **rule)
            bound = (right - before).abs().double() * 2.0**-16 + (right.abs().double() + 16 * what["lr"]) * 2.0**-22 * step
            yield f"{kind}, step {step}", near(weight, right, bound) and same(grad, given)


def check_eight_bits(run: Callable[..., Any], rule: dict[str, Any]) -> Iterator[Case]:
    """Against ottava.optim.AdamW(moments="int8"): the one comparison with the code under test."""
    import ottava.optim

    weight = torch.randn(40, 60)
    twin, own = torch.nn.Parameter(weight.clone()), {}
    optimizer = ottava.optim.AdamW([twin], **rule, moments="int8")
    for step in range(1, 9):
        grad = torch.randn(40, 60) * torch.randn(40, 1).mul(3).exp2()
        run(weight, grad, own, step)
        twin.grad = grad.clone()
        optimizer.step()
        yield f"step {step}", near(weight, twin.detach(), twin.detach().abs().double() * 2.0**-20 + 1e-7)


CHECKS = {
    "encode": check_encode, "decode": check_decode, "cast": check_cast, "gemm": check_gemm, "grouped": check_grouped,
    "linear": check_linear, "attention": check_attention, "optimizer": check_optimizer,
}


def main(names: list[str]) -> int:
    """Checks all adapters, or those named."""
    wrong = 0
    for entry in json.loads((HERE / "public.json").read_text()):
        if names and entry["name"] not in names:
            continue
        file, function = entry["adapter"].split(":")
        run = getattr(importlib.import_module(Path(file).stem), function)
        cases: list[Case] = []
        try:
            cases.extend(CHECKS[entry["kind"]](run, entry["what"]))
        except Exception as error:
            cases.append((f"raises {type(error).__name__}", False))
        differ = [name for name, fine in cases if not fine]
        good = bool(differ) != entry["clean"]
        wrong += not good
        word = "clean" if entry["clean"] else "mutant"
        print(f"{'ok ' if good else 'BAD'} {entry['name']:14s} {word:6s} {len(differ):3d} of {len(cases)} differ: {', '.join(differ[:2])}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

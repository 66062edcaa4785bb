"""GPU suites of single kernels: `ceilings` (copies and GEMMs), `gemm` (every way to run a GEMM) and `cast`.

`ceilings` computes the constants for `ottava plan --device`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ottava.bench.method import Run, WrongResultError, check, normal, race, replayed, rotating
from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.numerics.accumulator import lost_share
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.dispatch import gemm_ways
from ottava.ops.gemm import explain, gemm, tune_gemm
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES

_TINY = 64  # launches in the graph that measures one launch


def gemm_call(run: Run, recipe: str, m: int, n: int, k: int, *, fast: bool) -> tuple[Callable[[], Any], float, str]:
    """The GEMM of two casts of the recipe's fprop, its relative error, and its kernel."""
    cells = RECIPES[recipe].fprop
    assert cells.lhs is not None
    assert cells.rhs is not None
    lhs, rhs = cells.lhs, cells.rhs

    def pair() -> tuple[Any, Any]:
        return quantize(normal(run, m, k), lhs), quantize(normal(run, n, k), rhs)

    take = rotating(run, pair, m * k + n * k)
    a, b = take()
    y = gemm(a, b, out_dtype=torch.bfloat16, fast_accum=fast)
    rows = slice(0, min(m, 256))
    exact = a.dequantize(torch.float32)[rows].double() @ b.dequantize(torch.float32).double().t()
    # rounding to BF16 errs by 2e-3; with `fast` the accumulator keeps about 14 bits of each of K / 32 partial sums
    error = check(f"{recipe} {m}x{n}x{k}", y[rows], exact, 3e-2 if fast else 4e-3)
    ran = explain(a, b, out_dtype=torch.bfloat16)
    return (lambda: gemm(*take(), out_dtype=torch.bfloat16, fast_accum=fast)), error, ran


def ceilings(run: Run) -> dict[str, Any]:
    """Rates of copies and GEMMs, and the constants of a Device that follow from them."""
    table: list[dict[str, Any]] = []
    size = 2**16 if run.smoke else 2**28
    source, target = (torch.empty(size, dtype=torch.uint8, device=run.device) for _ in range(2))
    copy = race(run, {"copy": lambda: target.copy_(source)})["copy"]
    table.append({"what": "copy", "bytes_per_second": 2 * size / copy["median"], **copy})
    table.append(launch(run))
    table.append(transposing_cast(run))
    big = run.shapes((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 14336), (4096, 4096, 16384))
    for m, n, k in big:
        dense = rotating(run, partial(dense_pair, run, m, n, k), 2 * (m * k + n * k))
        contenders: dict[str, Callable[[], Any]] = {"bf16": partial(dense_gemm, dense)}
        facts: dict[str, Any] = {}
        for name, recipe, fast in (
            ("tensor_fast", "tensorwise", True),
            ("tensor", "tensorwise", False),
            ("row", "rowwise", False),
            ("block", "blockwise", False),
        ):
            contenders[name], error, ran = gemm_call(run, recipe, m, n, k, fast=fast)
            facts[name] = {"relative_error": error, "kernels": ran}
        for name, times in race(run, contenders).items():
            rate = 2 * m * n * k / times["median"]
            table.append({"what": name, "shape": [m, n, k], "flops": rate, **times, **facts.get(name, {})})
    return {"rows": table, "constants": constants(run, table)}


def gemms(run: Run) -> dict[str, Any]:
    """Each kernel and configuration on one pair of operands per shape. On a GPU `tune_gemm` saves the fastest."""
    rows: list[dict[str, Any]] = []
    cells = (("tensorwise", "fprop"), ("rowwise", "fprop"), ("blockwise", "fprop"), ("blockwise", "wgrad"))
    for m, n, k in run.shapes((16384, 14336, 4096), (16384, 4096, 14336), (4096, 14336, 16384), (4096, 4096, 4096)):
        for recipe, cell in cells:
            sides = getattr(RECIPES[recipe], cell)
            a, b = quantize(normal(run, m, k), sides.lhs), quantize(normal(run, n, k), sides.rhs)
            magnitudes = a.magnitudes(), b.magnitudes()
            exact, exact_biased = (reference.gemm(*pair, torch.float32, None) for pair in ((a, b), magnitudes))
            for fast in (False, True):
                call: dict[str, Any] = {"out_dtype": torch.bfloat16, "fast_accum": fast}
                ways = gemm_ways(a, b, **call)
                errors = {way: check(f"{way} {m}x{n}x{k}", work(), exact, 0.03) for way, work in ways.items()}
                # numbers of one sign: fast accumulation may lose what Hopper's does, nothing else loses anything
                limit = 0.03 + (lost_share(k, 1.0, "hopper") if fast else 0.0)
                biased = {
                    way: check(f"{way} {m}x{n}x{k} of magnitudes", work(), exact_biased, limit)
                    for way, work in gemm_ways(*magnitudes, **call).items()
                }
                facts = {"recipe": f"{recipe}.{cell}", "mode": "fast" if fast else "accurate", "shape": [m, n, k]}
                for way, times in race(run, ways).items():
                    rate = 2 * m * n * k / times["median"]
                    wrong = {"relative_error": errors[way], "relative_error_on_magnitudes": biased[way]}
                    rows.append(facts | {"what": way, "flops": rate} | wrong | times)
                if run.device.type == "cuda":
                    tune_gemm(a, b, **call)
    return {"rows": rows}


def launch(run: Run) -> dict[str, Any]:
    """Times the shortest kernel in a graph of many: the lowest cost of a launch."""
    number = torch.zeros(1, device=run.device)

    def many() -> None:
        for _ in range(_TINY):
            number.add_(1)

    times = race(run, {"launch": replayed(many) if run.cuda else many})["launch"]
    return {"what": "launch", **{name: value / _TINY for name, value in times.items()}}


def transposing_cast(run: Run) -> dict[str, Any]:
    """Times the casts of x and x.T with a given scale, from one read of x: the rate of casts."""
    ((m, k),) = run.shapes((16384, 4096))
    spec, scale = RECIPES["delayed"].fprop.lhs, torch.ones((), device=run.device)
    assert spec is not None
    take = rotating(run, partial(normal, run, m, k), 2 * m * k)
    triton = triton_quantize.supports_quantize(take(), spec, scale) is None
    way = partial(at_once if triton else one_by_one, take, spec, spec, scale)
    times = race(run, {"cast": way})["cast"]
    return {"what": "cast", "shape_cast": [m, k], "bytes_per_second": 4 * m * k / times["median"], **times}


def dense_pair(run: Run, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """(M, K), (N, K) in BF16."""
    return normal(run, m, k), normal(run, n, k)


def dense_gemm(take: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """torch's BF16 GEMM."""
    a, b = take()
    return torch.mm(a, b.t())


def constants(run: Run, table: list[dict[str, Any]]) -> dict[str, Any]:
    """The constants for `nn.plan.Device.read`, from the first and largest shape of the table."""
    first = next(row["shape"] for row in table if "shape" in row)
    rates = {row["what"]: row["flops"] for row in table if row.get("shape") == first}
    ratios = {name: rate / rates["bf16"] for name, rate in rates.items() if name != "bf16"}
    cuda = run.device.type == "cuda"
    gpu = torch.cuda.get_device_properties(run.device) if cuda else None
    return {
        "name": f"{gpu.name} (measured)" if gpu else "CPU (smoke run, means nothing)",
        "capability": [gpu.major, gpu.minor] if gpu else [0, 0],
        "processors": gpu.multi_processor_count if gpu else 1,
        "bf16": rates["bf16"],
        "bandwidth": next(row["bytes_per_second"] for row in table if row["what"] == "copy"),
        "transposing": next(row["bytes_per_second"] for row in table if row["what"] == "cast"),
        "launch": next(row["median"] for row in table if row["what"] == "launch"),
        **ratios,
    }


def cast(run: Run) -> dict[str, Any]:
    """Casts of x and x.T under each recipe: one by one, and from one read of x if a kernel supports that."""
    rows = []
    for m, k in run.shapes((16384, 2048), (16384, 4096), (16384, 14336)):
        take = rotating(run, partial(normal, run, m, k), 2 * m * k)
        for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "guarded"):
            first, second = RECIPES[name].fprop.lhs, RECIPES[name].wgrad.rhs
            assert first is not None
            assert second is not None
            scale = torch.tensor(448 / 8.0, device=run.device) if first.predicted else None
            contenders = {"one by one": partial(one_by_one, take, first, second, scale)}
            reason = triton_quantize.supports_quantize(take(), first, scale)
            if reason is None:
                contenders["both at once"] = partial(at_once, take, first, second, scale)
                same_codes(f"cast {name} {m}x{k}", take(), first, second, scale)
            moved = 4 * m * k  # bytes, at least: each element is read in 2 and written in 1 + 1
            for contender, times in race(run, contenders).items():
                rate = moved / times["median"]
                facts: dict[str, Any] = {
                    "recipe": name,
                    "shape": [m, k],
                    "what": contender,
                    "bytes_per_second": rate,
                    "triton": reason,
                }
                rows.append(facts | times)
    return {"rows": rows}


def one_by_one(
    take: Callable[[], Tensor], spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None
) -> None:
    """Casts x and x.T by two calls."""
    x = take()
    quantize(x, spec, scale=scale)
    quantize(x.t(), spec_t, scale=scale)


def at_once(take: Callable[[], Tensor], spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None) -> None:
    """Casts x and x.T from one read of x."""
    triton_quantize.quantize_both(take(), spec, spec_t, scale)


def same_codes(name: str, x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None) -> None:
    """Raises WrongResultError unless `quantize_both` returns the codes of the reference."""
    casts = triton_quantize.quantize_both(x, spec, spec_t, scale)
    for got, tensor, cell in zip(casts, (x, x.t()), (spec, spec_t), strict=True):
        truth = reference.quantize(tensor, cell, scale).data.contiguous()
        if got is None or not torch.equal(got.data.view(torch.uint8), truth.view(torch.uint8)):
            raise WrongResultError(f"{name}: codes differ from those of the reference, so its times mean nothing")

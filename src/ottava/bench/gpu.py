"""`ottava bench gpu`: measures speed and checks results on a GPU, beside BF16 and other installed packages.

ceilings    copy, launch, single BF16 and FP8 GEMMs: the constants of `ottava plan --device`
gemm        every way to run a GEMM, with Triton's under each promotion interval; saves the fastest for this device
cast        ottava's casts of x and x.T, in bytes per second
modules     forward and backward of norms and activations, alone and in front of a linear's cast
linear      forward and backward of a Linear, eager, compiled and as a graph, beside the prediction
host        host time and launches of a Linear
block       forward and backward of a decoder layer, Llama's 8B and 1B sizes, with memory
seed_layer  a transformer layer with the shapes of TransformerEngine issue #1119, with AdamW
train       tokens per second of whole training steps, eager and as a graph, with the loss
"""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.base.errors import need_known
from ottava.bench.method import (
    Rows,
    Run,
    WrongResultError,
    cases,
    check,
    failure,
    host_seconds,
    launches,
    normal,
    race,
    replayed,
    rotating,
    step,
    step_bytes,
    versions,
)
from ottava.bench.models import (
    Contender,
    GPTBlock,
    LlamaBlock,
    PlainByteTransformer,
    contender,
    contenders,
    missing,
    swiglu,
)
from ottava.engine.functional import produced
from ottava.engine.state import ScalingState
from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.nn.activations import ACTIVATIONS, ActivationFormula
from ottava.nn.convert import convert
from ottava.nn.graphed import graphed_step
from ottava.nn.mlp import NormMLP
from ottava.nn.norms import LayerNorm, NormLinear, RMSNorm
from ottava.nn.plan import Device, plan_layer
from ottava.numerics.accumulator import lost_share
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.dispatch import gemm_ways
from ottava.ops.gemm import explain, gemm, tune_gemm
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from ottava.train.config import ModelConfig
from ottava.train.model import VOCABULARY, ByteTransformer, loss

# --- single kernels --------------------------------------------------------------------------------------------------

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


def ceilings(run: Run) -> Rows:
    """Rates of copies, launches and casts; with those of `single_gemms` `constants` makes a Device of them."""
    size = 2**16 if run.smoke else 2**28
    pair = torch.empty(2, size, dtype=torch.uint8, device=run.device)
    copy = race(run.part(10), {"copy": lambda: pair[0].copy_(pair[1])})["copy"]
    yield rated({"what": "copy"}, copy, bytes_per_second=2 * size)
    yield launch(run.part(10))
    yield transposing_cast(run.part(10))


_SINGLE = (
    ("tensor_fast", "tensorwise", True),
    ("tensor", "tensorwise", False),
    ("row", "rowwise", False),
    ("block", "blockwise", False),
)


def single_gemms(run: Run, m: int, k: int, n: int) -> Rows:
    """BF16 and the fastest way of each kind of scales."""
    dense = rotating(run, lambda: (normal(run, m, k), normal(run, n, k)), 2 * (m * k + n * k))
    contenders: dict[str, Callable[[], Any]] = {"bf16": partial(dense_gemm, dense)}
    facts: dict[str, Any] = {"bf16": {}}
    for name, recipe, fast in _SINGLE:
        if recipe not in run.chosen(("tensorwise", "rowwise", "blockwise")):
            continue
        try:
            contenders[name], error, ran = gemm_call(run, recipe, m, n, k, fast=fast)
            facts[name] = {"relative_error": error, "kernels": ran}
        except Exception as error:
            yield {"what": name, "shape": [m, n, k], **failure(error)}
    for name, times in race(run, contenders).items():
        yield rated({"what": name, "shape": [m, n, k], **facts[name]}, times, flops=2 * m * n * k)


def rated(facts: dict[str, Any], times: dict[str, Any], **amounts: int) -> dict[str, Any]:
    """A row: what is measured, its times, and each amount a second; of one that failed, the error."""
    rates = {} if "error" in times else {name: amount / times["median"] for name, amount in amounts.items()}
    return facts | rates | times


def gemms(run: Run, m: int, k: int, n: int) -> Rows:
    """Each kernel and configuration on one pair of operands. On a GPU `tune_gemm` saves the fastest.

    A way that is wrong or fails has its error.
    """
    cells = [(recipe, "fprop") for recipe in run.chosen(("tensorwise", "rowwise", "blockwise"))]
    cells += [("blockwise", "wgrad")] if "blockwise" in run.chosen(("blockwise",)) else []
    for place, (recipe, cell) in enumerate(cells):
        part, sides = run.part(len(cells) - place), getattr(RECIPES[recipe], cell)
        a, b = quantize(normal(run, m, k), sides.lhs), quantize(normal(run, n, k), sides.rhs)
        magnitudes = a.magnitudes(), b.magnitudes()
        exact, exact_biased = (reference.gemm(*pair, torch.float32, None) for pair in ((a, b), magnitudes))
        for fast in (False, True):
            call: dict[str, Any] = {"out_dtype": torch.bfloat16, "fast_accum": fast}
            about = {"recipe": f"{recipe}.{cell}", "mode": "fast" if fast else "accurate", "shape": [m, n, k]}
            # numbers of one sign: fast accumulation may lose what Hopper's does, nothing else loses anything
            limit = 0.03 + (lost_share(k, 1.0, "hopper") if fast else 0.0)
            biased, right, wrong = gemm_ways(*magnitudes, **call), dict[str, Any](), dict[str, Any]()
            for way, work in gemm_ways(a, b, **call).items():
                try:
                    error = check(f"{way} {m}x{n}x{k}", work(), exact, 0.03)
                    lost = check(f"{way} {m}x{n}x{k} of magnitudes", biased[way](), exact_biased, limit)
                except Exception as problem:
                    yield {**about, "what": way, **failure(problem)}
                    continue
                right[way], wrong[way] = work, {"relative_error": error, "relative_error_on_magnitudes": lost}
            for way, times in race(part.part(2), right).items():
                yield rated({**about, "what": way, **wrong[way]}, times, flops=2 * m * n * k)
            if run.device.type == "cuda":
                tune_gemm(a, b, **call)


def launch(run: Run) -> dict[str, Any]:
    """Times the shortest kernel in a graph of many: the lowest cost of a launch."""
    number = torch.zeros(1, device=run.device)

    def many() -> None:
        for _ in range(_TINY):
            number.add_(1)

    times = race(run, {"launch": replayed(many) if run.cuda else many})["launch"]
    return {"what": "launch", **{name: value / _TINY if name != "error" else value for name, value in times.items()}}


def transposing_cast(run: Run) -> dict[str, Any]:
    """Times the casts of x and x.T with a given scale, from one read of x: the rate of casts."""
    m, k = (64, 64) if run.smoke else (16384, 4096)
    spec, scale = RECIPES["delayed"].fprop.lhs, torch.ones((), device=run.device)
    assert spec is not None
    take = rotating(run, partial(normal, run, m, k), 2 * m * k)
    triton = triton_quantize.supports_quantize(take(), spec, scale) is None
    way = partial(at_once if triton else one_by_one, take, spec, spec, scale)
    times = race(run, {"cast": way})["cast"]
    return rated({"what": "cast", "shape_cast": [m, k]}, times, bytes_per_second=4 * m * k)


def dense_gemm(take: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """torch's BF16 GEMM."""
    a, b = take()
    return torch.mm(a, b.t())


def constants(run: Run, table: list[dict[str, Any]]) -> dict[str, Any]:
    """The constants for `nn.plan.Device.read`, from the first and largest shape of the table; none if one failed."""
    if any("error" in row for row in table):
        return {}
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


def cast(run: Run, m: int, k: int) -> Rows:
    """Casts of x and x.T under each recipe: one by one, and from one read of x. The second needs a kernel for it."""
    take = rotating(run, partial(normal, run, m, k), 2 * m * k)
    names = run.chosen(("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "guarded"))
    for place, name in enumerate(names):
        first, second = RECIPES[name].fprop.lhs, RECIPES[name].wgrad.rhs
        about: dict[str, Any] = {"recipe": name, "shape": [m, k]}
        if first is None or second is None:
            yield {**about, "error": "left out: it keeps x or x.T in high precision"}
            continue
        scale = torch.tensor(448 / 8.0, device=run.device) if first.predicted else None
        contenders = {"one by one": partial(one_by_one, take, first, second, scale)}
        about["triton"] = reason = triton_quantize.supports_quantize(take(), first, scale)
        if reason is None:
            try:
                same_codes(f"cast {name} {m}x{k}", take(), first, second, scale)
                contenders["both at once"] = partial(at_once, take, first, second, scale)
            except Exception as error:
                yield {**about, "what": "both at once", **failure(error)}
        for way, times in race(run.part(len(names) - place), contenders).items():
            # bytes, at least: each element is read in 2 and written in 1 + 1
            yield rated({**about, "what": way}, times, bytes_per_second=4 * m * k)


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


# --- layers and models -----------------------------------------------------------------------------------------------

_LOOSE = 0.15  # relative error of an FP8 layer against BF16; wrong codes or scales give more than 1


Modes = Callable[[Contender], Iterator[tuple[str, Callable[[], Any]]]]
"""A contender's work in each of its modes, "eager" first; a later one may be made behind the first call."""


def compared(
    run: Run,
    runners: list[Contender],
    x: Tensor,
    about: dict[str, Any],
    modes: Modes,
    measure: Callable[..., float] | None = None,
) -> Rows:
    """One row for each contender and mode: times, speed-up over the fastest BF16 of the same mode, memory, kernels.

    Each output is first compared with that of the first contender. Who is wrong or fails has its error.
    """
    truth = runners[0].forward(x).detach()
    facts: dict[str, dict[str, Any]] = {}
    work: dict[str, Callable[[], Any]] = {}
    for c in runners:
        try:
            error = check(c.name, c.forward(x), truth, _LOOSE)
            for mode, call in modes(c):
                call()
                ScalingState(c.model).update()  # recipes with predicted scales predict from now on
                # a replay allocates no memory: its graph holds it
                memory = None if mode == "graph" else step_bytes(run, call)
                facts[f"{c.name}, {mode}"] = {"relative_error": error, "step_bytes": memory, "ran": ran(c.model)}
                work[f"{c.name}, {mode}"] = call
        except Exception as problem:
            yield {**about, "recipe": c.name, **failure(problem)}
    measured = race(run, work) if measure is None else race(run, work, measure)
    for label, times in measured.items():
        name, _, mode = label.partition(", ")
        row = {**about, "recipe": name, "mode": mode, **times, **facts[label]}
        dense = [
            one["median"]
            for key, one in measured.items()
            if "bf16" in key and key.endswith(f", {mode}") and "median" in one
        ]
        yield row | ({"speedup": min(dense) / times["median"]} if dense and "median" in times else {})


def ran(model: nn.Module) -> dict[str, str]:
    """The kernel of each GEMM in ottava's first layer. Empty for rivals and compiled code, which keep no record."""
    calls = (getattr(module, "last_call", None) for module in model.modules())
    first = next((call for call in calls if call is not None), None)
    return {name: record.kernel for name, record in first.records.items()} if first is not None else {}


def steps(run: Run, x: Tensor, dy: Tensor, graphs: bool = False) -> Modes:
    """Forward and backward, eager; on a GPU also as a graph, which torch.compile and TransformerEngine take badly."""

    def modes(c: Contender) -> Iterator[tuple[str, Callable[[], Any]]]:
        work = step(c.forward, c.model, x, dy)
        yield "eager", work
        if graphs and run.cuda and "compiled" not in c.name and not c.name.startswith("te "):
            yield "graph", replayed(work)

    return modes


def linear_layer(run: Run, k: int, n: int) -> nn.Linear:
    """A Linear, always with the same weights."""
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, device=run.device, dtype=torch.bfloat16)


def linear(run: Run, m: int, k: int, n: int) -> Rows:
    """Forward and backward of BF16, the recipes and the rivals, with the predicted speed-up."""
    x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
    runners = contenders(run, partial(linear_layer, run, k, n))
    for row in compared(run, runners, x, {"shape": [m, k, n]}, steps(run, x, dy, graphs=True)):
        recipe = row["recipe"].removesuffix(" compiled")
        if recipe in RECIPES and recipe != "bf16":
            row["predicted"] = plan_layer("", (m, k, n), RECIPES[recipe], Device()).speedup
        yield row


def host(run: Run, m: int, k: int, n: int) -> Rows:
    """Host time for forward and backward of one Linear, and its kernel launches."""
    x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
    runners = contenders(run, partial(linear_layer, run, k, n))
    counts: dict[str, int | None] = {}

    def modes(c: Contender) -> Iterator[tuple[str, Callable[[], Any]]]:
        work = step(c.forward, c.model, x, dy)
        yield "eager", work
        counts[c.name] = launches(run, work)

    for row in compared(run, runners, x, {"what": "host", "shape": [m, k, n]}, modes, host_seconds):
        yield row | {"launches": counts.get(row["recipe"])}


# --- norms and activations -------------------------------------------------------------------------------------------


def modules(run: Run, m: int, k: int, n: int) -> Rows:
    """Norms and SwiGLU alone, of torch, ottava and Liger; then in front of a linear: in two modules and in one.

    K is the model's width, N that of its MLP.
    """
    kinds = {"rmsnorm": (k, k), "layernorm": (k, k), "swiglu": (2 * n, n)}
    fused = {"norm_linear": (k, n), "norm_mlp": (k, k)}
    for place, (kind, (wide, out)) in enumerate((kinds | fused).items()):
        part = run.part(len(kinds) + len(fused) - place)
        x, dy = normal(run, m, wide).requires_grad_(), normal(run, m, out)
        runners = alone(part, kind, wide) if kind in kinds else in_front(part, kind, k, n)
        yield from compared(part, runners, x, {"what": kind, "shape": [m, k, n]}, steps(run, x, dy))
        del x, dy, runners


def alone(run: Run, kind: str, wide: int) -> list[Contender]:
    """torch's module, the same compiled, ottava's, Liger's: named after bf16, in which all of them run."""
    options: dict[str, Any] = {"device": run.device, "dtype": torch.bfloat16}
    plain: dict[str, Callable[[], nn.Module]] = {
        "rmsnorm": lambda: nn.RMSNorm(wide, eps=1e-5, **options),
        "layernorm": lambda: nn.LayerNorm(wide, **options),
        "swiglu": lambda: Called(lambda x: swiglu(*x.chunk(2, -1))),
    }
    ours: dict[str, Callable[[], nn.Module]] = {
        "rmsnorm": lambda: RMSNorm(wide, eps=1e-5, **options),
        "layernorm": lambda: LayerNorm(wide, **options),
        "swiglu": lambda: Called(lambda x: produced(ActivationFormula(ACTIVATIONS["swiglu"]), x)),
    }
    ways = {"bf16 torch": plain[kind]}
    ways |= {"bf16 torch compiled": plain[kind]} if run.compiled else {}
    ways["ottava"] = ours[kind]
    ways |= {"liger": partial(of_liger, kind, wide, run.device)} if run.rivals and "liger bf16" not in missing() else {}
    return [contender(name, build, "compiled" in name) for name, build in ways.items()]


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Calls it."""
        return self.function(x)


def of_liger(kind: str, wide: int, device: torch.device) -> nn.Module:
    """Liger's module of this kind."""
    if kind == "swiglu":
        function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
        return Called(lambda x: function(*x.chunk(2, -1)))
    file, name = {"rmsnorm": ("rms_norm", "LigerRMSNorm"), "layernorm": ("layer_norm", "LigerLayerNorm")}[kind]
    make = getattr(importlib.import_module(f"liger_kernel.transformers.{file}"), name)
    made: nn.Module = make(wide, eps=1e-5)
    return made.to(device, torch.bfloat16)


def in_front(run: Run, kind: str, k: int, n: int) -> list[Contender]:
    """Under each recipe torch's modules converted, and the one module of ottava that holds them; BF16 first."""
    options: dict[str, Any] = {"device": run.device, "dtype": torch.bfloat16}
    bare = options | {"bias": False}

    def plain() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.RMSNorm(k, eps=1e-5, **options)
        if kind == "norm_linear":
            return nn.Sequential(norm, nn.Linear(k, n, **bare))
        gate_up, act = nn.Linear(k, 2 * n, **bare), Called(lambda x: swiglu(*x.chunk(2, -1)))
        return nn.Sequential(norm, gate_up, act, nn.Linear(n, k, **bare))

    def one(recipe: str) -> nn.Module:
        by_shape = partial(sorted, key=lambda parameter: parameter.shape)  # no two of them share one
        settings: dict[str, Any] = {**bare, "norm": "rmsnorm", "recipe": recipe}
        made = NormLinear(k, n, **settings) if kind == "norm_linear" else NormMLP(k, n, activation="swiglu", **settings)
        with torch.no_grad():
            for mine, theirs in zip(by_shape(made.parameters()), by_shape(plain().parameters()), strict=True):
                mine.copy_(theirs)
        return made

    found = contenders(run, plain, ("tensorwise", "rowwise", "blockwise", "delayed"))
    return found + [
        contender(f"{name} fused", partial(one, name), False)
        for name in run.chosen(("tensorwise", "blockwise", "delayed"))
    ]


def block(run: Run, hidden: int, wide: int, heads: int, groups: int, batch: int, length: int) -> Rows:
    """Forward and backward of a Llama decoder layer without positions, with memory."""
    config = ModelConfig(d_model=hidden, ffn=wide, heads=heads, kv_heads=groups)

    def make() -> nn.Module:
        torch.manual_seed(0)
        with run.device:
            return LlamaBlock(config).to(torch.bfloat16)

    x, dy = normal(run, batch, length, hidden).requires_grad_(), normal(run, batch, length, hidden)
    name = {4096: "8B", 2048: "1B"}.get(hidden, "tiny")
    about = {"what": name, "shape": [batch, length, hidden, wide, heads, groups]}
    yield from compared(run, contenders(run, make), x, about, steps(run, x, dy))


def seed_layer(run: Run, hidden: int, wide: int, heads: int, groups: int, batch: int, length: int) -> Rows:
    """The layer of TransformerEngine issue #1119, without a mask, with AdamW, and its memory."""
    x = normal(run, batch, length, hidden)

    def make() -> nn.Module:
        torch.manual_seed(0)
        with run.device:
            return GPTBlock(hidden, heads, wide, groups, causal=False, approximate="tanh").to(torch.bfloat16)

    def modes(c: Contender) -> Iterator[tuple[str, Callable[[], Any]]]:
        optimizer = torch.optim.AdamW(c.model.parameters(), lr=1e-4, fused=run.cuda)
        yield "eager", partial(train_once, c.forward, optimizer, x)

    runners = contenders(run, make, ("tensorwise", "blockwise", "delayed"))
    yield from compared(run, runners, x, {"shape": [batch, length, hidden, wide, heads, groups]}, modes)


def train_once(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """One training step on the mean square of the output."""
    optimizer.zero_grad()
    forward(x).float().square().mean().backward()
    optimizer.step()


def train(run: Run, width: int, batch: int, length: int) -> Rows:
    """Tokens per second and loss of whole training steps: the demo's model, and one of 155 million parameters."""
    large = ModelConfig(d_model=1024, layers=12, heads=16, kv_heads=16, ffn=2816)
    tiny = ModelConfig(layers=1, d_model=32, heads=2, kv_heads=1, ffn=64)
    name, config = {1024: ("155M", large), 32: ("tiny", tiny)}.get(width, ("demo", ModelConfig()))
    text = learnable(run, batch, length)
    about = {"what": name, "shape": [batch, length]}
    losses: dict[str, list[Tensor]] = {}
    work: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for recipe in ("bf16", *run.chosen(("tensorwise", "delayed", "guarded"))):
        for mode in ("eager", "graph") if run.cuda else ("eager",):
            label = f"{recipe}, {mode}"
            try:
                model, call = trained(run, recipe, config, text, losses.setdefault(label, []), eager=mode == "eager")
                call()
                check(f"train {name} {recipe}", losses[label][0], losses["bf16, eager"][0], _LOOSE)
                memory = step_bytes(run, call) if mode == "eager" else None
                work[label], facts[label] = call, {"step_bytes": memory, "ran": ran(model)}
            except Exception as error:
                yield {**about, "recipe": recipe, "mode": mode, **failure(error)}
    measured = race(run, work)
    for label, times in measured.items():
        (recipe, _, mode), curve = label.partition(", "), losses[label]
        progress = {"first_loss": float(curve[0]), "last_loss": float(curve[-1]), "steps": len(curve)}
        row = rated({**about, "recipe": recipe, "mode": mode, **facts[label]}, times, tokens_per_second=batch * length)
        dense = measured.get(f"bf16, {mode}", {})
        both = "median" in dense and "median" in times
        yield row | progress | ({"speedup": dense["median"] / times["median"]} if both else {})


def trained(
    run: Run, recipe: str, config: ModelConfig, text: Tensor, losses: list[Tensor], *, eager: bool
) -> tuple[nn.Module, Callable[[], Any]]:
    """A model and its training step, which adds its loss to the list."""
    torch.manual_seed(0)
    with run.device:
        kind = PlainByteTransformer if recipe == "bf16" else ByteTransformer
        model = kind(config, text.shape[1] - 1).to(torch.bfloat16)
    if recipe != "bf16":
        convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=run.cuda, capturable=run.cuda)
    train_step = graphed_step(training_step(run, model, optimizer), text, eager=eager)
    return model, lambda: losses.append(train_step(text))  # it stays on the device


def learnable(run: Run, batch: int, length: int) -> Tensor:
    """Bytes that follow from the byte before, except one random byte in eight; int64 (batch, length + 1)."""
    start = torch.randint(VOCABULARY, (batch, 1), device=run.device)
    text = (start + 7 * torch.arange(length + 1, device=run.device)) % VOCABULARY
    noise = torch.randint(VOCABULARY, text.shape, device=run.device)
    return torch.where(torch.rand(text.shape, device=run.device) < 1 / 8, noise, text)


def training_step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A function that trains one step on a batch of text and returns the loss."""

    def train_step(text: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=not run.cuda):  # on a CPU attention is fp32
            value = loss(model, text[:, :-1], text[:, 1:])
        value.backward()
        optimizer.step()
        return value

    return train_step


# --- the suites ------------------------------------------------------------------------------------------------------


class Suite(NamedTuple):
    """What a suite measures."""

    measure: Callable[..., Rows]
    """(run, *shape) -> its rows."""
    shapes: tuple[tuple[int, ...], ...]
    """Its cases."""
    smoke: tuple[int, ...] | None = None
    """The sizes of a smoke run, where a shape is more than (M, K, N); no shape of the user's is taken there."""

    def rows(self, run: Run) -> Rows:
        """Of all cases; those of `ceilings` come first."""
        if self.measure is single_gemms:
            yield from ceilings(run)
        own = (self.smoke,) if run.smoke and self.smoke else self.shapes
        yield from cases(run, own if self.smoke else run.shapes(*own), self.measure)


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "ceilings": Suite(
            single_gemms, ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 14336, 4096), (4096, 16384, 4096))
        ),
        "gemm": Suite(gemms, ((16384, 4096, 14336), (16384, 14336, 4096), (4096, 16384, 14336), (4096, 4096, 4096))),
        "cast": Suite(cast, ((16384, 2048), (16384, 4096), (16384, 14336))),
        "modules": Suite(modules, ((16384, 4096, 14336), (8192, 2048, 8192))),
        "linear": Suite(
            linear,
            ((16384, 4096, 14336), (16384, 4096, 4096), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024)),
        ),
        "host": Suite(host, ((512, 512, 512),)),
        # Llama's 8B and 1B
        "block": Suite(block, ((4096, 14336, 32, 8, 4, 4096), (2048, 8192, 32, 8, 8, 2048)), (64, 128, 4, 2, 2, 16)),
        "seed_layer": Suite(seed_layer, ((4096, 16384, 32, 8, 32, 1024),), (64, 128, 4, 2, 2, 16)),
        "train": Suite(train, ((256, 64, 256), (1024, 16, 1024)), (32, 2, 16)),
    }
)
"""In running order: suites with smaller requirements come first."""
_PACKAGES = ("ottava", "torch", "triton", "torchao", "liger-kernel", "transformer-engine")
_UNITS = MappingProxyType({"flops": "FLOP/s", "bytes_per_second": "B/s"})
_GPU_STATE = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def bench(run: Run, suites: Iterable[str] = SUITES) -> Iterator[tuple[str, str, Any]]:
    """Measures suite after suite, each with an equal part of the time that is left.

    Yields (suite, "row", a row) as the rows come, then (suite, "gpu_state", that before and after), and with
    `ceilings` (suite, "constants", those of a Device). A row with an "error" has no times.

    Raises:
        ValueError: a suite or a recipe is unknown. Nothing is measured then.
    """
    chosen = list(suites)
    for kind, names, known in (("suite", chosen, tuple(SUITES)), ("recipe", run.recipes, tuple(RECIPES))):
        for name in names:
            need_known("bench gpu", kind, name, known)
    for place, name in enumerate(chosen):
        torch.manual_seed(0)
        torch._dynamo.reset()  # graphs of earlier suites count against the limit of recompilations
        state, rows = gpu_state(run), []
        try:
            for row in SUITES[name].rows(run.part(len(chosen) - place)):
                rows.append(row)
                yield name, "row", row
        except Exception as error:  # what is not a case: the suite's own inputs, say
            rows.append({"what": name, **failure(error)})
            yield name, "row", rows[-1]
        yield name, "gpu_state", [state, gpu_state(run)]
        if name == "ceilings" and (found := constants(run, rows)):
            yield name, "constants", found


def where(run: Run) -> dict[str, Any]:
    """Device, versions and commit, without which the numbers mean nothing."""
    return {
        "device": torch.cuda.get_device_name(run.device) if run.cuda else platform.processor() or "cpu",
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if run.cuda else "",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if run.cuda else None,
        "python": platform.python_version(),
        "versions": versions(_PACKAGES),
        "commit": _output(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]),
        "smoke": run.smoke,
        "rounds": run.rounds,
        "assumed": asdict(Device()),
        "left_out": missing() if run.rivals else {},
    }


def gpu_state(run: Run) -> dict[str, str]:
    """Clocks, power and temperature; empty without nvidia-smi."""
    line = _output(["nvidia-smi", f"--query-gpu={_GPU_STATE}", "--format=csv,noheader"]) if run.cuda else ""
    values = [value.strip() for value in line.splitlines()[0].split(",")] if line else []
    return dict(zip(_GPU_STATE.split(","), values, strict=False))


def line(row: dict[str, Any]) -> str:
    """A row as text: its name, its median in microseconds with percentiles, and its rates; or its error."""
    name = " ".join(str(row[key]) for key in ("recipe", "what", "mode", "shape") if row.get(key) is not None)
    if "error" in row:
        return f"  {name:52} {row['error'].splitlines()[0]}"
    times = f"{1e6 * row['median']:10.1f} us ({1e6 * row['p10']:.1f} to {1e6 * row['p90']:.1f})"
    extra = [f"{row[key] / 1e12:.3g} T{unit}" for key, unit in _UNITS.items() if key in row]
    extra += [f"{row['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in row else []
    extra += [f"{row['speedup']:.2f} x BF16"] if "speedup" in row else []
    extra += [f"(predicted {row['predicted']:.2f})"] if "predicted" in row else []
    extra += [f"{row['launches']} launches"] if row.get("launches") else []
    extra += [f"{row['step_bytes'] / 2**30:.2f} GiB"] if row.get("step_bytes") else []
    return f"  {name:52} {times} {' '.join(extra)}".rstrip()


def _output(command: list[str]) -> str:
    """The output of a program; empty if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""`ottava bench gpu`: measures speed and checks results on a GPU, beside BF16 and other installed packages.

ceilings    copy, launch, single BF16 and FP8 GEMMs: the constants of `ottava plan --device`
gemm        every way to run a GEMM, with Triton's under each promotion interval; saves the fastest for this device
cast        ottava's casts of x and x.T, in bytes per second
linear      forward and backward of a Linear, eager, compiled and as a graph, beside the prediction
host        host time and launches of a Linear
block       forward and backward of a decoder layer, Llama's 8B and 1B sizes, with memory
seed_layer  a transformer layer with the shapes of TransformerEngine issue #1119, with AdamW
train       tokens per second of whole training steps, eager and as a graph, with the loss
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ottava.base.errors import unknown_name
from ottava.bench.method import (
    Run,
    WrongResultError,
    check,
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
from ottava.bench.models import Contender, PlainByteTransformer, contenders, missing
from ottava.engine.state import ScalingState
from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.nn.convert import convert
from ottava.nn.graphed import graphed_step
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
    """Casts of x and x.T under each recipe: one by one, and from one read of x. The second needs a kernel for it."""
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


# --- layers and models -----------------------------------------------------------------------------------------------

_LOOSE = 0.15  # relative error of an FP8 layer against BF16; wrong codes or scales give more than 1


def rows_of(
    run: Run, runners: list[Contender], work: dict[str, Callable[[], Any]], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per contender: times, speed-up over the fastest BF16 of the same mode, memory, kernels."""
    # a replay allocates no memory: its graph holds it
    memory = {name: None if name.endswith(", graph") else step_bytes(run, call) for name, call in work.items()}
    measured, models = race(run, work), {c.name: c.model for c in runners}
    rows = []
    for label, times in measured.items():
        name, _, mode = label.partition(", ")
        base = min(other["median"] for key, other in measured.items() if "bf16" in key and key.endswith(f", {mode}"))
        facts = {**about, "recipe": name, "mode": mode, **times, "speedup": base / times["median"]}
        rows.append(facts | {"step_bytes": memory[label], "ran": ran(models[name])})
    return rows


def ran(model: nn.Module) -> dict[str, str]:
    """The kernel of each GEMM in ottava's first layer. Empty for rivals and compiled code, which keep no record."""
    calls = (getattr(module, "last_call", None) for module in model.modules())
    first = next((call for call in calls if call is not None), None)
    return {name: record.kernel for name, record in first.records.items()} if first is not None else {}


def settled(work: dict[str, Callable[[], Any]], runners: list[Contender]) -> dict[str, Callable[[], Any]]:
    """Runs one step and updates the scales once, so that recipes with predicted scales predict from now on.

    Returns:
        The same work.
    """
    for call in work.values():
        call()
    for contender in runners:
        ScalingState(contender.model).update()
    return work


def linear_layer(run: Run, k: int, n: int) -> nn.Linear:
    """A Linear, always with the same weights."""
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, device=run.device, dtype=torch.bfloat16)


def linear(run: Run) -> dict[str, Any]:
    """Forward and backward of BF16, the recipes and the rivals, with the predicted speed-up."""
    rows = []
    shapes = run.shapes((16384, 4096, 14336), (16384, 4096, 4096), (4096, 4096, 4096), (2048, 2048, 2048), (1024,) * 3)
    for m, k, n in shapes:
        x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
        runners = contenders(run, partial(linear_layer, run, k, n))
        truth = runners[0].model(x)
        errors = {c.name: check(f"linear {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
        work = settled({f"{c.name}, eager": step(c.forward, c.model, x, dy) for c in runners}, runners)
        if run.cuda:
            plain = [c for c in runners if "compiled" not in c.name and not c.name.startswith("te ")]
            work |= {f"{c.name}, graph": replayed(step(c.forward, c.model, x, dy)) for c in plain}
        for row in rows_of(run, runners, work, {"shape": [m, k, n]}):
            recipe = row["recipe"].removesuffix(" compiled")
            if recipe in RECIPES and recipe != "bf16":
                row["predicted"] = plan_layer("", (m, k, n), RECIPES[recipe], Device()).speedup
            rows.append(row | {"relative_error": errors[row["recipe"]]})
    return {"rows": rows}


def host(run: Run) -> dict[str, Any]:
    """Host time for forward and backward of one Linear, and its kernel launches."""
    rows = []
    for m, k, n in run.shapes((512, 512, 512)):
        x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
        runners = contenders(run, partial(linear_layer, run, k, n))
        work = settled({c.name: step(c.forward, c.model, x, dy) for c in runners}, runners)
        for name, times in race(run, work, host_seconds).items():
            facts = {"recipe": name, "what": "host", "shape": [m, k, n], "launches": launches(run, work[name])}
            rows.append(facts | times)
    return {"rows": rows}


class DecoderLayer(nn.Module):
    """A Llama decoder layer without positions: RMSNorm, grouped-query causal attention, RMSNorm, SwiGLU."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)
        self.swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self.out(attention(self.qkv(self.attention_norm(x)), self.heads, self.groups, causal=True))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        y: Tensor = x + self.down(self.swiglu(gate, up))
        return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def attention(qkv: Tensor, heads: int, groups: int, *, causal: bool) -> Tensor:
    """(batch, sequence, (heads + 2 groups) size) -> (batch, sequence, heads size); torch chooses the kernel."""
    size = qkv.shape[-1] // (heads + 2 * groups)
    parts = qkv.split([heads * size, groups * size, groups * size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


def block(run: Run) -> dict[str, Any]:
    """Forward and backward of a decoder layer of Llama's 8B and 1B sizes, with memory."""
    rows = []
    cases = {"8B": ((4096, 14336, 32, 8), (4, 4096)), "1B": ((2048, 8192, 32, 8), (8, 2048))}
    if run.smoke:
        cases = {"tiny": ((64, 128, 4, 2), (2, 16))}
    for name, (sizes, tokens) in cases.items():

        def make(sizes: tuple[int, int, int, int] = sizes) -> nn.Module:
            torch.manual_seed(0)
            with run.device:
                return DecoderLayer(*sizes).to(torch.bfloat16)

        x, dy = normal(run, *tokens, sizes[0]).requires_grad_(), normal(run, *tokens, sizes[0])
        rows += layers(run, make, x, dy, {"what": name, "shape": [*tokens, *sizes]})
    return {"rows": rows}


def layers(run: Run, make: Callable[[], nn.Module], x: Tensor, dy: Tensor, about: dict[str, Any]) -> list[Any]:
    """Rows of forward and backward of one module."""
    runners = contenders(run, make)
    truth = runners[0].model(x)
    errors = {c.name: check(f"block {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
    work = settled({f"{c.name}, eager": step(c.forward, c.model, x, dy) for c in runners}, runners)
    return [row | {"relative_error": errors[row["recipe"]]} for row in rows_of(run, runners, work, about)]


class SeedLayer(nn.Module):
    """Pre-norm attention and MLP: hidden 4096, feed-forward 16384, 32 heads, 8 groups, no mask, bias."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, hidden // heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * size)
        self.out, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self.out(attention(self.qkv(self.norms[0](x)), self.heads, self.groups, causal=False))
        y: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return y


def seed_layer(run: Run) -> dict[str, Any]:
    """The layer of TransformerEngine issue #1119 with AdamW, and its memory."""
    sizes, tokens = ((64, 128, 4, 2), (2, 16)) if run.smoke else ((4096, 16384, 32, 8), (32, 1024))
    x = normal(run, *tokens, sizes[0])

    def make() -> nn.Module:
        torch.manual_seed(0)
        with run.device:
            return SeedLayer(*sizes).to(torch.bfloat16)

    runners = contenders(run, make, ("tensorwise", "blockwise", "delayed"))
    truth = runners[0].model(x)
    errors = {c.name: check(f"seed_layer {c.name}", c.forward(x), truth, _LOOSE) for c in runners}
    work: dict[str, Callable[[], Any]] = {}
    for c in runners:
        optimizer = torch.optim.AdamW(c.model.parameters(), lr=1e-4, fused=run.cuda)
        work[f"{c.name}, eager"] = partial(train_once, c.forward, optimizer, x)
    about = {"shape": [*tokens, *sizes]}
    return {"rows": [row | {"relative_error": errors[row["recipe"]]} for row in rows_of(run, runners, work, about)]}


def train_once(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """One training step on the mean square of the output."""
    optimizer.zero_grad()
    forward(x).float().square().mean().backward()
    optimizer.step()


def train(run: Run) -> dict[str, Any]:
    """Tokens per second and loss of whole training steps: the demo's model, and one of 155 million parameters."""
    demo, large = ModelConfig(), ModelConfig(d_model=1024, layers=12, heads=16, kv_heads=16, ffn=2816)
    cases = {"demo": (demo, (64, 256)), "155M": (large, (16, 1024))}
    if run.smoke:
        cases = {"tiny": (ModelConfig(layers=1, d_model=32, heads=2, kv_heads=1, ffn=64), (2, 16))}
    rows = []
    for name, (config, tokens) in cases.items():
        text = learnable(run, *tokens)
        losses: dict[str, list[Tensor]] = {}
        work: dict[str, Callable[[], Any]] = {}
        models = {}
        for recipe in ("bf16", "tensorwise", "delayed", "guarded"):
            for mode in ("eager", "graph") if run.cuda else ("eager",):
                torch.manual_seed(0)
                with run.device:
                    kind = PlainByteTransformer if recipe == "bf16" else ByteTransformer
                    model = kind(config, tokens[1]).to(torch.bfloat16)
                if recipe != "bf16":
                    convert(model, recipe)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=run.cuda, capturable=run.cuda)
                train_step = graphed_step(training_step(run, model, optimizer), text, eager=mode == "eager")
                losses[f"{recipe}, {mode}"], models[recipe] = [], model
                work[f"{recipe}, {mode}"] = partial(append_loss, train_step, text, losses[f"{recipe}, {mode}"])
        runners = [Contender(recipe, model, model) for recipe, model in models.items()]
        count = tokens[0] * tokens[1]
        for row in rows_of(run, runners, work, {"what": name, "shape": list(tokens)}):
            curve = losses[f"{row['recipe']}, {row['mode']}"]
            check(f"train {name} {row['recipe']}", curve[0], losses["bf16, eager"][0], _LOOSE)
            progress = {"first_loss": float(curve[0]), "last_loss": float(curve[-1]), "steps": len(curve)}
            rows.append(row | progress | {"tokens_per_second": count / row["median"]})
    return {"rows": rows}


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


def append_loss(train_step: Callable[[Tensor], Tensor], text: Tensor, losses: list[Tensor]) -> None:
    """Runs one step and keeps its loss on the device."""
    losses.append(train_step(text))


# --- the suites ------------------------------------------------------------------------------------------------------

SUITES: Mapping[str, Callable[[Run], dict[str, Any]]] = MappingProxyType(
    {
        "ceilings": ceilings,
        "gemm": gemms,
        "cast": cast,
        "linear": linear,
        "host": host,
        "block": block,
        "seed_layer": seed_layer,
        "train": train,
    }
)
"""In running order: suites with smaller requirements come first."""
_PACKAGES = ("ottava", "torch", "triton", "torchao", "liger-kernel", "transformer-engine")
_UNITS = MappingProxyType({"flops": "FLOP/s", "bytes_per_second": "B/s"})
_GPU_STATE = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def bench(run: Run, suites: Iterable[str] = SUITES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures suite after suite. Yields its name, its rows and the state of the GPU before and after.

    Raises:
        ValueError: a suite is unknown. Nothing is measured then.
        WrongResultError: a contender computed a wrong result.
    """
    chosen = list(suites)
    for name in chosen:
        if name not in SUITES:
            raise ValueError(f"bench gpu: {unknown_name('suite', name, tuple(SUITES))}")
    for name in chosen:
        torch.manual_seed(0)
        torch._dynamo.reset()  # graphs of earlier suites count against the limit of recompilations
        state = gpu_state(run)
        result = SUITES[name](run)
        yield name, {**result, "gpu_state": [state, gpu_state(run)]}


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


def table(rows: list[dict[str, Any]]) -> str:
    """One line per row: its name, its median in microseconds with percentiles, and its rates."""
    lines = []
    for row in rows:
        name = " ".join(str(row[key]) for key in ("recipe", "what", "mode", "shape") if row.get(key) is not None)
        times = f"{1e6 * row['median']:10.1f} us ({1e6 * row['p10']:.1f} to {1e6 * row['p90']:.1f})"
        extra = [f"{row[key] / 1e12:.3g} T{unit}" for key, unit in _UNITS.items() if key in row]
        extra += [f"{row['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in row else []
        extra += [f"{row['speedup']:.2f} x BF16"] if "speedup" in row else []
        extra += [f"(predicted {row['predicted']:.2f})"] if "predicted" in row else []
        extra += [f"{row['launches']} launches"] if row.get("launches") else []
        extra += [f"{row['step_bytes'] / 2**30:.2f} GiB"] if row.get("step_bytes") else []
        lines.append(f"  {name:52} {times} {' '.join(extra)}".rstrip())
    return "\n".join(lines)


def _output(command: list[str]) -> str:
    """The output of a program; empty if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

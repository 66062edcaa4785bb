"""Speed on a GPU, in one command: `python benchmarks/gpu.py [ceilings|gemm|cast|linear|seed_layer ...] [--json OUT]`.

    ceilings    copy, BF16 and FP8 GEMMs by themselves: the constants of `ottava plan --device OUT`
    gemm        every way to run a GEMM, Triton's under each promotion interval too; what wins is kept for this device
    cast        ottava's casts of x and x.T, in bytes a second
    linear      forward and backward of a Linear: BF16 against each recipe, eager and as a graph, and the prediction
    seed_layer  a transformer layer with the shapes of TransformerEngine issue #1119, with AdamW

Method: random normal numbers (zeros run 13% faster), buffers rotated beyond the L2 cache, warm-up, contenders
interleaved A B A B, medians with 10th and 90th percentiles, and the results checked for correctness in the same run; a
contender that gives wrong numbers fails it. `--smoke` runs tiny shapes, on a CPU too, to check this program: its times
mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import ops
from ottava.kernels import decoded, reference, scaled_mm, triton_quantize
from ottava.nn.plan import Device, plan_layer
from ottava.ops import explain
from ottava.quantized_tensor import QuantizationSpec
from ottava.recipe import RECIPES

L2_BYTES = 180 * 2**20  # three times an H200's L2 cache


@dataclass(frozen=True)
class Run:
    """How a suite runs."""

    device: torch.device
    smoke: bool
    rounds: int
    """Samples of each contender."""

    def shapes(self, *full: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes, or one tiny one of as many sizes."""
        return (tuple(64 for _ in full[0]),) if self.smoke else full


def seconds(run: Run, work: Callable[[], Any]) -> float:
    """One call, by CUDA events on a GPU."""
    if run.device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def race(run: Run, contenders: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Name -> median, p10, p90 in seconds; the contenders take turns."""
    for work in contenders.values():
        for _ in range(1 if run.smoke else 10):
            work()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(run.rounds):
        for name, work in contenders.items():
            samples[name].append(seconds(run, work))
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def rotating(run: Run, make: Callable[[], Any], nbytes: int) -> Callable[[], Any]:
    """Calls give one of several equal things in turn, so that none of them waits in the L2 cache."""
    count = 1 if run.smoke else max(2, -(-L2_BYTES // nbytes))
    turns = itertools.cycle([make() for _ in range(min(count, 64))])
    return lambda: next(turns)


def check(name: str, got: Tensor, want: Tensor, tolerance: float) -> float:
    """The relative error in the Frobenius norm, which must be below the tolerance."""
    got, want = got.detach(), want.detach()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < tolerance:
        raise SystemExit(f"{name}: relative error {error:.3g} is not below {tolerance}: wrong results, no times")
    return error


def normal(run: Run, *shape: int) -> Tensor:
    """Random, BF16."""
    return torch.randn(*shape, device=run.device, dtype=torch.bfloat16)


def graphed(run: Run, work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work replayed as a CUDA graph: GPU time without the host's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


# --- suites ----------------------------------------------------------------------------------------------------------


def gemm_call(run: Run, recipe: str, m: int, n: int, k: int, *, fast: bool) -> tuple[Callable[[], Any], float, str]:
    """(the GEMM of two casts of the recipe's fprop, its relative error, what ran)."""
    cells = RECIPES[recipe].fprop
    assert cells.lhs is not None
    assert cells.rhs is not None
    lhs, rhs = cells.lhs, cells.rhs

    def pair() -> tuple[Any, Any]:
        return ottava.quantize(normal(run, m, k), lhs), ottava.quantize(normal(run, n, k), rhs)

    take = rotating(run, pair, m * k + n * k)
    a, b = take()
    y = ottava.gemm(a, b, out_dtype=torch.bfloat16, fast_accum=fast)
    rows = slice(0, min(m, 256))
    exact = a.dequantize(torch.float32)[rows].double() @ b.dequantize(torch.float32).double().t()
    error = check(f"{recipe} {m}x{n}x{k}", y[rows], exact, 4e-3)
    ran = explain(a, b, out_dtype=torch.bfloat16)
    return (lambda: ottava.gemm(*take(), out_dtype=torch.bfloat16, fast_accum=fast)), error, ran


def ceilings(run: Run) -> dict[str, Any]:
    """Rates of copies and GEMMs, and from them the constants of a Device."""
    table: list[dict[str, Any]] = []
    size = 2**16 if run.smoke else 2**28
    source, target = (torch.empty(size, dtype=torch.uint8, device=run.device) for _ in range(2))
    copy = race(run, {"copy": lambda: target.copy_(source)})["copy"]
    table.append({"what": "copy", "bytes_per_second": 2 * size / copy["median"], **copy})
    big = run.shapes((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 14336), (4096, 4096, 16384))
    for m, n, k in big:
        dense = rotating(run, lambda m=m, n=n, k=k: (normal(run, m, k), normal(run, n, k)), 2 * (m * k + n * k))
        contenders: dict[str, Callable[[], Any]] = {"bf16": lambda dense=dense: torch.mm(*(flip(dense())))}
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


def gemm(run: Run) -> dict[str, Any]:
    """Each kernel and configuration by itself, on one pair of operands a shape, and what `tune_gemm` makes of them."""
    rows = []
    for m, n, k in run.shapes((16384, 14336, 4096), (16384, 4096, 14336), (4096, 14336, 16384), (4096, 4096, 4096)):
        for name, cell in (
            ("tensorwise", "fprop"),
            ("rowwise", "fprop"),
            ("blockwise", "fprop"),
            ("blockwise", "wgrad"),
        ):
            sides = getattr(RECIPES[name], cell)
            a, b = ottava.quantize(normal(run, m, k), sides.lhs), ottava.quantize(normal(run, n, k), sides.rhs)
            exact = reference.gemm(a, b, torch.float32, None)
            for fast in (False, True):
                call: dict[str, Any] = {"out_dtype": torch.bfloat16, "fast_accum": fast}
                ways = ops.gemm_ways(a, b, **call)
                errors = {way: check(f"{way} {m}x{n}x{k}", work(), exact, 0.03) for way, work in ways.items()}
                own = {"recipe": f"{name}.{cell}", "mode": "fast" if fast else "accurate", "shape": [m, n, k]}
                for way, times in race(run, ways).items():
                    rate = 2 * m * n * k / times["median"]
                    rows.append(own | {"what": way, "flops": rate, "relative_error": errors[way], **times})
                if run.device.type == "cuda":
                    ops.tune_gemm(a, b, **call)
    return {"rows": rows}


def flip(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(M, K), (N, K) as torch.mm wants them."""
    return pair[0], pair[1].t()


def constants(run: Run, table: list[dict[str, Any]]) -> dict[str, Any]:
    """What `Device.read` takes, from the largest shape of the table."""
    first = next(row["shape"] for row in table if "shape" in row)
    rates = {row["what"]: row["flops"] for row in table if row.get("shape") == first}
    ratios = {name: rate / rates["bf16"] for name, rate in rates.items() if name != "bf16"}
    cuda = run.device.type == "cuda"
    known = torch.cuda.get_device_properties(run.device) if cuda else None
    return {
        "name": f"{known.name} (measured)" if known else "CPU (smoke run, means nothing)",
        "capability": [known.major, known.minor] if known else [0, 0],
        "processors": known.multi_processor_count if known else 1,
        "bf16": rates["bf16"],
        "bandwidth": table[0]["bytes_per_second"],
        **ratios,
    }


def cast(run: Run) -> dict[str, Any]:
    """x and x.T of each recipe's input: cast one by one, and by one reading of x where there is a kernel for it."""
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
            moved = 4 * m * k  # at least: 2 bytes read, 1 + 1 written
            for contender, times in race(run, contenders).items():
                rate = moved / times["median"]
                own = {"recipe": name, "shape": [m, k], "what": contender, "bytes_per_second": rate, "triton": reason}
                rows.append(own | times)
    return {"rows": rows}


def one_by_one(
    take: Callable[[], Tensor], spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None
) -> None:
    """Two casts."""
    x = take()
    ottava.quantize(x, spec, scale=scale)
    ottava.quantize(x.t(), spec_t, scale=scale)


def at_once(take: Callable[[], Tensor], spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None) -> None:
    """One reading of x."""
    triton_quantize.quantize_both(take(), spec, spec_t, scale)


def same_codes(name: str, x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec, scale: Tensor | None) -> None:
    """Ends the run unless the casts at once have the codes of the reference."""
    casts = triton_quantize.quantize_both(x, spec, spec_t, scale)
    for got, tensor, wanted in zip(casts, (x, x.t()), (spec, spec_t), strict=True):
        truth = reference.quantize(tensor, wanted, scale).data.contiguous()
        if got is None or not torch.equal(got.data.view(torch.uint8), truth.view(torch.uint8)):
            raise SystemExit(f"{name}: other codes than the reference's: wrong results, no times")


def linear(run: Run) -> dict[str, Any]:
    """Forward and backward, BF16 against the recipes; what was predicted stands beside it."""
    rows = []
    shapes = run.shapes((16384, 4096, 14336), (16384, 4096, 4096), (4096, 4096, 4096), (2048, 2048, 2048), (1024,) * 3)
    for m, k, n in shapes:
        x, dy = normal(run, m, k).requires_grad_(), normal(run, m, n)
        bf16 = nn.Linear(k, n, bias=False, device=run.device, dtype=torch.bfloat16)
        layers: dict[str, nn.Module] = {"bf16": bf16}
        for name in ("tensorwise", "rowwise", "blockwise", "delayed", "guarded"):
            layer = ottava.nn.Linear(k, n, bias=False, recipe=name, device=run.device, dtype=torch.bfloat16)
            layer.load_state_dict(bf16.state_dict(), strict=False)
            layers[name] = layer
        contenders = {f"{name}, eager": step(layer, x, dy) for name, layer in layers.items()}
        errors = {name: check(name, layer(x), bf16(x), 0.1) for name, layer in layers.items() if name != "bf16"}
        if run.device.type == "cuda":
            contenders |= {f"{name}, graph": graphed(run, step(layer, x, dy)) for name, layer in layers.items()}
        measured = race(run, contenders)
        for what, times in measured.items():
            name, mode = what.split(", ")
            predicted = 1.0 if name == "bf16" else plan_layer("", (m, k, n), RECIPES[name], Device()).speedup
            own = {"shape": [m, k, n], "recipe": name, "mode": mode, "predicted": predicted, **times}
            own["speedup"] = measured[f"bf16, {mode}"]["median"] / times["median"]
            rows.append(own | {"relative_error": errors.get(name)} | receipts(layers[name]))
    return {"rows": rows}


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are made anew."""

    def work() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x).backward(dy)

    return work


def receipts(layer: nn.Module) -> dict[str, Any]:
    """What each GEMM of a layer really ran."""
    call = getattr(layer, "last_call", None)
    return {"ran": {name: record.kernel for name, record in call.records.items()} if call else {}}


class SeedLayer(nn.Module):
    """Pre-norm attention and MLP: hidden 4096, feed-forward 16384, 32 heads, 8 groups, no mask, bias."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * self.size)
        self.out, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        batch, length, hidden = x.shape
        width = self.groups * self.size
        parts = self.qkv(self.norms[0](x)).split([hidden, width, width], dim=-1)
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def seed_layer(run: Run) -> dict[str, Any]:
    """One layer and AdamW, BF16 against the recipes, eager; peak memory too."""
    sizes, tokens = ((64, 128, 4, 2), (2, 16)) if run.smoke else ((4096, 16384, 32, 8), (32, 1024))
    x = normal(run, *tokens, sizes[0])
    contenders, memory, models = {}, {}, {}
    for name in ("bf16", "tensorwise", "delayed", "blockwise"):
        torch.manual_seed(0)
        model = SeedLayer(*sizes).to(run.device, torch.bfloat16)
        if name != "bf16":
            ottava.convert(model, name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.device.type == "cuda")
        models[name] = model(x).detach()

        def work(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()

        if run.device.type == "cuda":
            work()
            torch.cuda.reset_peak_memory_stats()
            work()
            memory[name] = torch.cuda.max_memory_allocated()
        contenders[name] = work
    errors = {name: check(name, y, models["bf16"], 0.1) for name, y in models.items() if name != "bf16"}
    measured = race(run, contenders)
    rows = [
        {"recipe": name, "relative_error": errors.get(name), "peak_bytes": memory.get(name), **times}
        | {"speedup": measured["bf16"]["median"] / times["median"]}
        for name, times in measured.items()
    ]
    return {"rows": rows}


SUITES = {"ceilings": ceilings, "gemm": gemm, "cast": cast, "linear": linear, "seed_layer": seed_layer}


# --- the command -----------------------------------------------------------------------------------------------------


def where(run: Run) -> dict[str, Any]:
    """Device, versions, commit, clocks: without them a number means nothing."""
    cuda = run.device.type == "cuda"
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    commit = said(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])
    return {
        "device": torch.cuda.get_device_name(run.device) if cuda else platform.processor() or "cpu",
        "gpu_state": said(query) if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "smoke": run.smoke,
        "assumed": asdict(Device()),
        "fallback": decoded.NAME,
        "native": scaled_mm.NAME,
    }


def said(command: list[str]) -> str:
    """What a program printed; empty if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row: what it is, its median in microseconds with percentiles, and its rates."""
    lines = []
    for row in rows:
        name = " ".join(str(row[key]) for key in ("recipe", "what", "mode", "shape") if row.get(key) is not None)
        times = f"{1e6 * row['median']:10.1f} us ({1e6 * row['p10']:.1f} to {1e6 * row['p90']:.1f})"
        extra = [f"{row[key] / 1e12:.3g} T{unit}" for key, unit in UNITS.items() if key in row]
        extra += [f"{row['speedup']:.2f} x BF16"] if "speedup" in row else []
        extra += [f"(predicted {row['predicted']:.2f})"] if "predicted" in row else []
        lines.append(f"  {name:44} {times} {' '.join(extra)}")
    return "\n".join(lines)


UNITS = {"flops": "FLOP/s", "bytes_per_second": "B/s"}


def main(words: list[str] | None = None) -> int:
    """Runs the suites, prints a table of each and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; none: all")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--rounds", type=int, default=50, help="samples of each contender")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, any device; times mean nothing")
    options = parser.parse_args(words)
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"unknown suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    if not torch.cuda.is_available() and not options.smoke:
        print("no CUDA device: nothing to measure; --smoke checks this program on a CPU", file=sys.stderr)
        return 3
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(device, options.smoke, 3 if options.smoke else options.rounds)
    torch.manual_seed(0)
    report: dict[str, Any] = {**where(run), "suites": {}}
    for name in options.suites or SUITES:
        found = SUITES[name](run)
        report["suites"][name] = found
        report |= {"constants": found["constants"]} if "constants" in found else {}
        print(f"{name}\n{table(found['rows'])}", flush=True)
        if options.json:  # after each suite: what has been measured is kept
            options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`ottava bench cpu`: measures casts, linear layers, models and their memory on a CPU, beside BF16, memcpy and torchao.

The bench skips emulators that are not installed; the result has None as their version.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.bench.method import Timing, interleaved, step, versions
from ottava.bench.models import EMULATORS, FFN, TOKENS, WIDTH, GPTBlock, PlainByteTransformer, SmolLM2, blocks, emulated
from ottava.engine.quantizer import WeightQuantizer
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.measure import Look
from ottava.measure.sample import sampled
from ottava.measure.tally import DETAILS, Detail
from ottava.measure.walk import Packed, found_by, measure_all, survey
from ottava.nn.convert import convert
from ottava.numerics.formats import E4M3, dtype_name
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_TENSOR, Granularity, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.gemm import gemm
from ottava.ops.quantize import quantize
from ottava.train.config import TrainConfig
from ottava.train.model import ByteTransformer, loss
from ottava.watching.session import watch

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
"""The recipes with a speed goal."""
COMPILED = ("BF16", "ottava tensorwise", "ottava mxfp8", "torchao tensorwise")
"""The models that `compiled` also runs under torch.compile."""
_COMPILED = ", compiled"
CAST_ELEMENTS = (1 << 20, 1 << 22, 1 << 25)
GEMM_SHAPES = ((2048, 512, 512), (2048, 512, 2048), (256, 576, 1536), (2048, 128, 384))
"""(rows, in_features, out_features): two of the block, one of SmolLM2, one of the demo."""
LINEAR_SHAPES = ((64, 64, 64), (2048, 512, 512), (2048, 1024, 4096), (4096, 2048, 2048))
"""(rows, in_features, out_features). Python's own calls take most of the time of the first."""
BLOCK_SIZES = (512, 8, 256, 8)
"""Width, heads, tokens, sequences."""
SMOLLM2_SIZES = (49_152, 30, 256)
"""Vocabulary, layers, tokens."""
BUILDS = 5
"""The largest number of compilation rounds."""
WATCHED_STEPS = 3
"""Training steps per round."""
WATCHES: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"detail": "numbers", "sample": 1}),
    MappingProxyType({"detail": "blocks", "sample": 16}),
)
"""Settings of the measured watches."""

Variants = dict[str, Callable[[], object]]
Around = Mapping[str, Callable[[], AbstractContextManager[object]]]


@dataclass(frozen=True)
class Case:
    """One table. Ratios are relative to the first timing."""

    suite: str
    """One of SUITES."""
    name: str
    """Sizes."""
    timings: tuple[Timing, ...]
    """In the order of the round; empty if the case has figures only."""
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other numbers: quantity with its unit -> variant -> value."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        names = [timing.name for timing in self.timings] + [n for values in self.figures.values() for n in values]
        width = max(map(len, names))
        lines = [f"{self.suite} {self.name}" + (f", ratio to {self.timings[0].name}" if self.timings else "")]
        lines += [
            f"  {t.name.ljust(width)}  {t.milliseconds:9.3f} ms  {t.ratio:6.2f} [{low:.2f}-{high:.2f}]"
            for t in self.timings
            for low, high in [t.quartiles]
        ]
        for quantity, values in self.figures.items():
            lines += [f"  {quantity}", *(f"    {name.ljust(width)}  {value:,.2f}" for name, value in values.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark."""

    rounds: int = 15
    """Rounds of every case. Quartiles are taken over the rounds."""
    compiled: bool = False
    """In linear, block and smollm2 also run the models of COMPILED under torch.compile. This takes minutes."""
    cpu_time: bool = False
    """Measure CPU time of the process instead of wall-clock time: for one thread on a busy machine."""
    checkpoint: Path | None = None
    """Folder of SmolLM2-135M in Hugging Face's layout; None: random weights, and no perplexity."""
    text: Path | None = None
    """The text of the perplexity."""

    def time(self, variants: Variants, around: Around | None = None) -> tuple[Timing, ...]:
        """Times variants in interleaved rounds."""
        clock = time.process_time if self.cpu_time else time.perf_counter
        return tuple(interleaved(variants, self.rounds, clock=clock, around=around or {}))


def bench(suites: Iterable[str] | None = None, settings: Settings | None = None) -> Iterator[Case]:
    """Measures case after case.

    Args:
        suites: names of SUITES; None: all but smollm2, which takes minutes and 2 GB.
    Raises:
        ValueError: a suite is unknown.
        FileNotFoundError: the checkpoint or text does not exist.
    """
    chosen = [suite for suite in SUITES if suite != "smollm2"] if suites is None else list(suites)
    for suite in chosen:
        if suite not in SUITES:
            raise ValueError(f"suite: got {suite!r}; needs one of {', '.join(SUITES)}")
    for suite in chosen:
        yield from SUITES[suite](settings or Settings())


def machine() -> dict[str, Any]:
    """The facts that ratios depend on: CPU, threads, versions."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": versions(("ottava", "torch", "torchao", "mx")),  # the last is microxcaling
    }


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> tuple[int, int]:
    """Bytes that a forward saves for its backward, without parameters: (activations, FP8 weights).

    Example:
        >>> layer, x = nn.Linear(8, 4), torch.ones(2, 8)
        >>> saved_bytes(lambda: layer(x), layer)                    # x, 2 x 8 fp32 numbers
        (64, 0)
    """
    sizes: dict[int, int] = {}  # address of a storage -> bytes

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = forward()  # y keeps the storages alive until they are counted, so no address appears twice
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    doors = [module for module in model.modules() if isinstance(module, WeightQuantizer) and module.cached is not None]
    cast = [operand for door in doors for operand in (door.cached or ())[2:] if isinstance(operand, QuantizedTensor)]
    addresses = {t.untyped_storage().data_ptr() for operand in cast for t in (operand.data, operand.scale_inv)}
    weights = sum(sizes.pop(address, 0) for address in addresses)
    del y
    return sum(sizes.values()), weights


def _cast(settings: Settings) -> Iterator[Case]:
    for n in CAST_ELEMENTS:
        yield Case("cast", f"bf16 {n >> 20}M", settings.time(_casts(n)))


def _casts(n: int) -> Variants:
    x = torch.randn(n // 1024, 1024).bfloat16()
    other = torch.empty_like(x)
    tensor, delayed = QuantizationSpec(E4M3), QuantizationSpec(E4M3, scaling="delayed")
    mx = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    scale = torch.tensor(64.0)
    variants: Variants = {
        "copy": lambda: other.copy_(x),
        "ottava tensor": lambda: quantize(x, tensor),
        "ottava tensor, scale known": lambda: quantize(x, delayed, scale=scale),
        "ottava 1x32": lambda: quantize(x, mx),
    }
    for every in (1, 16):
        for detail in DETAILS:
            name = f"ottava tensor, watched: detail={detail}, sample={every}"
            variants[name] = partial(_measured, x, tensor, every, detail)
    if n <= 1 << 22:
        variants["ottava tensor, no compiler"] = lambda: reference.quantize(x, tensor)
        variants["eager torch"] = lambda: (x * (448.0 / x.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn)
    return variants


def _gemm(settings: Settings) -> Iterator[Case]:
    """The three GEMMs of a Linear in their layouts: w.T, dy.T and x.T are views."""
    for rows, k, n in GEMM_SHAPES:
        x, w, dy = (torch.randn(shape).bfloat16() for shape in ((rows, k), (n, k), (rows, n)))
        for name, a, b in (("fprop", x, w), ("dgrad", dy, w.t()), ("wgrad", dy.t(), x.t())):
            yield Case("gemm", f"{name} {tuple(a.shape)} x {tuple(b.shape)}", settings.time(_gemms(a, b)))


def _gemms(a: Tensor, b: Tensor) -> Variants:
    variants: Variants = {"torch.mm BF16": lambda: torch.mm(a, b.t())}
    scales: tuple[tuple[Granularity, ScaleFormat], ...] = (
        (PER_TENSOR, "fp32"),
        (BLOCK_1X128, "fp32"),
        (BLOCK_1X32, "e8m0"),
    )
    for granularity, scale_format in scales:
        spec = QuantizationSpec(E4M3, granularity, scale_format)
        pair = quantize(a, spec), quantize(b, spec)
        variants[f"ottava {granularity}"] = partial(gemm, *pair, out_dtype=torch.bfloat16)
    return variants


def _measured(x: Tensor, spec: QuantizationSpec, every: int, detail: Detail) -> Packed:
    """Casts x, and measures the cast like a watch."""
    x_q = quantize(x, spec)
    extent = found_by(x_q, x.numel())
    look = Look(x, x_q, survey(x) if extent is None else extent)
    return measure_all([sampled(look, every, 0, blocks=detail == "blocks") or look], detail=detail)


def _linear(settings: Settings) -> Iterator[Case]:
    for rows, k, n in LINEAR_SHAPES:
        x, dy = torch.randn(rows, k), torch.randn(rows, n)
        models = _models(lambda k=k, n=n: nn.Linear(k, n), others=("torchao tensorwise",))  # type: ignore[misc]
        variants = _steps(models, x, dy, settings.compiled)
        timings = settings.time(variants, _updates(variants, models))
        yield Case("linear", f"fwd+bwd ({rows}, {k}, {n})", timings, _kept(models, x))


def _block(settings: Settings) -> Iterator[Case]:
    width, heads, tokens, sequences = BLOCK_SIZES
    x, dy = torch.randn(sequences, tokens, width), torch.randn(sequences, tokens, width)
    models = _models(lambda: GPTBlock(width, heads))
    variants = _steps(models, x, dy, settings.compiled)
    timings = settings.time(variants, _updates(variants, models))
    yield Case("block", f"d={width} h={heads} T={tokens} B={sequences}, fwd+bwd", timings, _kept(models, x))
    if settings.compiled:  # parts of the block that ottava does not change
        for layer, features in ((nn.GELU(), 4 * width), (nn.LayerNorm(width), width)):
            x, dy = torch.randn(sequences, tokens, features), torch.randn(sequences, tokens, features)
            timings = settings.time(_steps({"BF16": layer.bfloat16()}, x, dy, True))
            yield Case("block", f"its {type(layer).__name__} alone, fwd+bwd", timings)


def _statistics(settings: Settings) -> Iterator[Case]:
    """The cost of a watch that looks at every cast of every step."""
    width, heads, tokens, sequences = BLOCK_SIZES
    x, dy = torch.randn(sequences, tokens, width), torch.randn(sequences, tokens, width)
    for recipe in ("tensorwise", "blockwise"):
        model = _models(lambda: GPTBlock(width, heads), (recipe,), others=())[f"ottava {recipe}"]
        once = _steps({recipe: model}, x, dy, False)[recipe]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # a step of the watch ends with this optimizer's step

        def steps(once: Callable[[], object] = once, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(WATCHED_STEPS):
                once()
                optimizer.step()

        for looks in WATCHES:
            run = {"every": 1, **looks}
            with tempfile.TemporaryDirectory() as folder, watch(model, f"{folder}/run", run) as session:
                variants: Variants = {"unwatched": steps, "every step": steps}
                timings = settings.time(variants, {"unwatched": session.paused})
                if session.steps_done < settings.rounds * WATCHED_STEPS:
                    raise RuntimeError(f"statistics: the watch recorded {session.steps_done} steps; more were timed")
            what = ", ".join(f"{name}={value}" for name, value in looks.items())
            yield Case("statistics", f"block, {recipe}, {WATCHED_STEPS} steps, {what}", timings)


def _demo(settings: Settings) -> Iterator[Case]:
    """Training steps of the demo's model: its optimizer, FP32 parameters, torch.autocast. "BF16" is plain torch."""
    config = TrainConfig()
    ids = torch.randint(0, 256, (config.batch_size, config.sequence_length + 1))
    variants: Variants = {}
    for recipe in ("BF16", "bf16", *RECIPES):
        torch.manual_seed(0)
        model = (PlainByteTransformer if recipe == "BF16" else ByteTransformer)(config.model, config.sequence_length)
        if recipe != "BF16":
            convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def train(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, ids[:, :-1], ids[:, 1:])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

        variants["BF16" if recipe == "BF16" else f"ottava {recipe}"] = train
    timings = settings.time(variants)
    tokens = ids[:, 1:].numel()
    speeds = {t.name: 1e3 * tokens / t.milliseconds for t in timings}
    yield Case("demo", f"the demo's model, {tokens} tokens a step", timings, {"tokens/s": speeds})


def _build(settings: Settings) -> Iterator[Case]:
    """Compilation of the native kernels; a machine compiles them once."""
    few = replace(settings, rounds=min(settings.rounds, BUILDS), cpu_time=False)
    timings = few.time(
        {
            "one after the other": lambda: build_all(FIRST_STEP, 1),
            "at the same time": lambda: build_all(FIRST_STEP, len(FIRST_STEP)),
        }
    )
    yield Case("build", "libraries of the first step of a BF16 model, wall-clock time", timings)
    times = {name: build_time(library, few.rounds) for name, library in libraries().items()}
    figures = {
        "CPU seconds": {name: cpu for name, (cpu, _) in times.items()},
        "seconds by the clock": {name: wall for name, (_, wall) in times.items()},
    }
    yield Case("build", f"every library, empty cache, {compiled_by()}", (), figures)


def _smollm2(settings: Settings) -> Iterator[Case]:
    vocabulary, layers, tokens = SMOLLM2_SIZES
    source = SmolLM2(vocabulary, layers)
    if settings.checkpoint is not None:
        source.load(settings.checkpoint)

    def make() -> SmolLM2:
        model = SmolLM2(vocabulary, layers)
        model.load_state_dict(source.state_dict())
        return model

    models = _models(make, ("tensorwise", "mxfp8"), others=("torchao tensorwise",))
    ids = torch.randint(0, vocabulary, (1, tokens))
    variants: Variants = {}
    for name, (run, model) in _runs(models, settings.compiled).items():

        def train(run: Callable[[Tensor], Tensor] = run, model: nn.Module = model) -> None:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                value = run(ids)
            value.backward()

        variants[name] = train
    timings = replace(settings, rounds=min(settings.rounds, 5)).time(variants, _updates(variants, models))
    figures: dict[str, dict[str, float]] = {}
    if settings.checkpoint is not None and settings.text is not None:
        text = _token_ids(settings.checkpoint, settings.text)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            losses = {name: [model(row[None]) for row in text] for name, model in models.items()}
        figures["perplexity"] = {name: float(torch.stack(one).mean().exp()) for name, one in losses.items()}
    weights = "random weights" if settings.checkpoint is None else f"weights of {settings.checkpoint}"
    yield Case("smollm2", f"135M architecture, {weights}, 1 x {tokens} tokens, fwd+bwd", timings, figures)


def _token_ids(checkpoint: Path, text: Path) -> Tensor:
    """8 x 512 tokens, int64."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeError("perplexity: a text needs the package tokenizers; pip install tokenizers") from error
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text.read_text("utf-8")).ids
    if len(ids) < 8 * 512:
        raise ValueError(f"perplexity: {text} has {len(ids)} tokens; needs {8 * 512} or more")
    return torch.tensor(ids[: 8 * 512]).view(8, 512)


def _models(
    make: Callable[[], nn.Module], recipes: Iterable[str] | None = None, others: Iterable[str] = tuple(EMULATORS)
) -> dict[str, nn.Module]:
    """The same module in BF16, under ottava's recipes, and under other installed emulators."""

    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(make()).bfloat16()

    models: dict[str, nn.Module] = {"BF16": module()}
    for recipe in RECIPES if recipes is None else recipes:
        model = module()
        convert(model, recipe, filter=lambda name, layer: True)
        models[f"ottava {recipe}"] = model
    return models | emulated(module, others)


def _steps(models: Mapping[str, nn.Module], x: Tensor, dy: Tensor, compiled: bool) -> Variants:
    """Forward and backward of each model."""
    x, dy = x.bfloat16().requires_grad_(), dy.bfloat16()
    return {name: step(run, owner, x, dy) for name, (run, owner) in _runs(models, compiled).items()}


def _updates(variants: Variants, models: Mapping[str, nn.Module]) -> Around:
    """An untimed optimizer step before each run. As in training, it invalidates cached casts of weights and updates
    predicted scales. Its learning rate is 0, so it leaves the weights as they are."""

    def update(optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
        return nullcontext(optimizer.step())

    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.0) for name, model in models.items()}
    return {name: partial(update, optimizers[name.removesuffix(_COMPILED)]) for name in variants}


def _runs(models: Mapping[str, nn.Module], compiled: bool) -> dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]]:
    """Name -> the function to call, and the model that gets the gradients. `compiled` adds compiled models."""
    runs: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {n: (model, model) for n, model in models.items()}
    for name in COMPILED if compiled else ():
        if name in models:
            runs[f"{name}{_COMPILED}"] = torch.compile(models[name]), models[name]
    return runs


def _kept(models: Mapping[str, nn.Module], x: Tensor) -> dict[str, dict[str, float]]:
    x = x.bfloat16().requires_grad_()
    sizes = {name: saved_bytes(lambda model=model: model(x), model) for name, model in models.items()}  # type: ignore[misc]
    return {
        "activations kept for backward, MiB": {name: activations / 2**20 for name, (activations, _) in sizes.items()},
        "FP8 weights kept beside them, MiB": {name: weights / 2**20 for name, (_, weights) in sizes.items()},
    }


def _memory(settings: Settings) -> Iterator[Case]:
    x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    sizes = {}
    for name, block in blocks():
        activations, weights = saved_bytes(lambda block=block: block(x), block)  # type: ignore[misc]
        sizes[name] = activations / x.numel(), weights / WIDTH**2
    base = sizes["plain torch, fused norm"][0]
    yield Case(
        "memory",
        f"Llama block, d {WIDTH}, F {FFN}",
        (),
        {
            "kept for backward, bytes a token and feature": {name: kept for name, (kept, _) in sizes.items()},
            "of plain torch with a fused norm": {name: kept / base for name, (kept, _) in sizes.items()},
            "FP8 weights kept beside them, bytes by d^2": {name: weights for name, (_, weights) in sizes.items()},
        },
    )


# --- how long the native kernels compile -----------------------------------------------------------------------------

Library = tuple[str, str]
"""Name of a C++ file, and the macro of its variant, or ""."""

FIRST_STEP: tuple[Library, ...] = (("quantize", ""), ("gemm", ""), ("sums", ""), ("pointwise", ""))
"""The libraries of the first training step of a BF16 model."""


def libraries() -> dict[str, Library]:
    """Name in a table -> library, for all libraries."""
    names: dict[str, Library] = {}
    for name in native_build.sources():
        per_dtype = name in ("quantize", "sample", "measure", "stochastic", "block_scales", "rotate")
        for dtype, macro in native_build.VARIANTS.items() if per_dtype else ((None, ""),):
            names[f"{name} {dtype_name(dtype)}" if dtype is not None else name] = name, macro
    return names


def build_time(library: Library, rounds: int) -> tuple[float, float]:
    """Builds one library in an empty cache, `rounds` times; median seconds of CPU time, and by the clock.

    Raises:
        RuntimeError: the library cannot be built; the message gives the reason.

    Example:
        >>> build_time(("nothing_of_that_name", ""), 1)
        Traceback (most recent call last):
        RuntimeError: nothing_of_that_name: the package has no nothing_of_that_name.cpp; install it anew
    """
    times = []
    for _ in range(rounds):
        start, started = os.times(), time.perf_counter()
        build_all([library], 1)
        wall, end = time.perf_counter() - started, os.times()
        times.append((end.children_user + end.children_system - start.children_user - start.children_system, wall))
    cpu, wall = map(statistics.median, zip(*times, strict=True))
    return cpu, wall


def build_all(libraries: Iterable[Library], at_once: int) -> None:
    """Builds libraries in an empty cache, `at_once` at a time. Raises as `build_time`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        settings = replace(native_build.from_environment(), cache=Path(folder))
        builds = [(name, pool.submit(native_build.build, name, settings, macro)) for name, macro in libraries]
        for name, build in builds:
            if reason := build.result().reason:
                raise RuntimeError(f"{name}: {reason}")


def compiled_by() -> str:
    """The version line of the compiler and the instruction set of its GEMM; "" without a compiler."""
    command = native_build.find_compiler(native_build.from_environment())
    library = native_gemm.built().library
    if isinstance(command, str) or library is None:
        return ""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{version.splitlines()[0]}, {native_gemm.LEVELS[library.ottava_gemm_level()]}"


SUITES: Mapping[str, Callable[[Settings], Iterator[Case]]] = MappingProxyType(
    {
        "cast": _cast,
        "gemm": _gemm,
        "linear": _linear,
        "block": _block,
        "statistics": _statistics,
        "memory": _memory,
        "demo": _demo,
        "build": _build,
        "smollm2": _smollm2,
    }
)
"""The suites of `ottava bench cpu`."""

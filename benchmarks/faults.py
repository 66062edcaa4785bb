"""Does `diagnose` name the fault? Every fault that fits into a small model is put there: `python benchmarks/faults.py`.

Each fault is injected into a training run that is really watched, at several strengths and two model sizes; the rule
that belongs to it must come first. Clean twins (every recipe, SwiGLU and ReLU, several seeds) must make no rule fire.
Writes a table (Markdown) and all results (JSON), and prints precision and recall:

    recall       faulty runs whose first finding is the right one
    precision    of all runs with a finding (faulty and clean), those whose first finding is right

Some numbers are logged rather than caused, where the cause is outside of a small model (attention logits, update RMS,
gradient angles, the losses of gaps and spikes): these are marked "logged". What needs an answer of a person or another
framework is not injected, see NOT_INJECTED.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.debug.analysis.diagnose import Diagnosis, diagnose
from ottava.debug.analysis.rules import load_rules
from ottava.debug.run.reader import Run
from ottava.debug.watch import watch
from ottava.debug.watch.checks import Checks, check_master
from ottava.quantized_tensor import QuantizedTensor
from ottava.quantizer import Quantizer
from ottava.recipe import GemmRecipe, Recipe, get_recipe
from ottava.train.config import ModelConfig
from ottava.train.model import ByteTransformer

SIZES: Mapping[str, tuple[int, int]] = {"small": (64, 4), "medium": (128, 4)}
"""Width and blocks."""
STEPS, EVERY, BATCH, LENGTH = 16, 4, 4, 32
NOT_INJECTED = {
    "B8": "two models sharing state: ours cannot share; the rule asks a person",
    "C5": "FP32 inputs are slow: an answer about speed is needed",
    "C6": "odd dimensions are slow: an answer about speed is needed",
    "C7": "downstream scores: an answer is needed",
    "N12b": "which GEMM a bisection named: an answer is needed",
    "N15": "accumulation inside a tensor core: emulated GEMMs have none, and an answer is needed",
    "T4": "downstream scores: an answer is needed",
    "G1": "the general case behind the others; fires only where no cause is known",
}


class ReluModel(nn.Module):
    """Blocks of norm, FC1, ReLU, FC2 on a residual stream."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.RMSNorm(width), "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
            )
            for _ in range(blocks)
        )
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer["fc2"](layer["fc1"](layer["norm"](x)).relu())  # type: ignore[index,operator]
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


@dataclass
class Lab:
    """A training run that a fault may reach into."""

    model: nn.Module
    blocks: int
    recipe: str | Recipe
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    after_step: list[Callable[[int], None]] = field(default_factory=list)
    logged: Callable[[int, float], dict[str, float]] | None = None
    """(step, loss) -> what watch.log gets."""
    report: Callable[..., None] | None = None
    """Writes a check event."""
    optimizer: torch.optim.Optimizer | None = None
    lr: float = 2e-3
    step: int = 0

    def layer(self, block: int, *names: str) -> Any:
        """The first of a block's layers that exists."""
        owner = self.model.layers[block]  # type: ignore[index]
        for name in names:
            try:
                return owner[name] if isinstance(owner, nn.ModuleDict) else owner.get_submodule(name)
            except (AttributeError, KeyError):
                continue
        raise KeyError(names)

    def fc2(self, block: int) -> Any:
        return self.layer(block, "mlp.down_proj", "fc2")

    def fc1(self, block: int) -> Any:
        return self.layer(block, "mlp.gate_up_proj", "fc1")

    def change_input(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """From now on the layer gets another input; its gradient stays what it was, so that one tensor is at fault."""

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            x = args[0]
            return (x + (change(x.detach()) - x.detach()),)

        layer.register_forward_pre_hook(hook)

    def change_gradient(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """From now on the layer's backward gets another gradient."""

        def hook(_: nn.Module, __: Any, y: Tensor) -> None:
            if y.requires_grad:
                y.register_hook(change)

        layer.register_forward_hook(hook)

    def change_operands(self, door: Quantizer, change: Callable[[Tensor, Any, Any], tuple[Any, Any]]) -> None:
        """From now on what leaves a door is something else."""
        original = door.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return change(x, *original(x, *args, **kwargs))

        door.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class Fault:
    """One entry of the registry."""

    name: str
    rule: str
    """That must come first."""
    inject: Callable[[Lab, float], None]
    strengths: tuple[float, ...]
    recipe: str | Recipe = "tensorwise"
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the watch."""
    steps: int = STEPS
    twin: bool = False
    """Diagnosed beside its clean twin."""
    ranks: int = 1
    logged: bool = False
    """Numbers are logged, not caused."""


# --- what is injected ---------------------------------------------------------------------------------------------


def _rows_times(factor: float, every: int = 32) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale = torch.ones(flat.shape[0], 1, dtype=x.dtype)
        scale[::every] = factor
        return (flat * scale).reshape(x.shape)

    return change


def massive_tokens(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc2(1), _rows_times(factor))


def growing_activations(lab: Lab, octaves: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * 2.0 ** (octaves * lab.step / STEPS))


def unequal_rows(lab: Lab, factor: float) -> None:
    lab.change_input(lab.layer(1, "attention.o_proj"), _rows_times(factor))


def wide_gradient(lab: Lab, sigma: float) -> None:
    generator = torch.Generator().manual_seed(7)

    def change(g: Tensor) -> Tensor:
        return g * torch.exp(sigma * torch.randn(g.shape, generator=generator)).to(g.dtype)

    lab.change_gradient(lab.fc1(1), change)


def unequal_gradient_rows(lab: Lab, sigma: float) -> None:
    generator = torch.Generator().manual_seed(7)

    def change(g: Tensor) -> Tensor:
        rows = torch.exp(sigma * torch.randn(*g.shape[:-1], 1, generator=generator))
        return g * rows.to(g.dtype)

    for block in range(lab.blocks):
        lab.change_gradient(lab.fc1(block), change)


def amax_jump(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * (factor if lab.step == 12 else 1.0))


def old_spike(lab: Lab, factor: float) -> None:
    lab.change_input(lab.fc1(1), lambda x: x * (factor if lab.step == 3 else 1.0))  # step 3 is not looked at


def no_history(lab: Lab, _: float) -> None:
    pass  # the recipe is the fault: bootstrap=False


def bad_boundary(lab: Lab, factor: float) -> None:
    for block in (0, lab.blocks - 1):
        lab.change_input(lab.layer(block, "attention.o_proj"), _rows_times(factor))


def rising_kurtosis(lab: Lab, sigma: float) -> None:
    pattern: dict[torch.Size, Tensor] = {}

    def change(x: Tensor) -> Tensor:
        noise = pattern.setdefault(x.shape, torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
        return x * torch.exp(sigma * lab.step / STEPS * noise).to(x.dtype)

    lab.change_input(lab.layer(1, "attention.o_proj"), change)


def clustered_weights(lab: Lab, value: float) -> None:
    weight = lab.fc1(1).weight

    def cluster(_: int) -> None:
        with torch.no_grad():
            weight.copy_(weight.sign() * value * (1 + 0.003 * torch.rand_like(weight)))

    lab.before_step.append(cluster)


def growing_outputs(lab: Lab, factor: float) -> None:
    weight = lab.layer(1, "attention.o_proj", "fc2").weight

    def grow(_: int) -> None:
        with torch.no_grad():
            weight.mul_(factor)

    lab.before_step.append(grow)


def infinity(lab: Lab, step: float) -> None:
    def change(x: Tensor) -> Tensor:
        if lab.step < step:
            return x
        x = x.clone()
        x.view(-1)[5] = math.inf
        return x

    lab.change_input(lab.fc1(1), change)


def zero_rows(lab: Lab, rows: float) -> None:
    def zero(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).clone()
        flat[: int(rows)] = 0
        return flat.reshape(x.shape)

    def divide(x: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
        return _without_zero_rule(x, row), _without_zero_rule(x.t(), col)

    lab.change_input(lab.fc1(1), zero)
    lab.change_operands(lab.fc1(1).quantizers.input, divide)


def _without_zero_rule(x: Tensor, x_q: Any) -> Any:
    """As a cast with scale = max / amax and no floor: 0 / 0."""
    if not isinstance(x_q, QuantizedTensor):
        return x_q
    empty = x.abs().amax(1, keepdim=True) == 0
    return replace(x_q, scale_inv=torch.where(empty, math.nan, x_q.scale_inv))


def stale_weight(lab: Lab, lag: float) -> None:
    kept: deque[tuple[Any, Any]] = deque(maxlen=int(lag) + 1)

    def change(_: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
        kept.append((row, col))
        return kept[0]

    lab.change_operands(lab.fc1(1).quantizers.weight, change)


def rounded_scale(tensor: str) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, factor: float) -> None:
        def rounded(x_q: Any) -> Any:
            if not isinstance(x_q, QuantizedTensor):
                return x_q
            # factor 0: to a power of two, as UE8M0 stores it, without casting again
            scale_inv = torch.exp2(x_q.scale_inv.log2().ceil()) if factor == 0 else x_q.scale_inv * factor
            return replace(x_q, scale_inv=scale_inv)

        door = getattr(lab.fc1(1).quantizers, tensor)
        lab.change_operands(door, lambda _, row, col: (rounded(row), rounded(col)))

    return inject


def wrong_column(tensor: str) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, noise: float) -> None:
        def change(x: Tensor, row: Any, col: Any) -> tuple[Any, Any]:
            if not isinstance(col, QuantizedTensor):
                return row, col
            other = x * (1 + noise * torch.randn(1, x.shape[1], generator=torch.Generator().manual_seed(1)).to(x.dtype))
            return row, ottava.quantize(other.t(), replace(col.spec, scaling="current"))

        lab.change_operands(getattr(lab.fc1(1).quantizers, tensor), change)

    return inject


def pushed_twice(lab: Lab, _: float) -> None:
    def push(_: int) -> None:
        for module in lab.model.modules():
            if isinstance(module, Quantizer) and module.spec is not None:
                history = module.amax_history
                history.copy_(torch.cat([history[:1], history[:-1]]))

    lab.after_step.append(push)


def master_from_fp8(lab: Lab, noise: float) -> None:
    def look(step: int) -> None:
        layer = lab.fc1(1)
        parameter = ottava.quantize(layer.weight.detach(), ottava.QuantizationSpec(ottava.E4M3))
        master = parameter.dequantize(torch.float32) if noise == 0 else layer.weight.detach() * (1 + noise)
        if noise == 0:  # initialized from FP8 of a coarser format
            master = ottava.quantize(layer.weight.detach(), ottava.QuantizationSpec(ottava.E5M2)).dequantize(
                torch.float32
            )
        facts = check_master(master, parameter)
        if step == 1 and facts is not None and lab.report is not None:
            lab.report({"layer": layer.name, "tensor": "weight", **facts})

    lab.before_step.append(look)


def resumed_wrongly(lab: Lab, noise: float) -> None:
    def forget(step: int) -> None:
        if step != 57:
            return
        with torch.no_grad():
            for parameter in lab.model.parameters():
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
        assert lab.report is not None
        lab.report({}, kind="resumed", step=56)

    lab.before_step.append(forget)


def too_high_lr(lab: Lab, lr: float) -> None:
    lab.lr = lr


def logs(**columns: Callable[[int, float, float], float]) -> Callable[[Lab, float], None]:
    def inject(lab: Lab, strength: float) -> None:
        lab.logged = lambda step, loss: {name: of(step, loss, strength) for name, of in columns.items()}

    return inject


def lagging_second_moment(lab: Lab, factor: float) -> None:
    """The update's RMS is Adam's own; its second moment is as far behind as after a surge late in a run."""

    def lag(step: int) -> None:
        assert lab.optimizer is not None
        for state in lab.optimizer.state.values():
            state["exp_avg_sq"].mul_(1 / factor if step == 12 else 1.0)

    lab.before_step.append(lag)

    def rms(step: int, loss: float) -> dict[str, float]:
        assert lab.optimizer is not None
        largest = 0.0
        for state in lab.optimizer.state.values():
            if "exp_avg" in state:
                done = float(state["step"])
                m, v = state["exp_avg"] / (1 - 0.9**done), state["exp_avg_sq"] / (1 - 0.999**done)
                used = v > 0
                largest = max(largest, float((m[used] / v[used].sqrt()).square().mean().sqrt()) if used.any() else 0.0)
        return {"update_rms": largest}

    lab.logged = rms


def _hybrid_e4m3() -> Recipe:
    return get_recipe("tensorwise_e4m3")


def _without_bootstrap() -> Recipe:
    recipe = get_recipe("delayed")

    def start_at_one(gemm: GemmRecipe) -> GemmRecipe:
        assert gemm.lhs is not None
        assert gemm.rhs is not None
        return replace(gemm, lhs=replace(gemm.lhs, bootstrap=False), rhs=replace(gemm.rhs, bootstrap=False))

    gemms = {name: start_at_one(getattr(recipe, name)) for name in ("fprop", "dgrad", "wgrad")}
    return replace(recipe, name="delayed_from_1", **gemms)


def _coarse_gradients() -> Recipe:
    recipe = get_recipe("blockwise")
    x, w = recipe.fprop.lhs, recipe.fprop.rhs
    return replace(recipe, name="blockwise_128", dgrad=GemmRecipe(w, x), wgrad=GemmRecipe(w, x))


FAULTS: tuple[Fault, ...] = (
    Fault("scales differ over ranks", "B1", lambda lab, _: None, (1,), "delayed", ranks=2),
    Fault("stale FP8 weight", "B2", stale_weight, (1, 4)),
    Fault("stale FP8 weight, blocks", "B2", stale_weight, (2,), "blockwise"),
    Fault("amax pushed twice a step", "B3", pushed_twice, (1,), "delayed"),
    Fault("master weight from FP8", "B4", master_from_fp8, (0, 0.1)),
    Fault("resumed without its state", "B5", resumed_wrongly, (1.0, 2.0), steps=64, settings={"every": 32}),
    Fault("scale of X rounded alone", "B6", rounded_scale("input"), (0, 1.5)),
    Fault("scale of W rounded alone", "B6", rounded_scale("weight"), (0, 2.0), "blockwise_fp32"),
    Fault("scale of dY rounded alone", "B6", rounded_scale("grad_output"), (0, 0.5)),
    Fault("X.T cast from another tensor", "B7", wrong_column("input"), (0.3, 1.0), "blockwise"),
    Fault("dY.T cast from another tensor", "B7", wrong_column("grad_output"), (0.3, 1.0), "mxfp8"),
    Fault("W.T cast from another tensor", "B7", wrong_column("weight"), (0.3, 1.0), "mxfp8"),
    *(
        Fault(f"diverges with {key}", rule, too_high_lr, (0.1, 0.3), recipe, {key: value}, {"every": 16}, steps=48)
        for key, value, rule, recipe in (
            ("cpu_offload", True, "C1", "tensorwise"),
            ("fp8_param_gather", True, "C2", "tensorwise"),
            ("weight_caching", True, "C3", "tensorwise"),
            ("amax_reduction", "tp_only", "C4", "delayed"),
        )
    ),
    Fault("infinity in an activation", "F1", infinity, (5, 11)),
    Fault("massive tokens in FC2's input", "N1", massive_tokens, (1e4, 3e4, 1e5)),
    Fault("massive tokens, delayed", "N1", massive_tokens, (1e5,), "delayed"),
    Fault("activations grow", "N2", growing_activations, (10, 16)),
    Fault("a few huge rows", "N3", unequal_rows, (3e4, 1e5)),
    Fault("wide gradient in E4M3", "N4", wide_gradient, (2, 3), "tensorwise_e4m3"),
    Fault("amax jumps under delayed scales", "N5", amax_jump, (3, 16, 256), "delayed"),
    Fault("an old spike holds the scale down", "N6", old_spike, (256, 4096), "delayed"),
    Fault("delayed scales start at 1", "N7", no_history, (1,), _without_bootstrap()),
    Fault("first and last block worst", "N8", bad_boundary, (3e4, 1e5)),
    Fault("kurtosis rises", "N10", rising_kurtosis, (1.5, 1.8)),
    Fault("clustered values, floor scales", "N11", clustered_weights, (0.1171875, 0.114), "mxfp8_floor"),
    Fault("clustered values, rounded up", "N11", clustered_weights, (0.1215, 0.1218), "mxfp8"),
    Fault("outputs grow", "N14", growing_outputs, (1.4, 1.7), "bf16", settings={"tensors": ("X", "W", "dY", "Y")}),
    Fault("blocks of 128x128 for dY", "N16", unequal_gradient_rows, (4, 6), _coarse_gradients()),
    Fault("zero rows without a floor under amax", "N17", zero_rows, (1, 16), "rowwise"),
    Fault("Adam's second moment lags", "N13", lagging_second_moment, (100, 1000)),
    Fault("attention logits", "N9", logs(max_logit=lambda s, _, k: k * 2.0 ** (s / 4)), (30, 3e3), logged=True),
    Fault(
        "noisy dW", "N12", logs(dw_angle=lambda s, _, k: k, dx_angle=lambda s, _, k: 1.5), (8, 40), logged=True
    ),
    Fault("constant gap", "N18", logs(loss=lambda s, x, k: x * (1 + k)), (0.012, 0.03), twin=True, logged=True),
    Fault(
        "growing gap", "T2", logs(loss=lambda s, x, k: x * (1 + k * (s / STEPS) ** 3)), (0.05, 0.2), twin=True,
        logged=True,
    ),
    Fault(
        "spikes that the twin has not", "T1", logs(loss=lambda s, x, k: x + k * (s in (36, 42))), (3, 10), twin=True,
        logged=True, steps=48, settings={"every": 16},
    ),
)  # fmt: skip

CLEAN_RECIPES = (
    "tensorwise",
    "delayed",
    "guarded",
    "rowwise",
    "blockwise",
    "mxfp8",
    "tensorwise_e4m3",
    "nvfp4",
    "bf16",
)
"""bf16: not converted; the casts of `tensorwise` are simulated beside its GEMMs."""


# --- running it ---------------------------------------------------------------------------------------------------


def make_model(size: str, activation: str, seed: int) -> nn.Module:
    """A small transformer, or a stack of ReLU blocks."""
    width, blocks = SIZES[size]
    torch.manual_seed(seed)
    if activation == "relu":
        return ReluModel(width, blocks)
    return ByteTransformer(ModelConfig(d_model=width, layers=blocks, heads=4, kv_heads=2, ffn=3 * width), LENGTH)


def make_text() -> Tensor:
    """Bytes that can be learned: each follows from the one before, nine times in ten."""
    generator = torch.Generator().manual_seed(5)
    surprises = torch.randint(0, 256, (4096,), generator=generator).tolist()
    surprised = (torch.rand(4096, generator=generator) < 0.1).tolist()
    text = [0]
    for surprise, so in zip(surprises, surprised, strict=True):
        text.append(surprise if so else (5 * text[-1] + 3) % 32)
    return torch.tensor(text)


@contextmanager
def _rank(number: int) -> Iterator[None]:
    before = os.environ.get("RANK")
    os.environ["RANK"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("RANK") if before is None else os.environ.__setitem__("RANK", before)


def run(
    folder: Path, fault: Fault | None, strength: float, size: str, *, recipe: str | Recipe = "",
    activation: str = "swiglu", seed: int = 0, rank: int = 0, steps: int = 0,
) -> Run:  # fmt: skip
    """Trains under the watch, with a fault or clean."""
    recipe = recipe or (fault.recipe if fault else "tensorwise")
    steps = steps or (fault.steps if fault else STEPS)
    model = make_model(size, activation, seed)
    if get_recipe(recipe).name != "bf16":
        ottava.convert(model, recipe)
    lab = Lab(model, SIZES[size][1], recipe)
    if fault is not None:
        fault.inject(lab, strength)
    lab.optimizer = torch.optim.AdamW(model.parameters(), lr=lab.lr)
    generator = torch.Generator().manual_seed(100 + seed + 17 * rank)
    text = make_text()
    settings = {"every": EVERY, "sample": 1, "max_overhead": None, **(fault.settings if fault else {})}
    with _rank(rank), watch(model, folder, **settings) as seen:
        seen.describe(config={"recipe": get_recipe(recipe).name, **(fault.config if fault else {})})

        def report(facts: Mapping[str, Any], kind: str = "check", step: int | None = None) -> None:
            seen.writer.event(lab.step if step is None else step, kind, **facts)

        lab.report = report
        if seen.doors.on_operands is None:
            seen.doors.on_operands = Checks(report)
        for step in range(1, steps + 1):
            lab.step = step
            for action in lab.before_step:
                action(step)
            at = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
            ids = torch.stack([text[i : i + LENGTH + 1] for i in at])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), ids[:, 1:].flatten())
            loss.backward()
            if lab.logged is not None:
                seen.log(**lab.logged(step, float(loss.detach())))
            lab.optimizer.step()
            lab.optimizer.zero_grad()
            for action in lab.after_step:
                action(step)
    return Run.open(folder)


@dataclass(frozen=True)
class Result:
    """One run and what was said about it."""

    name: str
    expected: str
    """"" for a clean one."""
    first: str
    others: list[str]
    size: str
    strength: float
    recipe: str
    logged: bool
    confidence: float
    seconds: float

    @property
    def right(self) -> bool:
        return self.first == self.expected


def try_fault(fault: Fault, strength: float, size: str, book: Any = None) -> Result:
    """Injects, watches, diagnoses."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for rank in reversed(range(fault.ranks)):
            if rank:
                _other(folder, fault, strength, size, rank)
            else:
                run(folder / "run", fault, strength, size)
        twin = run(folder / "twin", None, 0, size, recipe=fault.recipe, steps=fault.steps) if fault.twin else None
        result = diagnose(Run.open(folder / "run"), baseline=twin, rules=book)
    return _result(fault.name, fault.rule, result, size, strength, get_recipe(fault.recipe).name, fault.logged, started)


def _other(folder: Path, fault: Fault, strength: float, size: str, rank: int) -> None:
    """A rank that writes no manifest."""
    try:
        run(folder / "run", fault, strength, size, rank=rank)
    except ValueError as error:  # it has no manifest to open
        if "watch.json" not in str(error):
            raise


def try_clean(recipe: str, activation: str, size: str, seed: int, book: Any = None) -> Result:
    """A run without a fault; beside a twin of another seed's data."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        watched = run(Path(place) / "run", None, 0, size, recipe=recipe, activation=activation, seed=seed)
        result = diagnose(watched, rules=book)
    return _result(f"clean, {activation}", "", result, size, seed, recipe, False, started)


def _result(
    name: str, expected: str, found: Diagnosis, size: str, strength: float, recipe: str, logged: bool, started: float
) -> Result:
    ids = [finding.id for finding in found.findings]
    confidence = found.findings[0].confidence if found.findings else 0.0
    seconds = round(time.perf_counter() - started, 2)
    return Result(name, expected, ids[0] if ids else "", ids[1:], size, strength, recipe, logged, confidence, seconds)


def scores(results: Sequence[Result]) -> dict[str, Any]:
    """Precision and recall over all runs."""
    faulty, clean = [r for r in results if r.expected], [r for r in results if not r.expected]
    fired = [r for r in results if r.first]
    right = sum(r.right for r in faulty)
    return {
        "faulty_runs": len(faulty),
        "right_rule_first": right,
        "recall": right / max(len(faulty), 1),
        "precision": right / max(len(fired), 1),
        "clean_runs": len(clean),
        "clean_runs_with_a_finding": sum(bool(r.first) for r in clean),
        "rules_injected": len({r.expected for r in faulty}),
        "rules_not_injected": sorted(NOT_INJECTED),
    }


def table(results: Sequence[Result]) -> str:
    """Markdown: one row a fault, and one for clean runs of each recipe."""
    lines = [
        "| fault | recipe | rule | right first | strengths | sizes | said instead |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.name, result.recipe, result.expected), []).append(result)
    for (name, recipe, rule), own in groups.items():
        strengths = ", ".join(f"{s:g}" for s in dict.fromkeys(r.strength for r in own)) if rule else f"{len(own)} seeds"
        wrong = ", ".join(sorted({r.first or "nothing" for r in own if not r.right}))
        mark = " (logged)" if own[0].logged else ""
        sizes = ", ".join(dict.fromkeys(r.size for r in own))
        count = f"{sum(r.right for r in own)} of {len(own)}"
        lines.append(f"| {name}{mark} | {recipe} | {rule or 'none'} | {count} | {strengths} | {sizes} | {wrong} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the suite; exit code 1 where a rule was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one strength, one size, two clean recipes")
    parser.add_argument("--only", default="", help="faults whose rule or name contains this")
    parser.add_argument("--size", default="", choices=("", *SIZES), help="this size only")
    parser.add_argument("--clean", action="store_true", help="clean runs only")
    parser.add_argument("--out", type=Path, default=None, help="folder for faults.md and faults.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    book, results = load_rules(), []
    sizes = (options.size,) if options.size else ("small",) if options.quick else tuple(SIZES)
    for fault in () if options.clean else FAULTS:
        if options.only not in fault.rule and options.only not in fault.name:
            continue
        for size in sizes:
            # the second size is for the strongest one only: it is there to see that thresholds do not depend on size
            for strength in fault.strengths if size == "small" and not options.quick else fault.strengths[-1:]:
                results.append(try_fault(fault, strength, size, book))
                print(_line(results[-1]), flush=True)
    for recipe in () if options.only else CLEAN_RECIPES[:2] if options.quick else CLEAN_RECIPES:
        for size in sizes:
            for activation in ("swiglu", "relu") if size == "small" else ("swiglu",):
                results.append(try_clean(recipe, activation, size, len(results), book))
                print(_line(results[-1]), flush=True)
    summary = scores(results)
    print(table(results))
    print(json.dumps(summary))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "faults.md").write_text(table(results) + "\n", encoding="utf-8")
        (options.out / "faults.json").write_text(
            json.dumps(
                {"scores": summary, "results": [vars(r) for r in results], "not_injected": NOT_INJECTED}, indent=1
            )
        )
    return 0 if all(r.right for r in results) else 1


def _line(result: Result) -> str:
    mark = "ok   " if result.right else "WRONG"
    said = ", ".join([result.first, *result.others]) or "nothing"
    what = f"{result.name} {result.strength:g} {result.size} {result.recipe}"
    return f"{mark} {what}: {result.expected or 'none'} / {said} ({result.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())

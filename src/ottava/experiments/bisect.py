"""Finds the GEMM, layer and operand with the largest error, and its cause, from one batch in log2 steps.

A probe runs the batch with only some cells of the recipe on and all others in high precision. It compares the gradient
(or loss) with that of high precision everywhere. Errors of independent parts add as squares, so `share` is the part of
the squared error that remains when only the suspect is on.

    1  only fprop, only dgrad, only wgrad, in all layers          -> the GEMM
    2  that GEMM in either half of the layers, again and again     -> the layer
    3  that GEMM of that layer with one operand quantized          -> the operand
    4  with both, multiplied natively and in high precision        -> quantization or accumulation

With an `accumulator` the native sums are those of that tensor core, emulated: the last question has an answer on a CPU.

If no half is much worse than the other, the error is spread over many layers. Then the verdict blames no layer, and the
remedy is another recipe.

`probe_gemms` splits the error of one GEMM, y = x w.T, dx or dw, from the real operands of a layer:

    (x_q, w)     only the left operand quantized, multiplied in high precision
    (x, w_q)     only the right operand quantized
    (x_q, w_q)   both quantized, multiplied in high precision: the error of quantization
    native       both quantized, multiplied by the engine: any further error comes from accumulation or kernel

On a CPU, and wherever the reference kernel runs, products are summed in fp32. The last two then agree, which says
nothing about the accumulator of a tensor core. Under a recipe that names one ("tensorwise/hopper") they are summed as
there, on any machine, and once more with promotions to fp32, the usual remedy.

`Ablation` asks the other question, of the captured step of a watched run: which casts must be off?

    1  the casts of one GEMM off, in all layers          -> is one of fprop, dgrad, wgrad enough?
    2  half of what is left off, again and again         -> the smallest set whose absence halves the error
    3  of each member one operand exact                  -> the operand

A set that halves the error makes three quarters of its square.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import unknown_name
from ottava.base.text import finite, progress
from ottava.engine.functional import QuantizedLayer
from ottava.experiments.casts import Casts, is_torchao, only_without
from ottava.experiments.program import Gradients, Player
from ottava.experiments.replay import (
    Deviation,
    Loss,
    Outcome,
    Replay,
    door_hooks,
    one_operand,
    ottava_layers,
    spelled_out,
)
from ottava.experiments.shadow import compared
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.measure.walk import measure
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.gemm import GemmRecord, gemm, whole
from ottava.ops.quantize import quantize
from ottava.recipe import GEMMS, TENSOR_OF, GemmRecipe, Recipe, get_recipe
from ottava.record.dumps import GemmDump

PROMOTION = 128
"""Products between promotions to fp32, as cuBLASLt's slow accumulation and DeepGEMM have them."""
_EVIDENCE = ("underflow_pct", "overflow_pct", "row_sqnr_p50_db", "sqnr_db", "mean_relative_error", "amax")


@dataclass(frozen=True, eq=False)
class GemmOperands:
    """The operands of one layer in one step, before any cast."""

    x: Tensor
    """(M, K)"""
    w: Tensor
    """(N, K)"""
    dy: Tensor | None
    """(M, N); None without a backward."""
    scales: Mapping[str, Tensor]
    """Tensor -> predicted scale, if it has one."""

    def side(self, gemm: str, side: str) -> tuple[str, Tensor]:
        """The long name of a cell's tensor, and the tensor as the GEMM contracts it: over its last dimension."""
        tensor, direction = TENSOR_OF[gemm, side]
        x = {"input": self.x, "weight": self.w, "grad_output": self.dy}[tensor]
        assert x is not None  # without a backward, callers ask for fprop only
        return tensor, x if direction == "row" else x.t()


@dataclass(frozen=True)
class GemmProbe:
    """SQNRs of one GEMM's result, compared with the same product in fp32."""

    gemm: str
    """fprop, dgrad or wgrad."""
    lhs: str
    """Spec of the left operand."""
    rhs: str
    only_lhs_db: float
    """Only the left operand quantized."""
    only_rhs_db: float
    both_db: float
    """Both quantized, multiplied in high precision."""
    native_db: float
    """Both quantized, multiplied by the engine."""
    row_p50_db: float
    """As native_db, for the median row of the result."""
    emulated: bool
    """Whether the engine emulates this GEMM, with fp32 sums."""
    accumulator: str = ""
    """The profile that native_db was summed under; "": the device's own sums."""
    promoted_db: float = math.nan
    """As native_db, with a promotion to fp32 every 128 products; NaN without a profile that lacks one."""

    @property
    def worse_operand(self) -> str:
        """ "lhs" or "rhs"."""
        return "lhs" if self.only_lhs_db <= self.only_rhs_db else "rhs"

    @property
    def accumulation_share(self) -> float:
        """Share of the error power that the operands do not explain; 0 to 1."""
        if math.isinf(self.native_db):
            return 0.0
        return max(0.0, 1.0 - 10 ** ((self.native_db - self.both_db) / 10))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; None for an SQNR without error."""
        values = {**asdict(self), "worse_operand": self.worse_operand, "accumulation_share": self.accumulation_share}
        return dict(finite(values))


def probe_gemms(operands: GemmOperands | GemmDump, recipe: Recipe) -> list[GemmProbe]:
    """Probes the quantized GEMMs of a layer.

    Args:
        operands: the layer's operands, from `captured` or from a dump.
        recipe: the layer's recipe, overrides applied.
    Returns:
        One probe for each quantized GEMM; without dy only fprop's.

    Example:
        >>> import ottava
        >>> x, w, dy = torch.randn(64, 128), torch.randn(32, 128), torch.randn(64, 32)
        >>> x[:, 0] *= 1e6                                              # an outlier channel
        >>> probes = probe_gemms(GemmOperands(x, w, dy, {}), ottava.RECIPES["rowwise"])
        >>> [probe.gemm for probe in probes], probes[2].both_db > 25
        (['fprop', 'dgrad', 'wgrad'], True)
    """
    if isinstance(operands, GemmDump):
        operands = GemmOperands(operands.x, operands.w, operands.dy, {})
    probes = []
    for name in GEMMS:
        cells: GemmRecipe = getattr(recipe, name)
        if cells.lhs is None or cells.rhs is None or (operands.dy is None and name != "fprop"):
            continue
        probes.append(_probe(name, cells, cells.lhs, cells.rhs, operands))
    return probes


def cast_evidence(operands: GemmOperands, gemm_name: str, side: str, spec: QuantizationSpec) -> dict[str, float]:
    """Statistics of the cast of one operand."""
    tensor, x = operands.side(gemm_name, side)
    x_q = quantize(x, spec, scale=_scale(operands, tensor, spec))
    tally = measure(x_q.transformed(x), x_q)
    return {name: float(STATISTICS[name].finish(tally)) for name in _EVIDENCE}


@contextmanager
def captured(layer: Any) -> Iterator[dict[str, Any]]:
    """Keeps the first tensor at each door of an ottava layer; `operands_of` makes operands of them."""
    seen: dict[str, Any] = {"scales": {}}

    def keep(tensor: str, x: Tensor, _: Any) -> None:
        if tensor not in seen:
            door = getattr(layer.quantizers, tensor)
            seen[tensor] = x.detach().clone()
            if door.spec is not None and bool(door.scale > 0):
                seen["scales"][tensor] = door.scale.clone()

    with door_hooks(layer, keep):
        yield seen


def operands_of(seen: Mapping[str, Any]) -> GemmOperands | None:
    """The operands that `captured` kept; None if the layer made no cast."""
    if "input" not in seen or "weight" not in seen:
        return None
    return GemmOperands(seen["input"], seen["weight"], seen.get("grad_output"), seen["scales"])


@torch.no_grad()
def _probe(
    name: str, cells: GemmRecipe, lhs: QuantizationSpec, rhs: QuantizationSpec, operands: GemmOperands
) -> GemmProbe:
    (left, a), (right, b) = operands.side(name, "lhs"), operands.side(name, "rhs")
    a_q = quantize(a, lhs, scale=_scale(operands, left, lhs))
    b_q = quantize(b, rhs, scale=_scale(operands, right, rhs), beside=a_q)
    exact_a, exact_b = (whole(x_q, x_q.transformed(x)) for x, x_q in ((a, a_q), (b, b_q)))
    near_a, near_b = whole(a_q), whole(b_q)
    reference = exact_a @ exact_b.t()
    records: list[GemmRecord] = []
    settings: dict[str, Any] = {"fast_accum": cells.fast_accum, "compute": cells.compute, "log": records.append}
    y = gemm(a_q, b_q, out_dtype=torch.float32, accumulator=cells.accumulator, **settings)
    return GemmProbe(
        gemm=name,
        lhs=str(lhs),
        rhs=str(rhs),
        only_lhs_db=_sqnr(near_a @ exact_b.t(), reference),
        only_rhs_db=_sqnr(exact_a @ near_b.t(), reference),
        both_db=_sqnr(near_a @ near_b.t(), reference),
        native_db=_sqnr(y, reference),
        row_p50_db=_row_sqnr(y, reference),
        emulated=not records[0].native and not records[0].accumulator,
        accumulator=records[0].accumulator,
        promoted_db=_promoted(a_q, b_q, cells.accumulator, reference),
    )


def _promoted(a: QuantizedTensor, b: QuantizedTensor, profile: Accumulator | None, reference: Tensor) -> float:
    if profile is None or profile.group is None or profile.promotion is not None:
        return math.nan
    slow = replace(profile, name=f"{profile.name} promoted", promotion=-(-PROMOTION // profile.group) * profile.group)
    return _sqnr(gemm(a, b, out_dtype=torch.float32, accumulator=slow), reference)


def _scale(operands: GemmOperands, tensor: str, spec: QuantizationSpec) -> Tensor | None:
    return operands.scales.get(tensor) if spec.predicted else None


def _sqnr(y: Tensor, reference: Tensor) -> float:
    noise, signal = float((y - reference).double().square().sum()), float(reference.double().square().sum())
    return math.inf if noise == 0 else -10 * math.log10(noise / signal) if signal > 0 else math.nan


def _row_sqnr(y: Tensor, reference: Tensor) -> float:
    noise, signal = (y - reference).double().square().sum(1), reference.double().square().sum(1)
    ratio = (noise / signal)[signal > 0]
    middle = float(ratio.median()) if ratio.numel() else math.nan
    return math.inf if middle == 0 else -10 * math.log10(middle)


Target = Literal["gradient", "loss"]
_SPREAD = 0.5
"""If the worst layer has a smaller share, the error is spread."""
_NOTHING = 1e-6


@dataclass(frozen=True)
class Probe:
    """One replay with some cells on."""

    what: str
    """The cells that were on."""
    deviation: Deviation
    """Deviation from high precision everywhere."""

    @property
    def error(self) -> float:
        """See `Deviation`."""
        return self.deviation.error


@dataclass(frozen=True)
class Suspect:
    """The result of the bisection."""

    layer: str
    gemm: str
    """fprop, dgrad or wgrad."""
    tensor: str
    """Long name of the operand with the larger error."""
    direction: str
    """"row", or "col" if the GEMM takes its transpose."""
    spec: str
    cause: str
    """"quantization" or "accumulation"."""
    share_of_gemm: float
    """Share of the squared error of this GEMM in all layers."""
    share: float
    """Share of the squared error of the whole recipe."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the operand's cast in this batch."""

    @property
    def symbol(self) -> str:
        """Symbol of the operand: X, W.T, dY."""
        return symbol(self.tensor, self.direction)


@dataclass(frozen=True)
class BisectResult:
    """The result of a bisection, with all probes."""

    target: str
    """gradient or loss."""
    recipe: str
    reference_loss: float
    """Loss in high precision."""
    total: Deviation
    """Deviation of the whole recipe."""
    probes: tuple[Probe, ...]
    suspect: Suspect | None
    """None if the recipe changes nothing."""
    spread: bool
    """Whether the error is spread over many layers; the suspect is then only the worst of them."""
    gemms: tuple[GemmProbe, ...]
    """The GEMMs of the suspect's layer."""
    notes: tuple[str, ...]
    """Limits of these numbers."""

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.suspect is None:
            return f"{self.recipe} changes the {self.target} of this batch by less than 1e-6: nothing to find"
        s = self.suspect
        where = f"{s.layer} {s.gemm}, {s.cause} of {s.symbol} ({s.spec})"
        share = f"{100 * s.share:.0f} % of the recipe's squared error"
        if self.spread:
            worst = f"the worst, {where}, has only {share}"
            return f"the error is spread over many layers: {worst}; change the recipe, not one layer"
        return f"{where}: {share}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        suspect = None if self.suspect is None else {**asdict(self.suspect), "symbol": self.suspect.symbol}
        values = {
            "verdict": self.verdict,
            "target": self.target,
            "recipe": self.recipe,
            "reference_loss": self.reference_loss,
            "total": asdict(self.total),
            "suspect": suspect,
            "spread": self.spread,
            "probes": [{"what": p.what, **asdict(p.deviation)} for p in self.probes],
            "gemms": [probe.to_dict() for probe in self.gemms],
            "notes": list(self.notes),
        }
        return finite(values)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        probes = (Probe(f"all of {self.recipe}", self.total), *self.probes)
        width = max(len(probe.what) for probe in probes)
        lines = [self.verdict, "", f"{'on':{width}}  {'error':>8}  {'angle':>7}  {'loss':>10}"]
        for probe in probes:
            d = probe.deviation
            angle = f"{d.angle_deg:6.2f}°" if math.isfinite(d.angle_deg) else f"{'-':>7}"
            lines.append(f"{probe.what:{width}}  {d.error:8.4f}  {angle}  {d.loss:10.5f}")
        if self.gemms and self.suspect is not None:
            lines += ["", f"{self.suspect.layer}: SQNR of each GEMM's result in dB"]
            lines.append(f"{'gemm':6}  {'only lhs':>9}  {'only rhs':>9}  {'both':>9}  {'native':>9}  operands")
            for g in self.gemms:
                cells = "  ".join(f"{v:9.2f}" for v in (g.only_lhs_db, g.only_rhs_db, g.both_db, g.native_db))
                lines.append(f"{g.gemm:6}  {cells}  {g.lhs} x {g.rhs}")
        if self.suspect is not None and self.suspect.evidence:
            evidence = ", ".join(f"{name} {value:.4g}" for name, value in self.suspect.evidence.items())
            lines += ["", f"{self.suspect.symbol} of {self.suspect.layer}: {evidence}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def bisect(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    recipe: Recipe | str | None = None,
    *,
    target: Target = "gradient",
    random: Mapping[str, Tensor] | None = None,
    on_probe: Callable[[Probe], None] | None = None,
    accumulator: Accumulator | str | None = None,
) -> BisectResult:
    """Finds the cast that changes the gradient (or the loss) of one batch most.

    Args:
        model: a model with ottava layers. Nothing in it changes, see `replay`.
        batch, loss: loss(model, batch) -> scalar; it is called 10 to 25 times.
        recipe: the recipe to take apart; None: every layer's own.
        target: "gradient" (compares it with the gradient in high precision, parameter by parameter) or "loss" (finds
            fprop only, and less precisely: two faults may cancel in a loss).
        random: states of torch's generators at the start of every probe; None: the present states.
        on_probe: called with every probe when it ends.
        accumulator: the profile of the card in question, such as "hopper": GEMMs are summed as there, on any machine,
            so that step 4 tells its accumulator from quantization. None: the recipe's.
    Raises:
        ValueError: the model has no ottava layers, nothing is quantized, or the target is unknown.
    Edge cases: a recipe that leaves fprop in high precision does not change the loss. "High precision" is the precision
        of the model under ottava.autocast(enabled=False), BF16 for a BF16 model. With delayed scaling the probes use
        the present scales of the doors.

    Example:
        >>> import torch, ottava
        >>> generator = torch.manual_seed(0)
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
        >>> report = ottava.convert(model, "delayed")
        >>> scale = model[2].quantizers.input.scale.fill_(1e4)     # a scale that is far too large: clips
        >>> x = torch.randn(32, 64).bfloat16()
        >>> result = bisect(model, x, lambda net, batch: net(batch).float().square().mean())
        >>> result.suspect.layer, result.suspect.tensor, result.suspect.cause, result.spread
        ('2', 'input', 'quantization', False)
    """
    if target not in get_args(Target):
        raise ValueError(f"bisect: {unknown_name('target', target, get_args(Target))}")
    replay = Replay(model, batch, loss, random=random, target=target)
    asked = None if recipe is None else get_recipe(recipe)
    search = _Search(replay, asked, accumulator, on_probe or (lambda probe: None))
    with closing(search.made):
        return search.run()


class _Search:
    def __init__(
        self,
        replay: Replay,
        recipe: Recipe | None,
        accumulator: Accumulator | str | None,
        on_probe: Callable[[Probe], None],
    ) -> None:
        self.replay, self.recipe, self.on_probe = replay, recipe, on_probe
        self.profile = "" if accumulator is None else f" under {getattr(accumulator, 'name', accumulator)}"
        self.layers = ottava_layers(replay.model)
        self.cells = {n: recipe.for_layer(n) if recipe else layer.resolved for n, layer in self.layers.items()}
        if accumulator is not None:
            self.cells = {name: cells.under(accumulator) for name, cells in self.cells.items()}
        self.cells = {n: cells for n, cells in self.cells.items() if any(getattr(cells, g).quantized for g in GEMMS)}
        self.layers = {name: self.layers[name] for name in self.cells}  # not a head in high precision
        self.probes: list[Probe] = []
        self.notes: list[str] = []
        self.next: tuple[str, Iterable[str], Sequence[str]] = ("", (), ())  # what the next probe is, for `_probes`
        most = 6 + 2 * math.ceil(math.log2(max(1, len(self.cells))))
        self.made = progress(self._probes(), "bisecting", total=most, prints=True)
        if not self.cells:
            raise ValueError("bisect: this recipe quantizes no GEMM of any layer; give another one with recipe=")

    def run(self) -> BisectResult:
        self.reference: Outcome = self.replay.run(None)
        total = self.replay.compare(self.replay.run(self._recipe(self.layers, GEMMS)), self.reference)
        if total.error < _NOTHING:
            return self._result(total, None, spread=False, gemms=())
        gemm, gemm_error = self._worst_gemm()
        layer, error = self._worst_layer(gemm, gemm_error)
        side = self._worst_side(layer, gemm)
        cells: GemmRecipe = getattr(self.cells[layer], gemm)
        cause = self._cause(layer, gemm, error)
        spec = cells.lhs if side == "lhs" else cells.rhs
        assert spec is not None
        operands = self._operands(layer)
        gemms = tuple(probe_gemms(operands, self.cells[layer])) if operands is not None else ()
        complete = operands is not None and (gemm == "fprop" or operands.dy is not None)
        evidence = cast_evidence(operands, gemm, side, spec) if complete else {}
        tensor, direction = TENSOR_OF[gemm, side]
        share, of_gemm = _share(error, total.error), _share(error, gemm_error)
        suspect = Suspect(layer, gemm, tensor, direction, str(spec), cause, of_gemm, share, evidence)
        if gemms and all(probe.emulated for probe in gemms):
            self.notes.append(
                "this machine emulates the GEMMs with fp32 sums, so the probes say nothing about the accumulator of a "
                "tensor core; name that of your card, as in accumulator='hopper'"
            )
        self.notes += [
            _accumulation(layer, cause, probe) for probe in gemms if probe.gemm == gemm and probe.accumulator
        ]
        return self._result(total, suspect, spread=of_gemm < _SPREAD and len(self.layers) > 1, gemms=gemms)

    def _worst_gemm(self) -> tuple[str, float]:
        present = [g for g in GEMMS if any(getattr(cells, g).quantized for cells in self.cells.values())]
        if self.replay.target == "loss":
            present = ["fprop"]  # only fprop changes a loss
        errors = {g: self._probe(f"{g} in all {len(self.layers)} layers", self.layers, [g]).error for g in present}
        return max(errors.items(), key=lambda item: item[1])

    def _worst_layer(self, gemm: str, error: float) -> tuple[str, float]:
        """Halves the layers until one remains; returns it with its error."""
        names = [name for name, cells in self.cells.items() if getattr(cells, gemm).quantized]
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            probes = [self._probe(f"{gemm} of {_named(half)}", half, [gemm]) for half in halves]
            worse = int(probes[1].error > probes[0].error)
            names, error = halves[worse], probes[worse].error
        return names[0], error

    def _worst_side(self, layer: str, gemm: str) -> str:
        errors = {}
        for side in ("lhs", "rhs"):
            tensor, direction = TENSOR_OF[gemm, side]
            what = f"{gemm} of {layer}, only {symbol(tensor, direction)} quantized"
            with door_hooks(self.layers[layer], one_operand(gemm, tensor)):
                errors[side] = self._probe(what, [layer], [gemm]).error
        return "rhs" if errors["rhs"] > errors["lhs"] else "lhs"

    def _cause(self, layer: str, gemm: str, error: float) -> str:
        """ "accumulation" if the same operands, multiplied in high precision, give less than half the squared error."""
        with door_hooks(self.layers[layer], one_operand(gemm, None)):
            decoded = self._probe(f"{gemm} of {layer}, multiplied in high precision", [layer], [gemm])
        return "accumulation" if decoded.error**2 < 0.5 * error**2 else "quantization"

    def _operands(self, layer: str) -> Any:
        with captured(self.layers[layer]) as seen:
            self.replay.run(self._recipe(self.layers, GEMMS))
        return operands_of(seen)

    def _probe(self, what: str, layers: Iterable[str], gemms: Sequence[str]) -> Probe:
        self.next = what, layers, gemms
        self.probes.append(next(self.made))
        self.on_probe(self.probes[-1])
        return self.probes[-1]

    def _probes(self) -> Iterator[Probe]:
        while True:
            what, layers, gemms = self.next
            outcome = self.replay.run(self._recipe(layers, gemms))
            yield Probe(what, self.replay.compare(outcome, self.reference))

    def _recipe(self, layers: Iterable[str], gemms: Sequence[str]) -> Recipe:
        """A recipe with only these GEMMs of these layers on."""
        return spelled_out({name: self.cells[name] for name in layers}, gemms)

    def _result(
        self, total: Deviation, suspect: Suspect | None, *, spread: bool, gemms: tuple[GemmProbe, ...]
    ) -> BisectResult:
        name = self.recipe.name if self.recipe else "the layers' own recipes"
        names = {layer.recipe.name for layer in self.layers.values()}
        if self.recipe is None and len(names) == 1:
            (name,) = names
        name += self.profile
        loss, target = self.reference.loss, self.replay.target
        return BisectResult(target, name, loss, total, tuple(self.probes), suspect, spread, gemms, tuple(self.notes))


def _accumulation(layer: str, cause: str, probe: GemmProbe) -> str:
    """What the accumulator costs in the suspect's GEMM, and what to do about it."""
    text = (
        f"{probe.gemm} of {layer}: {probe.native_db:.1f} dB under {probe.accumulator}, {probe.both_db:.1f} dB in fp32"
    )
    if math.isfinite(probe.promoted_db):
        text += f", {probe.promoted_db:.1f} dB with a promotion to fp32 every {PROMOTION} products"
    if cause != "accumulation":
        return f"{text}; the accumulator is not the cause"
    if probe.promoted_db > probe.native_db:
        return f"{text}. Remedy: slow accumulation (fast_accum=False) in this GEMM, or a shorter promotion interval"
    return f"{text}. Remedy: a shorter promotion interval, a recipe with blocks along K, or this GEMM in BF16"


def _named(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{len(layers)} layers, {layers[0]} to {layers[-1]}"


def _share(part: float, whole: float) -> float:
    return min(1.0, (part / whole) ** 2) if whole > 0 else 0.0


Unit = tuple[str, str]
"""A layer and a GEMM; "" for all GEMMs of a layer of another package."""
_TRIALS, _SECONDS = 40, 20.0
_OPERANDS = 4
"""Sets up to this size are taken apart into operands."""


class Ablation:
    """A search among the casts of one program.

    Args:
        player: runs the program.
        casts: its casts, real ones.
        exact: the gradients without casts.
        error: the error with all of them.
        tail: as the shadow's.
    """

    def __init__(self, player: Player, casts: Casts, exact: Gradients, error: float, *, tail: bool) -> None:
        self.player, self.casts, self.exact, self.error, self.tail = player, casts, exact, error, tail
        self.trials = 0
        self._began = time.perf_counter()
        self._known: dict[tuple[frozenset[Unit], str], float] = {}

    def facts(self) -> dict[str, Any] | None:
        """Searches; the facts of its line in experiments.jsonl. None: nothing can be switched alone."""
        units = self._units()
        if len(units) < 2 and not self.casts.sites:
            return None
        kept = self._least(self._of_one_gemm(units), ())
        after = self._error(kept)
        parts = [self._operand(unit, kept) if len(kept) <= _OPERANDS else "" for unit in kept]
        return {
            "set": [
                {"site" if n in self.casts.sites else "layer": n, "gemm": g, "operand": o}
                for (n, g), o in zip(kept, parts, strict=True)
            ],
            "of": len(units),
            "complete": not self._spent,
            "error_before": self.error,
            "error_after": after if math.isfinite(after) else None,
            "trials": self.trials,
            "seconds": time.perf_counter() - self._began,
        }

    def _units(self) -> list[Unit]:
        units: list[Unit] = []
        for name, layer in self.casts.layers.items():
            if name in self.casts.recipes:
                units += [(name, gemm) for gemm in GEMMS if getattr(self.casts.recipes[name], gemm).quantized]
            elif is_torchao(layer):
                units.append((name, ""))
        return units + [(site, "") for site in self.casts.sites]

    def _of_one_gemm(self, units: Sequence[Unit]) -> list[Unit]:
        """The units of the GEMM whose absence is enough; all units if none is."""
        groups = {gemm: [unit for unit in units if unit[1] == gemm] for gemm in GEMMS}
        errors = {gemm: self._error(group) for gemm, group in groups.items() if group}
        best = min(errors, key=errors.__getitem__, default="")
        return groups[best] if errors and errors[best] < self.error / 2 else list(units)

    def _least(self, units: Sequence[Unit], off: Sequence[Unit]) -> list[Unit]:
        """A smallest part of these units that is enough together with those that are off."""
        if len(units) == 1 or self._spent:
            return list(units)
        one, other = units[: len(units) // 2], units[len(units) // 2 :]
        for half in (one, other):
            if self._error([*off, *half]) < self.error / 2:
                return self._least(half, off)
        first = self._least(one, [*off, *other])
        return [*first, *self._least(other, [*off, *first])]

    def _operand(self, unit: Unit, kept: Sequence[Unit]) -> str:
        """The operand whose exactness is enough, if all other members are off."""
        layer = self.casts.layers.get(unit[0])
        if not isinstance(layer, QuantizedLayer):
            return ""
        others = [other for other in kept if other != unit]
        errors = {}
        for side, left in (("lhs", "rhs"), ("rhs", "lhs")):
            exact, quantized = TENSOR_OF[unit[1], side][0], TENSOR_OF[unit[1], left][0]
            errors[exact] = self._error(others, layer=layer, gemm=unit[1], quantized=quantized)
        best = min(errors, key=errors.__getitem__)
        return best if errors[best] < self.error / 2 else "both"

    @property
    def _spent(self) -> bool:
        return self.trials >= _TRIALS or time.perf_counter() - self._began > _SECONDS

    def _error(
        self, off: Sequence[Unit], *, layer: QuantizedLayer | None = None, gemm: str = "", quantized: str = ""
    ) -> float:
        """The error with these casts off; and with one GEMM of one layer in which only one operand is quantized."""
        key = frozenset(off), f"{layer.name if layer else ''} {gemm} {quantized}"
        if key in self._known:
            return self._known[key]
        if self._spent:
            return math.inf
        self.trials += 1
        way = only_without(self.casts, set(off))

        @contextmanager
        def switched() -> Any:
            with way.switched(), nullcontext() if layer is None else door_hooks(layer, one_operand(gemm, quantized)):
                yield

        found = self.player.run(replace(way, switched=switched), tail=self.tail)
        error = compared(found.gradients, self.exact, None, self.player.parameters, lambda _: "")["error"]
        self._known[key] = math.inf if error is None else error
        return self._known[key]

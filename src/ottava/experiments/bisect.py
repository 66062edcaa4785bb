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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ottava.base.errors import unknown_name
from ottava.base.text import finite
from ottava.experiments.probe import PROMOTION, GemmProbe, captured, cast_evidence, operands_of, probe_gemms
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
from ottava.measure.layer_names import symbol
from ottava.numerics.accumulator import Accumulator
from ottava.recipe import GEMMS, TENSOR_OF, GemmRecipe, Recipe, get_recipe

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
    return _Search(replay, asked, accumulator, on_probe or (lambda probe: None)).run()


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
        outcome = self.replay.run(self._recipe(layers, gemms))
        probe = Probe(what, self.replay.compare(outcome, self.reference))
        self.probes.append(probe)
        self.on_probe(probe)
        return probe

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

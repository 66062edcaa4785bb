"""Automatic fallback: a layer whose casts are bad look after look gets finer scales or BF16, in the GEMMs that need it.

    bad for `patience` looks in a row  ->  for each GEMM concerned the cheapest candidate that is predicted (`what_if`)
    to clear every floor from this very look, else BF16  ->  verified, if a `verify` is given  ->  a proposal with its
    evidence, applied only in mode "apply"  ->  left alone for `cooldown` looks  ->  back to its own recipe once that is
    predicted to have been well for `recovery` looks in a row

Only recipes of layers change, never a parameter or an optimizer's state, and `revert` undoes it. A larger fallback is
not a better one (BioNeMo: the bad layer just moved), so at most `most` layers change in a look, worst first; verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.ambient import autocast
from ottava.debug import limits
from ottava.debug.analysis.what_if import Prediction, cell_cost, predict
from ottava.debug.remedy.guard import EventLog, Spike
from ottava.debug.remedy.replay import Loss, Replay, only_pattern, ottava_layers, spelled_out
from ottava.debug.remedy.snapshot import Snapshot, Stateful
from ottava.debug.run.reader import Table
from ottava.debug.run.schema import symbol
from ottava.errors import unknown_name
from ottava.formats import get_format
from ottava.recipe import CELL_OF, GEMMS, GemmRecipe, Recipe, get_recipe

Mode = Literal["propose", "apply"]
CANDIDATES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""Tried in the order of their cost; BF16 is the last resort."""


LIMITS = (
    limits.Limit("underflow_pct", "%", lambda fmt: limits.PERCENT["underflow_pct"][0], above=False),
    limits.Limit("overflow_pct", "%", lambda fmt: limits.PERCENT["overflow_pct"][1], above=False),
    limits.Limit("row_sqnr_p50_db", "dB", limits.warn_db, above=True),
)


@dataclass(frozen=True)
class Evidence:
    """One number that is bad."""

    tensor: str
    direction: str
    metric: str
    value: float
    threshold: float
    unit: str

    def __str__(self) -> str:
        where = symbol(self.tensor, self.direction)
        return f"{where} {self.metric} {self.value:.4g} {self.unit} (limit {self.threshold:g})"

    @property
    def severity(self) -> float:
        """How many times over the limit; decibels count as ratios of amplitudes."""
        if self.unit == "dB":
            return float(10 ** ((self.threshold - self.value) / 20))
        return self.value / self.threshold


@dataclass(frozen=True)
class Verdict:
    """What a verification said."""

    better: bool
    why: str


Verify = Callable[[nn.Module, "Proposal"], Verdict]


@dataclass(frozen=True)
class Proposal:
    """Other cells for some GEMMs of one layer, or the way back."""

    step: int
    layer: str
    before: str
    """Recipe that it ran."""
    changes: Mapping[str, str]
    """GEMM -> the recipe whose cells it gets."""
    recipe: Recipe
    """The whole of the layer's new recipe, for `adopt`."""
    evidence: tuple[Evidence, ...]
    """Empty for the way back."""
    predicted: tuple[Prediction, ...]
    """What the new cells would have done in this look."""
    verdict: Verdict | None = None
    applied: bool = False

    @property
    def gemms(self) -> tuple[str, ...]:
        """That change."""
        return tuple(self.changes)

    @property
    def to(self) -> str:
        """The changes as text: one recipe, or one for each GEMM."""
        names = list(dict.fromkeys(self.changes.values()))
        return names[0] if len(names) == 1 else ", ".join(f"{gemm} {name}" for gemm, name in self.changes.items())

    @property
    def patch(self) -> str:
        """The line that makes it permanent."""
        cells = ", ".join(f'{gemm}=get_recipe("{name}").{gemm}' for gemm, name in self.changes.items())
        return f'recipe.override("{only_pattern(self.layer)}", {cells})'

    @property
    def why(self) -> str:
        """The evidence as a sentence."""
        said = "; ".join(map(str, self.evidence)) or f"{self.to} is predicted to be well again"
        if not self.predicted:
            said += '; finer casts could not be predicted: watch with detail="blocks"'
        return f"{said}; {self.verdict.why}" if self.verdict is not None else said

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "step": self.step,
            "layer": self.layer,
            "gemms": list(self.gemms),
            "from": self.before,
            "to": self.to,
            "why": self.why,
            "evidence": [vars(one) for one in self.evidence],
            "predicted": [one.to_dict() for one in self.predicted],
            "verified": None if self.verdict is None else self.verdict.better,
            "applied": self.applied,
            "patch": self.patch,
        }

    def __str__(self) -> str:
        done = "applied" if self.applied else "proposed"
        changes = ", ".join(f"{gemm} {name}" for gemm, name in self.changes.items())
        return f"step {self.step}: {self.layer} {self.before} -> {changes} ({done}): {self.why}"


@dataclass
class _Watched:
    """What is remembered of one layer."""

    bad: int = 0
    good: int = 0
    quiet_until: int = 0
    """Number of the look up to which it is left alone."""
    own: Recipe | None = None
    """As before the fallback; None where there is none."""
    proposed: tuple[tuple[str, str], ...] = ()
    """What was proposed last, so that it is not said at every look."""


class Fallback:
    """Reads the statistics of a watched run and proposes, or applies, other recipes for layers that are badly cast.

    Args:
        model: with ottava layers.
        mode: "propose" changes nothing; "apply" does.
        candidates: recipes that may take over, any order; BF16 need not be named.
        verify: (model, proposal) -> Verdict; a proposal that it does not find better is not applied. `by_gradient` and
            `by_fork` make one.
        patience: looks in a row that must be bad.
        recovery: looks in a row in which the layer's own recipe must be predicted to clear, for the way back.
        cooldown: looks for which a layer is left alone after a change.
        most: layers that change in one look.
        log: where "fallback" events go; a `RunWriter` is one.
    Raises:
        ValueError: unknown mode or recipe, or a model without ottava layers.
    Edge cases: a layer that runs under an `ottava.autocast(recipe)` around the training takes that one, whatever its
        own is. A tensor in BF16 is cast nowhere, so nothing is known about it and there is no way back from BF16 but
        `revert`, unless the watch simulates recipes for it.

    Example:
        >>> import tempfile, torch, ottava
        >>> from ottava.debug.measure import measure
        >>> from ottava.debug.run.reader import Run
        >>> from ottava.debug.run.schema import SlotKey
        >>> from ottava.debug.run.writer import RunWriter
        >>> model = nn.Sequential(nn.Linear(256, 64))
        >>> report = ottava.convert(model, "tensorwise")
        >>> x = torch.randn(256, 256)
        >>> x[:2] *= 1e6                                              # massive tokens
        >>> key = SlotKey("0", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunWriter(folder) as writer:
        ...         writer.tally(1, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
        ...     look = Run.open(folder).table()
        >>> fallback = Fallback(model, mode="apply", patience=2)
        >>> fallback.on_look(1, look), [p.to for p in fallback.on_look(2, look)], str(model[0].resolved.fprop.lhs)
        ([], ['fprop rowwise, wgrad bf16'], 'E4M3[row, pow2]')
        >>> fallback.revert()
        ['0']
        >>> str(model[0].resolved.fprop.lhs)
        'E4M3[tensor]'
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: Mode = "propose",
        candidates: Sequence[Recipe | str] = CANDIDATES,
        verify: Verify | None = None,
        patience: int = 3,
        recovery: int = 20,
        cooldown: int = 10,
        most: int = 4,
        log: EventLog | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"Fallback: {unknown_name('mode', mode, get_args(Mode))}")
        self.model, self.mode, self.verify, self.log = model, mode, verify, log
        self.patience, self.recovery, self.cooldown, self.most = patience, recovery, cooldown, most
        self.candidates = sorted((get_recipe(one) for one in candidates), key=_cost)
        self.proposals: list[Proposal] = []
        """All so far, ways back too."""
        self._layers = ottava_layers(model)
        self._watched = {name: _Watched() for name in self._layers}
        self._looks = 0
        self._last: tuple[int, Table] | None = None

    @property
    def applied(self) -> dict[str, str]:
        """Layers that run something else than their own recipe now, and what."""
        changed = (name for name, watched in self._watched.items() if watched.own is not None)
        return {name: str(self._layers[name].resolved) for name in changed}

    def on_look(self, step: int, table: Table) -> list[Proposal]:
        """Takes in the statistics of one step, as real casts gave them; returns what is new."""
        self._looks += 1
        self._last = step, table
        found: list[Proposal] = []
        bad = self._bad(table)
        for name, watched in self._watched.items():
            watched.bad = watched.bad + 1 if name in bad else 0
            if name not in bad:
                watched.proposed = ()
        ready = [name for name in bad if self._ready(name) and self._watched[name].bad >= self.patience]
        ready.sort(key=lambda name: -max(one.severity for one in bad[name]))
        for name in ready[: self.most]:
            found += self._propose(step, name, bad[name], table)
        for name, watched in self._watched.items():
            if watched.own is not None and self._ready(name) and name not in bad:
                found += self._way_back(step, name, watched, table)
        self.proposals += found
        return found

    def on_spike(self, model: nn.Module, spike: Spike) -> list[Proposal]:
        """For `SpikeGuard(fallback=...)`: acts on what was bad in the last look, without patience."""
        if self._last is None:
            return []
        _, table = self._last
        bad = self._bad(table)
        ready = sorted(filter(self._ready, bad), key=lambda name: -max(one.severity for one in bad[name]))
        found = [p for name in ready[: self.most] for p in self._propose(spike.step, name, bad[name], table)]
        self.proposals += found
        return found

    def revert(self, layer: str | None = None) -> list[str]:
        """Gives a layer, or all of them, its own recipe back; the names of those that had another.

        Edge cases: predicted scales start again from the current one.
        """
        if layer is not None and layer not in self._watched:
            raise ValueError(f"revert: {unknown_name('layer', layer, self._watched)}")
        owned = {n: w.own for n, w in self._watched.items() if w.own is not None and layer in (None, n)}
        for name, own in owned.items():
            self._layers[name].adopt(own, name)
            self._watched[name] = _Watched(quiet_until=self._looks + self.cooldown)
        return list(owned)

    def _ready(self, layer: str) -> bool:
        return self._looks > self._watched[layer].quiet_until

    def _bad(self, table: Table) -> dict[str, list[Evidence]]:
        """Evidence by layer, from casts that were really made."""
        real = table.where(source="door", phase="full") if len(table) else table
        found: dict[str, list[Evidence]] = {}
        for limit in LIMITS:
            values = real.metric(limit.metric)
            for i, value in enumerate(values):
                fmt = get_format(str(real["format"][i]))
                if not limit.fails(value, fmt):
                    continue
                if real["layer"][i] in self._watched and (real["tensor"][i], real["direction"][i]) in CELL_OF:
                    place = str(real["tensor"][i]), str(real["direction"][i])
                    one = Evidence(*place, limit.metric, float(value), limit.limit(fmt), limit.unit)
                    found.setdefault(str(real["layer"][i]), []).append(one)
        return found

    def _propose(self, step: int, name: str, evidence: list[Evidence], table: Table) -> list[Proposal]:
        layer, watched = self._layers[name], self._watched[name]
        rows = table.where(layer=name)
        changes: dict[str, str] = {}
        cells: dict[str, Any] = {}  # GEMM -> GemmRecipe
        predicted: list[Prediction] = []
        for gemm, tensors in _concerned(evidence, rows).items():
            if not getattr(layer.resolved, gemm).quantized:
                continue
            for candidate in [*self._finer(layer.resolved, name, gemm), get_recipe("bf16")]:
                new: GemmRecipe = getattr(candidate.for_layer(name), gemm)
                one: dict[str, Any] = {gemm: new}
                said = predict(rows, [layer.recipe.override(only_pattern(name), **one)])
                said = [p for p in said if p.tensor in tensors and CELL_OF[p.tensor, p.direction][0] == gemm]
                # of what was not recorded nothing is predicted, so nothing clears; but BF16 casts nothing
                if all(p.clears for p in said) and (said or not new.quantized):
                    changes[gemm], cells[gemm] = candidate.name, new
                    predicted += said
                    break
        known = tuple(changes.items())
        if not changes or watched.proposed == known:
            return []
        watched.proposed = known
        recipe = layer.recipe.override(only_pattern(name), **cells)
        before = layer.resolved.name
        return [self._act(Proposal(step, name, before, changes, recipe, tuple(evidence), tuple(predicted)))]

    def _finer(self, own: Recipe, name: str, gemm: str) -> Iterator[Recipe]:
        """Candidates that cost more in this GEMM than what the layer has."""
        for candidate in self.candidates:
            if _cost(candidate.for_layer(name), [gemm]) > _cost(own, [gemm]):
                yield candidate

    def _way_back(self, step: int, name: str, watched: _Watched, table: Table) -> list[Proposal]:
        own = watched.own
        assert own is not None
        resolved, now = own.for_layer(name), self._layers[name].resolved
        changed = {gemm: own.name for gemm in GEMMS if getattr(resolved, gemm) != getattr(now, gemm)}
        predicted = tuple(predict(table.where(layer=name), [own]))
        tensors = {tensor for (tensor, _), (gemm, _) in CELL_OF.items() if gemm in changed}
        known = tensors <= {p.tensor for p in predicted if p.steps}
        watched.good = watched.good + 1 if known and all(p.clears for p in predicted) else 0
        if watched.good < self.recovery:
            return []
        proposal = Proposal(step, name, now.name, changed, own, (), predicted)
        return [self._act(proposal, back=True)]

    def _act(self, proposal: Proposal, *, back: bool = False) -> Proposal:
        if self.verify is not None:
            proposal = replace(proposal, verdict=self.verify(self.model, proposal))
        wanted = proposal.verdict is None or proposal.verdict.better
        if self.mode == "apply" and wanted:
            layer, watched = self._layers[proposal.layer], self._watched[proposal.layer]
            own = None if back else watched.own or layer.recipe
            layer.adopt(proposal.recipe, proposal.layer)
            self._watched[proposal.layer] = _Watched(own=own, quiet_until=self._looks + self.cooldown)
            proposal = replace(proposal, applied=True)
        elif not wanted or back:
            self._watched[proposal.layer].quiet_until = self._looks + self.cooldown
            self._watched[proposal.layer].good = 0
        if self.log is not None:
            facts = {"from": proposal.before, "to": proposal.to, "why": proposal.why, "applied": proposal.applied}
            self.log.event(
                proposal.step,
                "fallback",
                layer=proposal.layer,
                gemm=",".join(proposal.gemms),
                patch=proposal.patch,
                **facts,
            )
        return proposal


def by_gradient(batch: Any, loss: Loss, *, gain: float = 0.05) -> Verify:
    """A verification by one replayed batch: better if the error of the gradient falls by at least `gain` of itself.

    Args:
        batch: or a function that gives one when asked.
        loss: (model, batch) -> scalar. Nothing in the model is changed; see `replay`.
    """

    def verify(model: nn.Module, proposal: Proposal) -> Verdict:
        cells = {name: layer.resolved for name, layer in ottava_layers(model).items()}
        replay = Replay(model, batch() if callable(batch) else batch, loss)
        reference = replay.run(None)
        errors = []
        for own in (cells[proposal.layer], proposal.recipe.for_layer(proposal.layer)):
            outcome = replay.run(spelled_out({**cells, proposal.layer: own}))
            errors.append(replay.compare(outcome, reference).error)
        before, after = errors
        better = after <= before * (1 - gain) if proposal.evidence else after <= before * (1 + gain)
        return Verdict(better, f"gradient error {before:.4f} -> {after:.4f} on a replayed batch")

    return verify


def by_fork(
    optimizer: Optimizer,
    train_step: Callable[[Any], Tensor | float],
    batches: Callable[[], Sequence[Any]],
    *,
    extras: Sequence[Stateful] = (),
    tolerance: float = 0.0,
) -> Verify:
    """A verification by a short fork: the same batches are trained on with and without the change, then undone.

    Args:
        train_step: (batch) -> loss: all of a step; learning rates and schedulers too (then in `extras`). The fork runs
            between two steps of the training: gradients that wait are dropped.
        batches: gives those of the fork; 20 to 500 steps of training.
        tolerance: better if the mean loss of the second half ends at most so far above, relatively.
    """

    def verify(model: nn.Module, proposal: Proposal) -> Verdict:
        cells = {name: layer.resolved for name, layer in ottava_layers(model).items()}
        data = list(batches())
        start = Snapshot.take(model, optimizer, proposal.step, tuple(extras))
        means = []
        for own in (cells[proposal.layer], proposal.recipe.for_layer(proposal.layer)):
            try:
                with autocast(spelled_out({**cells, proposal.layer: own})):
                    losses = [float(train_step(one)) for one in data]
            finally:
                start.restore(model, optimizer, tuple(extras))
            half = losses[len(losses) // 2 :]
            means.append(sum(half) / len(half))
        before, after = means
        better = after <= before * (1 + tolerance)
        return Verdict(better, f"mean loss {before:.4f} -> {after:.4f} in a fork of {len(data)} steps")

    return verify


def _concerned(evidence: Sequence[Evidence], rows: Table) -> dict[str, set[str]]:
    """GEMM -> its tensors that are bad; x counts for x.T too where that was not cast on its own."""
    cast = set(zip(rows["tensor"], rows["direction"], strict=True))
    found: dict[str, set[str]] = {}
    for one in evidence:
        for direction in ("row", "col"):
            if direction == one.direction or (one.tensor, direction) not in cast:
                found.setdefault(CELL_OF[one.tensor, direction][0], set()).add(one.tensor)
    return {gemm: found[gemm] for gemm in GEMMS if gemm in found}


def _cost(recipe: Recipe, gemms: Sequence[str] = GEMMS) -> float:
    cells = [getattr(recipe, gemm) for gemm in gemms]
    return sum(cell_cost(cell.lhs) + cell_cost(cell.rhs) for cell in cells)

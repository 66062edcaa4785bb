"""Gives layers with bad casts finer scales or BF16 in the GEMMs that need it, and takes them back later.

    a layer is bad for `patience` looks in a row  ->  for each bad GEMM, `what_if` predicts from this look the cheapest
    candidate that clears every floor; if none does, BF16  ->  `verify` tests it, if given  ->  a proposal with its
    evidence, applied only in mode "apply"  ->  no change for `cooldown` looks  ->  back to the layer's own recipe once
    it is predicted to clear for `recovery` looks in a row

Only the recipes of layers change, never a parameter or an optimizer's state, and `revert` undoes it. More fallback is
not better (BioNeMo: the bad layer just moved), so at most `most` layers change in a look, worst first. Use `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.base.errors import need_known
from ottava.diagnose.what_if import Prediction, cell_cost, predict
from ottava.engine.autocast import autocast
from ottava.experiments.replay import Loss, Replay, only_pattern, ottava_layers, spelled_out
from ottava.experiments.snapshot import Snapshot, Stateful
from ottava.measure import limits
from ottava.measure.layer_names import symbol
from ottava.numerics.formats import get_format
from ottava.recipe import CELL_OF, GEMMS, GemmRecipe, Recipe, get_recipe
from ottava.record.reader import Table
from ottava.remedy.guard import EventLog, Spike

Mode = Literal["propose", "apply"]
CANDIDATES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""Tried in the order of cost; BF16 comes last."""
LIMITS = (
    limits.Limit("underflow_pct", "%", lambda fmt: limits.PERCENT["underflow_pct"][0], above=False),
    limits.Limit("overflow_pct", "%", lambda fmt: limits.PERCENT["overflow_pct"][1], above=False),
    limits.Limit("row_sqnr_p50_db", "dB", limits.warn_db, above=True),
)


@dataclass(frozen=True)
class Evidence:
    """One bad number."""

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
        """The value as a multiple of its limit; decibels count as ratios of amplitudes."""
        if self.unit == "dB":
            return float(10 ** ((self.threshold - self.value) / 20))
        return self.value / self.threshold


@dataclass(frozen=True)
class Verdict:
    """The result of a verification."""

    better: bool
    why: str


Verify = Callable[[nn.Module, "Proposal"], Verdict]


@dataclass(frozen=True)
class Proposal:
    """Other cells for some GEMMs of one layer, or its own cells again."""

    step: int
    layer: str
    before: str
    """The layer's recipe before."""
    changes: Mapping[str, str]
    """GEMM -> recipe of its new cells."""
    recipe: Recipe
    """The layer's new recipe, for `adopt`."""
    evidence: tuple[Evidence, ...]
    """Empty if the layer gets its own recipe back."""
    predicted: tuple[Prediction, ...]
    """Predictions for the new cells in this look."""
    verdict: Verdict | None = None
    applied: bool = False

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs that change."""
        return tuple(self.changes)

    @property
    def to(self) -> str:
        """The new recipes as text: one name, or one for each GEMM."""
        names = list(dict.fromkeys(self.changes.values()))
        return names[0] if len(names) == 1 else ", ".join(f"{gemm} {name}" for gemm, name in self.changes.items())

    @property
    def patch(self) -> str:
        """The line of code that makes the change permanent."""
        cells = ", ".join(f'{gemm}=get_recipe("{name}").{gemm}' for gemm, name in self.changes.items())
        return f'recipe.override("{only_pattern(self.layer)}", {cells})'

    @property
    def why(self) -> str:
        """The evidence as a sentence."""
        text = "; ".join(map(str, self.evidence)) or f"{self.to} is predicted to be good again"
        if not self.predicted:
            text += '; the run has no histograms to predict finer casts: watch with detail="blocks"'
        return f"{text}; {self.verdict.why}" if self.verdict is not None else text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "step": self.step,
            "layer": self.layer,
            "gemms": list(self.gemms),
            "from": self.before,
            "to": self.to,
            "why": self.why,
            "evidence": [vars(evidence) for evidence in self.evidence],
            "predicted": [prediction.to_dict() for prediction in self.predicted],
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
    """The state of one layer."""

    bad: int = 0
    good: int = 0
    quiet_until: int = 0
    """Last look of the cooldown."""
    own: Recipe | None = None
    """The layer's own recipe during a fallback; None without one."""
    proposed: tuple[tuple[str, str], ...] = ()
    """The last proposal, which is not repeated at every look."""


class Fallback:
    """Reads the statistics of a watched run and proposes, or applies, other recipes for layers with bad casts.

    Args:
        model: a model with ottava layers.
        mode: "propose" changes nothing; "apply" changes recipes.
        candidates: recipes to choose from, in any order; BF16 is always one.
        verify: (model, proposal) -> Verdict; only proposals that it finds better are applied. `by_gradient` and
            `by_fork` make one.
        patience: bad looks in a row before a change.
        recovery: looks in a row in which the layer's own recipe must be predicted to clear before it comes back.
        cooldown: looks without a change of the layer after a change.
        most: largest number of layers that change in one look.
        log: gets "fallback" events; a `RunWriter` is one.
    Raises:
        ValueError: the mode or a recipe is unknown, or the model has no ottava layers.
    Edge cases: an `ottava.autocast(recipe)` around the training overrules the recipes of layers. A tensor in BF16 has
        no casts to measure, so a layer leaves BF16 only by `revert`, unless the watch simulates recipes for it.

    Example:
        >>> import tempfile, torch, ottava
        >>> from ottava.measure.walk import measure
        >>> from ottava.record.reader import Run
        >>> from ottava.record.schema import SlotKey
        >>> from ottava.record.writer import RunWriter
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
        need_known("Fallback", "mode", mode, get_args(Mode))
        self.model, self.mode, self.verify, self.log = model, mode, verify, log
        self.patience, self.recovery, self.cooldown, self.most = patience, recovery, cooldown, most
        self.candidates = sorted(map(get_recipe, candidates), key=_cost)
        self.proposals: list[Proposal] = []
        """All proposals so far."""
        self._layers = ottava_layers(model)
        self._watched = {name: _Watched() for name in self._layers}
        self._looks = 0
        self._last: Table | None = None

    @property
    def applied(self) -> dict[str, str]:
        """Layer -> its present recipe, for layers that do not run their own."""
        changed = (name for name, watched in self._watched.items() if watched.own is not None)
        return {name: str(self._layers[name].resolved) for name in changed}

    def on_look(self, step: int, table: Table) -> list[Proposal]:
        """Reads the statistics of the real casts of one step; returns new proposals."""
        self._looks += 1
        self._last = table
        bad = self._bad(table)
        for name, watched in self._watched.items():
            watched.bad = watched.bad + 1 if name in bad else 0
            if name not in bad:
                watched.proposed = ()
        patient = {name: found for name, found in bad.items() if self._watched[name].bad >= self.patience}
        proposals = self._propose_worst(step, patient, table)
        for name, watched in self._watched.items():
            if watched.own is not None and self._ready(name) and name not in bad:
                proposals += self._way_back(step, name, watched, table)
        self.proposals += proposals
        return proposals

    def on_spike(self, model: nn.Module, spike: Spike) -> list[Proposal]:
        """For `SpikeGuard(fallback=...)`: acts on the bad layers of the last look, without patience."""
        if self._last is None:
            return []
        proposals = self._propose_worst(spike.step, self._bad(self._last), self._last)
        self.proposals += proposals
        return proposals

    def revert(self, layer: str | None = None) -> list[str]:
        """Gives a layer, or all layers, their own recipe back; returns the names of those that had another.

        Edge cases: predicted scales start again from the current scale.
        """
        need_known("revert", "layer", layer, (None, *self._watched))
        owned = {n: w.own for n, w in self._watched.items() if w.own is not None and layer in (None, n)}
        for name, own in owned.items():
            self._layers[name].adopt(own, name)
            self._watched[name] = _Watched(quiet_until=self._looks + self.cooldown)
        return list(owned)

    def _ready(self, layer: str) -> bool:
        return self._looks > self._watched[layer].quiet_until

    def _bad(self, table: Table) -> dict[str, list[Evidence]]:
        """Layer -> evidence, from real casts."""
        real = table.where(source="door", phase="full") if len(table) else table
        bad: dict[str, list[Evidence]] = {}
        for limit in LIMITS:
            for i, value in enumerate(real.metric(limit.metric)):
                name, tensor, direction, fmt = (str(real[key][i]) for key in ("layer", "tensor", "direction", "format"))
                known = name in self._watched and (tensor, direction) in CELL_OF
                if known and limit.fails(value, own := get_format(fmt)):
                    number = Evidence(tensor, direction, limit.metric, float(value), limit.limit(own), limit.unit)
                    bad.setdefault(name, []).append(number)
        return bad

    def _propose_worst(self, step: int, bad: Mapping[str, list[Evidence]], table: Table) -> list[Proposal]:
        """Proposals for the `most` worst layers that are not in their cooldown."""
        ready = sorted(filter(self._ready, bad), key=lambda name: -max(evidence.severity for evidence in bad[name]))
        return [p for name in ready[: self.most] for p in self._propose(step, name, bad[name], table)]

    def _propose(self, step: int, name: str, evidence: list[Evidence], table: Table) -> list[Proposal]:
        layer, watched = self._layers[name], self._watched[name]
        rows = table.where(layer=name)
        changes: dict[str, str] = {}
        cells: dict[str, Any] = {}  # GEMM -> GemmRecipe
        predicted: list[Prediction] = []
        for gemm, tensors in _concerned(evidence, rows).items():
            if not getattr(layer.resolved, gemm).quantized:
                continue
            now = _cost(layer.resolved, [gemm])
            finer = (one for one in self.candidates if _cost(one.for_layer(name), [gemm]) > now)
            for candidate in [*finer, get_recipe("bf16")]:
                new: GemmRecipe = getattr(candidate.for_layer(name), gemm)
                change: dict[str, Any] = {gemm: new}
                outcome = predict(rows, [layer.recipe.override(only_pattern(name), **change)])
                outcome = [p for p in outcome if p.tensor in tensors and CELL_OF[p.tensor, p.direction][0] == gemm]
                # without histograms there is no prediction and nothing clears, except for BF16, which casts nothing
                if all(p.clears for p in outcome) and (outcome or not new.quantized):
                    changes[gemm], cells[gemm] = candidate.name, new
                    predicted += outcome
                    break
        if not changes or watched.proposed == tuple(changes.items()):
            return []
        watched.proposed = tuple(changes.items())
        recipe = layer.recipe.override(only_pattern(name), **cells)
        before = layer.resolved.name
        return [self._act(Proposal(step, name, before, changes, recipe, tuple(evidence), tuple(predicted)))]

    def _way_back(self, step: int, name: str, watched: _Watched, table: Table) -> list[Proposal]:
        own = watched.own
        assert own is not None
        resolved, now = own.for_layer(name), self._layers[name].resolved
        changed = {gemm: own.name for gemm in GEMMS if getattr(resolved, gemm) != getattr(now, gemm)}
        predicted = tuple(predict(table.where(layer=name), [own]))
        tensors = {tensor for (tensor, _), (gemm, _) in CELL_OF.items() if gemm in changed}
        complete = tensors <= {p.tensor for p in predicted if p.steps}
        watched.good = watched.good + 1 if complete and all(p.clears for p in predicted) else 0
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
            facts = {"layer": proposal.layer, "gemm": ",".join(proposal.gemms), "patch": proposal.patch}
            facts |= {"from": proposal.before, "to": proposal.to, "why": proposal.why}
            self.log.event(proposal.step, "fallback", **facts, applied=proposal.applied)
        return proposal


def by_gradient(batch: Any, loss: Loss, *, gain: float = 0.05) -> Verify:
    """Verifies by replaying one batch: better if the error of the gradient falls by at least the share `gain`.

    Args:
        batch: a batch, or a function that returns one.
        loss: (model, batch) -> scalar. Nothing in the model changes, see `replay`.

    Example:
        >>> import torch, ottava
        >>> model = ottava.convert(nn.Sequential(nn.Linear(64, 64)), "tensorwise").model
        >>> verify = by_gradient(torch.randn(8, 64), lambda model, batch: model(batch).square().mean())
        >>> Fallback(model, mode="apply", verify=verify).mode
        'apply'
    """

    def verify(model: nn.Module, proposal: Proposal) -> Verdict:
        replay = Replay(model, batch() if callable(batch) else batch, loss)
        reference = replay.run(None)
        before, after = (replay.compare(replay.run(one), reference).error for one in _sides(model, proposal))
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
    """Verifies by a short fork: trains on the same batches with and without the change, and undoes both.

    Args:
        train_step: (batch) -> loss; does a whole step, with learning rates and schedulers (list these in `extras`). The
            fork runs between two steps of the training and drops waiting gradients.
        batches: returns the batches of the fork, 20 to 500.
        extras: objects with a state_dict that a step changes.
        tolerance: the mean loss of the second half may be higher by this share and still count as better.

    Example:
        >>> import torch, ottava
        >>> model = ottava.convert(nn.Sequential(nn.Linear(64, 64)), "tensorwise").model
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(batch):
        ...     optimizer.zero_grad()
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> verify = by_fork(optimizer, train_step, lambda: [torch.randn(8, 64) for _ in range(20)])
        >>> Fallback(model, mode="apply", verify=verify).mode
        'apply'
    """

    def verify(model: nn.Module, proposal: Proposal) -> Verdict:
        data = list(batches())
        start = Snapshot.take(model, optimizer, proposal.step, tuple(extras))
        means = []
        for recipe in _sides(model, proposal):
            try:
                with autocast(recipe):
                    losses = [float(train_step(batch)) for batch in data]
            finally:
                start.restore(model, optimizer, tuple(extras))
            half = losses[len(losses) // 2 :]
            means.append(sum(half) / len(half))
        before, after = means
        better = after <= before * (1 + tolerance)
        return Verdict(better, f"mean loss {before:.4f} -> {after:.4f} in a fork of {len(data)} steps")

    return verify


def _sides(model: nn.Module, proposal: Proposal) -> list[Recipe]:
    """The recipe of the model without the change, and with it."""
    cells = {name: layer.resolved for name, layer in ottava_layers(model).items()}
    return [spelled_out(cells), spelled_out({**cells, proposal.layer: proposal.recipe.for_layer(proposal.layer)})]


def _concerned(evidence: Sequence[Evidence], rows: Table) -> dict[str, set[str]]:
    """GEMM -> its bad tensors. x also counts for x.T, unless x.T has a cast of its own."""
    cast = set(zip(rows["tensor"], rows["direction"], strict=True))
    bad: dict[str, set[str]] = {}
    for number in evidence:
        for direction in ("row", "col"):
            if direction == number.direction or (number.tensor, direction) not in cast:
                bad.setdefault(CELL_OF[number.tensor, direction][0], set()).add(number.tensor)
    return {gemm: bad[gemm] for gemm in GEMMS if gemm in bad}


def _cost(recipe: Recipe, gemms: Sequence[str] = GEMMS) -> float:
    cells = [getattr(recipe, gemm) for gemm in gemms]
    return sum(cell_cost(cell.lhs) + cell_cost(cell.rhs) for cell in cells)

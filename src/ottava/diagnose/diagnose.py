"""Explains a run: what happened, what was tried, which law is broken, and what to do.

The answer is the first of these that holds: an operand that is not the cast of its tensor; an exact law of training
that is broken; an experiment that shows what the casts do; a fact in which the run differs from a good run; a
statistical law. FP8 is blamed only by an experiment. Where nothing could be tried, the answer says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.base.text import data_frame, finite, html_table, without_powers
from ottava.diagnose.calls import DATA, stale
from ottava.diagnose.difference import Difference, differences
from ottava.diagnose.facts import GROUP_SETTINGS, Facts
from ottava.diagnose.laws import LAWS, NEEDS, Broken, Law, broken
from ottava.diagnose.loss import Event, event
from ottava.diagnose.remedies import REMEDIES, ran, render
from ottava.diagnose.trials import Damage, Trial, behind, damage, forecast, judge, named, spoken, triage
from ottava.measure.layer_names import symbol
from ottava.recipe import GEMMS, RECIPES
from ottava.record.reader import Run, number_of
from ottava.record.schema import FAILED

CONFIDENCE: MappingProxyType[str, tuple[int, int]] = MappingProxyType(
    {"fp8": (315, 333), "difference": (226, 265), "law": (269, 346), "software": (20, 22), "suspect": (0, 1)}
)
"""Stage -> (right, asked): how often such a first answer was right at the first look at blind sets (docs/faults.md)."""
_ALWAYS = frozenset({"O1", "O2", "D3", "D6"})
"""Laws without which nothing trains, or something else than was meant."""
_OF_CASTS = frozenset({"O3", "O4", "O7", "O8", "R1"})
"""Laws that casts can break, too: a gradient that underflows is none."""
_MEANT = frozenset({"D1", "D3", "D4", "M4", "M6", "O7", "O13"})
"""Laws that may be broken on purpose even where something happens to the loss."""
_HEALTHY = 0.02  # update over weight
_COURSE = 12  # losses
_AS_FAR = 0.8  # of this run's error: two batches of one program part by less
_PLACES = ("trainer", "model_config", "arguments", "casting", "code", "cast", "setting", "optimizer", "parameter")
_NO_CAUSE = frozenset({"recipe", "weights", "batch"})
"""Differences that good runs have, too: another recipe, another seed."""


@dataclass(frozen=True)
class Evidence:
    """One number behind a finding."""

    layer: str
    tensor: str
    metric: str
    value: float | str
    unit: str
    step: int | None


@dataclass(frozen=True)
class Finding:
    """One answer."""

    id: str
    """Of the law; "FP8" for casts that hurt, "CHECK" for a wrong operand, "DIFF" for a difference."""
    title: str
    stage: str
    """fp8, suspect (a damaged cast, nothing tried), software, law or difference."""
    severity: str
    """critical, warning or note."""
    cause: str
    """What was seen, with its numbers."""
    tried: list[str] = field(default_factory=list)
    """What was tried and what came out."""
    layers: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """First step; [] if it holds for the whole run."""
    evidence: list[Evidence] = field(default_factory=list)
    remedies: list[dict[str, Any]] = field(default_factory=list)
    """{name, text, cost, patch, trial}: the best first."""
    confidence: tuple[int, int] | None = None
    """(right, asked): answers of this stage at first looks at blind sets; None: not measured."""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run."""

    verdict: str
    """critical, warning or none."""
    sentence: str
    """The answer, in one or two sentences."""
    fp8: str
    """What the experiments say of FP8: none (nothing cast), innocent, guilty or unknown."""
    event: str
    """What happened to the loss; "" if nothing did."""
    tried: list[str]
    """The experiments and what came out."""
    findings: list[Finding]
    notes: list[Finding]
    """What may be meant, or has no part in the event; severity "note"."""
    forecast: list[str]
    """If nothing cast: what FP8 would do."""
    questions: list[dict[str, Any]]
    """The triage tree: {id, question, answer, say, needs}."""
    untested: list[dict[str, str]]
    """Laws that lack data: {id, title, needs}."""
    tested: int
    coverage_pct: float
    """Share of the linear layers that the watch saw; NaN if unknown."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(finite(asdict(self)))

    def __repr__(self) -> str:
        return f"<Diagnosis {self.verdict}: {self.sentence}>"

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per finding and note."""
        return data_frame([asdict(one) for one in (*self.findings, *self.notes)])

    def _repr_html_(self) -> str:
        rows = [(one.severity, one.title, one.cause) for one in (*self.findings, *self.notes)]
        return html_table([("severity", "title", "cause"), *rows], self.sentence)

    def fails(self, on: str) -> bool:
        """Whether the worst finding is at least as severe as `on`.

        Example:
            >>> nothing = Diagnosis("warning", "", "none", "", [], [], [], [], [], [], 0, 100.0)
            >>> nothing.fails("critical"), nothing.fails("warning")
            (False, True)
        """
        order = ("none", "warning", "critical")
        return self.verdict != "none" and order.index(self.verdict) >= order.index(on)


def diagnose(run: Run, *, baseline: Run | None = None, framework: str | None = None) -> Diagnosis:
    """Explains a run.

    Args:
        run: the run folder.
        baseline: the same training in BF16, or a good run.
        framework: print changes for this one of `remedies.FRAMEWORKS`; None: for those that ran.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(f"{folder}/run") as writer:
        ...     writer.describe(cast={"ran": False})
        ...     for step in range(1, 13):
        ...         writer.step(step, loss=2.5, lr=0.0)
        ...     writer.flush()
        ...     answer = diagnose(Run.open(f"{folder}/run"))
        >>> answer.findings[0].title, answer.fp8
        ('The learning rate is 0', 'none')
    """
    facts, good = Facts(run), None if baseline is None else Facts(baseline)
    happened = event(facts.loss, None if good is None else good.loss, facts.guess)
    differ = [] if good is None else differences(good, facts)
    frameworks = ran(facts.frameworks, facts.packages) if framework is None else [framework]
    found, trial = _answers(facts, good, happened, differ, frameworks)
    known = _one_answer(found)
    findings = [f for f in known if f.severity != "note"]
    notes = [f for f in known if f.severity == "note"]
    passed = good is None and happened is not None and not happened.lasts and not findings
    if passed and happened is not None and facts.loss.only_a_batch(happened.step):
        happened = None
    if good is not None and (rates := good.column("lr")) is not None:
        each = [v for n, v in good.groups.items() if n.startswith("lr/")]
        alike = len(each) == sum(n.startswith("lr/") for n in facts.groups)
        schedule = np.nan_to_num(np.stack(each, 1) if len(each) > 1 and alike else rates).tolist()
        for remedy in (r for f in findings for r in f.remedies if r["name"] in ("good_lr", "good_rates")):
            remedy["trial"] = {"schedule": schedule}
            if remedy["name"] == "good_lr" and any(d.key == "lr" and d.good < 0.5 * np.nanmax(rates) for d in differ):
                remedy |= {"text": REMEDIES["good_schedule"].text, "patch": {}}
    lack = [law for law in LAWS if not facts.has(law.needs)]
    untested = [{"id": law.id, "title": law.title, "needs": NEEDS.get(law.needs, law.needs)} for law in lack]
    answer = Diagnosis(
        verdict=next((s for s in ("critical", "warning") if any(f.severity == s for f in findings)), "none"),
        sentence=_sentence(facts, findings, happened, trial, good is not None),
        fp8=trial.part,
        event="" if happened is None else happened.sentence,
        tried=[
            *trial.tried,
            *(f"Step {e['step']}: {e.get('why')}." for e in facts.experiments("refused") if e.get("of") == "trace"),
        ],
        findings=findings,
        notes=notes,
        forecast=forecast(facts) if facts.casts is False else [],
        questions=triage(facts, good, happened, trial),
        untested=untested,
        tested=len(LAWS) - len(untested),
        coverage_pct=facts.coverage,
    )
    told: Diagnosis = without_powers(answer)
    return told


def _answers(
    facts: Facts, good: Facts | None, happened: Event | None, differ: Sequence[Difference], frameworks: Sequence[str]
) -> tuple[list[Finding], Trial]:
    """All findings, the answer first, and the trial that stands beside them."""
    if any(d.kind == "recipe" for d in differ):  # a recipe that draws random numbers gives the script other batches
        differ = [d for d in differ if not (d.kind == "batch" and d.step not in (None, 1))]
    of_casts = any(d.kind in ("cast", "casting") for d in differ)  # there only the experiments speak of FP8
    trial = judge(facts, happened)
    if good is not None:
        trial = _of_cast(facts, trial, happened, differ) if of_casts else _parting(facts, trial, good)
        trial = _by_recipe(facts, good, happened, differ, _as_good(facts, good, happened, trial))
    hits = broken(facts, happened)
    kept = {} if good is None else {law.id: how for law, how in broken(good, None)}
    laws = [_law(law, how, happened, facts, frameworks) for law, how in hits]
    # what the good run breaks in the same places does not part the two
    same = [law.id in kept and {*how.where} <= {*kept[law.id].where} for law, how in hits]
    laws = [replace(f, severity="note") if alike else f for f, alike in zip(laws, same, strict=True)]
    exact = {law.id for law, how in hits if law.exact and how.grave}
    # with a good run beside, the place where the code parts is the answer, and a broken law may follow from it
    parted = any(d.kind in _PLACES[:6] for d in differ)
    placed = _differing([d for d in differ if parted and d.kind in _PLACES], happened, frameworks)
    led = {} if good is None or of_casts else _led([f for f in laws if f.id in exact], placed, kept)
    strong = [f for f in laws if f.id in exact - _OF_CASTS and f.id not in led]
    others = [f for f in laws if f.id in exact & _OF_CASTS and f.id not in led]
    others += _differing([d for d in differ if not (parted and d.kind in _PLACES)], happened, frameworks)
    others += [f for f in laws if f.id not in exact]
    first = [_checked(facts, frameworks), *(f for f in led.values() if f.id not in _OF_CASTS)]
    placed = [*(f for f in led.values() if f.id in _OF_CASTS), *placed]
    # casts that were tried only after the event may suffer from what made it; a flat loss has left nothing
    left = math.inf if happened is None or happened.kind == "flat" else happened.step
    after = trial.step is not None and trial.step >= left and not trial.sound
    known = [f for f in (*first, *strong, *others, *(() if of_casts else placed)) if f and f.severity != "note"]
    if happened is not None and after and trial.part == "guilty" and known:
        trial = behind(facts, happened.step, trial)
    # what is broken for certain since before the trials, of which the first are calm
    since = min((how.since for law, how in hits if law.id in exact and how.since is not None), default=None)
    if trial.part == "guilty" and trial.step is not None and since is not None and since < trial.step:
        cleared = behind(facts, since, trial, "The fault below began")
        trial = cleared if cleared.part == "innocent" else trial
    hurt = _fp8(facts, trial, happened, frameworks)
    if hurt is not None:
        hurt = _beside_good(hurt, facts, good, differ, frameworks)
    if trial.part == "guilty" and (of_casts or not after):
        found = [*first, *strong, hurt, *placed, *others]
    else:
        found = [*first, *placed, *strong, *([*others, hurt] if after else [hurt, *others])]
    if trial.part == "innocent" and any(f is not None and f.stage == "software" for f in found):
        trial = replace(trial, part="unknown")  # casts as they ran are healthy; their software is not
    return [finding for finding in found if finding is not None], trial


def _beside_good(
    hurt: Finding, facts: Facts, good: Facts | None, differ: Sequence[Difference], frameworks: Sequence[str]
) -> Finding:
    """Casts that hurt, with the place where the code parts from that of the good run, and with the good run's casts."""
    if (place := next((d for d in differ if d.kind in _PLACES[:6]), None)) is not None:
        hurt = hurt if place.sentence in hurt.cause else replace(hurt, cause=f"{hurt.cause} {place.sentence}")
        if place.kind == "cast" and good is not None and good.casts:  # the good run casts, too, and is healthy
            hurt = replace(hurt, remedies=[_undo(place, frameworks), *hurt.remedies])
    works = next(iter(good.recipes), "") if good is not None and "door" in {*good.table["source"]} else ""
    if works in RECIPES and works not in facts.recipes:
        hurt = replace(hurt, remedies=[_arm(works, "the good run does", frameworks), *hurt.remedies])
    return hurt


def _arm(name: str, came: str, frameworks: Sequence[str]) -> dict[str, Any]:
    """Another recipe, and what came of it."""
    values = {"name": name, "came": came, "code": f'ottava.convert(model, "{name}")'}
    return render("arm", values, frameworks, {"recipe": name} if name in RECIPES else None)


def _of_cast(facts: Facts, trial: Trial, happened: Event | None, differ: Sequence[Difference]) -> Trial:
    """The trial where a cast parts two runs, which nothing clears.

    All before it is equal, so the good run is the experiment in which this cast is another; of a cast that a shadow
    step has turned off it knows more.
    """
    tried = {str(site) for e in facts.experiments("shadow") for site in e.get("sites") or ()}
    one = next((d for d in differ if d.kind == "cast" and "float8_" in d.sentence), None)
    lasting = happened is not None and happened.lasts
    parts = one is not None and lasting and not any(d.kind == "weights" for d in differ)
    if trial.part == "guilty":
        return replace(trial, sound=trial.sound or parts)
    if one is not None and parts and not any(one.key in site for site in tried):
        said = f"{one.sentence} Up to this cast the two runs are equal, so the good run shows what it does."
        return Trial("guilty", (said,), one.step, place=({"site": one.key},), sound=True)
    untried = ("No experiment tried the casts that part the two runs.",) if trial.part == "none" else trial.tried
    return replace(trial, part="unknown", tried=untried)


def _parting(facts: Facts, trial: Trial, good: Facts) -> Trial:
    """The trial; but casts that move the good run's gradient as far are not what parts the two runs."""
    if trial.part != "guilty" or (beside := _as_far(good, trial)) is None:
        return trial
    # late in a good run its gradient is small, and any error is large beside it: steps of the same number are compared
    theirs, own = ({e["step"]: number_of(e.get("error")) for e in f.experiments("shadow")} for f in (good, facts))
    far = [theirs[step] >= _AS_FAR * own[step] for step in theirs.keys() & own.keys()]
    if far and 2 * sum(far) < len(far):
        return trial
    said = f"The casts of the good run move its gradient by {100 * beside.error:.3g} %"
    if far and not all(far):
        step = max(step for step in theirs.keys() & own.keys() if theirs[step] < _AS_FAR * own[step])
        said = f"{said}, but by {100 * theirs[step]:.3g} % at step {step}, where they are {100 * own[step]:.3g} % here."
        return replace(trial, part="unknown", tried=(f"{trial.tried[0]} {said}",), place=(), arms=())
    said = f"{said}, so they do not part the two runs."
    return replace(trial, part="innocent", tried=(f"{trial.tried[0]} {said}",), place=(), arms=())


def _as_far(good: Facts, trial: Trial) -> Trial | None:
    """The trial of the good run, if its casts move its gradient as far."""
    beside = judge(good, None)
    return beside if beside.part == "guilty" and beside.error >= _AS_FAR * trial.error else None


def _as_good(facts: Facts, good: Facts, happened: Event | None, trial: Trial) -> Trial:
    """The trial; casts are guilty if without them a run that left comes most of the way back, in every trial since.

    So its weights are as good, and what began later than the event would show in them.
    """
    if happened is None or happened.stays is None or trial.sound or (hurts := judge(facts, None)).part != "guilty":
        return trial
    at = dict(zip(good.loss.steps.tolist(), good.loss.loss.tolist(), strict=True))
    if (shared := good.beside(facts, "input_hash")) is not None:
        steps, a, b = shared
        at |= dict.fromkeys(steps[a != b].tolist(), math.nan)
    since = [e for e in facts.experiments("shadow") if e.get("mode") == "real" and e["step"] >= happened.step]
    rows = [
        (e["step"], *(number_of(e.get(k)) for k in ("loss", "loss_without")), at.get(e["step"], math.nan))
        for e in since
    ]
    above = [(n, x, y, z) for n, x, y, z in rows if x - z > max(good.loss.rise, _GAP * abs(z))]
    if not above or not all(x - y >= _MOST_OF * (x - z) for _, x, y, z in above):
        return trial
    step, x, y, z = above[-1]
    share = 100 * min((x - y) / (x - z), 1.0)
    said = (
        f"At step {step} the loss is {x:.3g} with casts, {y:.3g} without them and {z:.3g} in the good run: "
        f"casts make {share:.0f} % of the gap."
    )
    return replace(hurts, tried=(said, *hurts.tried), sound=True)


_GAP, _MOST_OF = 0.1, 2 / 3  # of the loss; of the gap


def _by_recipe(facts: Facts, good: Facts, happened: Event | None, differ: Sequence[Difference], trial: Trial) -> Trial:
    """The trial where two runs differ in their recipe alone: then the good run is an experiment that says who began."""
    recipe = next((d for d in differ if d.kind == "recipe"), None)
    lasting = happened is not None and happened.stays is not None
    if recipe is None or len(differ) > 1:
        return trial
    mine = damage(facts)
    if trial.part == "innocent" and mine.kind and not damage(good, [mine.layer]).kind:  # a loss may hide small rows
        said = f"{recipe.sentence} Nothing else does, and the good run's casts do not damage {mine.layer}."
        place = ({"layer": mine.layer},)
        return Trial("guilty", (said, *trial.tried), mine.step, place=place, hurts="tensor", sound=True)
    if trial.part != "unknown" or not lasting:
        return trial
    hurts = judge(facts, None)
    if hurts.part not in ("guilty", "unknown") or not hurts.error > 0:
        return trial
    if _as_far(good, hurts) is not None:
        return trial
    said = f"{recipe.sentence} Nothing else does, so the good run shows that the casts do it."
    return replace(hurts, part="guilty", tried=(said, *hurts.tried))


def _one_answer(found: Sequence[Finding]) -> list[Finding]:
    """Behind the first answer, what follows from it or is only statistical is a note."""
    exact = {law.id for law in LAWS if law.exact} | {"CHECK"}
    answer = next((f for f in found if f.severity != "note"), None)
    return [f if f is answer or f.id in exact else replace(f, severity="note") for f in found]


def _checked(facts: Facts, frameworks: Sequence[str]) -> Finding | None:
    """An operand that is not the cast of its tensor: a bug of software, whatever the loss does."""
    checks = list(facts.checks())
    if not checks:
        old = next(iter(stale(facts)), None)
        return None if old is None else Finding(
            "CHECK", "An FP8 copy of a weight is stale", "software", "critical", old.sentence,
            layers=[old.used.module] if old.used.module else [], tensors=["weight"], steps=[old.step],
            remedies=[render("renew", {}, frameworks)], confidence=CONFIDENCE.get("software"),
        )  # fmt: skip
    first = min(checks, key=lambda c: c["step"])
    layer, tensor, what = (str(first.get(k) or "") for k in ("layer", "tensor", "check"))
    where = f"{symbol(tensor)} of {layer}" if tensor else layer
    cause = f"The operand that the GEMM got for {where} is not the cast of its tensor ({what}), {len(checks)} times."
    proof = Evidence(layer, tensor, what, number_of(first.get("value")), "", int(first["step"]))
    return Finding(
        "CHECK", "An operand is not the cast of its tensor", "software", "critical", cause,
        layers=[layer] if layer else [], tensors=[tensor] if tensor else [], steps=[int(first["step"])],
        evidence=[proof], remedies=[render("software", {}, frameworks)], confidence=CONFIDENCE.get("software"),
    )  # fmt: skip


def _law(law: Law, how: Broken, happened: Event | None, facts: Facts, frameworks: Sequence[str]) -> Finding:
    late = happened is not None and how.since is not None and how.since > happened.step + 1
    # a loss that comes back asks for no cause that a number only suggests, and for no other if it was single batches
    if happened is not None and not happened.lasts:
        shown = how.shown and (law.exact or not facts.loss.only_a_batch(happened.step))
        late = late or not (shown or (law.exact and law.id != "O7"))
    if how.grave and law.id in _ALWAYS:
        severity = "critical"
    elif late or (not how.grave and (happened is None or not happened.lasts or law.id in _MEANT)):
        severity = "note"
    else:
        severity = "critical" if happened is not None and happened.stays is not None else "warning"
    lr = facts.at("lr", how.since if how.since is not None else math.inf)
    # a step that moves the median weight by 2 % of itself, where the updates are known
    ratio = float(how.numbers.get("update_ratio", math.nan))
    slower = lr * _HEALTHY / ratio if ratio > _HEALTHY else lr / 10
    values = {"lr": f"{slower:.2g}" if math.isfinite(slower) else "a tenth of it"}
    remedy, times = how.remedy or law.remedy, float(how.numbers.get("raise", math.nan))
    values |= {"raise": f"{times:.2g}", "raised": f"{times * lr:.2g}" if math.isfinite(times * lr) else "a larger lr"}
    loaded = next(iter(facts.of_kind("load")), {})
    values["prefix"] = str(loaded.get("theirs", "")).removesuffix(str(loaded.get("mine", "")))
    trials: dict[str, dict[str, Any]] = {
        "lower_lr": {"lr": slower / lr if lr > 0 else 0.1}, "zero_grad": {"clear": True},
        "raise_lr": {"lr": times}, "train": {"train": True}, "load": {"load": True}, "optimizer": {"hold": True},
    }  # fmt: skip
    return Finding(
        law.id, how.title or law.title, "law", severity, how.sentence, layers=list(how.where[:12]),
        steps=[] if how.since is None else [how.since],
        remedies=[render(remedy, values, frameworks, trials.get(remedy))], confidence=CONFIDENCE.get("law"),
    )  # fmt: skip


def _fp8(facts: Facts, trial: Trial, happened: Event | None, frameworks: Sequence[str]) -> Finding | None:
    """The casts hurt, as an experiment shows; or they may, where nothing could be tried."""
    if trial.part == "unknown" and facts.casts:
        return _suspect(facts, happened, frameworks)
    if trial.part != "guilty":
        return None
    sites = [str(p["site"]) for p in trial.place if p.get("site")]
    hurt = damage(facts, trial.layers, sites=sites)
    # the worst cast of the place says how; if it is healthy, so may be one before it
    hurt = hurt if hurt.kind or sites else damage(facts)
    place = named(trial.place) or hurt.layer
    title = "FP8 casts lose a tensor" if trial.hurts == "tensor" else f"FP8 casts hurt the {trial.hurts}"
    title = f"{title}: {place}" if place else title
    proof = [Evidence("", "", "gradient error", trial.error, "", trial.step)] if math.isfinite(trial.error) else []
    if hurt.kind:
        proof.append(Evidence(hurt.layer, hurt.tensor, hurt.metric, hurt.value, "", hurt.step))
    grave = happened is not None and (happened.stays is not None or not facts.loss.only_a_batch(happened.step))
    return Finding(
        "FP8", title, "fp8", "critical" if grave else "warning",
        " ".join(filter(None, (trial.tried[0], hurt.sentence))), tried=list(trial.tried[1:]),
        layers=trial.layers or ([hurt.layer] if hurt.layer else []),
        tensors=list(dict.fromkeys(str(p["operand"]) for p in trial.place if p.get("operand"))),
        steps=[] if trial.step is None else [trial.step], evidence=proof,
        remedies=_cures(facts, trial, hurt, frameworks), confidence=CONFIDENCE.get("fp8"),
    )  # fmt: skip


def _suspect(facts: Facts, happened: Event | None, frameworks: Sequence[str]) -> Finding | None:
    """The weaker answer: a recorded cast is damaged, and no experiment says what that does."""
    hurt = damage(facts, last=math.inf if happened is None else happened.step)
    if not hurt.kind or facts.experiments("shadow"):
        return None  # what an experiment could not decide, a statistic does not
    proof = Evidence(hurt.layer, hurt.tensor, hurt.metric, hurt.value, "", hurt.step)
    cause = f"{hurt.sentence} Nothing was tried, so this is no proof."
    # some recipes clip on purpose: a loss with a course, to which nothing lasting happened, says that it is no fault
    fine = np.isfinite(facts.loss.loss).sum() >= _COURSE and (happened is None or not happened.lasts)
    severity = "note" if fine else "warning"
    return Finding(
        "CAST", f"A cast is damaged: {symbol(hurt.tensor)} of {hurt.layer}", "suspect", severity, cause,
        layers=[hurt.layer], tensors=[hurt.tensor], steps=[] if hurt.step is None else [hurt.step], evidence=[proof],
        remedies=_cures(facts, Trial("unknown", ()), hurt, frameworks), confidence=CONFIDENCE.get("suspect"),
    )  # fmt: skip


def _cures(facts: Facts, trial: Trial, hurt: Damage, frameworks: Sequence[str]) -> list[dict[str, Any]]:
    """Remedies of damaged casts: those that were tried and cured first, with what they reached; then by the damage."""
    recipe = facts.recipes[0] if facts.recipes else "tensorwise"
    layers = trial.layers or ([hurt.layer] if hurt.layer else [])
    tried = [arm for arm in trial.arms if arm.get("inside")]
    cures = [_arm(arm["name"], f"the loss is {arm['loss']:.4g}", frameworks) for arm in tried]
    # whole layers: what hurts most in one step is not all that hurts in the others
    values = {
        "recipe": recipe,
        "names": ", ".join(layers[:4]) + (f" and {len(layers) - 4} more layers" if len(layers) > 4 else ""),
        "overrides": "".join(f'.override("{n}", "blockwise")' for n in layers),
        "off": "".join(f'.override("{n}", "bf16")' for n in layers),
        "quoted": ", ".join(f'"{n}"' for n in layers),
        "regex": "|".join(f"^{re.escape(n)}$" for n in layers),
        "gemms": ", ".join(GEMMS),
    }
    predicted = any(str(s) in ("delayed", "guarded") for s in facts.table["scaling"])
    kinds = ["current"] if predicted and hurt.kind in ("clipped", "flushed") else []
    kinds += ["high_precision"] if layers else []
    kinds += ["finer"] if layers and (hurt.kind in ("coarse", "flushed", "") or not predicted) else []
    sites = [str(p["site"]) for p in trial.place if p.get("site")]
    other = {"stored": "stored", "ranks": "wire", "outside": "outside", "site": "site", "function": "derivative"}
    kinds = next(([kind] for word, kind in other.items() if any(p.get(word) for p in trial.place)), kinds)
    values["site"] = ", ".join(map(spoken, sites or [str(p["outside"]) for p in trial.place if p.get("outside")]))
    trials: dict[str, dict[str, Any]] = {
        "site": {"sites": sites}, "derivative": {"derivatives": True}, "current": {"recipe": "tensorwise"},
        "finer": {"recipe": "blockwise", "layers": layers}, "high_precision": {"recipe": "bf16", "layers": layers},
    }  # fmt: skip
    rendered = {kind: render(kind, values, frameworks, trials.get(kind)) for kind in kinds}
    if math.isfinite(trial.cured) and (layers or sites):
        came = f"Without the worst of these casts the gradient's error falls to {100 * trial.cured:.3g} %."
        rendered["site" if sites else "high_precision"]["text"] += f" Tried: {came[0].lower()}{came[1:]}"
    return cures + list(rendered.values())


def _differing(differ: Sequence[Difference], happened: Event | None, frameworks: Sequence[str]) -> list[Finding]:
    """The differences from a good run, where something happened: what is set or computed otherwise first."""
    if happened is None:  # a fault that no loss shows is seen in the code; a setting changes what code is given
        places = [d for d in differ if d.kind in _PLACES[:6]]
        until = max((d.step or 0 for d in places), default=-1)
        makes = [d for d in differ if d.kind in ("setting", "optimizer") and (d.step or 0) <= until]
        return [_finding(d, "warning", frameworks) for d in (*makes, *places)]
    early = [d for d in differ if d.step is None or d.step <= happened.step]
    causes = [d for d in early if d.kind not in _NO_CAUSE]
    same_start = not any(d.kind == "weights" for d in differ)  # then no other seed explains other batches
    causes += [d for d in early if d.kind == "batch" and (same_start or d.step not in (None, 1))]
    # of all weights, or all batches, another seed is the usual reason; but a seed moves no loss from the first step on
    causes += [d for d in early if d.kind == "weights" and (d.good > 0 or happened.kind == "high")]
    weak = [d for d in early if d not in causes and d.kind != "recipe"]
    severity = "critical" if happened.stays is not None else "warning"
    return [*(_finding(d, severity, frameworks) for d in causes), *(_finding(d, "note", frameworks) for d in weak)]


def _finding(one: Difference, severity: str, frameworks: Sequence[str]) -> Finding:
    return Finding(
        "DIFF", _titled(one), "difference", severity, one.sentence, layers=list(one.where[:12]),
        steps=[] if one.step is None else [one.step], remedies=[_undo(one, frameworks)],
        confidence=CONFIDENCE.get("difference"),
    )  # fmt: skip


_KINDS = MappingProxyType(
    {
        "optimizer": ("The optimizer is not that of the good run", "good_setting"),
        "casting": ("The casts are not set as in the good run", "good_setting"),
        "trainer": ("The Trainer is not set as in the good run", "good_setting"),
        "model_config": ("The model is not configured as in the good run", "good_setting"),
        "arguments": ("The model is not called as in the good run", "good_call"),
        "code": ("The code parts from that of the good run", ""),
        "cast": ("A cast parts from that of the good run", ""),
        "parameter": ("The parameters are not those of the good run", "good_parameters"),
        "weights": ("The run begins with other weights than the good run", "good_weights"),
        "program": ("The loop does something else than in the good run", ""),
        "batch": ("The run sees other batches than the good run", "good_batch"),
        "labels": ("The inputs are those of the good run, and the labels are not", "good_labels"),
    }
)
"""Kind of a difference -> the title of the finding, and its remedy; "": the place says more."""


def _titled(one: Difference) -> str:
    if one.kind == "setting" and one.key == "lr" and one.good and one.bad:
        if (times := one.bad / one.good) > 1:
            return f"The learning rate is {times:.3g} times that of the good run"
        return f"The learning rate is {1 / times:.3g} times smaller than in the good run"
    title, _ = _KINDS.get(one.kind, ("", ""))
    return title or f"The {one.key.replace('_', ' ')} is not that of the good run"


def _led(laws: Sequence[Finding], placed: Sequence[Finding], kept: Mapping[str, Broken]) -> dict[str, Finding]:
    """Each broken law that the good run, which breaks those `kept`, does not break gravely, with the place where the
    code parts: the law says what the place does."""
    place = next((f for f in placed if f.severity != "note"), None)
    own = [f for f in laws if f.severity != "note" and not (f.id in kept and kept[f.id].grave)]
    found: dict[str, Finding] = {}
    if place is None:
        return found
    for f in own:
        said = {remedy["text"] for remedy in f.remedies}
        more = [remedy for remedy in place.remedies if remedy["text"] not in said]
        found[f.id] = replace(f, cause=f"{f.cause} {place.cause}", remedies=[*f.remedies, *more])
    return found


def _undo(one: Difference, frameworks: Sequence[str]) -> dict[str, Any]:
    values = {"key": one.key.replace("_", " "), "good": one.good, "bad": one.bad}
    if one.kind == "setting":
        values |= {k: f"{v:.6g}" for k, v in values.items() if isinstance(v, float)}
        trial = {"settings": {one.key: one.good}} if one.key in GROUP_SETTINGS[1:] else None
        whole = one.key == "lr" and not one.where
        name = "good_rates" if whole and one.group else "good_lr" if whole else "good_setting"
        return render(name, values, frameworks, None if one.where else trial)
    if one.kind in ("code", "cast") and one.good != one.bad:
        name = "missing_call" if one.bad == "nothing" else "own_call" if one.good == "nothing" else "good_call_here"
        return render(name, values | {"key": one.key}, frameworks)
    name = "optimizer" if one.kind == "parameter" and one.key == "held" else _KINDS.get(one.kind, ("", ""))[1]
    return render(name or ("good_data" if one.key == DATA else "good_code"), values, frameworks)


def _sentence(facts: Facts, findings: Sequence[Finding], happened: Event | None, trial: Trial, compared: bool) -> str:
    """The answer: the first finding, or that there is none; and what the experiments say of FP8."""
    count = len(facts.steps)
    last = int(facts.steps[-1]) if count else 0
    ended = facts.manifest.get("ended")
    end = f" The record stops after step {last}: the run did not end." if ended == "" else ""
    if isinstance(ended, str) and (why := ended.removeprefix(FAILED)) != ended:
        end = f" The watch ended after step {last} by an error of its own, and the training went on ({why})."
    elif ended not in (None, "", "closed"):
        end = f" The run ended after step {last} with {str(ended)[:120]}."
    if isinstance(left := facts.manifest.get("unfinished"), Mapping):
        end = f" The script ended in step {left.get('step')} before a backward: its {left.get('what')} is not finite."
    part = {
        "none": "No cast to FP8 was seen.",
        "innocent": "FP8 is innocent: " + (trial.tried[0] if trial.tried else ""),
        "unknown": "Whether FP8 has a part in it was not tried." if not trial.tried else f"FP8: {trial.tried[0]}",
        "guilty": "",
    }[trial.part]
    if findings:
        first = findings[0]
        more = "" if first.stage in ("fp8", "software") or not part else f" {part}"  # both are of casts
        return f"{first.title}. {first.cause}{more}{end}"
    if happened is not None and happened.kind == "leaves" and happened.stays is not None and not compared:
        meant = (
            "Harder data, another phase or a weight of the loss that grows do that, too: a good run beside would tell."
        )
        return f"No fault found in {count} steps. {happened.sentence} {meant} {part}{end}".replace("  ", " ")
    if happened is not None and (happened.stays is not None or compared or happened.kind == "flat"):
        return f"{happened.sentence} No law is broken, so the cause is not known. {part}{end}".replace("  ", " ")
    if not count:
        return f"The record has no step, so nothing is known of the run. {part}{end}"
    seen = "" if math.isnan(facts.coverage) else f" The watch saw {facts.coverage:.0f} % of the linear layers."
    steps = f"{count} step{'s' if count != 1 else ''}"
    return f"No fault found in {steps}. {part}{seen}{end}"

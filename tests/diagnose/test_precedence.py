"""A cause that came first explains what came later at its reach, and leads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ottava.diagnose.facts import context_of
from ottava.diagnose.fired import Fired
from ottava.diagnose.precedence import began, explained
from ottava.diagnose.rows import CastRows, StepRows
from ottava.diagnose.rules import Rule
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def rule(name: str, **fields: object) -> Rule:
    given: dict[str, object] = {"title": name, "stage": "numeric", "cause": "c", "refute_by": "r", "when": "step > 0"}
    return Rule(id=name, **{**given, **fields})  # type: ignore[arg-type]


def test_what_came_later_is_explained_within_reach(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.step(step, loss=1.0)
            for layer in ("a", "b"):
                key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                writer.tally(step, key, Tally())
    context = context_of(Run.open(tmp_path))
    casts, steps = CastRows(context), StepRows(context)
    at = {
        (slot.layer, int(step)): i for i, (slot, step) in enumerate(zip(casts.slots, casts.table["step"], strict=True))
    }

    def left(cause: Fired, *effects: Fired) -> dict[str, int]:
        return {hit.rule.id: len(hit.index) for hit in explained([*effects, cause])}

    def effect(name: str = "E", *places: tuple[str, int]) -> Fired:
        return Fired(rule(name), casts, np.array([at[place] for place in places]))

    everything = (("a", 1), ("a", 3), ("b", 3))
    for reach, kept in (("layer", 2), ("slot", 2), ("run", 1), ("everywhere", 0)):
        cause = Fired(rule("C", explains=["E"], reach=reach, over="casts"), casts, np.array([at["a", 2]]))
        assert left(cause, effect("E", *everything)).get("E", 0) == kept, reach
        assert cause.also == ["E E"]
    # an update reaches every cast of later steps
    lr = Fired(rule("C", explains=["E"], reach="run", over="steps", stage="training"), steps, np.array([1]))
    assert left(lr, effect("E", ("a", 1), ("a", 2), ("b", 3))) == {"C": 1, "E": 2}
    # the one that began first explains the other, not the other way round
    late = Fired(rule("L", explains=["E"], reach="run"), casts, np.array([at["b", 3]]))
    early = Fired(rule("E", explains=["L"], reach="run"), casts, np.array([at["a", 1]]))
    assert began(early) < began(late)
    assert left(late, early) == {"E": 1}


def test_what_a_twin_survived_explains_nothing(tmp_path: Path) -> None:
    """Both met the learning rate; the twin learned, and this run did not: the casts keep their finding."""
    for name, slope in (("run", 0.0), ("twin", 0.1)):
        with RunWriter(tmp_path / name) as writer:
            for step in range(1, 21):
                writer.step(step, loss=4.0 - slope * step)
                source = "door" if name == "run" else "hook"  # a BF16 twin has simulated casts
                key = SlotKey("a", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", source)
                writer.tally(step, key, Tally())
    run, twin = Run.open(tmp_path / "run"), Run.open(tmp_path / "twin")
    for baseline, kept in ((None, 1), (twin, 20), (run, 1)):
        context = context_of(run, baseline=baseline)
        lr = Fired(
            rule("C", explains=["E"], reach="run", over="steps", stage="training"), StepRows(context), np.array([0])
        )
        hits = explained([lr, Fired(rule("E"), CastRows(context), np.arange(20))])
        assert {hit.rule.id: len(hit.index) for hit in hits} == {"C": 1, "E": kept}

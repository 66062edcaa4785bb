"""The trainer under the watch, with the loss-spike guard, and with automatic fallback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import warm
from ottava.base.settings import ConfigError
from ottava.record.reader import Run
from ottava.train.loop import Trainer

from .test_loop import curve, saved_curve, tiny

POISONED = 30


def poisoned(trainer: Trainer) -> Trainer:
    """A trainer whose text is noise in one step."""
    honest = trainer.corpus.batch

    def batch(*, step: int, **sizes: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = honest(step=step, **sizes)
        if step == POISONED:
            targets = torch.randint_like(targets, 128, 256)
        return inputs, targets

    object.__setattr__(trainer.corpus, "batch", batch)  # frozen
    return trainer


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_watched_run_is_the_unwatched_one(recipe: str, tmp_path: Path) -> None:
    """Line for line, also when resumed; the folder holds the records of both."""
    bare = Trainer(tiny(f"recipe={recipe}"), tmp_path / "bare")
    bare.advance()
    config = tiny(f"recipe={recipe}", "watch={every: 3, triggers: {clipping: null}}")
    watched = Trainer(config, tmp_path / "watched")
    watched.advance(6)
    watched.close()
    resumed = Trainer(config, tmp_path / "watched", resume=True)
    resumed.advance()
    assert saved_curve(tmp_path / "watched") == saved_curve(tmp_path / "bare")
    run = Run.open(tmp_path / "watched")
    assert run.steps["step"].tolist() == list(range(1, 13))
    assert run.steps["loss"] == pytest.approx([record.loss for record in bare.history])
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 3, 6, 9, 12]
    assert run.manifest["config"]["recipe"] == recipe


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_loop import tiny
from ottava.train.loop import Trainer
for name, every in (("before", 100), ("after", 2)):
    settings = ("recipe=bf16", "watch={every: 1}", f"checkpoint.every={every}")
    Trainer(tiny(*settings), Path(sys.argv[1]) / name).advance(3)
os._exit(9)
"""


def test_a_kill_loses_nothing_that_a_checkpoint_holds_and_resumes_without_one(tmp_path: Path) -> None:
    """Killed before the first checkpoint, a watched run begins again in its folder; killed after one, the looks of the
    steps before it are on record."""
    assert warm.run(["-c", KILLED, str(tmp_path), str(Path(__file__).parent)]).returncode == 9
    assert set(Run.open(tmp_path / "after").table()["step"].tolist()) >= {1, 2}
    resumed = Trainer(tiny("recipe=bf16", "watch={every: 1}", "checkpoint.every=100"), tmp_path / "before", resume=True)
    resumed.advance()
    run = Run.open(tmp_path / "before")
    assert run.steps["step"].tolist() == sorted(set(run.table()["step"].tolist())) == list(range(1, 13))


def test_a_poisoned_batch_is_skipped_and_training_goes_on(tmp_path: Path) -> None:
    """The guard rewinds, finds the spike in high precision too, and leaves the batch out; the records follow."""
    settings = ("recipe=tensorwise", "steps=40", "optimizer.learning_rate=1e-2", "watch={every: 10}")
    trainer = poisoned(Trainer(tiny(*settings, "guard={every: 10, z: 8}"), tmp_path / "run"))
    records = trainer.advance(35)
    assert trainer._guard is not None
    assert [(spike.step, spike.cause) for spike in trainer._guard.spikes] == [(POISONED, "data")]
    assert [record.step for record in records] == [record.step for record in trainer.history] == list(range(1, 36))
    assert [record.step for record in trainer.history if math.isnan(record.loss)] == [POISONED]
    assert not trainer.diverged
    assert saved_curve(tmp_path / "run") == curve(trainer.history)
    trainer.save()
    trainer.close()
    resumed = Trainer(tiny(*settings, "guard={every: 10, z: 8}"), tmp_path / "run", resume=True)
    assert resumed.step == 35
    resumed.advance()
    assert resumed.done
    events = [event["kind"] for event in Run.open(tmp_path / "run").events]
    assert "spike" in events
    assert "rewind" in events


def test_a_guard_that_never_acts_changes_no_bit(tmp_path: Path) -> None:
    """A snapshot only reads."""
    bare, guarded = (
        Trainer(tiny("recipe=delayed", *more), tmp_path / name)
        for name, more in (("bare", ()), ("guarded", ("guard={every: 3}",)))
    )
    bare.advance()
    guarded.advance()
    assert curve(guarded.history) == curve(bare.history)


@pytest.mark.parametrize("mode", ["propose", "apply"])
def test_a_badly_cast_layer_falls_back(mode: str, tmp_path: Path) -> None:
    """A column of huge products before down_proj: proposed with evidence, applied only when asked."""
    trainer = Trainer(
        tiny("recipe=tensorwise", "steps=16", "watch={every: 1, sample: 1}", f"auto_fallback={mode}"), tmp_path / "run"
    )
    for name, parameter in trainer.model.named_parameters():
        if name.endswith("gate_up_proj.weight"):
            with torch.no_grad():
                parameter[0] *= 3e3
                parameter[parameter.shape[0] // 2] *= 3e3
    before = {n: m.resolved for n, m in trainer.model.named_modules() if hasattr(m, "resolved")}
    trainer.advance(14)
    trainer.close()
    events = [event for event in Run.open(tmp_path / "run").events if event["kind"] == "fallback"]
    assert events
    assert events[0]["layer"] == "layers.0.mlp.down_proj"
    assert {event["applied"] for event in events} <= {mode == "apply", False}
    assert "limit" in events[0]["why"]
    changed = {n for n, m in trainer.model.named_modules() if hasattr(m, "resolved") and m.resolved != before[n]}
    applied = {event["layer"] for event in events if event["applied"]}
    assert changed == applied
    assert bool(applied) == (mode == "apply")
    assert json.dumps(events)


def test_a_fallback_without_a_watch_is_refused() -> None:
    """Without a watch the fallback would see nothing."""
    with pytest.raises(ConfigError, match="needs a watch"):
        tiny("auto_fallback=propose")

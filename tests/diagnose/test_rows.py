"""Rows of conditions: which cast is where, and what its peers and its twin did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ottava.diagnose.conditions import Condition, Missing, evaluate
from ottava.diagnose.facts import context_of
from ottava.diagnose.rows import CastRows, StepRows
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def record(
    folder: Path, names: list[str], flushed: dict[str, int], steps: tuple[int, ...] = (1, 5), shift: float = 0
) -> Run:
    with RunWriter(folder) as writer:
        for step in range(1, 11):
            writer.step(step, loss=step + shift)
        for step in steps:
            for name in names:
                key = SlotKey(name, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                tally = Tally(n=100, n_nonzero=100, n_underflow=flushed.get(name, 0) * step, amax=1.0)
                writer.tally(step, key, tally)
    return Run.open(folder)


NAMES = [*(f"layers.{i}.fc1" for i in range(5)), "lm_head"]


def test_positions_and_peers(tmp_path: Path) -> None:
    rows = CastRows(context_of(record(tmp_path / "run", NAMES, {f"layers.{i}.fc1": i for i in range(5)})))
    first_look = rows.table["step"] == 1
    assert rows.positions()[first_look].tolist() == ["first", "inner", "inner", "inner", "last", "last"]
    peers = rows.peers(Condition.parse("underflow_pct > 0").comparisons[0].left)
    assert set(peers[first_look]) == {2.0}  # the median of blocks 1 to 3
    assert set(peers[~first_look]) == {10.0}


def test_both_ends_are_counted_and_a_head_is_both(tmp_path: Path) -> None:
    for flushed, ends in (
        ({"layers.0.fc1": 1}, 1.0),
        ({"layers.0.fc1": 1, "layers.4.fc1": 1}, 2.0),
        ({"lm_head": 1}, 2.0),
    ):
        rows = CastRows(context_of(record(tmp_path / str(flushed), NAMES, flushed)))
        assert set(rows.ends(Condition.parse("underflow_pct > 0").root)) == {ends}, flushed
    inner = CastRows(context_of(record(tmp_path / "inner", NAMES, {"layers.2.fc1": 1})))
    assert set(inner.ends(Condition.parse("underflow_pct > 0").root)) == {0.0}


def test_routers_are_asked_about_only_where_something_casts_them(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for layer, source in (("a.mlp.gate", "hook"), ("b.mlp.gate", "door"), ("a.mlp.experts.up_proj.1", "hook")):
            key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", source)
            writer.tally(1, key, Tally(n=1, n_nonzero=1, amax=1.0))
    context = context_of(Run.open(tmp_path))
    assert set(context.table["layer"]) == {"b.mlp.gate"}
    assert set(context.simulated["layer"]) == {"a.mlp.experts.up_proj.1"}, "it stays in BF16 beside what is cast"


def test_two_blocks_have_no_peers(tmp_path: Path) -> None:
    rows = CastRows(context_of(record(tmp_path / "run", NAMES[:2], {})))
    assert np.isnan(rows.peers(Condition.parse("amax > 0").comparisons[0].left)).all()


def test_the_twin_is_asked_at_its_nearest_look(tmp_path: Path) -> None:
    run = record(tmp_path / "run", NAMES[:1], {}, steps=(1, 4, 9))
    twin = record(tmp_path / "twin", NAMES[:1], {NAMES[0]: 1}, steps=(2, 10), shift=0.5)
    context = context_of(run, twin)
    left = Condition.parse("baseline(underflow_pct) > 0").comparisons[0].left
    values = evaluate(left, CastRows(context), set())
    assert values is not None
    assert values.tolist() == [2.0, 2.0, 10.0]
    losses = Condition.parse("loss - baseline(loss) == -0.5").ask(StepRows(context))[0]
    assert losses.tolist() == [1.0] * 10
    with pytest.raises(Missing, match="--baseline"):
        CastRows(context_of(run)).call("baseline", Condition.parse("amax > 0").comparisons[0].left)


def test_rank_spread_needs_ranks(tmp_path: Path) -> None:
    rows = CastRows(context_of(record(tmp_path / "run", NAMES[:1], {})))
    with pytest.raises(Missing, match="more than one rank"):
        rows.value("amax_rank_octaves")

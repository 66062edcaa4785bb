"""Every cell is a real row; of rows that share a cell the worst one stands for all, as its statistic goes bad."""

from itertools import pairwise

import numpy as np
import pytest

from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey
from ottava.report.grid import SCALES, Grid


def key(layer: str, tensor: str = "input", recipe: str = "tensorwise", direction: str = "row") -> SlotKey:
    return SlotKey(layer, tensor, direction, recipe, "E4M3", "tensor", "fp32", "current", "door")


def table(rows: list[tuple[int, SlotKey, dict[str, float]]]) -> Table:
    """Rows with finished numbers only."""
    columns = {name: np.array([getattr(k, name) for _, k, _ in rows], dtype=object) for name in SlotKey._fields}
    return Table(
        columns | {"step": np.array([s for s, _, _ in rows])}, Tally(n=np.zeros(len(rows))), [r for *_, r in rows]
    )


def test_cells_are_rows(small_run: Run) -> None:
    source = small_run.table()
    grid = Grid.of(source, 1000)
    assert grid.looks == [(step, step) for step in range(2, 25, 2)]
    for i, slot in enumerate(grid.slots):
        for look in range(len(grid.looks)):
            row = grid.row[i, look]
            assert SlotKey(*(source[name][row] for name in SlotKey._fields)) == slot
            assert source["step"][row] == grid.step[i, look] == grid.looks[look][0]
    for name in grid.values:
        assert np.array_equal(grid.values[name], source.metric(name)[grid.row], equal_nan=True)
    parts = {name for name in STATISTICS if name.startswith(("error_", "blocks_"))}  # need another detail
    assert set(STATISTICS) - set(grid.values) - parts <= {
        "scale_error_max",
        "scale_error_min",
        "scale_error_mean",
        "rank_spread",
    }


def test_column_of_several_looks_shows_the_worst_of_them() -> None:
    steps = range(10, 60, 10)
    grid = Grid.of(table([(s, key("fc2"), {"underflow_pct": 50.0 if s == 20 else 0.1, "amax": s}) for s in steps]), 2)
    assert grid.looks == [(10, 30), (40, 50)]
    assert grid.step.tolist() == [[20, 40]] or grid.step.tolist() == [[20, 50]]
    assert grid.values["underflow_pct"].tolist() == [[50.0, 0.1]]
    assert grid.values["amax"][0, 0] == 20  # of that very look


def test_worst_of_a_look_is_the_highest_level() -> None:
    rows = [
        (1, key("a"), {"underflow_pct": 0.2, "row_sqnr_p50_db": 31.0}),
        (1, key("b"), {"underflow_pct": 0.0, "row_sqnr_p50_db": 14.0}),
        (2, key("a"), {"kurtosis": 9.0}),
    ]
    grid = Grid.of(table(rows), 10)
    first, second = grid.worst_of_looks()
    assert first is not None
    assert (grid.slots[first.slot].layer, first.metric, first.value) == ("b", "row_sqnr_p50_db", 14.0)
    assert second is None  # kurtosis alone does not tell health
    assert grid.worst() == first


def test_groups_hold_every_cast_once_under_what_it_does(small_run: Run) -> None:
    grid = Grid.of(small_run.table(), 10)
    groups = grid.groups()
    members = [slot for group in groups for slot, _ in group["members"]]  # type: ignore[attr-defined]
    assert sorted(members) == list(range(len(grid.slots)))
    inputs = [(g["kind"], g["title"], [label for _, label in g["members"]]) for g in groups if g["tensor"] == "input"]  # type: ignore[attr-defined]
    assert inputs == [
        ("qkv", "layers.*.self_attn.qkv_proj", ["0", "1", "2"]),
        ("proj", "layers.*.self_attn.o_proj", ["0", "1", "2"]),
        ("fc1", "layers.*.mlp.gate_up_proj", ["0", "1", "2"]),
        ("fc2", "layers.*.mlp.down_proj", ["0", "1", "2"]),
    ]


def test_layers_count_as_numbers() -> None:
    grid = Grid.of(table([(1, key(f"h.{i}.fc1"), {"amax": 1.0}) for i in (10, 2, 0)]), 10)
    assert [slot.layer for slot in grid.slots] == ["h.0.fc1", "h.2.fc1", "h.10.fc1"]


def test_layers_without_a_number_keep_the_order_of_the_forward() -> None:
    grid = Grid.of(table([(1, key(name), {"amax": 1.0}) for name in ("stem", "body", "exit")]), 10)
    assert [slot.layer for slot in grid.slots] == ["stem", "body", "exit"]
    (group,) = grid.groups()
    assert (group["title"], group["members"]) == ("", [(0, "stem"), (1, "body"), (2, "exit")])


def test_empty_table_is_an_empty_grid() -> None:
    grid = Grid.of(table([]), 10)
    assert (grid.slots, grid.looks, dict(grid.values)) == ([], [], {})
    assert (grid.worst(), grid.worst_of_looks(), grid.groups()) == (None, [], [])


@pytest.mark.parametrize("most", [1, 3, 7])
def test_looks_are_cut_into_neighbours_without_overlap(small_run: Run, most: int) -> None:
    looks = Grid.of(small_run.table(), most).looks
    assert len(looks) == most
    assert all(a[1] < b[0] for a, b in pairwise(looks))
    assert (looks[0][0], looks[-1][1]) == (2, 24)


@pytest.mark.parametrize("name", SCALES)
def test_scale_goes_the_way_of_its_statistic(name: str) -> None:
    scale, worse = SCALES[name], STATISTICS[name].worse
    rising = scale.alarm > scale.calm
    assert worse == ("high" if rising != scale.below_format else "low")


@pytest.mark.parametrize("name", SCALES)
def test_levels_run_from_calm_to_alarm(name: str) -> None:
    scale, floor = SCALES[name], 31.5
    ends = np.array([scale.calm, scale.alarm])
    middle = np.sqrt(ends.prod()) if scale.log else ends.mean()
    values = np.array([ends[0], middle, ends[1]])
    levels = scale.levels(floor - values if scale.below_format else values, floor)
    assert levels == pytest.approx([0.0, 0.5, 1.0])
    assert np.isnan(scale.levels(np.nan, floor))

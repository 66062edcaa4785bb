"""Fields that are made when they are read: equal to those made at once, and nothing else is made."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa

from ottava.measure.tally import Tally, tally_fields
from ottava.record.schema import DenseColumns, LazyTally, MergedColumns, StoredColumns


def a_table(rows: int = 6, seed: int = 0) -> Tally:
    """Whole numbers in every field."""
    generator = np.random.default_rng(seed)
    shapes = {f.name: (rows, f.metadata["bins"]) if f.metadata["bins"] else (rows,) for f in tally_fields()}
    values: dict[str, Any] = {name: generator.integers(0, 100, shape).astype(float) for name, shape in shapes.items()}
    return Tally(**values)


def rows_of(tally: Tally, index: list[int]) -> dict[str, Any]:
    return {f.name: getattr(tally, f.name)[index] for f in tally_fields()}


def equal(lazy: Tally, values: dict[str, Any]) -> bool:
    return all(np.array_equal(getattr(lazy, name), value) for name, value in values.items())


def test_chosen_rows_are_those_rows() -> None:
    """Chosen twice, in any order, also none and repeatedly."""
    dense = a_table()
    lazy = LazyTally(DenseColumns(dense), np.arange(6))
    assert equal(lazy, rows_of(dense, list(range(6))))
    assert equal(lazy.take(np.array([4, 1, 1])), rows_of(dense, [4, 1, 1]))
    assert equal(lazy.take(np.array([4, 1, 5])).take(np.array([2, 0])), rows_of(dense, [5, 4]))
    assert lazy.take(np.array([], dtype=np.int64)).exponents.shape == (0, 1024)


def test_a_field_is_made_once_and_only_when_it_is_read() -> None:
    """A statistic of one field does not touch the others."""
    asked: list[str] = []

    class Counting(DenseColumns):
        def rows(self, name: str, index: Any) -> Any:
            asked.append(name)
            return super().rows(name, index)

    lazy = LazyTally(Counting(a_table()), np.arange(3))
    lazy.take(np.array([0]))
    assert asked == []
    assert lazy.n is lazy.n
    assert lazy.row_sqnr.shape == (3, 128)
    assert asked == ["n", "row_sqnr"]


def test_a_lazy_tally_is_a_tally() -> None:
    """Adds, compares and pickles as one."""
    dense = a_table()
    lazy = LazyTally(DenseColumns(dense), np.arange(6))
    assert lazy == dense
    assert (lazy + dense) == (dense + dense)
    assert pickle.loads(pickle.dumps(lazy)) == dense


def test_groups_merge_as_their_tallies_add() -> None:
    """Every field, for some of the groups, in another order."""
    dense = a_table()
    group = np.array([2, 0, 1, 0, 2, 2])
    lazy = LazyTally(MergedColumns(LazyTally(DenseColumns(dense), np.arange(6)), group), np.arange(3))
    for number in (2, 0):
        rows = [Tally(**rows_of(dense, [int(i)])) for i in np.flatnonzero(group == number)]
        whole = Tally(**{f.name: np.zeros((1, f.metadata["bins"])) for f in tally_fields("histogram")})
        for row in rows:
            whole += row
        one = lazy.take(np.array([number]))
        assert all(
            np.array_equal(np.ravel(getattr(one, f.name)), np.ravel(getattr(whole, f.name))) for f in tally_fields()
        )
    assert lazy.take(np.array([2, 0])).n.tolist() == [dense.n[group == 2].sum(), dense.n[group == 0].sum()]


def test_columns_that_a_file_lacks_are_those_of_an_empty_tally() -> None:
    """Written by an earlier version: no such field, absent lists, nothing at all."""
    stored = pa.table({"n": [3, 4], "below_row": pa.array([[1, 2], None], pa.list_(pa.int64()))})
    lazy = LazyTally(StoredColumns(stored), np.array([1, 0]))
    assert lazy.n.tolist() == [4, 3]
    assert np.isinf(lazy.amin).all()
    assert lazy.below_row[:, :3].tolist() == [[0, 0, 0], [1, 2, 0]]
    assert not lazy.exponents.any()
    nothing = LazyTally(StoredColumns(None), np.arange(0))
    assert nothing.n.shape == (0,)
    assert nothing.row_sqnr.shape == (0, 128)


def test_which_histograms_are_there_is_known_without_making_them() -> None:
    """In a file, in arrays, and merged over ranks."""
    lists = pa.array([[1, 2], None, [3], []], pa.list_(pa.int64()))
    stored = StoredColumns(pa.table({"n": [1, 1, 1, 1], "exponents": lists, "exponents_first": [4, 0, 5, 0]}))
    lazy = LazyTally(stored, np.array([3, 2, 1, 0]))
    assert lazy.filled("exponents").tolist() == [False, True, False, True]
    assert lazy.take(np.array([1, 1])).filled("exponents").tolist() == [True, True]
    assert lazy.filled("below_row").tolist() == [False] * 4
    whole = LazyTally(stored, np.arange(4))
    merged_ranks = LazyTally(MergedColumns(whole, np.array([1, 1, 2, 0])), np.array([0, 1, 2]))
    assert merged_ranks.filled("exponents").tolist() == [False, True, True]
    dense = LazyTally(DenseColumns(Tally(n=np.ones(2), exponents=np.eye(2, 1024, k=3))), np.arange(2))
    assert dense.filled("exponents").tolist() == [True, True]
    assert LazyTally(StoredColumns(None), np.arange(0)).filled("exponents").shape == (0,)
    assert np.array_equal(whole.filled("exponents"), whole.exponents.any(axis=1))

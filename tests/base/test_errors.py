"""Refusals name what was got, the nearest known name, and all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from ottava.base.errors import RefusesUnknownFields, need_known, need_type, unknown_name


@dataclass(frozen=True)
class Settings(RefusesUnknownFields):
    """Something with two fields, one of them obligatory."""

    margin: int
    amax_history_len: int = 16


def test_the_nearest_name_is_named() -> None:
    """One letter missing: the sentence offers the right name, then lists all."""
    assert unknown_name("recipe", "rowise", ("bf16", "rowwise")) == (
        "unknown recipe 'rowise'; did you mean 'rowwise'? known: bf16, rowwise"
    )


def test_equally_near_names_are_ordered_by_their_first_letters() -> None:
    """mes shares two of three letters in order with each of these names."""
    for names in (("mse", "rms", "lse"), ("rms", "lse", "mse")):
        assert "did you mean 'mse'?" in unknown_name("statistic", "mes", names)


def test_initials_are_a_name() -> None:
    """lr is learning_rate, though its letters are nearer to those of eps."""
    names = ("optimizer.eps", "optimizer.learning_rate", "optimizer.weight_decay")
    assert "did you mean 'optimizer.learning_rate'?" in unknown_name("setting", "optimizer.lr", names)
    assert "did you mean 'batch_size'?" in unknown_name("setting", "bs", ("steps", "batch_size"))


@pytest.mark.parametrize("got", ["ROWWISE", "Rowwise", "rOwWiSs"])
def test_case_does_not_hide_the_nearest_name(got: str) -> None:
    """The name asked for is shown as it was written, the known one as it is known."""
    assert unknown_name("recipe", got, ("bf16", "rowwise")).startswith(
        f"unknown recipe {got!r}; did you mean 'rowwise'"
    )


@pytest.mark.parametrize("got", ["zzz", 5, None])
def test_nothing_is_guessed_where_nothing_is_near(got: object) -> None:
    """A name far from all others gets the list only."""
    assert unknown_name("recipe", got, ("bf16", "rowwise")) == f"unknown recipe {got!r}; known: bf16, rowwise"


@pytest.mark.parametrize("got", [{}, [1], ([],), {1}, 5, 1.5, True])
def test_what_is_no_name_is_unknown(got: object) -> None:
    """From a file may come anything; a set or a mapping of names would ask it for its hash."""
    for known in (("fp8",), {"fp8"}, {"fp8": 1}):
        with pytest.raises(ValueError, match=r"^x: unknown method .* known: fp8$"):
            need_known("x", "method", got, known)


def test_unknown_fields_are_refused_with_the_nearest() -> None:
    """TransformerEngine takes amax_history_length and keeps 1024."""
    with pytest.raises(TypeError, match="unknown field 'amax_history_length'; did you mean 'amax_history_len'"):
        Settings(margin=0, amax_history_length=4)  # type: ignore[call-arg]


def test_known_fields_are_taken() -> None:
    """By position and by name; dataclasses' own complaints stay."""
    assert Settings(1, amax_history_len=2) == Settings(margin=1, amax_history_len=2)
    with pytest.raises(TypeError, match="missing"):
        Settings()  # type: ignore[call-arg]


def test_kinds_are_told_apart_as_people_do() -> None:
    for got, kind in ((1, int), (True, bool), ("x", str), ([1], Sequence), ({}, Mapping)):
        need_type("a field", got, kind)
    for got, kind, said in (
        (True, int, "a field is True; needs a whole number"),
        ("x", Sequence, "a field is 'x'; needs a list"),
        (1, bool, "a field is 1; needs true or false"),
        (5, Mapping, "a field is 5; needs a mapping"),
    ):
        with pytest.raises(TypeError, match=f"^{said}$"):
            need_type("a field", got, kind)

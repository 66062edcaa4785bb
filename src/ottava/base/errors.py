"""How ottava refuses: every message gives the wrong value, the needed one and the next step.

All rooms share these functions. `unknown_name` writes the sentence for an unknown name, with the nearest known one;
`need_known` raises it.
`need` refuses an argument of another type, and `need_type` a setting. `RefusesUnknownFields` gives a frozen dataclass a
constructor that refuses typos; TransformerEngine accepts `DelayedScaling(amax_history_length=16)` and keeps 1024.
`refuse_other_sums` stops a kernel that does not sum the requested fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps what torch or the training calls, so that an error in it does not end the training."""


def unknown_name(kind: str, got: object, known: Iterable[str]) -> str:
    """The sentence for an unknown name: the name, the nearest known one, and all known ones.

    Example:
        >>> unknown_name("recipe", "rowise", ("bf16", "rowwise"))
        "unknown recipe 'rowise'; did you mean 'rowwise'? known: bf16, rowwise"
    """
    by_folded = {name.casefold(): name for name in known}  # Rowwise is nearer to rowwise than to any other name
    word = str(got).casefold()

    def closeness(name: str) -> tuple[float, bool]:
        # initials are a name, too; the first letter decides between equally near ones: mes is mse rather than rms
        above, _, last = name.rpartition(".")
        initials = f"{above}." * bool(above) + "".join(part[:1] for part in last.split("_"))
        short = "_" in last and initials == word
        return float(short) or difflib.SequenceMatcher(None, name, word).ratio(), name[:1] == word[:1]

    nearest = max(by_folded, key=closeness, default="")
    hint = f"; did you mean {by_folded[nearest]!r}?" if nearest and closeness(nearest)[0] >= 0.5 else ";"
    return f"unknown {kind} {got!r}{hint} known: {', '.join(by_folded.values())}"


def need_known(
    caller: object, kind: str, got: object, known: Collection[str | None], error: type[Exception] = ValueError
) -> None:
    """Raises an error with the sentence of `unknown_name`, unless `got` is one of the known names.

    Example:
        >>> need_known("watch", "sink", "parket", ("parquet", "tensorboard"))
        Traceback (most recent call last):
        ValueError: watch: unknown sink 'parket'; did you mean 'parquet'? known: parquet, tensorboard
    """
    if not isinstance(got, str | None) or got not in known:  # a set asks for a hash, which lists lack
        sentence = unknown_name(kind, got, [name for name in known if name is not None])
        raise error(f"{caller}: {sentence}" if caller else sentence)


class PoisonError(ValueError):
    """Weights or states of an optimizer are not finite: a checkpoint of them would be no way back."""

    exit_code = 1


def need(caller: str, got: object, kind: type, needed: str = "a torch.nn.Module: the model itself") -> None:
    """Refuses an argument of another type.

    Raises:
        TypeError: the message names the caller, the argument's type, and the needed one.

    Example:
        >>> need("convert", None, list, "a list of layers")
        Traceback (most recent call last):
        TypeError: convert: got None; needs a list of layers
    """
    if isinstance(got, kind):
        return
    what = f"the class {got.__name__}, no object of it" if isinstance(got, type) else f"a {type(got).__name__}"
    raise TypeError(f"{caller}: got {'None' if got is None else what}; needs {needed}")


_WORDS = MappingProxyType(
    {Mapping: "a mapping", Sequence: "a list", str: "a text", int: "a whole number", bool: "true or false"}
)


def need_type(what: str, got: object, kind: type) -> None:
    """Raises TypeError if `got` has another type. A bool is no whole number here, and a text is no list.

    Example:
        >>> need_type("margin", True, int)
        Traceback (most recent call last):
        TypeError: margin is True; needs a whole number
    """
    mistaken = (bool, int) if kind is int else (str, Sequence)
    if not isinstance(got, kind) or (kind is mistaken[1] and isinstance(got, mistaken[0])):
        raise TypeError(f"{what} is {got!r}; needs {_WORDS.get(kind, kind.__name__)}")


def refuse_other_sums(kernel: str, asked: Mapping[str, int], summed: Mapping[str, int]) -> None:
    """Raises ValueError unless a kernel sums exactly the requested fields. Field -> bins, 0 for a number.

    Example:
        >>> refuse_other_sums("measure", {"sx": 0, "sx3": 0}, {"sx": 0})
        Traceback (most recent call last):
        ValueError: measure: the field 'sx3' is a number in measure/tally.py, but missing in the kernel; make them agree
    """
    for name in {**asked, **summed}:
        there, here = (
            {None: "missing", 0: "a number"}.get(bins, f"of {bins} bins")
            for bins in (asked.get(name), summed.get(name))
        )
        if there != here:
            raise ValueError(
                f"{kernel}: the field {name!r} is {there} in measure/tally.py, "
                f"but {here} in the kernel; make them agree"
            )


class RefusesUnknownFields:
    """Mixin for dataclasses: an unknown keyword raises TypeError that names the nearest field."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # __new__ sees the keywords before the dataclass's __init__, whose message names no field
        known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]  # every user is a dataclass
        made_by = next(one for one in cls.__mro__ if "__init__" in vars(one))
        own = "__dataclass_fields__" in vars(made_by)  # a subclass may have a constructor of its own
        for name in kwargs:
            if own and name not in known:
                raise TypeError(f"{cls.__name__}: {unknown_name('field', name, known)}")
        return super().__new__(cls)

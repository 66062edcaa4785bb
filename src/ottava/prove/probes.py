"""What calls on other operands show of a kernel that is wrong: it keeps something of a call before.

The same call runs again, after a call on other operands, and on operands that changed in place. Nothing is said where
the results stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.prove.codes import Allowed
from ottava.prove.hypotheses import Asked
from ottava.prove.judge import block_amax, cast_spec, expect
from ottava.prove.matrix import KernelCase


class Failure(NamedTuple):
    """A case whose results are wrong."""

    case: KernelCase
    got: Mapping[str, Tensor]
    """All results as float64."""
    wrong: Mapping[str, Tensor]
    """Where they are wrong; results without a wrong element are left out."""
    previous: Mapping[str, Any] | None = None
    """The inputs of the call before, of these shapes if there was one."""
    first: Mapping[str, Any] | None = None
    """The inputs of the first call of these shapes, if there was one."""
    latest: Mapping[str, Any] | None = None
    """The inputs of the call before, whatever its shapes."""
    allowed: Mapping[str, Allowed] | None = None
    """What the results may be."""
    call: Asked | None = None
    """What a hypothesis may look at; `explain` fills it in."""

    @property
    def size(self) -> int:
        """Numbers of all results."""
        return sum(x.numel() for x in self.got.values())

    def right(self, name: str) -> Tensor:
        """Right numbers of a result."""
        assert self.allowed is not None
        return self.allowed[name].right


Rerun = Callable[..., Failure | None]
"""(case, fill=, around=, plain=) -> the results of another call; None: it raises."""


def repeated(kind: str, what: Mapping[str, Any], failures: Sequence[Failure], rerun: Rerun) -> dict[str, str] | None:
    """What an earlier call changes; None: nothing."""
    try:
        said = next(_calls(kind, what, _usual(failures), rerun), None)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError):
        return None  # the kernel raises on such operands
    return None if said is None else dict(zip(("hypothesis", "sentence"), said, strict=True))


def _usual(failures: Sequence[Failure]) -> list[KernelCase]:
    """Wrong cases, those of ordinary finite numbers first, without numbers of an earlier call."""
    cases = [replace(one.case, before=None) for one in failures if one.size <= 1 << 15] or [failures[0].case]

    def odd(case: KernelCase) -> tuple[bool, ...]:
        finite = all(bool(x.float().isfinite().all()) and bool(x.any()) for x in case.inputs.values())
        return not case.plain, not finite, "normal" not in case.name

    return sorted(cases, key=odd)


def _changed(name: str, x: Tensor) -> Tensor:
    """An operand with other numbers: codes with the other sign, scales and numbers four times as large."""
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()
    y = torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    held = y.view(torch.uint8) if x.dtype.itemsize == 1 else y
    if x.dtype.itemsize > 1:
        held *= 4
    elif name.startswith("scale"):
        held.copy_((held.int() + 2).clamp(max=254))
    else:
        held ^= 8 if x.dtype == torch.uint8 and int(held.max()) < 16 else 128
    return y


def _calls(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Iterator[tuple[str, str]]:
    """(name, sentence)."""
    if _drawn(kind, what):
        return
    for case in cases[:2]:
        names = [name for name in case.inputs if name != "ends"]
        changed = {name: _changed(name, case.inputs[name]) for name in names}
        other = replace(case, inputs={**case.inputs, **changed})
        one, two, three, _, behind = (rerun(c) for c in (case, case, case, other, case))
        placed = rerun(replace(case, before=other.inputs)) if kind != "optimizer" else behind
        if one is None or two is None or three is None or behind is None or placed is None:
            continue
        for name, x in two.got.items():
            steps, right = (x - one.got[name], three.got[name] - x), two.right(name)
            near = 0.02 * right.abs() + 1e-6 * x.abs().nan_to_num().amax()
            if bool(steps[0].any()) and all(bool(((step - right).abs() <= near).all()) for step in steps):
                yield (
                    "added to earlier calls",
                    f"The same call again adds the right {name} to {name} of the call before",
                )
        if told := _unlike(two, three):
            chance = "it depends on earlier calls, or on chance"
            yield "not repeatable", f"The same call gives other numbers in {told} each time: {chance}"
        for late, when in ((behind, "after a call on other operands"), (placed, "if its operands change in place")):
            if told := _unlike(late, three):
                kept = _stale(kind, what, case, other, late, names)
                yield "kept of an earlier call", f"The same call gives other numbers in {told} {when}: {kept}"


def _drawn(kind: str, what: Mapping[str, Any]) -> bool:
    """Whether a call rounds at random."""
    spec = cast_spec(what) if kind == "cast" else None
    return "stochastic" in str(what.get("rounding") if spec is None else spec.rounding)


def _unlike(one: Failure, two: Failure) -> str:
    names = [n for n, x in one.got.items() if not torch.equal(x.nan_to_num(7.0), two.got[n].nan_to_num(7.0))]
    return " and ".join(names)


def _stale(
    kind: str, what: Mapping[str, Any], case: KernelCase, other: KernelCase, late: Failure, names: Sequence[str]
) -> str:
    """The input, or the scale, of the other call that gives the numbers."""
    ways: dict[str, dict[str, Any]] = {name: {} for name in names}
    if kind == "cast" and (spec := cast_spec(what)) is not None:
        amax = block_amax(other.inputs["x"], spec.granularity)
        ways = {"the amax": {"amax": amax}, "the result": {"x": other.inputs["x"]}}
    for name, knobs in ways.items() if late.wrong else ():
        inputs = {**case.inputs, name: other.inputs[name]} if not knobs else case.inputs
        allowed = expect(kind, inputs, what, None, **knobs)
        if not any(bool(one.wrong(late.got[n]).any()) for n, one in allowed.items() if n in late.wrong):
            return f"it uses {name} of the call before"
    return "something of the call before is kept"

"""Runs an adapter through its cases, and writes down what became of it.

Verdicts, the worst first: wrong, raises, within the proved bound (or: within the bound, where a factor of it is no
proof), exact, not tried. Results are "exact" where all are those of ottava's own reference.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import progress
from ottava.prove.adapters import KINDS, READ, KernelAdapter
from ottava.prove.codes import Allowed, numbers_of
from ottava.prove.expected import expect, result_format
from ottava.prove.explain import Failure, explain
from ottava.prove.hypotheses import Asked
from ottava.prove.judge import cast_spec
from ottava.prove.matrix import GUARD, Draws, KernelCase, buffer, cases, placed
from ottava.recipe import get_recipe

_KEPT = 8
"""Wrong cases that are kept for an explanation, the smallest."""
_LARGE = 1 << 17
_CHUNK = 1 << 24
"""FP32 inputs at a time: 64 MiB."""
_NESTED = "ottava_first_call"


@dataclass
class KernelCertificate:
    """What is known of an adapter."""

    adapter: str
    kind: str
    what: dict[str, Any]
    verdict: str = "not tried"
    cases: int = 0
    wrong: int = 0
    exact: int = 0
    refused: int = 0
    first: dict[str, Any] | None = None
    explained: dict[str, str] | None = None
    reason: str = ""
    refusals: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict not in ("wrong", "raises")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [f"{self.adapter}  {self.kind}  {self.verdict}" + (f": {self.reason}" if self.reason else "")]
        counts = {"cases": self.cases, "exact": self.exact, "wrong": self.wrong, "refused": self.refused}
        told = ", ".join(f"{count:,} {name}" for name, count in counts.items()) + f", {self.seconds:.1f} s"
        lines.append(f"  {told}")
        if self.first is not None:
            lines += [f"  first   {self.first['case']}", f"          {self.first['said']}"]
            lines += [f"          {name} = {value}" for name, value in self.first.get("inputs", {}).items()]
        if self.explained is not None:
            lines.append(f"  cause   {self.explained['hypothesis']}: {self.explained['sentence']}")
        lines += [f"  note    {note}" for note in self.notes]
        lines += [f"  refused {count} times: {text}" for text, count in self.refusals.items()]
        return "\n".join(lines)


class _Misbehaves(Exception):
    """What a call did that no number shows: (name, sentence)."""


def refusal(kind: str, what: Mapping[str, Any]) -> str | None:
    """Why an adapter cannot be tried; None if it can."""
    if kind == "optimizer" and what.get("rule", "adamw") != "adamw":
        return f"no reference for rule {what['rule']!r}; there is one for adamw"
    if kind == "attention" and what.get("recipe") not in (None, "bf16", "fp8"):
        return f"attention has recipes bf16 and fp8; got {what['recipe']}"
    if kind in ("encode", "decode"):
        result_format("encode", "codes", what)  # an unknown format is a bad call
    if kind not in ("cast", "gemm", "grouped", "linear"):
        return None
    recipe = get_recipe(what.get("recipe", "tensorwise"))
    rows = [recipe.fprop, recipe.dgrad, recipe.wgrad] if kind == "linear" else [recipe.fprop]
    specs = [cast_spec(what)] if kind == "cast" else [spec for row in rows for spec in (row.lhs, row.rhs)]
    if kind != "linear" and None in specs:
        return f"recipe {recipe.name} quantizes nothing there"
    known = [spec for spec in specs if spec is not None]
    if any(spec.transform is not None or spec.predicted or spec.block_scale != "amax" for spec in known):
        return f"recipe {recipe.name} rotates, predicts or searches for scales: there is no bound"
    return None


def certify(
    adapter: KernelAdapter,
    *,
    count: int = 100,
    seed: int = 0,
    device: str | torch.device = "cpu",
    everything: bool = False,
    listed: bool = True,
) -> KernelCertificate:
    """Runs `count` cases, and explains what is wrong; listed: those that are the same for every seed come first."""
    found = KernelCertificate(adapter.name, adapter.kind, dict(adapter.what))
    started = time.perf_counter()
    if unread := sorted(set(adapter.what) - set(READ[adapter.kind])):
        found.notes.append(f"not read: {', '.join(unread)}; {adapter.kind} reads {', '.join(READ[adapter.kind])}")
    if reason := refusal(adapter.kind, adapter.what):
        found.reason = reason
        return found
    kept: list[Failure] = []
    larger: list[Failure] = []
    passed: list[Failure] = []
    last: Mapping[str, Any] | None = None
    earlier: dict[Any, tuple[Mapping[str, Any], ...]] = {}  # the first call of these shapes, and the last
    largest = 0.0
    within, faults, refusals = 0, Counter[tuple[str, str]](), Counter[str]()
    with _dirty():
        drawn = cases(adapter.kind, adapter.what, count, Draws(seed, torch.device(device), listed))
        for case in progress(drawn, f"certifying {adapter.name}", total=count):
            found.cases += 1
            shapes = tuple((x.shape, x.dtype) for x in case.inputs.values())
            alike = earlier.get(shapes, ())
            latest, previous, last = last, (*alike[-1:], last)[0], case.inputs
            earlier[shapes] = (*alike[:1], case.inputs)
            before, largest = largest, max(largest, _amax(case.inputs))
            try:
                failure, exact = judged(adapter, case, call(adapter, case))
            except NotImplementedError as error:
                refusals[_short(error)] += 1
                continue
            except _Misbehaves as fault:
                faults[fault.args] += 1
                found.wrong += 1
                found.first = found.first or {"case": case.name, "said": fault.args[1]}
                continue
            except Exception as error:  # anything may come out of somebody's kernel
                said = f"{type(error).__name__}: {_short(error)}"
                if not case.plain:
                    refusals[said] += 1
                else:
                    faults["raises", said] += 1
                    found.first = found.first or {"case": case.name, "said": f"raises {said}"}
                continue
            begun = alike[0] if alike else None
            seen = Asked(adapter.kind, case.inputs, adapter.what, case.before or previous, begun, latest, before)
            failure = failure._replace(call=seen)
            if not failure.wrong:
                if len(passed) < _KEPT and failure.size < _LARGE:
                    passed.append(failure)
                found.exact += exact
                within += not exact
                continue
            found.wrong += 1
            if not kept and not any(name != "raises" for name, _ in faults):
                found.first = _first(adapter, failure)
            # a case of a few numbers fits many hypotheses
            kept = sorted([*kept, failure], key=lambda one: (one.size < 24, one.size))
            if len(kept) > _KEPT and (over := kept.pop()).size < _LARGE:
                larger = sorted([*larger, over], key=lambda one: one.size)[-2:]
        if everything and not found.wrong and not faults:
            kept += _every_float(adapter, found, torch.device(device))
        found.refusals, found.refused = dict(refusals.most_common(3)), sum(refusals.values())
        cause = partial(explain, adapter.kind, adapter.what, kept, passed, partial(rerun, adapter), larger)
        _conclude(found, faults, within, cause)
    found.seconds = time.perf_counter() - started
    return found


def _conclude(
    found: KernelCertificate, faults: Counter[tuple[str, str]], within: int, cause: Callable[[], dict[str, str] | None]
) -> None:
    """The verdict, and what explains it."""
    loud = [(name, said) for (name, said), _ in faults.most_common() if name != "raises"]
    if loud:
        found.verdict, found.explained = "wrong", {"hypothesis": loud[0][0], "sentence": loud[0][1]}
    elif found.wrong:
        found.verdict = "wrong"
        try:
            found.explained = cause()
        except Exception as error:  # of odd numbers; the verdict stands
            said = f"The search for a cause ended with {type(error).__name__}: {_short(error)}"
            found.explained = {"hypothesis": "not explained", "sentence": said}
    elif faults:
        name, said = faults.most_common(1)[0][0]
        text = f"{sum(faults.values())} of {found.cases} calls raise, first {said}"
        found.verdict, found.explained = "raises", {"hypothesis": name, "sentence": text}
    elif found.cases > found.refused:
        judged_by_factor = found.kind == "attention" or found.what.get("moments", "float32") not in ("float32", "fp32")
        bound = "within the bound" if judged_by_factor else "within the proved bound"
        found.verdict = bound if within else "exact"
    else:
        found.reason = next(iter(found.refusals), "no case")


def _every_float(adapter: KernelAdapter, found: KernelCertificate, device: torch.device) -> list[Failure]:
    """All 2**32 FP32 inputs, in chunks: numbers of one sign rise with their bits, so that codes come in long runs.

    A run whose ends are right and whose codes are all alike is right; other runs are judged number by number.
    """
    if adapter.kind != "encode" or adapter.what.get("rounding", "nearest") not in ("nearest", "nearest_even"):
        found.notes.append("--all is for encoders that round to nearest")
        return []
    step = 1 << 14
    for start in progress(range(-(1 << 31), 1 << 31, _CHUNK), "all FP32 numbers"):
        x = torch.arange(start, start + _CHUNK, dtype=torch.int64, device=device).to(torch.int32).view(torch.float32)
        codes = adapter.function(x).view(torch.uint8).view(-1, step)
        numbers = x.view(-1, step)
        mixed = (codes.amin(1) != codes.amax(1)) | ~numbers[:, 0].isfinite() | ~numbers[:, -1].isfinite()
        for x, part in ((numbers[:, [0, -1]], codes[:, [0, -1]]), (numbers[mixed], codes[mixed])):
            case = KernelCase(f"all FP32 numbers from 0x{start & 0xFFFFFFFF:08X} on", {"x": x.contiguous()})
            failure, _ = judged(adapter, case, {"codes": part.contiguous()})
            if failure.wrong:
                found.wrong, found.cases = found.wrong + 1, found.cases + 1
                found.first = _first(adapter, failure)
                return [failure]
    found.notes.append("all 2^32 FP32 inputs are right")
    return []


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


@contextmanager
def _dirty() -> Iterator[None]:
    """torch fills what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# --- one call --------------------------------------------------------------------------------------------------------


def call(adapter: KernelAdapter, case: KernelCase, fill: str = "nan") -> dict[str, Tensor]:
    """The results of a call.

    Raises:
        _Misbehaves: the adapter changed an operand, wrote outside of its buffers, or returned something else.
    """
    if adapter.kind == "optimizer":
        return {"parameter": _steps(adapter, case)}
    inputs, names, results = dict(case.inputs), *KINDS[adapter.kind][1:]
    device = next(iter(inputs.values())).device
    if case.before is not None:
        now = {name: x.clone() for name, x in inputs.items()}
        for name, x in case.before.items():
            inputs[name].data.copy_(x)
        adapter.function(*inputs.values(), *(buffer(*case.buffers[name], device, fill)[0] for name in names))
        for name, x in now.items():
            inputs[name].data.copy_(x)  # as an optimizer does that tells nobody
    made = {name: buffer(*case.buffers[name], device, fill) for name in names}
    before = {name: _memory(x).clone() for name, x in inputs.items()}
    guards = {name: _guards(memory, memory.numel() - 2 * GUARD) for name, (_, memory) in made.items()}
    got = adapter.function(*inputs.values(), *(view for view, _ in made.values()))
    for name, x in inputs.items():
        if not torch.equal(_memory(x), before[name]):
            raise _Misbehaves("input changed", f"It writes into {name}, an input")
    for name, (_, memory) in made.items():
        if not torch.equal(_guards(memory, memory.numel() - 2 * GUARD), guards[name]):
            raise _Misbehaves("writes outside", f"It writes outside of {name}")
    values = [view for view, _ in made.values()] if got is None else [*got] if isinstance(got, tuple | list) else [got]
    if len(values) != len(results) or not all(isinstance(value, Tensor) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values)
        said = f"It returns {len(values)} results ({kinds}); needs {', '.join(results)}"
        raise _Misbehaves("another number of results", said)
    return dict(zip(results, values, strict=True))


def _memory(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _guards(x: Tensor, count: int) -> Tensor:
    """The bytes before and behind `count` elements, which nobody may touch."""
    memory, size = _memory(x), x.element_size()
    return torch.cat([memory[: GUARD * size], memory[(GUARD + count) * size :]])


def _steps(adapter: KernelAdapter, case: KernelCase) -> Tensor:
    """The parameter after each step (steps, ...)."""
    parameter, after = placed(case.inputs["parameter"], "offset"), []
    state: dict[str, Any] = {}
    edges = _guards(parameter, parameter.numel())
    for step, gradient in enumerate(case.inputs["grad"], start=1):
        before = gradient.clone()
        adapter.function(parameter, gradient, state, step)
        if not torch.equal(gradient, before) and not bool(gradient.isnan().any()):
            raise _Misbehaves("input changed", "It writes into grad, an input")
        after.append(parameter.detach().clone())
    if not torch.equal(_guards(parameter, parameter.numel()), edges):
        raise _Misbehaves("writes outside", "It writes outside of the parameter")
    return torch.stack(after)


def rerun(
    adapter: KernelAdapter,
    case: KernelCase,
    fill: str = "nan",
    around: str = "nan",
    plain: bool = False,
    fresh: bool = False,
    whole: bool = False,
) -> Mapping[str, Tensor] | Failure:
    """Where the results of another call are wrong, in other memory, or in a fresh process; whole: all that is known."""
    if fresh:
        return {} if _alone(adapter, case) else {"": torch.ones(())}
    if plain or around != "nan":
        held = case.inputs.items()
        inputs = {name: placed(x.clone(), "contiguous", around) if isinstance(x, Tensor) else x for name, x in held}
        case = replace(case, inputs=inputs)
    try:
        found = judged(adapter, case, call(adapter, case, fill))[0]
        return found if whole else found.wrong
    except Exception:
        return {"": torch.ones(())}


def _alone(adapter: KernelAdapter, case: KernelCase) -> bool:
    """Whether a call is right as the first one of a process; False, too, if that cannot load the adapter."""
    if _NESTED in sys._xoptions or ":" not in adapter.name:  # a file that certifies itself, or no name to load
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.pt"
        told = {name: getattr(adapter, name) for name in ("name", "kind")} | {"what": dict(adapter.what)}
        held = {"inputs": dict(case.inputs), "buffers": dict(case.buffers), "before": case.before and dict(case.before)}
        torch.save({"adapter": told, "case": held}, path)
        program = f"import sys; sys.path[:] = {sys.path!r}\nfrom ottava.prove.certificate import first_call\n"
        words = [sys.executable, "-X", _NESTED, "-c", f"{program}first_call({str(path)!r})"]
        try:
            ran = subprocess.run(words, capture_output=True, timeout=300)
        except subprocess.TimeoutExpired:
            return False
    return ran.returncode == 0


def first_call(path: str) -> None:
    """Judges the call that `_alone` saved; ends the process with 0 if it is right."""
    from ottava.prove.ready import load

    held = torch.load(path, weights_only=True)
    told = held["adapter"]
    adapter = load(told["name"], told["kind"], **told["what"])
    with _dirty():
        case = KernelCase("", **held["case"])
        sys.exit(bool(judged(adapter, case, call(adapter, case))[0].wrong))


def judged(adapter: KernelAdapter, case: KernelCase, got: Mapping[str, Tensor]) -> tuple[Failure, bool]:
    """(what is wrong, whether all numbers are ottava's own).

    Raises:
        _Misbehaves: a result has another type or shape.
    """
    shaped = {name: x.detach() for name, x in got.items()}
    allowed = expect(adapter.kind, case.inputs, adapter.what, shaped if adapter.kind == "cast" else None)
    numbers, wrong, exact = {}, {}, True
    for name, one in allowed.items():
        x = shaped[name]
        if x.numel() == 1 and one.low.numel() == 1:
            x = x.reshape(one.low.shape)
        if x.shape != one.low.shape:
            raise _Misbehaves("another shape", f"{name} has shape {tuple(x.shape)}; needs {tuple(one.low.shape)}")
        if x.dtype not in one.dtypes:
            is_, *needed = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, *one.dtypes))
            raise _Misbehaves("output of another type", f"{name} is {is_}; needs {' or '.join(needed)}")
        numbers[name] = numbers_of(x, result_format(adapter.kind, name, adapter.what)).to(one.low.device)
        mask = one.wrong(numbers[name])
        if bool(mask.any()):
            wrong[name] = mask
        exact &= one.exact is None or bool(((numbers[name] == one.exact) | numbers[name].isnan()).all())
    ours = not wrong and exact and (adapter.kind != "cast" or _as_ours(adapter, case, numbers))
    return Failure(case, numbers, wrong, allowed=allowed if wrong else None), ours


def _as_ours(adapter: KernelAdapter, case: KernelCase, numbers: Mapping[str, Tensor]) -> bool:
    """Whether a cast has the codes and scales of ottava's own reference, bit for bit."""
    from ottava.kernels.reference import quantize

    spec = cast_spec(adapter.what)
    assert spec is not None
    if spec.rounding == "stochastic" or not bool(case.inputs["x"].isfinite().all()):
        return True
    cast = quantize(case.inputs["x"], spec)
    scales = cast.scale_inv.double().flatten()
    same = torch.equal(numbers_of(cast.data, spec.format), numbers["data"])
    return same and torch.equal(scales, numbers["scale_inv"].flatten())


def _amax(inputs: Mapping[str, Any]) -> float:
    """Of x, if it is finite."""
    x = inputs.get("x")
    amax = float(x.double().abs().max()) if isinstance(x, Tensor) and x.numel() else 0.0
    return amax if math.isfinite(amax) else 0.0


def _first(adapter: KernelAdapter, failure: Failure) -> dict[str, Any]:
    """The first wrong element: where, what it was made of, what it is and what it must be."""
    name, mask = next(iter(failure.wrong.items()))
    place = tuple(int(i) for i in mask.nonzero()[0]) if mask.dim() else ()
    one: Allowed = (failure.allowed or expect(adapter.kind, failure.case.inputs, adapter.what))[name]
    low, high, got = (float(x[place]) for x in (one.low, one.high, failure.got[name]))
    needed = f"{low:.9g}" if low == high or math.isnan(low) else f"{low:.9g} to {high:.9g}"
    if low < high and low <= got <= high:
        needed += ", and the mean of many is biased"
    where = f"{name}[{', '.join(map(str, place))}]" if place else name
    said = f"{where} is {got:.9g}; needs {needed} ({int(mask.sum()):,} of {mask.numel():,} are wrong)"
    return {"case": failure.case.name, "result": name, "index": list(place), "got": got, "said": said,
            "needed": [low, high],
            "inputs": _inputs(adapter.kind, failure.case, name, place)}  # fmt: skip


def _inputs(kind: str, case: KernelCase, name: str, place: tuple[int, ...]) -> dict[str, str]:
    """The numbers that an element is made of, in short."""
    if kind in ("encode", "decode", "cast") and name != "scale_inv":
        key = "codes" if kind == "decode" else "x"
        x = case.inputs[key][place]
        bits = x.reshape(1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
        width, at = 2 * x.element_size(), ", ".join(map(str, place))
        return {f"{key}[{at}]": f"{float(x.float()):.9g} (0x{int(bits) & 16**width - 1:0{width}X})"}
    rows = {"gemm": (("a", 0), ("b", 1)), "grouped": (("a", 0),)}.get(kind, ())
    told = {}
    for key, dim in rows:
        line = case.inputs[key][place[dim]].float().flatten()
        end = " ..." if line.numel() > 6 else ""
        told[f"{key}[{place[dim]}]"] = ", ".join(f"{float(x):g}" for x in line[:6]) + end
    return told

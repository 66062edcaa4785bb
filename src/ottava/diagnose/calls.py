"""The first call of torch in which two runs of one program part, from their traces (`experiments.trace`).

Both traces are walked side by side. The first call that one run makes alone, that has other arguments, or that gives
another result from the same arguments is the place of the fault: everything before it agrees. Values are compared as
long as everything before was equal; with another seed or other data only the calls are.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ottava.diagnose.facts import Facts, bare

_WINDOW = 300  # calls behind a difference, to tell a call that one run makes alone from one in another form
_ROUNDING = 2e-3  # relative: rounding of another order of sums, in the first step
_COARSE = 3e-2  # the same of 16-bit results
_NARROW = re.compile(r"float8_")
_RANDOM = frozenset(
    (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_",
        "uniform_", "bernoulli", "bernoulli_", "multinomial", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "alpha_dropout", "exponential_", "random_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_",
        "xavier_uniform_", "xavier_normal_", "orthogonal_", "gumbel_softmax", "poisson",
    )
)  # fmt: skip
_KEEPS = frozenset(
    (
        "detach", "clone", "contiguous", "mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "clamp",
        "clip", "clamp_", "mul_", "div_", "to", "float", "bfloat16", "half", "type", "view", "reshape", "t",
        "transpose", "permute", "flatten", "view_as", "sub", "add", "__sub__", "__add__", "given",
    )
)  # fmt: skip
"""Calls after which a tensor still is a copy of a weight, but for a factor and rounding."""
_SAMPLES = 4  # of a batch; fewer may be something else
_ORIGIN = re.compile("entry ([0-9]+) of the step before")
_COLUMNS = ("loss", "grad_norm", "input_hash", "label_hash")
DATA = "the data"
"""The place of what a model is given."""


class Call(NamedTuple):
    """One entry of a trace."""

    name: str
    place: tuple[Any, ...]
    """File, line, function, source, FILE:FUNCTION of the caller, 1 for a library's, and the script's lines above it."""
    module: str
    arguments: tuple[str, ...]
    sources: tuple[int, ...]
    """The entries that made the tensors it gets."""
    results: tuple[Any, ...]
    backward: bool
    gradient: bool
    """Whether a backward may come through its result."""

    @property
    def tensors(self) -> list[list[Any]]:
        """Fingerprints of its results: dtype[shape], hash, mean, rms, projection, and how many are not finite."""
        return [r for r in self.results if isinstance(r, list)]

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal in two runs of the same code on the same data, whatever its values."""
        shapes = tuple(r[0] if isinstance(r, list) else "" for r in self.results)
        return self.name, self.module, self.arguments, shapes, self.backward

    @property
    def at(self) -> str:
        """FILE:LINE."""
        return f"{self.place[0]}:{self.place[1]}"

    @property
    def where(self) -> str:
        """FILE:LINE (source), the module, and where the script comes to it."""
        source = f" (`{self.place[3]}`)" if self.place[3] else ""
        inside = f" in module {self.module}" if self.module else ""
        under = f" (called at {self._lines})" if self.place[6:] else ""
        return f"{self.at}{source}{inside}{under}"

    @property
    def line(self) -> str:
        """FILE:LINE that a user can change; of a library's call the lines of the script that come to it."""
        return self._lines if self.place[5:6] == (1,) and self.place[6:] else self.at

    @property
    def _lines(self) -> str:
        return " → ".join(reversed(self.place[6:] if self.place[5] else self.place[6:7]))

    def __str__(self) -> str:
        text = f"{self.name}({', '.join(self.arguments)})"
        return f"`{text if len(text) <= 100 else text[:97] + '...'}`"


class Parting(NamedTuple):
    """Where two runs part."""

    step: int
    kind: str
    """call, arguments, value, random, given or gradient."""
    sentence: str
    place: str
    """FILE:LINE in the bad run."""
    module: str
    cast: bool
    """Whether the place converts to FP8, so that only an experiment says what it does."""
    good: str
    bad: str


def parting(good: Facts, bad: Facts, *, values: bool) -> Parting | None:
    """The first call in which two runs part; None if they do not, or a run has no trace.

    Args:
        values: whether the runs begin with the same weights, so that their results should be equal.
    """
    a, b = _traces(good), _traces(bad)
    ignored = _cast_layers(good, bad)
    casting = _casting([*a.values(), *b.values()])
    for step in sorted(a.keys() & b.keys()):
        inside = {c.place[:3:2] for c in (*a[step], *b[step]) if c.module in ignored}
        mine, theirs = (
            # a backward has no module: what the layers' own functions do there is theirs
            [c for c in calls if c.module not in ignored and not (c.backward and c.place[:3:2] in inside)]
            for calls in (a[step], b[step])
        )
        found = _walk(mine, theirs, values=values and not ignored and equal_until(good, bad, step))
        if found is not None:
            told = _told(step, *found, casting)
            data = _data(mine, theirs) if found[0] == "given" and None not in found else ""
            return told._replace(sentence=f"Step {step}: {data}", place=DATA) if data else told
    return None


def _data(a: Sequence[Call], b: Sequence[Call]) -> str:
    """What a model is given otherwise in two steps, by the names of its arguments; "" if nothing is."""
    one, other = _named(a), _named(b)
    said = [
        f"`{name}` begins {there}, in the good run {here}"
        if here != there
        else f"`{name}` begins alike and goes on otherwise"
        for name, (there, values) in other.items()
        for here, theirs in [one.get(name, ("", ()))]
        if here and apart(theirs, values)
    ]
    made = "It is made outside of the calls that were seen: in the data set, the collator or the loop."
    return f"the model is given other numbers. {'; '.join(said)}. {made}" if said else ""


def _named(calls: Sequence[Call]) -> dict[str, tuple[str, Any]]:
    """Argument of the model -> how it begins, and its fingerprint."""
    named: dict[str, tuple[str, Any]] = {}
    for call in calls:
        for text in call.results[1:] if call.name == "given" else ():
            name, _, row = str(text).partition(" = ")
            named.setdefault(name, (row, call.results[:1]))
    return named


class Stale(NamedTuple):
    """An FP8 copy that was not made again."""

    step: int
    """The first step that uses it although it was made before."""
    made: Call
    used: Call

    @property
    def sentence(self) -> str:
        """Where it was made, and where it is used."""
        made, used = (f"{c.at} (`{c.place[3]}`)" for c in (self.made, self.used))
        inside = f" in {self.used.module}" if self.used.module else ""
        said = f"The FP8 copy of a weight that step {self.step - 1} made at {made} serves step {self.step} again,"
        return f"{said} at {used}{inside}, although the optimizer has changed the weight since."


def stale(facts: Facts) -> list[Stale]:
    """FP8 copies of weights that outlive the weight: made in one traced step, used in the next, not renewed."""
    found, traces = [], _traces(facts)
    for step in sorted(s for s in traces if s - 1 in traces):
        before, now = traces[step - 1], traces[step]
        matches = [(i, c, _ORIGIN.fullmatch("".join(c.arguments[1:2]))) for i, c in enumerate(now) if c.name == "given"]
        again = {int(m[1]): c for _, c, m in matches if m}
        trains = {int(m[1]) for i, _, m in matches if m and _trains(now, i)}
        # the entry that noted the same tensor first
        first = [*range(len(before))]
        for i, call in enumerate(before):
            if call.name.endswith("_") and not call.name.endswith("__") and call.sources:
                first[i] = first[min(call.sources[0], i)]
        # only what keeps the values up to a factor: a moment of an optimizer is no copy
        copies: dict[int, bool] = {}
        for i, call in enumerate(before):
            sources = [s for s in call.sources if s < i]
            kept = [s for s in sources if s in copies or (first[s] in again and _moved(before[s], again[first[s]]))]
            if not kept or call.name not in _KEEPS or not _as_large(call, before[kept[0]]):
                continue
            if any(s not in kept and _as_large(before[s], call) for s in sources):
                continue
            copies[i] = _narrow(call) or any(copies.get(s, False) for s in kept)
            if copies[i] and i in trains and not _moved(call, again[i]):
                found.append(Stale(step, call, again[i]))
        if found:
            break
    return found


_PAIRS = frozenset(
    (
        "sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__", "__rmul__", "mse_loss", "l1_loss", "smooth_l1_loss",
        "huber_loss",
    )
)  # fmt: skip
"""Calls that compare outputs with targets, or weigh them."""
_BROADCASTS = frozenset(
    (
        "unsqueeze", "__getitem__", "view", "reshape", "view_as", "expand", "sum", "mean", "norm",
        "vector_norm", "amax", "amin", "max", "min", "std", "var", "logsumexp",
    )
)  # fmt: skip
"""Calls that make a column on purpose: to broadcast it."""
_COLUMN = re.compile(r"[a-z]+[0-9]+\[(\d+), 1\]")


def squared(facts: Facts) -> tuple[int, Call, int] | None:
    """(step, call, N) of the first call of the loop, outside of all modules, that gets (N, 1) and (N); None without.

    What was made a column for that, by `unsqueeze` or an index, is meant.
    """
    for step, calls in sorted(_traces(facts).items()):
        for call in calls:
            # what needs no gradient is data, a metric or a look, and no loss
            if call.name not in _PAIRS or not call.gradient or (call.module and not call.name.endswith("_loss")):
                continue
            texts = call.arguments[:2]
            column = next((found for text in texts if (found := _COLUMN.fullmatch(text))), None)
            size = int(column[1]) if column else 0
            if column is None or size < _SAMPLES or not any(text.endswith(f"[{size}]") for text in texts):
                continue
            made = [calls[s] for s in call.sources if s < len(calls)]
            of = [c.name for c in made if c.tensors and c.tensors[0][0] == column[0]]
            if of and not any(name in _BROADCASTS for name in of) and "None" not in call.place[3]:
                return step, call, size
    return None


def starts_high(facts: Facts, times: float) -> tuple[Call, float, float] | None:
    """(call, loss, loss of a guess) of the first cross-entropy of a run, if it is so many times that of a guess. A loss
    of the loop may be a sum of several. A sum over rows, as Hugging Face's Trainer takes it, is divided by all of them:
    rows that the loss ignores make that too low, never too high."""
    for call in _traces(facts).get(1, ()):
        sizes = [int(n) for n in re.findall(r"\d+", call.arguments[0].partition("[")[2])] if call.arguments else []
        if call.name == "cross_entropy" and call.gradient and len(sizes) > 1 and sizes[1] > 1 and call.results:
            result = call.results[0]
            known = isinstance(result, list) and len(result) == 6 and str(result[0]).endswith("[]")
            rows = math.prod(sizes) // sizes[1] if any(a.endswith("'sum'") for a in call.arguments) else 1
            if known and result[2] / rows > times * math.log(sizes[1]):
                return call, float(result[2]) / rows, math.log(sizes[1])
    return None


def overflowed(facts: Facts) -> tuple[int, Call] | None:
    """The first step, and its first conversion to FP8 that makes infinities or NaN of finite numbers.

    Of later steps it would say nothing: weights that an update has ruined are cast, too.
    """
    step, calls = min(_traces(facts).items(), default=(0, []))

    def broken(call: Call) -> bool:
        return any(len(r) == 6 and r[5] > 0 for r in call.tensors)

    for call in calls if len(facts.steps) and step == facts.steps[0] else ():
        narrow = any(_NARROW.match(r[0]) for r in call.tensors)
        sources = [calls[i] for i in call.sources if 0 <= i < len(calls)]
        if narrow and broken(call) and sources and not any(map(broken, sources)):
            return step, call
    return None


def _trains(calls: Sequence[Call], entry: int) -> bool:
    """Whether a backward comes through what uses an entry, or through its module: a copy for a look or for a target is
    meant to be old."""
    users = [c for c in calls if entry in c.sources]
    inside = {c.module for c in calls if c.gradient}
    return any(c.gradient or c.backward or (c.module and c.module in inside) for c in users)


def _moved(one: Call, other: Call) -> bool:
    return any(a[1:2] != b[1:2] for a, b in zip(one.tensors, other.tensors, strict=False))


def _as_large(one: Call, other: Call) -> bool:
    """Whether two results have as many elements, in more than one dimension."""
    sizes = [re.findall(r"[0-9]+", str(c.results[0][0]).partition("[")[2]) if c.results else [] for c in (one, other)]
    return len(sizes[0]) > 1 and math.prod(map(int, sizes[0])) == math.prod(map(int, sizes[1]))


def _traces(facts: Facts) -> dict[int, list[Call]]:
    found: dict[int, list[Call]] = {}
    for line in facts.run.trace:
        try:
            places, modules = [tuple(p) for p in line["places"]], [bare(m) for m in line["modules"]]
            calls = [
                Call(str(name), places[at], modules[inside], tuple(map(str, given)), tuple(made), tuple(results),
                     bool(back and back[0] & 1), bool(back and back[0] & 2))
                for name, at, inside, given, made, results, *back in line["calls"]
            ]  # fmt: skip
            found.setdefault(line["step"], calls)
        except (KeyError, TypeError, ValueError, IndexError):
            continue  # a line that somebody edited
    return found


def _cast_layers(good: Facts, bad: Facts) -> set[str]:
    """Layers that cast otherwise in the two runs: another recipe is no fault of the code."""
    a, b = (
        {bare(x["name"]): str(x.get("recipe") or x.get("casts") or "") for x in f.manifest.get("layers") or ()}
        for f in (good, bad)
    )
    return {n for n in a.keys() | b.keys() if a.get(n, "") != b.get(n, "")}


def _casting(traces: Sequence[Sequence[Call]]) -> set[str]:
    """FILE:FUNCTION of those that convert to FP8 or read it, and of their callers."""
    converting = [c for calls in traces for c in calls if c.name != "given" and _narrow(c)]
    found = {where for c in converting for where in (f"{c.place[0]}:{c.place[2]}", c.place[4])}
    return {where for where in found if where and not where.endswith(":<module>")}


def _narrow(call: Call) -> bool:
    return any(map(_NARROW.match, (*call.arguments, *(r[0] for r in call.tensors))))


def reads_codes(facts: Facts) -> Call | None:
    """The first call that takes FP8 numbers in a step: the weights of a layer may be stored so."""
    calls = (c for _, calls in sorted(_traces(facts).items()) for c in calls)
    return next((c for c in calls if c.module and any(map(_NARROW.match, c.arguments))), None)


def equal_until(good: Facts, bad: Facts, step: int) -> bool:
    """Whether all steps before have the same losses, gradients and batches, to the bit."""
    for name in _COLUMNS:
        a, b = (f.column(name) for f in (good, bad))
        if a is None or b is None:
            continue
        a, b = a[good.steps < step], b[bad.steps < step]
        if not np.array_equal(a, b, equal_nan=True):
            return False
    return True


def _walk(a: Sequence[Call], b: Sequence[Call], *, values: bool) -> tuple[str, Call | None, Call | None] | None:
    if not values:
        return _only(a, b)
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one.key != other.key:
            return _aligned(a[i : i + _WINDOW], b[i : i + _WINDOW])
        if apart(one.results, other.results):
            # of one name, but of another line or with other tensors: perhaps one run has a call alone
            if one.sources != other.sources or one.place[2:4] != other.place[2:4]:
                found = _aligned(a[i : i + _WINDOW], b[i : i + _WINDOW], lambda c: (*c.key, c.place[3]))
                if found[0] == "call":
                    return found
            kind = one.name if one.name in ("given", "gradient") else "random" if one.name in _RANDOM else "value"
            return kind, one, other
    return None


def _aligned(
    a: Sequence[Call], b: Sequence[Call], key: Callable[[Call], tuple[Any, ...]] = lambda c: c.key
) -> tuple[str, Call | None, Call | None]:
    """What the first calls of two lists are to each other: they differ."""
    if a[0].name == b[0].name and a[0].place[2:4] == b[0].place[2:4]:
        return "arguments", a[0], b[0]
    matcher = difflib.SequenceMatcher(None, [*map(key, a)], [*map(key, b)], autojunk=False)
    tag, *ends = next(code for code in matcher.get_opcodes() if code[0] != "equal")
    mine, theirs = a[ends[0] : ends[1]], b[ends[2] : ends[3]]
    if all(c.name == "given" for c in (*mine, *theirs)):
        one, other = next(iter(mine), None), next(iter(theirs), None)
        # of other kinds or places they are other tensors: what is done with them says more
        done, there = ([c for c in calls if c.name != "given"] for calls in (a, b))
        if one is None or other is None or one.key == other.key or not (done and there):
            return "given", one, other  # one run alone changes the tensor where nobody sees it
        return _aligned(done, there, key)
    # what a call gets says less than the call
    one, other = (next((c for c in calls if c.name != "given"), calls[0]) for calls in (a, b))
    if tag == "insert":
        return "call", None, other
    if tag == "delete":
        return "call", one, None
    return ("arguments" if one.name == other.name else "call"), one, other


def _only(a: Sequence[Call], b: Sequence[Call]) -> tuple[str, Call | None, Call | None] | None:
    """Without equal values: the first call that one run never makes, numbers in its arguments aside."""

    def loose(call: Call) -> tuple[Any, ...]:
        return call.name, call.module, call.place[3]

    known, seen = {loose(c) for c in a}, {loose(c) for c in b}
    mine = next((c for c in a if loose(c) not in seen and c.name not in ("given", "gradient")), None)
    theirs = next((c for c in b if loose(c) not in known and c.name not in ("given", "gradient")), None)
    return None if mine is None and theirs is None else ("call", mine, theirs)


def apart(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two lists of fingerprints differ by more than rounding.

    Example:
        >>> one, other = ["f32[2]", 7, 1.0, 2.0, 0.5, 0], ["f32[2]", 8, 1.0, 2.0000001, 0.5, 0]
        >>> apart([one], [other]), apart([one], [["f32[2]", 8, -1.0, 2.0, 0.5, 0]])
        (False, True)
    """
    return any(_apart(one, other) for one, other in zip(a, b, strict=False))


def _apart(a: Any, b: Any) -> bool:
    if not (isinstance(a, list) and isinstance(b, list)):
        numbers = all(isinstance(x, float) for x in (a, b))
        return bool(abs(a - b) > _ROUNDING * max(abs(a), abs(b)) if numbers else a != b)
    if len(a) < 6 or len(b) < 6 or a[1] == b[1]:
        return False
    label = str(a[0])
    if not label.startswith(("f", "bf", "c")):
        return True
    limit = _COARSE if label.startswith(("bf16", "f16", "float8")) else _ROUNDING
    size = max(abs(a[3]), abs(b[3]))
    return a[5] != b[5] or any(abs(x - y) > limit * size for x, y in zip(a[2:5], b[2:5], strict=True))


def _told(step: int, kind: str, one: Call | None, other: Call | None, casting: set[str]) -> Parting:
    here = other or one
    assert here is not None
    sentence, calls = "".join(_sentence(kind, one, other)), [c for c in (one, other) if c is not None]
    alone = kind == "given" and len(calls) == 1  # the place reads, and does nothing to it
    cast = not alone and any(f"{c.place[0]}:{c.place[2]}" in casting for c in calls)
    cast = cast or any("float8_" in text for c in calls for text in (*c.arguments, str(c.results)))
    return Parting(
        step, kind, f"Step {step}: {sentence}", here.line, here.module, cast,
        str(one or "nothing"), str(other or "nothing"),
    )  # fmt: skip


def _sentence(kind: str, one: Call | None, other: Call | None) -> Iterator[str]:
    if kind == "given" and (one is None or other is None):
        here, who = (other, "this run") if one is None else (one, "the good run")
        assert here is not None
        yield f"{_labels(here)}, read at {here.where}, was changed outside of the calls that were seen in {who} alone."
    elif other is None:
        assert one is not None
        yield f"the good run calls {one} at {one.where}, this run does not."
    elif one is None:
        yield f"this run calls {other} at {other.where}, the good run does not."
    elif kind == "arguments":
        pairs = [(x, y) for x, y in zip(one.arguments, other.arguments, strict=False) if x != y]
        if len(one.arguments) != len(other.arguments):
            yield f"this run calls {other} at {other.where}, the good run {one}."
        elif pairs:
            mine, theirs = (", ".join(side) for side in zip(*pairs, strict=True))
            yield f"`{other.name}` at {other.where} gets {theirs}, in the good run {mine}."
        elif _labels(one) == _labels(other):
            yield f"`{other.place[3]}` runs {_from(other)}, in the good run {_from(one)}."
        else:
            yield f"`{other.name}` at {other.where} gives {_labels(other)}, in the good run {_labels(one)}."
    elif kind == "call":
        yield f"this run calls {other} at {other.where}, where the good run calls {one}"
        yield f" at {one.where}." if one.place[1] != other.place[1] else "."
    elif kind == "gradient":
        yield f"the first value that differs is the gradient of {other.arguments[0]}, {_values(one, other)}: forward "
        yield f"and loss are equal, so the backward at {other.where} computes something else."
    elif kind == "given":
        yield f"the first value that differs is made outside of the calls that were seen: it is read at {other.where}, "
        yield f"{_values(one, other)}."
    else:
        again = " in the backward, where a forward is repeated," if other.backward else ""
        yield f"the first value that differs is the output of `{other.name}`{again} at {other.where}, "
        drew = ": it drew other random numbers" if kind == "random" else ""
        same = ", from the same input" if one.sources == other.sources else ""
        yield f"{_values(one, other)}{same}{drew}."


def _from(call: Call) -> str:
    """The lines of the script that come to a call, and the module that it runs in."""
    lines = " → ".join([*reversed(call.place[6:]), f"{call.place[0]}:{call.place[1]}"])
    return f"at {lines} in module {call.module}" if call.module else f"at {lines}"


def _labels(call: Call) -> str:
    return ", ".join(str(r[0]) if isinstance(r, list) else str(r) for r in call.results) or "nothing"


def _values(one: Call, other: Call) -> str:
    a, b = next((pair for pair in zip(one.results, other.results, strict=False) if _apart(*pair)), ("", ""))
    if a == b:
        return ""
    if not (isinstance(a, list) and isinstance(b, list)):
        return f"{b} against {a} in the good run"
    if str(a[0]).endswith("[]"):
        return f"{b[2]:.4g} against {a[2]:.4g} in the good run"
    said = "with other elements"
    for what, i in (("mean", 2), ("rms", 3)):
        if abs(a[i] - b[i]) > 1e-3 * max(abs(a[3]), 1e-30):
            said = f"{what} {b[i]:.4g} against {a[i]:.4g} in the good run"
    return f"{a[0]} {said}"

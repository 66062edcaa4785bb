"""The differential prover: where two programs stop being the same, and at which tensor.

    check(model_a, model_b, batch)      two models: the weights of A go into B, one step of both
    check(program_a, program_b, batch)  two functions of the batch that build and step what they like
    check("runs/a", "runs/b")           two saved traces, of one process or of many ranks

A is the reference. It runs once more as it is, and some times with every tensor moved by one rounding; that says how
far a right B may be, tensor by tensor (see `tolerance`). Everything is compared in the order in which A computes, so
the first tensor beyond its limit is where the fault is: all that it was computed from is right.

The operator is found by a run more of both: calls of aten operators are laid side by side, and the first pair with
equal arguments and unequal results, or the calls that only one program makes, are the operation. A script that shows it
alone holds the calls from the last equal tensors to the first unequal one, on the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
import itertools
import math
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.base.files import replacing
from ottava.base.text import columns, grouped, listed
from ottava.experiments.program import tensors_in, tree_map
from ottava.prove.align import Aligned, JudgedTensor, UnlikeError, align
from ottava.prove.recorder import GRADIENTS, Key, StepRecorder, StepRecording, bare
from ottava.prove.tolerance import Distance, Nudge, distance, limits, unit
from ottava.prove.traces import load_trace
from ottava.record.random_state import random_states_kept

_MOST_LINES = 12
_MOST_BYTES = 2 << 30


@dataclass(frozen=True, eq=False)
class AtenCall:
    """One call: its tensors are numbers of values."""

    name: str
    """aten.mm.default"""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: tuple[int, ...]

    @property
    def short(self) -> str:
        """mm"""
        return self.name.removeprefix("aten.").rpartition(".")[0]


@dataclass(frozen=True)
class Ref:
    """The number of a value among the arguments."""

    number: int


class Operations(TorchDispatchMode):
    """Notes every call while it is entered.

    Example:
        >>> x = torch.ones(2)
        >>> with Operations() as noted:
        ...     _ = x * 3 + 1
        >>> [one.name for one in noted.done]
        ['aten.mul.Tensor', 'aten.add.Tensor']
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[AtenCall] = []
        self.values: dict[int, Tensor] = {}
        self._numbers: dict[int, tuple[Tensor, int, int]] = {}
        self._left = _MOST_BYTES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(Tensor, lambda x: Ref(self._number(x)), (tuple(args), dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        made = tuple(self._number(x, new=True) for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        self.done.append(AtenCall(str(func), given[0], given[1], made))
        return result

    def _number(self, x: Tensor, *, new: bool = False) -> int:
        known = self._numbers.get(id(x))
        if known is not None and known[0] is x and known[1] == _version(x) and not new:
            return known[2]
        number = len(self.values)
        self._left -= x.nbytes
        plain = type(x) in (Tensor, torch.nn.Parameter) and self._left > 0 and not x.is_meta
        self.values[number] = x.detach().clone() if plain else torch.empty(0)
        self._numbers[id(x)] = x, _version(x), number
        return number


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def part(a: Operations, b: Operations, pairs: Sequence[tuple[int, int]], limit: float) -> tuple[int, int, str] | None:
    """The first pair of calls that give another result, in the order of B, and a sentence.

    Args:
        limit: the distance up to which results are equal.
    """
    extra: tuple[list[AtenCall], ...] = ([], [])
    was = (-1, -1)
    for i, j in pairs:
        if (i, j) != (was[0] + 1, was[1] + 1):
            extra = a.done[was[0] + 1 : i], b.done[was[1] + 1 : j]
        was, one, other = (i, j), a.done[i], b.done[j]
        for x, y in zip((a.values[n] for n in one.made), (b.values[n] for n in other.made), strict=True):
            if x.shape == y.shape and x.is_floating_point() and distance(x, y).whole > limit:
                given = [[z for z in _leaves(o) if not isinstance(z, Ref)] for o in (one, other)]
                if given[0] != given[1]:
                    return i, j, f"{one.short} with other arguments: {given[0]} in A, {given[1]} in B"
                first, second = (", ".join(o.short for o in calls[-4:]) or "nothing" for calls in extra)
                return i, j, f"{one.short}, after A calls {first} and B calls {second}" if any(extra) else one.short
    return None


def _leaves(call: AtenCall) -> list[Any]:
    return pytree.tree_leaves((call.arguments, call.keywords))


def _pairs(a: Operations, b: Operations) -> Iterator[tuple[int, int]]:
    one, two = ([(o.name, *(tuple(m.values[x].shape) for x in o.made)) for o in m.done] for m in (a, b))
    for i, j, size in difflib.SequenceMatcher(None, one, two, autojunk=False).get_matching_blocks():
        yield from ((i + k, j + k) for k in range(size))


def write(said: str, limit: float, a: Operations, b: Operations, path: Path) -> tuple[Path | None, str]:
    """Finds the operation, and writes the script and its tensors beside it.

    Args:
        said: the finding.
        limit: the distance of a right program.
    Returns:
        The script, None if there is none, and a sentence.
    """
    limit, pairs = min(limit, 0.5), [*_pairs(a, b)]
    found = part(a, b, pairs, limit)
    if found is None:
        return None, "No operator of torch that both call gives another result: no reproducer is written."
    before = [(i, j) for i, j in pairs if j < found[1] or i < found[0]]
    twin = {x: y for i, j in before for y, x in zip(a.done[i].made, b.done[j].made, strict=True)}
    tensors: dict[str, Tensor] = {}
    bodies = [_body(*one, a, tensors) for one in ((a, found[0], {}), (b, found[1], twin))]
    words = [text.replace("\\", "/").replace('"', "'") for text in (said, found[2])]
    store = path.with_suffix(".safetensors")
    text = _SCRIPT.format(said=words[0], operation=words[1], file=store.name, a=bodies[0], b=bodies[1], limit=limit)
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, store)
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    try:  # a script that shows nothing is not handed out
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(path))
    except Exception as error:
        path.unlink()
        store.unlink()
        return None, f"Operator: {found[2]}. Alone it does not show the difference ({type(error).__name__})."
    return path, f"Operator: {found[2]}."


_SCRIPT = '''"""{said}
Operator: {operation}"""
import pathlib, torch
from safetensors.torch import load_file
from torch import device
aten, inf, nan = torch.ops.aten, float("inf"), float("nan")
t = load_file(pathlib.Path(__file__).with_name("{file}"))
def a():
{a}
def b():
{b}
x, y = a().double(), b().double()
error = float((x - y).norm() / x.norm())
print(f"distance {{error:.3g}}, limit {limit:.3g}")
assert not error <= {limit!r}
'''


def _body(mode: Operations, place: int, same: dict[int, int], a: Operations, tensors: dict[str, Tensor]) -> str:
    """The calls that lead to the result of one, from tensors of which both programs have an equal one."""
    maker = {x: number for number, o in enumerate(mode.done[: place + 1]) for x in o.made}
    wanted, waiting, loaded = {place}, [place], {}
    while waiting:
        for number in (x.number for x in _leaves(mode.done[waiting.pop()]) if isinstance(x, Ref)):
            own, before, twin = mode.values[number], maker.get(number), a.values.get(same.get(number, -1))
            equal = twin is not None and twin.shape == own.shape and distance(twin, own).whole == 0
            # a call that B makes and A does not must be shown, with what it got
            shown = mode is not a and not equal and before is not None and mode.done[before].name.startswith("aten.")
            if before is not None and shown and before not in wanted and len(wanted) < _MOST_LINES:
                wanted.add(before)
                waiting.append(before)
            elif before not in wanted:
                name = f"a{same[number]}" if equal else f"{'a' if mode is a else 'b'}{number}"
                tensors[name], loaded[number] = own, f't["{name}"]'
    lines = []
    for operation in (mode.done[number] for number in sorted(wanted)):
        words = [_word(x, loaded) for x in operation.arguments]
        words += [f"{k}={_word(v, loaded)}" for k, v in operation.keywords.items()]
        made = ", ".join(f"v{x}" for x in operation.made) + "," * (len(operation.made) > 1)
        lines.append(f"    {made} = {operation.name}({', '.join(words)})")
    return "\n".join([*lines, f"    return v{mode.done[place].made[0]}"])


def _word(x: Any, loaded: dict[int, str]) -> str:
    if isinstance(x, Ref):
        return loaded.get(x.number, f"v{x.number}")
    if isinstance(x, list | tuple):
        return f"[{', '.join(_word(y, loaded) for y in x)}]"
    if isinstance(x, torch.device):
        return f"device({str(x)!r})"
    return repr(x)


DRAWS = 3
"""Runs of A with every tensor moved by one rounding."""
_DISTANCES = ("all of it", "its worst row", "its worst column", "its worst element")


@dataclass(eq=False)
class Subject:
    """A program that `check` can run again and again.

    Args:
        model: every run gets a copy.
        step: (model, optimizer or None, batch): forward, backward and step. None: one forward, the loss, its backward.
        optimizer: makes the optimizer of the parameters; None: no update.
        name: in the verdict.
    """

    model: nn.Module
    step: Callable[[nn.Module, Optimizer | None, Any], Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    name: str = ""


@dataclass(frozen=True, eq=False)
class Judged:
    """One tensor with its distance and its limit."""

    row: JudgedTensor
    far: Distance
    limit: Distance

    @property
    def wrong(self) -> bool:
        """Whether one of the four distances is beyond its limit."""
        return any(not f <= m for f, m in zip(self.far, self.limit, strict=True))

    @property
    def worst(self) -> int:
        """The number of the distance that is farthest beyond its limit."""
        return max(range(4), key=lambda i: self.far[i] / self.limit[i] if self.limit[i] else math.inf)


@dataclass(frozen=True, eq=False)
class Finding:
    """The first tensor that is not as it should be."""

    key: Key
    phase: str
    """start, data, forward, recomputation, loss, backward, weight gradient, clipping, update or buffer."""
    module: str
    """Path of the module whose code computed it."""
    operation: str
    rank: int | None
    error: float
    limit: float
    sentence: str
    others: tuple[str, ...] = ()
    """Other modules that may have computed it."""


@dataclass(eq=False)
class Verdict:
    """What `check` found."""

    finding: Finding | None
    judged: list[Judged]
    notes: list[str]
    names: tuple[str, str] = ("A", "B")
    reproducer: Path | None = None
    aligned: Aligned | None = field(default=None, repr=False)

    @property
    def same(self) -> bool:
        """Whether every tensor is within its limit."""
        return self.finding is None

    def __str__(self) -> str:
        (a, b), count = self.names, len(self.judged)
        if self.finding is None:
            lines = [f"{b} computes what {a} computes: all {count} tensors are within their limits."]
        else:
            said = f"{sum(j.wrong for j in self.judged)} of {count} tensors are beyond their limits"
            lines = [self.finding.sentence, "", f"{said}; the first, in program order:"]
            rows = [("tensor", "distance", "limit", "")]
            for j in self.around():
                far, limit = (f"{one[j.worst]:.2g}" for one in (j.far, j.limit))
                rows.append((str(j.row.key), far, limit, "wrong" if j.wrong else "right"))
            lines += [f"  {line}" for line in columns(*rows)]
        lines += ["", *(f"Note: {note}" for note in self.notes)] if self.notes else []
        lines += ["", f"Reproducer: python {self.reproducer}"] if self.reproducer is not None else []
        return "\n".join(lines)

    def around(self) -> list[Judged]:
        """The first tensors beyond their limits, behind the two that come before."""
        wrong = [j for j in self.judged if j.wrong]
        first = self.judged.index(wrong[0]) if wrong else 0
        return self.judged[max(first - 2, 0) : first] + wrong[:6]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {} if self.finding is None else vars(self.finding) | {"tensor": str(self.finding.key)}
        found = {name: value for name, value in told.items() if name != "key"} or None
        return {
            "schema_version": 1, "written_by": "ottava check", "sentence": str(self).partition("\n")[0],
            "same": self.same, "finding": found, "tensors": len(self.judged), "notes": self.notes,
            "wrong": [str(j.row.key) for j in self.judged if j.wrong],
            "reproducer": None if self.reproducer is None else str(self.reproducer),
        }  # fmt: skip


Program = nn.Module | Subject | StepRecording | Path | str | Callable[[Any], Any]


def check(
    a: Program,
    b: Program,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    steps: int = 1,
    draws: int = DRAWS,
    names: Mapping[str, str] | None = None,
    casts: Mapping[str, tuple[float, float]] | None = None,
    share_weights: bool = True,
    seed: int = 0,
    reproducer: Path | str | None = None,
) -> Verdict:
    """Runs one step of two programs on the same weights and data, and names the first tensor that is wrong.

    Args:
        a: the reference: a model, a `Subject`, a function of the batch, or a saved trace (`StepRecording` or a folder).
        b: what is held against it.
        batch: passed to both; floating-point tensors in the dtype of each model's parameters.
        loss: (model, batch) -> scalar; None: the model's own loss, or its outputs times fixed random numbers.
        optimizer: makes the optimizer of a model's parameters; None: no update is compared.
        steps: steps in a row, from the shared state.
        draws: runs of A that are moved by one rounding.
        names: path in B -> path in A, for models that name their modules differently; a path stands for all below it.
        casts: path in A -> units of rounding of a cast that B makes by hand, of operands and of gradients. Casts of
            ottava's and torchao's layers are known.
        share_weights: whether B gets the weights of A.
        seed: of the random numbers.
        reproducer: where to write a script that shows the first wrong operation alone; None: none is written.
    Returns:
        The verdict.
    Raises:
        ValueError: the programs have hardly a module in common, or two runs of A differ by more than a rounding.

    Example:
        >>> class Wrong(nn.Linear):
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return super().forward(x) * 1.01
        >>> right = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> wrong = nn.Sequential(nn.Linear(8, 8), Wrong(8, 8))
        >>> check(right, wrong, torch.ones(4, 8)).finding.module
        '1'
    """
    sides = [_side(x, optimizer, name) for x, name in ((a, "A"), (b, "B"))]
    if share_weights and all(isinstance(s, Subject) for s in sides):
        sides[1].model = with_weights(sides[0].model, sides[1].model, names or {})

    def run(side: Any, nudge: Nudge | None = None) -> StepRecording:
        return _run(side, batch, loss, steps, seed, nudge)

    first, second = (side if isinstance(side, StepRecording) else run(side) for side in sides)
    second = renamed(second, names or {})
    if not isinstance(sides[0], StepRecording):
        first.again = run(sides[0])
        first.nudged = [run(sides[0], nudge_for(first, second, seed, casts)) for seed in range(1, draws + 1)]
    verdict = judge(first, second)
    found = verdict.finding
    if reproducer is not None and found is not None and not any(isinstance(s, StepRecording) for s in sides):
        calls = [_run(s, batch, loss, steps, seed, None, operations=True).operations for s in sides]
        verdict.reproducer, note = write(found.sentence, found.limit, calls[0], calls[1], Path(reproducer))
        verdict.notes.append(note)
    return verdict


def nudge_for(
    a: StepRecording, b: StepRecording, seed: int, casts: Mapping[str, tuple[float, float]] | None = None
) -> Nudge:
    """Moves A by the coarser units of both programs."""
    together: dict[str, tuple[float, float]] = {}
    for known in [*(r.casts for one in (a, b) for r in (one.ranks or [one])), casts or {}]:
        for path, units in known.items():
            together[path] = max(units[0], together.get(path, units)[0]), max(units[1], together.get(path, units)[1])
    mine, theirs = (coarsest(one) for one in (a, b))
    return Nudge(seed, theirs if theirs > mine else 0.0, together)


def coarsest(recording: StepRecording) -> float:
    """The unit in which a program gives most of its outputs."""
    outputs = (e.value.dtype for e in (recording.ranks or [recording])[0].entries if e.key.kind == "output")
    found = sorted(filter(None, map(unit, outputs))) or [0.0]
    return found[len(found) // 2]


def judge(a: StepRecording, b: StepRecording) -> Verdict:
    """Holds every tensor of B against A, and names the first that is wrong."""
    again = [align(a, a.again).rows] if a.again is not None else []
    for row in itertools.chain(*again):
        if row.b is not None and row.a.shape == row.b.shape and (far := distance(row.a, row.b).whole) > 0.3:
            raise UnlikeError(
                f"check: two runs of A itself differ: {row.key} by {far:.0%}. Give the program one seed, "
                "the same data and no state from run to run; dropout needs a seed before the step"
            )
    aligned = align(a, b)
    moved = [{(r.key, r.call): r for r in rows} for rows in (*(align(a, n).rows for n in a.nudged), *again)]
    floats = (row for row in aligned.rows if row.a.is_floating_point() and row.a.numel())
    usual = grouped((row.key.kind, _size(row.a)) for row in floats)
    medians = {kind: sorted(found)[len(found) // 2] for kind, found in usual.items()}
    medians = {kind: size if math.isfinite(size) else 0.0 for kind, size in medians.items()}
    judged: list[Judged] = []
    doubtful: dict[Key, Tensor] = {}  # parameter -> where its gradient may be zero but for rounding
    weights = {r.key.path: r for r in aligned.rows if r.key.kind == "weight"}
    for row, other in ((row, row.b) for row in aligned.rows):
        if other is None:
            continue
        key, size, coarse = row.key, medians.get(row.key.kind, 0.0), unit(row.unit)
        plain = key._replace(kind="output") if key.kind == "recomputed" else key
        runs = [m.b for one in moved if key.kind != "weight" and (m := one.get((plain, row.call))) is not None]
        went = [distance(row.a, x, size) for x in runs if x is not None and x.shape == row.a.shape]
        limit = limits(went, coarse if a.nudged or key.kind == "weight" else 32 * coarse)
        if key.kind == "update" and (weight := weights.get(key.path)) is not None:
            # the optimizer adds to weights of the coarser dtype: each of them is rounded
            rounding = unit(weight.unit) * (1 + _size(weight.a) / own) if (own := _size(row.a)) else math.inf
            limit = Distance(*(m + rounding * (1 if i == 0 else 4) for i, m in enumerate(limit)))
        zero = doubtful.get(key._replace(kind="gradient")) if key.kind == "update" else None
        if zero is not None and zero.shape == row.a.shape:
            # Adam divides a gradient by its size: where it may be zero but for rounding, its sign is chance
            other = torch.where(zero, row.a.double(), other.double())
        judged.append(Judged(row, distance(row.a, other, size), limit))
        if key.kind == "gradient":
            doubtful[key] = row.a.abs() <= 4 * limit.element * _size(row.a)
    rule = "A has no runs that were moved by a rounding, so limits are a rule of thumb: 32 units of the coarser dtype."
    notes = [] if a.nudged else [rule]
    if unlike := [f"{row.key} {row.said}" for row in aligned.rows if row.b is None]:
        notes.append(f"Not compared: {listed(unlike, 4)}.")
    for only, of in ((aligned.only_a, a), (aligned.only_b, b)):
        if only:
            notes.append(f"Only {of.name} has {listed(dict.fromkeys(map(str, only)), 4)}.")
        if lost := max(r.lost for r in (of, *of.ranks)):
            notes.append(f"{of.name} has {lost:,} more tensors than fit into 8 GiB. They are not compared.")
    wrong = next((j for j in judged if j.wrong), None)
    finding = None if wrong is None else explain(wrong, judged, a, b)
    return Verdict(finding, judged, notes, (a.name, b.name), aligned=aligned)


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


_PHASES = MappingProxyType(
    {
        "weight": ("start", "the programs start from other weights: {path}"),
        "output": ("forward", "the forward of {named}"),
        "recomputed": ("recomputation", "the recomputed forward of {named}"),
        "gradient": ("weight gradient", "the gradient of {path}{lost}, while that which enters {named} is right"),
        "clipped gradient": ("clipping", "what happens between backward and optimizer, such as clipping or unscaling"),
        "update": ("update", "the step of the optimizer ({operation})"),
        "buffer": ("buffer", "the buffer {path}"),
    }
)
"""Kind of a tensor -> the phase that computes it, and a sentence, where no other tensor must be asked."""


def explain(wrong: Judged, judged: Sequence[Judged], a: StepRecording, b: StepRecording) -> Finding:
    """Which code computed the first wrong tensor."""
    row, number, kinds = wrong.row, wrong.worst, {**a.kinds, **b.kinds}
    key, path = row.key, row.key.path
    others: tuple[str, ...] = ()
    if key.kind in GRADIENTS:
        phase, module, said, others = _backward(row, judged, kinds)
    elif key.kind == "input" and not path:
        phase, module, said = "data", path, "the data differ"
    elif key.kind == "input" and path.startswith("<"):
        phase, module, said = "forward", "", f"the code between the model and {kinds.get(path, path)}"
    elif key.kind == "input":
        phase, module = "forward", path.rpartition(".")[0]
        while module and kinds.get(module) in ("ModuleList", "ModuleDict"):
            module = module.rpartition(".")[0]
        said = f"the code of {_named(module, kinds)} before it calls {path}"
    else:
        module = path if path in kinds or key.kind in ("output", "recomputed") else path.rpartition(".")[0]
        phase, words = _PHASES.get(key.kind, _PHASES["buffer"])
        lost = " (B has none)" if row.said else ""
        said = words.format(path=path, named=_named(module, kinds), lost=lost, operation=row.operation)
    rank, far, limit = _rank(wrong), wrong.far[number], wrong.limit[number]
    where = f" on rank {rank}" if rank is not None else ""
    step = f" in step {key.step + 1}" if key.step else ""
    size = f"{_DISTANCES[number]} is {far:.2g} of its size from {a.name}; a right program stays below {limit:.2g}"
    sentence = f"{b.name} parts from {a.name} in {said}{where}{step}: {key}: {size}."
    return Finding(key, phase, module, row.operation, rank, far, limit, sentence, others)


def _named(path: str, kinds: Mapping[str, str]) -> str:
    kind = kinds.get(path, "")
    return f"{path or 'the model'}" + (f" ({kind})" if kind else "")


def _backward(
    row: JudgedTensor, judged: Sequence[Judged], kinds: Mapping[str, str]
) -> tuple[str, str, str, tuple[str, ...]]:
    """A gradient of an activation is the work of the modules that took the activation."""
    key, rows = row.key, [j.row for j in judged]
    forward = key._replace(kind="input" if key.kind == "input gradient" and key.path else "output")
    own = next((one for one in rows if one.key == forward and one.call == row.call), None)

    def alike(other: JudgedTensor) -> bool:
        return own is not None and other.a.shape == own.a.shape and torch.equal(other.a, own.a)

    late = math.inf if own is None else own.order - (forward.kind == "input")
    inputs = [one for one in rows if one.key.kind == "input" and one.key.step == key.step and one.order > late]
    takers = [one.key.path for one in inputs if alike(one)]
    if forward.kind == "input" and key.path not in takers:
        takers.insert(0, key.path)
    # the innermost that is still right: a module whose own output gradient is right
    right = {j.row.key.path for j in judged if j.row.key.kind == "output gradient" and not j.wrong}
    takers = [t for t in dict.fromkeys(takers) if t in right] or list(dict.fromkeys(takers))
    leaves = [t for t in takers if not any(o != t and o.startswith(f"{t}.") for o in takers)]
    # what the model gives goes to the loss
    ends = any(one.key == Key(key.step, "", "output", one.key.part) and alike(one) for one in rows)
    if ends or (leaves and leaves[0].startswith("<")) or (not key.path and key.kind == "output gradient"):
        return "loss", next(iter(leaves), ""), "the loss: the code after the model's output, or its scale", ()
    if leaves:
        return "backward", leaves[0], f"the backward of {_named(leaves[0], kinds)}", tuple(leaves[1:])
    parent = key.path.rpartition(".")[0]
    return "backward", parent, f"the backward of the code of {_named(parent, kinds)} after {key.path}", ()


def _rank(wrong: Judged) -> int | None:
    """The rank with the farthest part, where ranks hold parts that differ."""
    row = wrong.row
    if len({rank for rank, _ in row.shards}) < 2 or row.b is None:
        return None
    far: dict[int, float] = {}
    for rank, place in row.shards:
        try:
            far[rank] = max(far.get(rank, 0.0), distance(row.a[place], row.b[place]).whole)
        except (IndexError, RuntimeError):
            return None
    return max(far, key=lambda r: far[r]) if len(set(far.values())) > 1 else None


# --- running ------------------------------------------------------------------------------------------


def _side(x: Program, optimizer: Any, name: str) -> Any:
    if isinstance(x, str | Path):
        return load_trace(Path(x))
    if isinstance(x, Subject):
        return Subject(x.model, x.step, x.optimizer or optimizer, x.name or name)
    if isinstance(x, nn.Module):
        return Subject(x, None, optimizer, name)
    if isinstance(x, StepRecording):
        return x
    if callable(x):
        return name, x
    raise TypeError(
        f"check: got a {type(x).__name__}; needs a model, a Subject, a function of the batch, or a saved trace"
    )


def _run(
    side: Any, batch: Any, loss: Any, steps: int, seed: int, nudge: Nudge | None, operations: bool = False
) -> StepRecording:
    """One run of a side, from the same state and seed."""
    noted = Operations() if operations else None
    with random_states_kept():
        torch.manual_seed(seed)
        if not isinstance(side, Subject):
            (name, program), given = side, copy.deepcopy(batch)
            recorder = StepRecorder(steps=steps, nudge=nudge)
        else:
            name, model = side.name, copy.deepcopy(side.model)
            made = side.optimizer(model.parameters()) if side.optimizer is not None else None
            given, step = _in_dtype(batch, model), side.step or _plain_step(loss)
            recorder = StepRecorder(model, steps=steps, nudge=nudge)

            def program(batch: Any) -> None:
                for _ in range(steps):
                    step(model, made, batch)

        with recorder, noted or nullcontext():
            program(given)
    recording = recorder.recording(name)
    if not recording.entries:
        raise UnlikeError(
            f"check: {name} has called no module and stepped no optimizer; give a program that runs a training step"
        )
    recording.operations = noted
    return recording


def _in_dtype(batch: Any, model: nn.Module) -> Any:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1), torch.float32)

    def cast(x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).clone().requires_grad_(x.requires_grad) if floats else x

    return tree_map(cast, batch)


def _plain_step(loss: Callable[[nn.Module, Any], Tensor] | None) -> Callable[[nn.Module, Optimizer | None, Any], Any]:
    def step(model: nn.Module, optimizer: Optimizer | None, batch: Any) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        (loss or generated_loss)(model, batch).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def generated_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss; else the mean of its outputs times fixed random numbers, so every gradient is used."""
    given = batch if isinstance(batch, tuple) else (batch,)
    output = model(**batch) if isinstance(batch, Mapping) else model(*given)
    if isinstance(own := getattr(output, "loss", None), Tensor):
        return own
    random = torch.Generator().manual_seed(1)
    parts = [x for x in tensors_in(output) if x.is_floating_point() and x.requires_grad]
    if not parts:
        raise ValueError("check: the model gives no tensor with a gradient; give loss=, a function of (model, batch)")
    sums = [(x.float() * torch.randn(x.shape, generator=random).to(x.device)).sum() for x in parts]
    total: Tensor = torch.stack(sums).sum()
    return total / sum(x.numel() for x in parts) * 8


def with_weights(a: nn.Module, b: nn.Module, names: Mapping[str, str]) -> nn.Module:
    """A copy of B with the weights and buffers of A.

    Raises:
        UnlikeError: a parameter of B has no namesake in A, or another shape.
    """

    def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)

    b, source = copy.deepcopy(b), {bare(name): x for name, x in held(a)}
    with torch.no_grad():
        for name, target in held(b):
            value = source.get(path := in_a(bare(name), names))
            if value is not None and value.shape == target.shape:
                target.copy_(value)
            elif isinstance(target, nn.Parameter):
                has = "A has no parameter of this name" if value is None else f"A has shape {tuple(value.shape)}"
                raise UnlikeError(
                    f"check: parameter {path} of B has shape {tuple(target.shape)}; {has}. Give two models with "
                    "the same parameters, names={path in B: path in A}, or share_weights=False"
                )
    return b


def in_a(path: str, names: Mapping[str, str]) -> str:
    """A path of B as A has it.

    Example:
        >>> in_a("blocks.0.w1", {"blocks.0": "layers.0"})
        'layers.0.w1'
    """
    for theirs in sorted(names, key=len, reverse=True):
        if path == theirs or path.startswith(f"{theirs}."):
            return names[theirs] + path[len(theirs) :]
    return path


def renamed(recording: StepRecording, names: Mapping[str, str]) -> StepRecording:
    """A recording of B with the paths of A."""
    for one in (recording.ranks or [recording]) if names else ():
        for entry in one.entries:
            entry.key = entry.key._replace(path=in_a(entry.key.path, names))
        one.casts = {in_a(path, names): unit for path, unit in one.casts.items()}
        one.kinds = {in_a(path, names): kind for path, kind in one.kinds.items()}
    return recording

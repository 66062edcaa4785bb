"""Finds the first operator of torch that gives another result, and writes a script that shows it alone.

Both programs run once more, and every call of an aten operator is noted with its arguments. The calls of both are laid
side by side; the first pair with equal arguments and unequal results, or the calls that only one of them makes, are the
operation. The script holds the calls from the last equal tensors to the first unequal one, on the same numbers.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.base.files import replacing
from ottava.prove.tolerance import distance

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
    try:
        return x._version
    except RuntimeError:  # a tensor of inference_mode has none
        return 0


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

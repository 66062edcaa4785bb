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
from collections.abc import Iterator
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


@dataclass(frozen=True)
class FirstCall:
    """Where the operators of two programs part."""

    a: int
    b: int
    """Places of the first pair of equal calls with unequal results."""
    sentence: str


def part(a: Operations, b: Operations, limit: float) -> FirstCall | None:
    """The first pair of calls that give another result, in the order of B.

    Args:
        limit: the distance up to which results are equal.
    """
    pairs = [*_pairs(a, b)]
    extra: tuple[list[str], list[str]] = ([], [])
    was = (-1, -1)
    for i, j in pairs:
        if j - was[1] > 1 or i - was[0] > 1:
            extra = [_short(o) for o in a.done[was[0] + 1 : i]], [_short(o) for o in b.done[was[1] + 1 : j]]
        was = i, j
        for x, y in zip(a.done[i].made, b.done[j].made, strict=True):
            one, two = a.values[x], b.values[y]
            if one.shape == two.shape and one.is_floating_point() and distance(one, two).whole > limit:
                name = _short(a.done[i])
                if _plain(a.done[i]) != _plain(b.done[j]):
                    said = f"{name} with other arguments: {_plain(a.done[i])} in A, {_plain(b.done[j])} in B"
                elif extra[0] or extra[1]:
                    first, second = (", ".join(calls[-4:]) or "nothing" for calls in extra)
                    said = f"{name}, after A calls {first} and B calls {second}"
                else:
                    said = name
                return FirstCall(i, j, said)
    return None


def _short(operation: AtenCall) -> str:
    return operation.name.removeprefix("aten.").rpartition(".")[0]


def _plain(operation: AtenCall) -> list[Any]:
    leaves = pytree.tree_leaves((operation.arguments, operation.keywords))
    return [x for x in leaves if not isinstance(x, Ref)]


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
    limit = min(limit, 0.5)
    found = part(a, b, limit)
    if found is None:
        return None, "No operator of torch that both call gives another result: no reproducer is written."
    twin = {
        x: y
        for i, j in _pairs(a, b)
        if j < found.b or i < found.a
        for y, x in zip(a.done[i].made, b.done[j].made, strict=True)
    }
    tensors: dict[str, Tensor] = {}
    bodies = []
    for mode, place, same in ((a, found.a, {}), (b, found.b, twin)):
        bodies.append(_body(mode, place, a, same, tensors))
    words = [text.replace("\\", "/").replace('"', "'") for text in (said, found.sentence)]
    file = path.with_suffix(".safetensors").name
    text = _SCRIPT.format(said=words[0], operation=words[1], file=file, a=bodies[0], b=bodies[1], limit=limit)
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, path.with_suffix(".safetensors"))
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    try:  # a script that shows nothing is not handed out
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(path))
    except Exception as error:
        path.unlink()
        path.with_suffix(".safetensors").unlink()
        return None, f"Operator: {found.sentence}. Alone it does not show the difference ({type(error).__name__})."
    return path, f"Operator: {found.sentence}."


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


def _body(mode: Operations, place: int, a: Operations, same: dict[int, int], tensors: dict[str, Tensor]) -> str:
    """The calls that lead to the result of one, from tensors of which both programs have an equal one."""
    maker = {x: number for number, o in enumerate(mode.done[: place + 1]) for x in o.made}
    wanted, lines, waiting = {place}, [], [place]
    loaded: dict[int, str] = {}
    while waiting:
        number = waiting.pop()
        operation = mode.done[number]
        for ref in (x for x in pytree.tree_leaves((operation.arguments, operation.keywords)) if isinstance(x, Ref)):
            own = mode.values[ref.number]
            twin = a.values.get(same.get(ref.number, ref.number if mode is a else -1))
            equal = mode is not a and twin is not None and twin.shape == own.shape and distance(twin, own).whole == 0
            before = maker.get(ref.number)
            # a call that B makes and A does not must be shown, with what it got
            inner = (
                mode is not a
                and before is not None
                and not equal
                and before not in wanted
                and len(wanted) < _MOST_LINES
            )
            if inner and before is not None and mode.done[before].name.startswith("aten."):
                wanted.add(before)
                waiting.append(before)
            elif before not in wanted:
                name = (
                    f"{'a' if mode is a or equal else 'b'}{same.get(ref.number, ref.number) if equal else ref.number}"
                )
                tensors[name] = own
                loaded[ref.number] = f't["{name}"]'
    for number in sorted(wanted):
        operation = mode.done[number]
        words = [_word(x, loaded) for x in operation.arguments] + [
            f"{k}={_word(v, loaded)}" for k, v in operation.keywords.items()
        ]
        call = f"{operation.name}({', '.join(words)})"
        lines.append(
            f"    {', '.join(f'v{x}' for x in operation.made)}{',' if len(operation.made) > 1 else ''} = {call}"
        )
    return "\n".join([*lines, f"    return v{mode.done[place].made[0]}"])


def _word(x: Any, loaded: dict[int, str]) -> str:
    if isinstance(x, Ref):
        return loaded.get(x.number, f"v{x.number}")
    if isinstance(x, list | tuple):
        return f"[{', '.join(_word(y, loaded) for y in x)}]"
    if isinstance(x, torch.device):
        return f"device({str(x)!r})"
    return repr(x)

"""Compares logs of single operations that others write: numbers of each result, not the results.

    DebugMode    the text of torch's `debug_string()` under `DebugMode.log_tensor_hashes()`: the L1 norm of each result
    torchtitan   rank_0_activations.log of its numerics capture: L1 and L2 norm, smallest, largest, mean

Two logs may have other lengths and other dtypes: casts that only one program makes, recomputed operations and layers of
one more call are left out of the comparison, which goes along the longest common order of (module, operation, shape).
A norm averages roundings, so it may be off by 4 units of the coarser dtype; no runs were moved by a rounding.
Source: torch/utils/_debug_mode; torchtitan agent_tooling/numerics_debugging/activation_tracer.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import listed
from ottava.base.untrusted import UntrustedError, read_text
from ottava.prove.align import Aligned, JudgedTensor, UnlikeError
from ottava.prove.prover import Finding, Judged, Verdict
from ottava.prove.recorder import Key, TraceError, bare
from ottava.prove.tolerance import Distance, unit

_DTYPES = MappingProxyType(
    {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    | {"f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
)
_RESULT = re.compile(r"->.*?\bt(?:\$\d+)?: (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]")
_HASH = re.compile(r"'hash': (?P<number>[-+.\w]+)")
_UNITS = 4
_NUMBERS = ("L1 norm", "L2 norm", "Min", "Max", "Mean")
_WORDS = ("the L1 norm", "the L2 norm", "the smallest number", "the largest number", "the mean")


@dataclass(frozen=True)
class LoggedOperation:
    """One operation."""

    module: str
    name: str
    backward: bool
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: the log does not say."""
    numbers: Tensor
    """float64: as many as the log has; NaN where it has none."""


def load_log(path: Path) -> list[LoggedOperation]:
    """The operations of a log, in its order.

    Raises:
        TraceError: it cannot be read, or is no such log.
    """
    try:
        text = read_text(path)
    except UntrustedError as error:
        raise TraceError(f"{path}: {error}") from None
    found = [*(_of_titan(text) if text.startswith("Total captured activations:") else _of_debug_mode(text))]
    if not found:
        raise TraceError(
            f"{path}: has no operation with a norm; needs the text of debug_string() under "
            "DebugMode.log_tensor_hashes(), or rank_N_activations.log of torchtitan"
        )
    return found


def _of_debug_mode(text: str) -> Iterator[LoggedOperation]:
    modules: list[tuple[int, str]] = []
    behind = False  # the forward of all modules: what follows outside of any is the backward
    for line in text.splitlines():
        depth, said = len(line) - len(line.lstrip()), line.strip()
        while modules and modules[-1][0] >= depth:
            modules.pop()
        if said.startswith("[nn.Mod] "):
            modules.append((depth, said.removeprefix("[nn.Mod] ").split(" ")[0]))
            behind = True
        elif (result := _RESULT.search(said)) and (norm := _HASH.search(said.rpartition(" # ")[2])):
            path = modules[-1][1].partition(".")[2] if modules else ""  # the first word is the model's class
            numbers = torch.tensor([_number(norm["number"])], dtype=torch.float64)
            where = bare(path), said.partition("(")[0].removeprefix("aten::"), behind and not modules
            yield LoggedOperation(*where, _shape(result["shape"]), _DTYPES.get(result["dtype"]), numbers)


def _of_titan(text: str) -> Iterator[LoggedOperation]:
    for head, *lines in map(str.splitlines, re.split(r"\n(?=\[)", text)[1:]):
        facts = dict(line.strip().split(": ", 1) for line in lines if ": " in line)
        numbers = torch.tensor([_number(facts.get(name, "nan")) for name in _NUMBERS], dtype=torch.float64)
        module, _, name = head.strip("[] ").rpartition("/")
        if bool(numbers.isnan().all()) or not (named := re.fullmatch(r"op_\d+_(.+)", name)):
            continue
        dtype = re.search(r"torch\.(float\w+|bfloat16)", facts.get("Shape", "") + facts.get("Dtype", ""))
        shape = re.search(r"\[([\d, ]*)\]", facts.get("Shape", ""))
        where = bare("" if module == "<none>" else module), named[1], facts.get("Phase", "forward") != "forward"
        kind = getattr(torch, dtype[1], None) if dtype else None
        yield LoggedOperation(*where, _shape(shape[1]) if shape else (), kind, numbers)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def compare_logs(
    a: Sequence[LoggedOperation], b: Sequence[LoggedOperation], names: tuple[str, str] = ("A", "B")
) -> Verdict:
    """Names the first operation whose numbers are beyond their limit.

    Raises:
        UnlikeError: less than one in ten operations is in both logs.

    Example:
        >>> one = LoggedOperation("mlp", "mm", False, (2, 4), torch.float32, torch.tensor([8.0], dtype=torch.float64))
        >>> cast = LoggedOperation("mlp", "_to_copy", False, (2, 4), torch.bfloat16, one.numbers)
        >>> compare_logs([one], [cast, one]).same
        True
    """
    keys: list[list[tuple[Any, ...]]] = [[(o.module, o.name, o.shape) for o in log] for log in (a, b)]
    if not {*keys[0]} & {*keys[1]}:  # a compiled program has no modules
        keys = [[(o.name, o.shape) for o in log] for log in (a, b)]
    blocks = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    pairs = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    if len(pairs) * 10 < min(len(a), len(b)):
        raise UnlikeError(
            f"check: {len(pairs)} of {len(a)} and {len(b)} operations are in both logs; needs two logs of one model"
        )
    judged = [_judged(a[i], b[j], order) for order, (i, j) in enumerate(pairs)]
    notes = [f"Logs have norms, no tensors: limits are a rule of thumb, {_UNITS} units of the coarser dtype."]
    for log, at, name in ((a, 0, names[0]), (b, 1, names[1])):
        met = {pair[at] for pair in pairs}
        if only := [f"{o.name} of {o.module or 'the model'}" for i, o in enumerate(log) if i not in met]:
            notes.append(f"Only {name} has {listed(dict.fromkeys(only), 4)}.")
    first = next((n for n, one in enumerate(judged) if one.wrong), None)
    found = None if first is None else _finding(a[pairs[first][0]], b[pairs[first][1]], judged[first])
    return Verdict(found, judged, notes, names, aligned=Aligned([one.row for one in judged], [], []))


def _judged(a: LoggedOperation, b: LoggedOperation, order: int) -> Judged:
    coarse = max((one.dtype or torch.bfloat16 for one in (a, b)), key=unit)
    x, y = a.numbers, b.numbers
    told = ~(x.isnan() & y.isnan())
    size = torch.stack([x.abs(), y.abs()]).amax(0)
    if len(x) > 3:  # the smallest number and the mean are held against the size of all: the larger end
        size[2:] = size[2:].maximum(size[2:4].max())
    far = torch.where(x == y, 0.0, (x - y).abs() / torch.where(size == 0, 1.0, size))[told].nan_to_num(math.inf)
    row = JudgedTensor(Key(0, a.module, f"{a.name} result"), 0, x, y, a.name, coarse, float(order))
    worst, limit = float(far.max()) if len(far) else 0.0, _UNITS * unit(coarse)
    return Judged(row, Distance(*[worst] * 4), Distance(*[limit] * 4))


def _finding(a: LoggedOperation, b: LoggedOperation, judged: Judged) -> Finding:
    off = ((a.numbers - b.numbers).abs() / a.numbers.abs().clamp(min=1e-300)).nan_to_num(-1.0, posinf=math.inf)
    which = int(off.argmax())
    phase, where = "backward" if a.backward else "forward", a.module or "the model"
    sentence = (
        f"The first operation that differs is {a.name} of {where} ({phase}), shape {list(a.shape)}: {_WORDS[which]} of "
        f"its result is {float(b.numbers[which]):.6g}, in A {float(a.numbers[which]):.6g}. All before it agrees."
    )
    return Finding(judged.row.key, phase, a.module, a.name, None, judged.far.whole, judged.limit.whole, sentence)

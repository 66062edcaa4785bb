"""Opens saved traces: those of `ottava check --save`, and the dumps of msprobe and TransformerEngine.

    ottava     rank0.json, rank0.safetensors
    msprobe    dump.json beside dump_tensor_data/NAME.pt (task "tensor"), of level L0: modules. A name is
               Module.PATH.CLASS.forward.CALL or .backward.CALL

    TE         tensor_dumps/rank_N/LAYER_TENSOR_iter_000001.pt of its feature DumpTensors: a dict with high_precision,
               or data and scale_inv. Layers come in the order of their names, and their numbers count as numbers

Source: msprobe docs/zh/dump, "module dump data"; transformer_engine/debug/features/dump_tensors.py. No code of a file
runs, see `interop.safe_pickle`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ottava.base.untrusted import UntrustedError, parse_json, read_text
from ottava.interop.contents import StateFileError, read_entries
from ottava.interop.safe_pickle import DamagedError, RefusedError
from ottava.prove.recorder import Key, StepRecording, TensorSeen, TraceError, bare

_MODULE = re.compile(r"Module\.(?P<path>.+)\.(?P<kind>\w+)\.(?P<way>forward|backward)\.(?P<call>\d+)")
_SIDES = (("forward", "input_args", "input"), ("forward", "output", "output"),
          ("backward", "input", "output gradient"), ("backward", "output", "input gradient"))  # fmt: skip


def load_trace(path: Path) -> StepRecording:
    """A saved trace.

    Raises:
        TraceError: nothing is there, or it cannot be read.
    """
    if (path / "dump.json").is_file():
        return _msprobe(path)
    ranks = sorted((path / "tensor_dumps" if (path / "tensor_dumps").is_dir() else path).glob("rank_*"), key=_numbers)
    return _te(path, ranks) if any(rank.is_dir() for rank in ranks) else StepRecording.load(path)


_TE = re.compile(r"(?P<layer>.+)_(?P<tensor>activation|gradient|weight|output|wgrad|dgrad)_iter_(?P<step>\d+)")
_TE_KINDS = MappingProxyType(
    {"weight": "weight", "activation": "input", "output": "output"}
    | {"gradient": "output gradient", "dgrad": "input gradient", "wgrad": "gradient"}
)


def _numbers(path: Path) -> list[tuple[int, str]]:
    """A key that sorts 10 behind 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", path.name)]


def _te(folder: Path, ranks: list[Path]) -> StepRecording:
    first, *others = (StepRecording([*_te_entries(rank)], folder.name, r, len(ranks)) for r, rank in enumerate(ranks))
    if not all(one.entries for one in (first, *others)):
        hint = "dump with high_precision_tensor, or dump_quantized_internals"
        raise TraceError(f"{folder}: a rank has no tensor; {hint}")
    first.ranks = [first, *others] if others else []
    return first


def _te_entries(folder: Path) -> Iterator[TensorSeen]:
    files = [(match, path) for path in sorted(folder.glob("*.pt"), key=_numbers) if (match := _TE.fullmatch(path.stem))]
    steps = sorted({int(match["step"]) for match, _ in files})
    phases = [*_TE_KINDS]
    for place, (match, path) in enumerate(files):
        try:
            held = {name: x for name, x in read_entries(path) if isinstance(x, Tensor)}
        except (StateFileError, DamagedError, RefusedError, OSError) as error:
            raise TraceError(f"{path}: {str(error).splitlines()[0][:200]}") from None
        value = held.get("high_precision")
        if value is None and {"data", "scale_inv"} <= held.keys():
            value = held["data"].float() * held["scale_inv"].float()
        if value is None:
            continue
        step, phase = steps.index(int(match["step"])), phases.index(match["tensor"])
        at = phase < 3  # weights, then layers forward, then layers backward
        order = step * 1e6 + (place if phase == 0 else 1e5 + place if at else 9e5 - place)
        key = Key(step, bare(match["layer"]) + (".weight" if match["tensor"] in ("weight", "wgrad") else ""),
                  _TE_KINDS[match["tensor"]])  # fmt: skip
        yield TensorSeen(key, value.detach(), order, "TransformerEngine")


def _msprobe(folder: Path) -> StepRecording:
    file = folder / "dump.json"
    try:
        facts = parse_json(read_text(file))
        data = facts.get("data") if isinstance(facts, dict) else None
        if not isinstance(data, dict):
            raise TraceError(f"{file}: has no object data; needs a dump.json of msprobe")
        entries = [*_entries(folder / "dump_tensor_data", data)]
    except (UntrustedError, StateFileError, DamagedError, RefusedError, OSError) as error:
        raise TraceError(f"{file}: {str(error).splitlines()[0][:200]}") from None
    if not entries:
        need = "dump with task tensor, level L0"
        raise TraceError(f"{file}: names no tensor of a module that is in dump_tensor_data; {need}")
    return StepRecording(entries, folder.name, kinds={e.key.path: e.operation for e in entries})


def _entries(folder: Path, data: dict[str, Any]) -> Iterator[TensorSeen]:
    order = 0
    for name, sides in data.items():
        match = _MODULE.fullmatch(name)
        if match is None or not isinstance(sides, dict):
            continue
        for way, side, kind in _SIDES:
            held = sides.get(side)
            for part, one in enumerate(held if way == match["way"] and isinstance(held, list) else []):
                said = one.get("data_name") if isinstance(one, dict) else None
                # a name is a file in that folder, not a path to elsewhere
                if not isinstance(said, str) or Path(said).name != said or not (folder / said).is_file():
                    continue
                tensor = next((x for _, x in read_entries(folder / said) if isinstance(x, Tensor)), None)
                if tensor is not None:
                    order, key = order + 1, Key(0, bare(match["path"]), kind, part)
                    yield TensorSeen(key, tensor.detach(), float(order), match["kind"])

"""Opens saved traces: those of `ottava check --save`, and the dumps of msprobe.

    ottava     rank0.json, rank0.safetensors
    msprobe    dump.json beside dump_tensor_data/NAME.pt (task "tensor"), of level L0: modules. A name is
               Module.PATH.CLASS.forward.CALL or .backward.CALL

Source: msprobe docs/zh/dump, "module dump data". No code of a file runs, see `interop.safe_pickle`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
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
    return _msprobe(path) if (path / "dump.json").is_file() else StepRecording.load(path)


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
        raise TraceError(
            f"{file}: names no tensor of a module that is in dump_tensor_data; dump with task tensor, level L0"
        )
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
                    order += 1
                    yield TensorSeen(
                        Key(0, bare(match["path"]), kind, part), tensor.detach(), float(order), match["kind"]
                    )

"""The ways in which a pickle runs code, against every door that reads pickles: none runs any, and each says so.

The techniques are those that scanners such as fickling look for: a call by reduction, by instance, by constructor, by
state, by extension code, by persistent id; names that walk through allowed modules; a second pickle inside the first;
a payload behind the end, in an archive's other entries, and in the old format of torch.save.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ottava.compat.checkpoints import read_state
from ottava.interop.contents import read_contents
from ottava.interop.importers import import_run
from ottava.interop.safe_pickle import DamagedError, load_pickle, load_torch

CANARY = "canary"


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def name(module: str, function: str, *, stack: bool = False) -> bytes:
    return text(module) + text(function) + b"\x93" if stack else f"c{module}\n{function}\n".encode()


def attacks(canary: Path) -> dict[str, bytes]:
    """Technique -> a pickle that would make the file `canary`."""
    shell, code = text(f"touch {canary}"), text(f"open({str(canary)!r}, 'w')")
    opened, written = text(str(canary)), text("w")
    dotted = text("numpy.core") + text("load.__globals__.__builtins__.eval") + b"\x93"
    inner = b"\x80\x04" + name("os", "system") + shell + b"\x85R."
    return {
        "reduce": name("os", "system") + shell + b"\x85R.",
        "reduce, name on the stack": b"\x80\x04" + name("posix", "system", stack=True) + shell + b"\x85R.",
        "instance": b"(" + shell + b"ios\nsystem\n.",
        "object": b"(" + name("os", "system") + shell + b"o.",
        "new object": b"\x80\x02" + name("subprocess", "Popen") + text("touch") + b"\x85\x81.",
        "new object with keywords": b"\x80\x04" + name("subprocess", "Popen") + b")}\x92.",
        "eval": name("builtins", "eval") + code + b"\x85R.",
        "exec, old name": name("__builtin__", "exec") + code + b"\x85R.",
        "open": name("builtins", "open") + opened + written + b"\x86R.",
        "io.open": name("io", "open") + opened + written + b"\x86R.",
        "import": name("builtins", "__import__") + text("antigravity") + b"\x85R.",
        "getattr": name("builtins", "getattr") + name("os", "path") + text("os") + b"\x86R.",
        "partial": name("functools", "partial") + name("os", "system") + shell + b"\x86R.",
        "map": name("builtins", "map") + name("os", "system") + b"(" + shell + b"l\x86R.",
        "attrgetter": name("operator", "attrgetter") + text("system") + b"\x85R.",
        "runpy": name("runpy", "run_path") + opened + b"\x85R.",
        "pty": name("pty", "spawn") + text("sh") + b"\x85R.",
        "pickle in a pickle": name("pickle", "loads") + b"C" + bytes([len(inner)]) + inner + b"\x85R.",
        "torch.load": name("torch", "load") + opened + b"\x85R.",
        "torch.hub": name("torch.hub", "load") + text("x/y") + text("z") + b"\x86R.",
        "numpy.load": name("numpy", "load") + opened + b"\x85R0" + name("os", "system") + shell + b"\x85R.",
        "a name through numpy": b"\x80\x04" + dotted + code + b"\x85R.",
        "a name through torch": b"\x80\x04" + text("torch") + text("os.system") + b"\x93" + shell + b"\x85R.",
        "reconstructor": name("copyreg", "_reconstructor") + name("os", "system") + b"R.",
        "state of a function": name("torch._utils", "_rebuild_tensor_v2") + b"}" + text("x") + b"Nsb" + inner[2:],
        "extension": b"\x80\x02\x82\x01.",
        "persistent id": text(str(canary)) + b"Q.",
        "a list first": b"]" + name("os", "system") + shell + b"\x85Ra.",
        "popped again": name("os", "system") + shell + b"\x85R0N.",
        "memo": name("os", "system") + b"q\x010" + b"h\x01" + shell + b"\x85R.",
    }


def zipped(payload: bytes) -> bytes:
    """As torch.save writes today."""
    made = io.BytesIO()
    torch.save({"x": torch.ones(1)}, made)
    again = io.BytesIO()
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(again, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, payload if entry.filename.endswith("data.pkl") else old.read(entry))
    return again.getvalue()


def legacy(payload: bytes) -> bytes:
    """As torch.save wrote before 1.6: its fourth pickle holds the objects."""
    made = io.BytesIO()
    torch.save({"x": torch.ones(1)}, made, _use_new_zipfile_serialization=False)
    data, stream, ends = made.getvalue(), io.BytesIO(made.getvalue()), list[int]()
    for _ in range(4):
        list(pickletools.genops(stream))
        ends.append(stream.tell())
    return data[: ends[2]] + payload + data[ends[3] :]


def nested(payload: bytes) -> bytes:
    """TransformerEngine's state: a pickle in a tensor of bytes."""
    made = io.BytesIO()
    torch.save({"fc._extra_state": torch.frombuffer(bytearray(payload), dtype=torch.uint8)}, made)
    return made.getvalue()


DOORS: dict[str, tuple[Callable[[Path], object], Callable[[bytes], bytes]]] = {
    "load_pickle": (lambda path: load_pickle(path.read_bytes()), bytes),
    "load_torch": (load_torch, zipped),
    "load_torch, old format": (load_torch, legacy),
    "inspect": (read_contents, zipped),
    "inspect, nested state": (read_contents, nested),
    "import of a checkpoint": (read_state, legacy),
    "import of dumps": (lambda path: import_run(path, path.with_name("run")), zipped),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_technique_runs_code(door: str, tmp_path: Path) -> None:
    """Not while it is read, and not when what was read is printed and dropped."""
    read, wrap = DOORS[door]
    for number, (technique, payload) in enumerate(attacks(tmp_path / CANARY).items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "decoder_layers_0_mlp_fc1_activation_iter_1.pt"
        path.write_bytes(wrap(payload))
        if technique == "a name through numpy":  # a name of another package, of which some doors make a stand-in
            with contextlib.suppress(ValueError, pickle.UnpicklingError):
                str(read(path))
        else:
            with pytest.raises((ValueError, DamagedError)):
                read(path)
        assert not (tmp_path / CANARY).exists(), technique


def test_the_attacks_are_attacks(tmp_path: Path) -> None:
    """Python's own reader runs them: most of these make the file."""
    ran = 0
    for technique, payload in attacks(tmp_path / CANARY).items():
        if technique in ("import", "pty", "runpy", "torch.hub", "new object"):
            continue
        with contextlib.suppress(Exception):
            pickle.loads(payload)
        ran += (tmp_path / CANARY).exists()
        (tmp_path / CANARY).unlink(missing_ok=True)
    assert ran >= 12

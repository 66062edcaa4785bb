"""Reads pickles of other programs without running anything of theirs.

A pickle names functions and calls them: `pickle.loads` on a checkpoint runs whatever its author liked.
TransformerEngine keeps its scaling state in such pickles, and itself refuses to load them unless told otherwise. Here
every name is looked up in a short list: what rebuilds tensors and plain containers; an inert `StandIn` for classes of
TransformerEngine, Megatron, numpy and argparse, which remembers what it was made from and does nothing; and nothing
else. Any other name is refused before it is imported.

Before a pickle is loaded, its opcodes are read without obeying them: what it claims to hold must be there, and it may
not build more than its limits. Else a hundred bytes could fill the memory, or keep Python hashing for years.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ottava.untrusted import regular_size

_STAND_IN_FOR = ("transformer_engine.", "transformer_engine_torch.", "megatron.", "numpy.", "argparse.Namespace")
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_MAKER = "_make_in_reduce_ex"
"""TransformerEngine 2.15 rebuilds its tensors by this class method, which pickle names by calling getattr."""
_MAX_OPCODES, _MAX_PARTS, _MAX_DEPTH = 5_000_000, 10_000_000, 500
"""Of one pickle: steps of it, objects in objects counted along every path, objects within objects. The checkpoint of a
model of 10,000 tensors has some 300,000 opcodes, and a depth of 10."""
_LEGACY_PICKLES = 5
"""At the beginning of a file of torch.save before 1.6: magic number, protocol, machine, content, keys of storages."""
_CONTAINERS = MappingProxyType({kind.__name__: kind for kind in (set, frozenset, bytearray, list, dict, tuple)})


class RefusedError(ValueError):
    """A pickle names something that reading it would run."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"names {', '.join(names)}, and reading that would run code")


class DamagedError(pickle.UnpicklingError):
    """A pickle is cut short, contradicts itself, or would build more than its limits; the message says what."""

    exit_code = 4


class StandIn:
    """What stands for an object of a class that is not imported."""

    qualified_name = ""
    """Module and name of that class."""
    args: tuple[Any, ...]
    """What it was called with."""
    state: Any
    """What its attributes were set from, None if from nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_in(name: str) -> type[StandIn]:
    return type(name.rpartition(".")[2], (StandIn,), {"qualified_name": name})


def load_torch(file: Path | bytes) -> Any:
    """What `torch.save` wrote, by torch's own restricted reader, with stand-ins for classes that it does not know.

    Raises:
        RefusedError: the file names something else.
        DamagedError: it is damaged, or beyond the limits.
        OSError, UntrustedError: as in `untrusted.regular_size`.
    Edge cases: a large file is mapped, not read. A tensor may still claim more than the file has: see `check_tensors`.
    """
    if isinstance(file, Path):
        regular_size(file)
    try:
        return _load_torch(file)
    except (RefusedError, DamagedError):
        raise
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise RefusedError([found[1]]) from error
        # torch's own text advises to load without restriction
        raise DamagedError(str(error).partition("WeightsUnpickler error: ")[2] or "not a pickle") from error
    except Exception as error:  # torch and zipfile raise whatever the damaged bytes lead them to
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _load_torch(file: Path | bytes) -> Any:
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [(io.BytesIO, "_io.BytesIO")]
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as stream:
        is_zip = zipfile.is_zipfile(stream)  # older files cannot be asked for the names in them
        stream.seek(0)
        for _ in range(0 if is_zip else _LEGACY_PICKLES):
            _scan(stream)
        if is_zip:
            _scan_archive(stream)
    if is_zip:
        unknown = [name for name in get_unsafe_globals_in_checkpoint(_stream(file)) if name != "_io.BytesIO"]
        if refused := [name for name in unknown if not name.startswith((*_STAND_IN_FOR, *_GETATTR))]:
            raise RefusedError(refused)
        classes = {name: _stand_in(name) for name in unknown if name not in _GETATTR}
        stand_ins += [(kind, name) for name, kind in classes.items()]
        if len(classes) < len(unknown):
            makers = {kind: _stand_in(f"{name}.{_MAKER}") for name, kind in classes.items()}
            stand_ins += [(maker, maker.qualified_name) for maker in makers.values()]
            look_up = _attribute_maker(makers)
            stand_ins += [(look_up, name) for name in _GETATTR]
    with safe_globals(stand_ins):
        mmap = is_zip and isinstance(file, Path)
        return torch.load(_stream(file), map_location="cpu", weights_only=True, mmap=mmap)


def _scan_archive(stream: IO[bytes]) -> None:
    size = stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise DamagedError("its entries are compressed, and torch.save compresses none")
        if sum(entry.file_size for entry in entries) > size:
            raise DamagedError("its entries claim more bytes than the file has")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _scan(io.BytesIO(archive.read(entry)))


@dataclass(slots=True)
class _Part:
    """What is known, without making it, of an object that a pickle would make."""

    parts: int = 1
    depth: int = 0
    largest: int = 0
    """Whole number in it."""
    text: str = ""

    def take(self, others: Sequence[_Part]) -> None:
        """The others become parts of it."""
        self.parts += sum(other.parts for other in others)
        self.depth = max([self.depth, *(other.depth + 1 for other in others)])
        self.largest = max([self.largest, *(other.largest for other in others)])
        if self.parts > _MAX_PARTS:
            raise DamagedError(f"its parts, counted along every path to them, are more than {_MAX_PARTS:,}")
        if self.depth > _MAX_DEPTH:
            raise DamagedError(f"its parts are nested more than {_MAX_DEPTH} deep")


def _scan(stream: IO[bytes]) -> None:
    """Reads one pickle, up to its end, without making anything.

    Raises:
        DamagedError: an opcode is unknown, claims bytes that are not there, or takes what nobody put; or the limits are
            passed.
    """
    stack: list[_Part | None] = []
    memo: dict[int, _Part | None] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            number: Any = argument
            if count > _MAX_OPCODES:
                raise DamagedError(f"it has more than {_MAX_OPCODES:,} opcodes")
            if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[number])
            elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                place = len(memo) if opcode.name == "MEMOIZE" else number
                if not 0 <= place <= count:  # the unpickler makes a table of so many places
                    raise DamagedError(f"it keeps an object at place {place}, and has {count} before it")
                memo[place] = stack[-1]
            elif opcode.name == "DUP":
                stack.append(stack[-1])
            else:
                _obey(opcode, argument, stack)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise DamagedError(f"is no whole pickle ({error})") from error


def _obey(opcode: pickletools.OpcodeInfo, argument: Any, stack: list[_Part | None]) -> None:
    """What an opcode takes from the stack, and leaves there."""
    kinds = opcode.stack_before
    has_mark = pickletools.markobject in kinds
    taken: list[_Part | None] = []
    if has_mark:
        while (top := stack.pop()) is not None:
            taken.append(top)
    for _ in range(kinds.index(pickletools.markobject) if has_mark else len(kinds)):
        taken.append(stack.pop())
    parts = [part for part in reversed(taken) if part is not None]
    if opcode.name == "MARK":
        stack.append(None)
    elif opcode.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
        parts[0].take(parts[1:])
        stack.append(parts[0])
    elif opcode.stack_after:
        made = _Part()
        made.take(parts)
        made.largest = max(made.largest, argument if type(argument) is int else 0)
        made.text = (
            " ".join(part.text for part in parts) if opcode.name == "STACK_GLOBAL" else str(argument or "")[:200]
        )
        names = {part.text for part in parts} | ({made.text} if opcode.name == "INST" else set())
        if names & {"builtins bytearray", "__builtin__ bytearray"} and made.largest:
            raise DamagedError(f"it makes a bytearray of {made.largest:,} zeros")
        stack.append(made)


def check_tensors(value: Any, size: int) -> None:
    """Refuses tensors whose numbers are not all in the file: on the meta device, sparse, or larger than what is stored.

    Args:
        value: a tensor, or containers and stand-ins that hold some.
        size: of the file in bytes.
    Raises:
        DamagedError: says which shape.

    Example:
        >>> check_tensors({"history": torch.zeros(1).expand(10**12)}, size=100)
        Traceback (most recent call last):
        ottava.debug.safe_pickle.DamagedError: a tensor of shape (1000000000000,) has more numbers than the file
    """
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            shape = tuple(item.shape)
            if item.device.type != "cpu" or item.layout != torch.strided or item.is_quantized:
                raise DamagedError(f"a tensor of shape {shape} is on {item.device}, {item.layout}; needs plain numbers")
            stored = item.untyped_storage().nbytes()
            if item.numel() * item.element_size() > stored or stored > size:
                raise DamagedError(f"a tensor of shape {shape} has more numbers than the file")
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif isinstance(item, StandIn):
            waiting += [item.args, item.state]


def _attribute_maker(makers: Mapping[type[StandIn], type[StandIn]]) -> Callable[[Any, str], type[StandIn]]:
    """getattr, of nothing but that one method of stand-ins."""

    def look_up(owner: Any, name: str) -> type[StandIn]:
        if name != _MAKER or not isinstance(owner, type) or owner not in makers:
            raise RefusedError([f"getattr({getattr(owner, '__name__', owner)!r}, {name!r})"])
        return makers[owner]

    return look_up


def _stream(file: Path | bytes) -> Any:
    return io.BytesIO(file) if isinstance(file, bytes) else file


def load_pickle(data: bytes) -> Any:
    """What `pickle.dumps` made of tensors, containers and the classes that have stand-ins.

    Raises:
        RefusedError: the pickle names something else; none of it has run.
        DamagedError: it is damaged, or beyond the limits.

    Example:
        >>> load_pickle(pickle.dumps({"scale": torch.ones(2)}))
        {'scale': tensor([1., 1.])}
        >>> load_pickle(b"cos\\nsystem\\n(S'echo you are mine'\\ntR.")
        Traceback (most recent call last):
        ottava.debug.safe_pickle.RefusedError: names os.system, and reading that would run code
    """
    _scan(io.BytesIO(data))
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except (RefusedError, DamagedError):
        raise
    except Exception as error:  # pickle, and what it calls, raise whatever the damaged bytes lead them to
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0]) from error


class _Unpickler(pickle.Unpickler):
    """Every object it hands out is made anew, so that a pickle which sets attributes on one changes nothing of ours."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._stand_ins: dict[str, type[StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "builtins" and name in _CONTAINERS:
            return _CONTAINERS[name]
        if full == "collections.OrderedDict":
            return OrderedDict
        if full == "torch._utils._rebuild_tensor_v2":
            return _tensor_maker()
        if full == "torch.storage._load_from_bytes":
            return _storage_maker()
        if full.startswith(_STAND_IN_FOR):
            return self._stand_ins.setdefault(full, _stand_in(full))
        raise RefusedError([full])


def _storage_maker() -> Callable[[bytes], Any]:
    def load(data: bytes) -> Any:
        storage = load_torch(data)
        if not isinstance(storage, torch.TypedStorage):
            raise DamagedError(f"a tensor's storage is {type(storage).__name__}")
        return storage

    return load


def _tensor_maker() -> Callable[..., Tensor]:
    def make(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
        if not isinstance(storage, torch.TypedStorage) or min(offset, *size, *stride, 0) < 0:
            raise DamagedError("a tensor has no storage, or a negative size")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage._size():  # torch would enlarge the storage
            raise DamagedError("a tensor is larger than its storage")
        flat = torch.empty(0, dtype=storage.dtype)
        return flat.set_(storage._untyped_storage, offset, size, stride)

    return make

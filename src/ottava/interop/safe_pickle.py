"""Reads pickles of other programs without running any of their code.

A pickle names functions and calls them, so `pickle.loads` runs any code that the author of a checkpoint chose.
TransformerEngine keeps its scaling state in such pickles, and refuses to load them itself by default. This reader
allows few names: functions that rebuild tensors and plain containers, and classes of TransformerEngine, torchao,
Megatron, numpy and argparse. For those classes it makes an inert `StandIn`, which keeps its arguments and does nothing
(`StandInTensor` for torchao's tensors). It refuses any other name before importing it.

First the reader scans the opcodes without executing them. It refuses a pickle that claims bytes the file does not have,
or that exceeds a limit. Otherwise a hundred bytes could fill the memory, or keep Python hashing for years.
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
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, Self

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ottava.base.untrusted import regular_size

_STAND_IN_FOR = (
    "transformer_engine.",
    "transformer_engine_torch.",
    "megatron.",
    "numpy.",
    "argparse.Namespace",
    "torchao.",
)
_TENSORS = re.compile(r"torchao\..*Tensor(Impl)?")
"""Classes that are tensors which hold others: torch makes them without numbers, and sets their attributes."""
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_MAKER = "_make_in_reduce_ex"
"""TransformerEngine 2.15 rebuilds its tensors by this class method; the pickle gets it by calling getattr."""
_MAX_OPCODES, _MAX_PARTS, _MAX_DEPTH = 5_000_000, 10_000_000, 500
"""Limits of one pickle. Parts are counted along every path to them; depth is the nesting of objects. The checkpoint of
a model with 10,000 tensors has about 300,000 opcodes and a depth of 10."""
_LEGACY_PICKLES = 5
"""A file of torch.save before 1.6 begins with so many: magic number, protocol, machine, content, keys of storages."""
_CONTAINERS = MappingProxyType({kind.__name__: kind for kind in (set, frozenset, bytearray, list, dict, tuple)})


class RefusedError(ValueError):
    """Reading a pickle would run code that it names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"names {', '.join(names)}, and reading that would run code")


class DamagedError(pickle.UnpicklingError):
    """A pickle is cut short, contradicts itself, or exceeds a limit; the message says which."""

    exit_code = 4


class StandIn:
    """Replaces an object whose class is not imported."""

    qualified_name = ""
    """Module and name of that class."""
    args: tuple[Any, ...]
    """Arguments of the constructor."""
    state: Any
    """The value that the pickle set its attributes from; None if it set none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StandInTensor(Tensor):
    """The stand-in for a tensor that holds others, as attributes; it has a shape and a dtype, and no numbers."""

    qualified_name = ""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses: nothing computes with it."""
        raise TypeError(f"{cls.qualified_name}: a stand-in computes nothing")


def _stand_in(name: str) -> type[Any]:
    if _TENSORS.fullmatch(name):
        return type(name.rpartition(".")[2], (StandInTensor,), {"qualified_name": name})
    return type(name.rpartition(".")[2], (StandIn,), {"qualified_name": name})


def load_torch(file: Path | bytes) -> Any:
    """Loads a file of `torch.save` with torch's restricted reader; unknown classes become stand-ins.

    Raises:
        RefusedError: the file names a function or class that is not allowed.
        DamagedError: it is damaged, or exceeds a limit.
        OSError, UntrustedError: as in `untrusted.regular_size`.
    Edge cases: a large file is mapped, not read. A tensor may still claim more bytes than the file has, see
        `check_tensors`.
    """
    if isinstance(file, Path):
        regular_size(file)
    try:
        return _load_torch(file)
    except (RefusedError, DamagedError):
        raise
    except pickle.UnpicklingError as error:
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise RefusedError([name[1]]) from error
        # torch's message advises to load without restriction: leave that out
        raise DamagedError(str(error).partition("WeightsUnpickler error: ")[2] or "not a pickle") from error
    except Exception as error:  # damaged bytes make torch and zipfile raise errors of any kind
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _load_torch(file: Path | bytes) -> Any:
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [(io.BytesIO, "_io.BytesIO")]
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as stream:
        is_zip = zipfile.is_zipfile(stream)  # torch cannot list the names in older files
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        for _ in range(0 if is_zip else _LEGACY_PICKLES):
            _scan(stream, size)
        if is_zip:
            _scan_archive(stream, size)
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


def _scan_archive(stream: IO[bytes], size: int) -> None:
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise DamagedError("its entries are compressed, and torch.save compresses none")
        if sum(entry.file_size for entry in entries) > size:
            raise DamagedError("its entries claim more bytes than the file has")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _scan(io.BytesIO(archive.read(entry)), size)


@dataclass(slots=True)
class _Part:
    """What the scan knows about an object that the pickle would make."""

    parts: int = 1
    depth: int = 0
    largest: int = 0
    """Largest whole number in it."""
    text: str = ""

    def take(self, others: Sequence[_Part]) -> None:
        """Makes the others parts of this object."""
        self.parts += sum(other.parts for other in others)
        self.depth = max([self.depth, *(other.depth + 1 for other in others)])
        self.largest = max([self.largest, *(other.largest for other in others)])
        if self.parts > _MAX_PARTS:
            raise DamagedError(f"its parts, counted along every path to them, are more than {_MAX_PARTS:,}")
        if self.depth > _MAX_DEPTH:
            raise DamagedError(f"its parts are nested more than {_MAX_DEPTH} deep")


def _scan(stream: IO[bytes], size: int) -> None:
    """Scans one pickle up to its end without making any object; its file has `size` bytes.

    Raises:
        DamagedError: an opcode is unknown, claims missing bytes, or takes an object that no opcode put there; or the
            pickle exceeds a limit.
    """
    stack: list[_Part | None] = []
    memo: dict[int, _Part | None] = {}
    # a file would allocate what it is asked for, and a pickle asks for any number
    held: Any = SimpleNamespace(read=lambda n: stream.read(min(n, size)), readline=stream.readline, tell=stream.tell)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(held)):
            number: Any = argument
            if count > _MAX_OPCODES:
                raise DamagedError(f"it has more than {_MAX_OPCODES:,} opcodes")
            if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[number])
            elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                place = len(memo) if opcode.name == "MEMOIZE" else number
                if not 0 <= place <= count:  # the unpickler allocates a table of so many places
                    raise DamagedError(f"it keeps an object at place {place}, and has {count} before it")
                memo[place] = stack[-1]
            elif opcode.name == "DUP":
                stack.append(stack[-1])
            else:
                _obey(opcode, argument, stack)
                if opcode.name == "BINPERSID" and (top := stack[-1]) and top.largest > size:  # torch allocates it
                    raise DamagedError(f"it claims a storage of {top.largest:,} numbers, and has {size:,} bytes")
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise DamagedError(f"is no whole pickle ({error})") from error


def _obey(opcode: pickletools.OpcodeInfo, argument: Any, stack: list[_Part | None]) -> None:
    """Changes the stack as the opcode would."""
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
    """Refuses tensors whose numbers are not all in the file: on the meta device, sparse, or larger than their storage.

    Args:
        value: a tensor, or containers and stand-ins that hold some.
        size: size of the file in bytes.
    Raises:
        DamagedError: the message names the shape.

    Example:
        >>> check_tensors({"history": torch.zeros(1).expand(10**12)}, size=100)
        Traceback (most recent call last):
        ottava.interop.safe_pickle.DamagedError: a tensor of shape (1000000000000,) has more numbers than the file
    """
    waiting, visited = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, StandInTensor):
            waiting += vars(item).values()
        elif isinstance(item, Tensor):
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
    """A getattr that knows only `_MAKER` of stand-ins."""

    def look_up(owner: Any, name: str) -> type[StandIn]:
        if name != _MAKER or not isinstance(owner, type) or owner not in makers:
            raise RefusedError([f"getattr({getattr(owner, '__name__', owner)!r}, {name!r})"])
        return makers[owner]

    return look_up


def _stream(file: Path | bytes) -> Any:
    return io.BytesIO(file) if isinstance(file, bytes) else file


def load_pickle(data: bytes) -> Any:
    """Loads a pickle of tensors, containers and the classes that have stand-ins.

    Raises:
        RefusedError: the pickle names a function or class that is not allowed; no code of it has run.
        DamagedError: it is damaged, or exceeds a limit.

    Example:
        >>> load_pickle(pickle.dumps({"scale": torch.ones(2)}))
        {'scale': tensor([1., 1.])}
        >>> load_pickle(b"cos\\nsystem\\n(S'echo you are mine'\\ntR.")
        Traceback (most recent call last):
        ottava.interop.safe_pickle.RefusedError: names os.system, and reading that would run code
    """
    _scan(io.BytesIO(data), len(data))
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except (RefusedError, DamagedError):
        raise
    except Exception as error:  # damaged bytes lead to errors of any kind
        raise DamagedError((str(error).splitlines() or [type(error).__name__])[0]) from error


class _Unpickler(pickle.Unpickler):
    """Makes every function and class anew, so that a pickle that sets attributes on one changes nothing of ours."""

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

"""Reads pickles of other programs without running anything of theirs.

A pickle names functions and calls them: `pickle.loads` on a checkpoint runs whatever its author liked.
TransformerEngine keeps its scaling state in such pickles, and itself refuses to load them unless told otherwise. Here
every name is looked up in a short list: what rebuilds tensors and plain containers; an inert `StandIn` for classes of
TransformerEngine, Megatron, numpy and argparse, which remembers what it was made from and does nothing; and nothing
else. Any other name is refused before it is imported.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

_STAND_IN_FOR = ("transformer_engine.", "transformer_engine_torch.", "megatron.", "numpy.", "argparse.Namespace")
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_MAKER = "_make_in_reduce_ex"
"""TransformerEngine 2.15 rebuilds its tensors by this class method, which pickle names by calling getattr."""
_CONTAINERS = MappingProxyType({kind.__name__: kind for kind in (set, frozenset, bytearray, list, dict, tuple)})


class RefusedError(ValueError):
    """A pickle names something that reading it would run."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"names {', '.join(names)}, and reading that would run code")


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
    Edge cases: a large file is mapped, not read. Damage raises whatever torch raises.
    """
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [(io.BytesIO, "_io.BytesIO")]
    is_zip = zipfile.is_zipfile(_stream(file))  # older files cannot be asked for the names in them
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
    try:
        with safe_globals(stand_ins):
            mmap = is_zip and isinstance(file, Path)
            return torch.load(_stream(file), map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise RefusedError([found[1]]) from error
        # torch's own text advises to load without restriction
        raise pickle.UnpicklingError(str(error).partition("WeightsUnpickler error: ")[2] or "not a pickle") from error


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
    Edge cases: damage raises whatever pickle raises.

    Example:
        >>> load_pickle(pickle.dumps({"scale": torch.ones(2)}))
        {'scale': tensor([1., 1.])}
        >>> load_pickle(b"cos\\nsystem\\n(S'echo you are mine'\\ntR.")
        Traceback (most recent call last):
        ottava.debug.safe_pickle.RefusedError: names os.system, and reading that would run code
    """
    return _Unpickler(io.BytesIO(data)).load()


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
            raise pickle.UnpicklingError(f"a tensor's storage is {type(storage).__name__}")
        return storage

    return load


def _tensor_maker() -> Callable[..., Tensor]:
    def make(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
        if not isinstance(storage, torch.TypedStorage) or min(offset, *size, *stride, 0) < 0:
            raise pickle.UnpicklingError("a tensor has no storage, or a negative size")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage._size():  # torch would enlarge the storage
            raise pickle.UnpicklingError("a tensor is larger than its storage")
        flat = torch.empty(0, dtype=storage.dtype)
        return flat.set_(storage._untyped_storage, offset, size, stride)

    return make

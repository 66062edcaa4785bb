"""The restricted reader: tensors and containers come back, nothing else happens."""

from __future__ import annotations

import collections
import pickle
import random
import struct
import sys
import types
from pathlib import Path

import pytest
import torch

from ottava.interop.safe_pickle import RefusedError, StandIn, load_pickle, load_torch


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_tensors_of_every_layout_and_dtype_come_back(protocol: int) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    made = {"whole": base, "column": base[:, 1], "transposed": base.t(), "offset": base[1:, ::2]}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        made[str(dtype)] = torch.ones(2, 3, dtype=dtype)
    made |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    found = load_pickle(pickle.dumps(made, protocol=protocol))
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def calling(full: str, argument: str = "'1'") -> bytes:
    """A pickle that calls module.name(argument)."""
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n(S{argument}\ntR.".encode()


@pytest.mark.parametrize(
    "full",
    [
        "os.system",
        "posix.system",
        "subprocess.Popen",
        "builtins.eval",
        "builtins.getattr",
        "builtins.__import__",
        "__builtin__.eval",
        "torch.load",
        "torch.serialization.load",
        "torch.hub.load",
        "functools.partial",
        "operator.attrgetter",
        "pickle.loads",
        "copyreg._reconstructor",
        "collections.namedtuple",
        "importlib.import_module",
        "__main__.anything",
        "numpy_evil.f",
        "transformer_engine_evil.f",
    ],
)
def test_every_other_name_is_refused_before_it_is_imported(full: str) -> None:
    with pytest.raises(RefusedError, match="reading that would run code"):
        load_pickle(calling(full))
    assert not {"numpy_evil", "transformer_engine_evil"} & sys.modules.keys()


def test_stand_in_only_remembers() -> None:
    """A class of TransformerEngine, and a dotted name that would reach through numpy to eval."""
    found = load_pickle(calling("transformer_engine.common.recipe.Format", "'HYBRID'"))
    assert isinstance(found, StandIn)
    assert (found.qualified_name, found.args) == ("transformer_engine.common.recipe.Format", ("HYBRID",))
    names = (b"numpy.core", b"load.__globals__.__builtins__.eval")
    pushed = b"".join(b"\x8c" + bytes([len(name)]) + name for name in names)
    assert issubclass(load_pickle(b"\x80\x04" + pushed + b"\x93."), StandIn)


@pytest.mark.parametrize(
    "module, name", [("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes")]
)
def test_attributes_that_a_pickle_sets_stay_in_its_own_copy(module: str, name: str) -> None:
    """BUILD sets attributes on whatever a name gave: on torch's own function, __doc__ would change for everybody."""
    get = f"c{module}\n{name}\n".encode()
    assert load_pickle(get + b"(N}S'__doc__'\nS'hijacked'\nstb.").__doc__ == "hijacked"
    assert load_pickle(get + b".").__doc__ is None
    assert getattr(sys.modules[module], name).__doc__ != "hijacked"


@pytest.mark.parametrize("size", [5, 2**30, -4])
def test_tensor_that_reaches_beyond_its_storage_is_refused(size: int) -> None:
    """Else torch would enlarge the storage, by as much as the file says."""
    data = pickle.dumps(torch.arange(4.0), protocol=3)
    assert data.count(b"K\x04\x85") == 1  # the size (4,)
    with pytest.raises(pickle.UnpicklingError, match=r"larger than its storage|negative size"):
        load_pickle(data.replace(b"K\x04\x85", b"J" + struct.pack("<i", size) + b"\x85"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_does_nothing_but_raise() -> None:
    """Of 300 pickles with some bytes changed some load, most raise, and none ends the process."""
    data = pickle.dumps({"scale": torch.ones(3), "history": torch.zeros(4, 3), "recipe": ["x", 1]})
    chance = random.Random(0)
    outcomes = collections.Counter[str]()
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            load_pickle(bytes(damaged))
            outcomes["loaded"] += 1
        except Exception as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["loaded"] > 0
    assert len(outcomes) > 2


class Anything:
    """A class of the file's author."""


def test_nothing_stays_allowed_for_the_next_file(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save({"x": torch.ones(2)}, tmp_path / "good.pt")
    assert torch.equal(load_torch(tmp_path / "good.pt")["x"], torch.ones(2))
    torch.save({"x": Anything()}, tmp_path / "bad.pt")
    with pytest.raises(RefusedError, match="Anything"):
        load_torch(tmp_path / "bad.pt")
    assert set(torch.serialization.get_safe_globals()) == before


def test_getattr_reaches_one_method_of_stand_ins_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerEngine 2.15 pickled its tensors so."""
    module = types.ModuleType("transformer_engine.tensors")
    kind = type("Kind", (), {"__module__": module.__name__})
    module.Kind = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Looks:
        def __init__(self, *args: object) -> None:
            self.args = args

        def __reduce__(self) -> object:
            return getattr, self.args

    for owner, name in ((kind, "__subclasses__"), (kind, "mro"), (collections.OrderedDict, "_make_in_reduce_ex")):
        torch.save([kind, Looks(owner, name)], tmp_path / "evil.pt")
        with pytest.raises(RefusedError, match=f"getattr.*{name}"):
            load_torch(tmp_path / "evil.pt")

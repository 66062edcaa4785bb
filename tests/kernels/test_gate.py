"""Nothing that is no plain tensor in memory reaches C++ or Triton; each such thing is refused with a sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ottava
from ottava.kernels import gate
from ottava.kernels.gate import launched, pointer, refusal
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native import pointwise as native_sums
from ottava.numerics.formats import E4M3
from ottava.numerics.rounding import byte_values

SPEC = ottava.QuantizationSpec(E4M3)


class Mine(Tensor):
    """A subclass that computes as its base."""


def freed() -> Tensor:
    """A view of what FSDP has taken the memory from."""
    x = torch.randn(6, 4)[3:]
    x.untyped_storage().resize_(0)
    return x


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3, 4)


def negated() -> Tensor:
    return torch.ones(3, 4, dtype=torch.complex64).conj().imag


READ_BY_TORCH: dict[str, tuple[Callable[[], Tensor], str]] = {
    "fake": (fake, "FakeTensor, a subclass"),
    "meta": (lambda: torch.ones(3, 4, device="meta"), "on meta"),
    "subclass": (lambda: torch.ones(3, 4).as_subclass(Mine), "Mine, a subclass"),
    "zeros that are made": (lambda: torch._efficientzerotensor((3, 4)), "without memory"),
}
READ_BY_NONE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "COO": (lambda: torch.ones(3, 4).to_sparse(), "sparse_coo.*dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "nested.*dense"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged), "nested"),
    "freed": (freed, "memory has been freed"),
}
WRAPPERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[0],
    "functionalize": torch.func.functionalize,
}


def refused(x: Tensor, because: str) -> None:
    """By the doors of the gate."""
    if not (type(x) is Tensor and x.is_nested):  # which has an address, and no shape: no kernel gets so far
        with pytest.raises(TypeError, match=because if x.is_cpu else "read the memory of a CPU"):
            pointer(x)
    with pytest.raises(TypeError, match=because):
        launched(torch.ones(2), x)


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype; the address of a fake one is deprecated
def test_foreign_tensors_are_refused_with_a_sentence() -> None:
    """Those that torch's operations read have a reason, for the reference to run; those that nothing reads are errors,
    from the casts too."""
    for make, because in READ_BY_TORCH.values():
        assert re.search(because, refusal(make()) or "")
        refused(make(), because)
    assert re.search("negated", refusal(negated()) or "")
    for make, because in READ_BY_NONE.values():
        refused(make(), because)
        for call in (refusal, lambda x: ottava.quantize(x, SPEC)):
            with pytest.raises(TypeError, match=because):
                call(make())
    for make, because in (READ_BY_NONE["freed"], READ_BY_TORCH["fake"]):
        with pytest.raises(TypeError, match=because):
            native_sums.checksum(make())


def test_what_torch_func_wraps_is_refused() -> None:
    """Whatever wraps it; outside of casts and GEMMs torch's own operation runs, with the same numbers."""
    x = torch.randn(2, 3, 4)
    for name, wrap in WRAPPERS.items():
        seen: list[str | None] = []

        def look(y: Tensor, seen: list[str | None] = seen) -> Tensor:
            seen.append(refusal(y))
            refused(y, "torch.func")
            return y * 1

        wrap(look)(x)
        assert seen, name
        assert "torch.func" in str(seen[0]), name
    sums = torch.func.vmap(native_sums.column_sums)(x)
    assert sums.equal(torch.stack([y.sum(0) for y in x]))
    assert torch.func.functionalize(native_sums.column_sums)(x[0]).equal(native_sums.column_sums(x[0]))


def test_plain_tensors_pass() -> None:
    """Parameters, views, empty ones, those of inference mode; an address is that of the first element."""
    x = torch.randn(4, 6)
    with torch.inference_mode():
        inferred = torch.ones(3)
    for y in (x, nn.Parameter(x), x[1:, 2:], x.t(), inferred, torch.empty(0, 3), torch.empty(3, 0)[1:]):
        assert refusal(y) is None
        assert pointer(y) == y.data_ptr()
        launched(y, None)
    assert pointer(x[1:]) == pointer(x) + 24
    assert pointer(None) == 0


def test_modes_around_a_call_change_nothing() -> None:
    """A default device elsewhere: what a kernel writes to lies beside what it reads. Fake tensors: shapes come out."""
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    layer = ottava.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(weight)
    expected = layer(x)
    native_gemm._cell.cache_clear()  # tables are made where they are wanted first
    byte_values.cache_clear()
    modes: tuple[AbstractContextManager[object], ...] = (torch.device("meta"), nullcontext())
    for mode in modes:
        with mode:
            assert layer(x).equal(expected)
            assert native_sums.column_sums(x).is_cpu
            for recipe in ("mxfp8", "blockwise"):
                with ottava.autocast(recipe):
                    assert layer(x).is_cpu
    with FakeTensorMode():
        faked = ottava.nn.Linear(64, 48, dtype=torch.bfloat16)
        assert faked(torch.ones(2, 64, dtype=torch.bfloat16)).shape == (2, 48)
    assert layer(x).equal(expected)


def test_tensor_parallelism_ends_in_a_sentence(mesh: DeviceMesh) -> None:
    """torch's styles before the conversion split FP8 layers; after it torch's call is refused, and the model is as it
    was. A DTensor that comes another way is refused by the first cast."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.randn(4, 64).bfloat16()
    for recipe in ("tensorwise", "delayed"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
        whole = copy.deepcopy(model)
        parallelize_module(model, mesh, plan)
        for one in (model, whole):
            assert ottava.convert(one, recipe).skipped == {}
        y = whole(x)  # the sum over ranks is rounded before the bias is added
        assert (model(x) - y).abs().max() <= torch.finfo(torch.bfloat16).eps * y.abs().max()
        ottava.assert_fp8(model)

        for place in plan:
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
            ottava.convert(model, recipe)
            expected = model(x)
            with pytest.raises(TypeError, match=rf"{place}\.weight: .*cannot split a layer that is converted already"):
                parallelize_module(model, mesh, {place: plan[place]})
            assert model(x).equal(expected)
        with pytest.raises(TypeError, match=r"got a DTensor; .*ottava\.distributed"):
            model(distribute_tensor(x, mesh, [Replicate()]))
        model[0]._parameters["weight"] = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
        with pytest.raises(TypeError, match=r"got a DTensor; .*ottava\.distributed"):
            model(x)


def test_no_kernel_asks_for_an_address_by_itself() -> None:
    """Every other file of the room has its pointers from the gate, and every launch of Triton's passes it."""
    files = {path.name: path.read_text("utf-8") for path in Path(str(gate.__file__)).parent.rglob("*.py")}
    asking = [name for name, text in files.items() if "data_ptr" in text and name != "gate.py"]
    assert asking == []
    launching = [name for name, text in files.items() if re.search(r"[_.]kernel\[", text)]
    assert len(launching) >= 4, launching
    assert [name for name in launching if "    launched(" not in files[name]] == []

"""Tensor dumps of TransformerEngine: pickles of its classes, read without running anything."""

from __future__ import annotations

import enum
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.interop.importers import import_run
from ottava.interop.importers.collected import ImportRunError
from ottava.interop.importers.te_dump import restored
from ottava.measure.walk import measure
from ottava.numerics.tensor import QuantizedTensor
from ottava.record.reader import Run

MODULE = "transformer_engine.pytorch.tensor.float8_tensor"
FUNCTIONS = ("_make_float8_tensor_in_reduce_ex", "_make_mxfp8_tensor_in_reduce_ex", "_make_other_tensor")
FUNCTIONS += ("_make_float8_blockwise_tensor_in_reduce_ex",)


class Pickled:
    """Pickles as a call of one of TransformerEngine's functions, as its tensors do."""

    def __init__(self, function: str, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return getattr(sys.modules[MODULE], self.function), self.args


@pytest.fixture
def te() -> Iterator[types.ModuleType]:
    """A package of TransformerEngine's name while files are written; none while they are read."""
    names = [MODULE[: i if i > 0 else None] for i, c in enumerate(MODULE + ".") if c == "."]
    modules = {name: types.ModuleType(name) for name in names}
    module = modules[MODULE]
    for name in FUNCTIONS:
        function = types.FunctionType((lambda *args: args).__code__, {}, name)
        function.__module__, function.__qualname__ = MODULE, name
        setattr(module, name, function)
    module.DType = enum.IntEnum("DType", {"kFloat8E4M3": 7, "kFloat8E5M2": 8}, module=MODULE)  # type: ignore[attr-defined]
    sys.modules.update(modules)
    yield module
    for name in names:
        sys.modules.pop(name, None)


def tensor() -> Tensor:
    x = torch.randn(4, 32, 256, dtype=torch.bfloat16) * torch.exp2(torch.randn(4, 32, 1)).bfloat16()
    x[0, 0] *= 1000
    return x


def dump(folder: Path, content: Any, name: str = "decoder_layers_0_mlp_fc2_activation", rank: int = 0) -> Path:
    path = folder / "tensor_dumps" / f"rank_{rank}" / f"{name}_iter_000100.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def without_te(te: types.ModuleType, source: Path, target: Path, **options: Any) -> Run:
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    return import_run(source, target, **options)


def cast(x: Tensor, recipe: str) -> QuantizedTensor:
    spec = ottava.RECIPES[recipe].fprop.lhs
    assert spec is not None
    return ottava.quantize(x.reshape(-1, x.shape[-1]), spec)


def pickled(te: Any, recipe: str, x: Tensor) -> Pickled:
    """The cast as TransformerEngine keeps it: padded scales, other orders."""
    x_q = cast(x, recipe)
    codes, kind = x_q.data.view(torch.uint8).reshape(x.shape), te.DType.kFloat8E4M3
    if recipe == "tensorwise":
        return Pickled(FUNCTIONS[0], codes, kind, x_q.scale_inv.reshape(1), x.dtype, x.shape, None)
    if recipe == "mxfp8":
        exponents = (x_q.scale_inv.log2() + 127).to(torch.uint8)
        padded = torch.nn.functional.pad(exponents, (0, 0, 0, 128 - exponents.shape[0]))
        return Pickled(FUNCTIONS[1], codes, padded, None, None, kind, x.dtype, x.shape, None, False)
    scales = torch.nn.functional.pad(x_q.scale_inv.t().contiguous(), (0, 4))
    return Pickled(FUNCTIONS[3], x.shape, codes, scales, None, None, kind, x.dtype, None, False, None)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "blockwise"])
def test_codes_and_tensor_give_the_tally_of_the_cast(te: types.ModuleType, tmp_path: Path, recipe: str) -> None:
    """Exactly what `measure` says of the same cast."""
    x = tensor()
    path = dump(tmp_path / "logs", {"high_precision": x, "quantized": pickled(te, recipe, x)})
    run = without_te(te, path.parents[2], tmp_path / "run")
    table = run.table()
    (key,) = table.slots()
    assert (key.layer, key.tensor, key.recipe) == ("decoder.layers.0.mlp.fc2", "input", recipe)
    assert (key.format, key.source) == ("E4M3", "import:te_dump")
    assert table["step"].tolist() == [100]
    wanted, got = measure(x.reshape(-1, 256), cast(x, recipe)), table.tally(0)
    for name in ("n", "n_underflow", "n_overflow", "see", "sxe", "amax", "scale_min"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert (got.row_sqnr == wanted.row_sqnr).all()
    assert run.manifest["imported"]["notes"] == []


class KindOfC:
    """pybind11's enum: an object without arguments, whose state is its number."""

    def __getstate__(self) -> int:
        return 7

    def __setstate__(self, state: int) -> None:
        pass


@pytest.mark.parametrize("recipe, kind", [("tensorwise", "Float8Tensor"), ("mxfp8", "MXFP8Tensor")])
def test_dumps_of_transformer_engine_2_15(te: Any, tmp_path: Path, recipe: str, kind: str) -> None:
    """Its tensors were rebuilt by a class method, found with getattr, and its dtypes were an enum of C++."""

    def _make_in_reduce_ex(cls: type, *args: Any) -> Any:
        return args

    owner: Any = type(kind, (), {"_make_in_reduce_ex": classmethod(_make_in_reduce_ex), "__module__": MODULE})
    setattr(te, kind, owner)
    KindOfC.__module__, te.KindOfC = MODULE, KindOfC
    x = tensor()
    new = pickled(te, recipe, x)
    args = tuple(KindOfC() if isinstance(arg, enum.IntEnum) else arg for arg in new.args)
    old = type("Old", (), {"__reduce__": lambda self: (owner._make_in_reduce_ex, args)})()
    path = dump(tmp_path / "logs", {"high_precision": x, "quantized": old})
    with zipfile.ZipFile(path) as archive:
        assert b"getattr" in archive.read(f"{path.stem}/data.pkl")
    run = without_te(te, path.parents[2], tmp_path / "run")
    (key,) = run.table().slots()
    assert (key.recipe, key.format, key.source) == (recipe, "E4M3", "import:te_dump")
    assert run.table().tally(0).see == measure(x.reshape(-1, 256), cast(x, recipe)).see


def test_without_codes_a_recipe_is_simulated(tmp_path: Path) -> None:
    """And the rows say so."""
    x = tensor()
    dump(tmp_path / "logs", {"high_precision": x}, rank=1)
    run = import_run(tmp_path / "logs", tmp_path / "run", recipe="blockwise")
    (key,) = run.table().slots()
    assert (key.recipe, key.source) == ("blockwise", "import:te_dump, simulated")
    assert run.ranks == [1]
    assert run.table().tally(0).see == measure(x.reshape(-1, 256), cast(x, "blockwise")).see


def test_nothing_in_a_dump_is_executed(te: types.ModuleType, tmp_path: Path) -> None:
    """A pickle that calls something is refused by name; other dumps are still read."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "mine"),)

    x = tensor()
    dump(tmp_path / "logs", {"high_precision": x, "quantized": Evil()}, "fc1_weight")
    dump(tmp_path / "logs", {"quantized": pickled(te, "tensorwise", x)}, "fc2_weight")
    dump(tmp_path / "logs", {"high_precision": x, "quantized": Pickled("_make_other_tensor", 1)}, "fc3_weight")
    dump(tmp_path / "logs", [x], "fc4_weight")
    (tmp_path / "logs" / "fc5_weight_iter_000001.pt").write_bytes(b"PK torn")
    with pytest.raises(ImportRunError, match=r"understood no value.*mkdir.*would run code"):
        without_te(te, tmp_path / "logs", tmp_path / "run")
    dump(tmp_path / "logs", {"high_precision": x}, "fc6_weight")
    run = import_run(tmp_path / "logs", tmp_path / "run")
    assert [key.layer for key in run.table().slots()] == ["fc6"]
    notes = "\n".join(run.manifest["imported"]["notes"])
    for words in (
        "mkdir",
        "no high-precision tensor",
        "make_other_tensor, which is unknown",
        "got list; needs the dict",
    ):
        assert words in notes
    assert "fc5_weight_iter_000001.pt: " in notes
    assert not (tmp_path / "mine").exists()


def test_scales_in_another_order_are_not_believed(te: types.ModuleType, tmp_path: Path) -> None:
    """Swizzled ones are refused; those that fit nothing are noted."""
    x = tensor()
    right = pickled(te, "mxfp8", x)
    dump(tmp_path / "a", {"high_precision": x, "quantized": Pickled(right.function, *right.args[:-1], True)})
    other = pickled(te, "tensorwise", x)
    args = (*other.args[:2], other.args[2] * 64, *other.args[3:])
    dump(tmp_path / "b", {"high_precision": x, "quantized": Pickled(other.function, *args)})
    with pytest.raises(ImportRunError, match="in the order of the GEMM"):
        without_te(te, tmp_path / "a", tmp_path / "run_a")
    run = import_run(tmp_path / "b", tmp_path / "run_b")
    assert "hardly resemble the tensor" in run.manifest["imported"]["notes"][0]


def test_layers_are_spelt_as_the_logs_spell_them(tmp_path: Path) -> None:
    """A dump has underscores for dots; the log beside it knows better."""
    log = tmp_path / "logs" / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("2025 - INFO - Assigned layer name: model.enc_layers.0.my_linear\n", encoding="utf-8")
    dump(tmp_path / "logs", {"high_precision": tensor()}, "model_enc_layers_0_my_linear_weight")
    run = import_run(tmp_path / "logs", tmp_path / "run")
    assert [key.layer for key in run.table().slots()] == ["model.enc_layers.0.my_linear"]


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("decoder_layers_0_mlp_linear_fc2", "decoder.layers.0.mlp.linear_fc2"),
        ("model_encoder_layers_12_self_attention_proj", "model.encoder.layers.12.self_attention.proj"),
        ("output_layer", "output_layer"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_without_a_log_are_restored_as_far_as_can_be_told(name: str, wanted: str) -> None:
    assert restored(name) == wanted

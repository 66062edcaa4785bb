"""Files of TransformerEngine and torchao, read without their code: the numbers are those of their own dequantize."""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ottava
from ottava.base.untrusted import UntrustedError
from ottava.cli.app import app
from ottava.compat.checkpoints import import_checkpoint, read_state
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_128X128, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.weights.checkpoint import dequantize_state_dict
from ottava.weights.parameter import QuantizedWeight

TE = "transformer_engine.pytorch.tensor"


@contextmanager
def fake(name: str, **members: Any) -> Iterator[None]:
    """A module that pickle finds while a file is written, and nobody while it is read."""
    parents = [name.rsplit(".", i)[0] for i in range(name.count(".") + 1)]
    made = {parent: types.ModuleType(parent) for parent in parents if parent not in sys.modules}
    vars(made[name]).update(members)
    sys.modules |= made
    for member in members.values():
        member.__module__ = name
    try:
        yield
    finally:
        for parent in made:
            del sys.modules[parent]


class Saved:
    """Pickles itself as a call of one of TransformerEngine's functions."""

    def __init__(self, maker: Any, *arguments: Any) -> None:
        self.call = maker, arguments

    def __reduce__(self) -> Any:
        return self.call


def te_file(path: Path, kind: str, *arguments: Any, fp8: int = 7) -> None:
    """As TransformerEngine 2.16 pickles: a function of the tensor's module and its arguments."""

    def made(*_: Any) -> None:
        raise AssertionError("the code of a checkpoint ran")

    made.__qualname__ = made.__name__ = f"_make_{kind}_in_reduce_ex"

    def enum(*_: Any) -> None:
        raise AssertionError("the code of a checkpoint ran")

    enum.__qualname__ = enum.__name__ = "DType"
    with fake(f"{TE}.{kind}", **{made.__name__: made}), fake("transformer_engine_torch", DType=enum):
        values = [Saved(enum, fp8) if isinstance(one, str) else one for one in arguments]
        torch.save({"fc.weight": Saved(made, *values), "fc.bias": torch.ones(4)}, path)


def test_tensors_of_transformer_engine(tmp_path: Path) -> None:
    """Per tensor, in tiles with padded scales, and in MX blocks with padded bytes; codes are those that were saved."""
    torch.manual_seed(0)
    path, x = tmp_path / "te.pt", torch.randn(256, 160).bfloat16()
    for size, kind, fmt in (
        (PER_TENSOR, "float8_tensor", "fp32"),
        (BLOCK_128X128, "float8_blockwise_tensor", "fp32"),
        (BLOCK_1X32, "mxfp8_tensor", "e8m0"),
    ):
        cast = ottava.quantize(x, QuantizationSpec(E4M3, size, fmt))  # type: ignore[arg-type]
        data, scale = cast.data.view(torch.uint8), cast.scale_inv
        if kind == "float8_tensor":
            te_file(path, kind, data, "fp8", scale.reshape(1), torch.bfloat16, x.shape, None)
        elif kind == "float8_blockwise_tensor":
            padded = torch.nn.functional.pad(scale, (0, 2))
            te_file(path, kind, x.shape, data, padded, None, None, "fp8", torch.bfloat16, None, True, None)
        else:
            padded = torch.nn.functional.pad(scale.to(torch.float8_e8m0fnu).view(torch.uint8), (0, 3, 0, 128))
            te_file(path, kind, data, padded, None, None, "fp8", torch.bfloat16, x.shape, None, False)
        state = read_state(path)
        assert torch.equal(state["fc.weight"].view(torch.uint8), data)
        assert torch.equal(dequantize_state_dict(state)["fc.weight"], cast.dequantize())
        assert torch.equal(state["fc.bias"], torch.ones(4))


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    path, x = tmp_path / "te.pt", torch.zeros(128, 128, dtype=torch.uint8)
    one = torch.ones(1)
    rows = (x.shape, x, torch.ones(1, 128), None, None, "fp8", torch.bfloat16, None, False, None)
    for kind, arguments, fp8, words in (
        ("float8_tensor", (x, "fp8", one, torch.bfloat16, x.shape), 8, "format 8 of TransformerEngine's"),
        ("float8_tensor", (None, "fp8", one, torch.bfloat16, x.shape), 7, "only the codes of its transpose"),
        ("float8_blockwise_tensor", rows, 7, "is_2D_scaled"),
        ("mxfp8_tensor", (x, x, None, None, "fp8", torch.bfloat16, x.shape, None, True), 7, "order of a GEMM"),
        ("nvfp4_tensor", (x,), 7, "no quantized tensor that is read here"),
        ("float8_tensor", (x, "fp8", torch.ones(3), torch.bfloat16, x.shape), 7, r"scales \(3, 1\)"),
    ):
        te_file(path, kind, *arguments, fp8=fp8)
        with pytest.raises(UntrustedError, match=words):
            read_state(path)
    torch.save({"step": 3}, path)
    with pytest.raises(UntrustedError, match="holds no tensor"):
        read_state(path)
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UntrustedError, match=str(path)):
        read_state(path)
    with path.open("wb") as stream:
        pickle.dump({"w": print}, stream)
    with pytest.raises(UntrustedError):
        read_state(path)


def ao_model() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    return model


def test_tensors_of_torchao(tmp_path: Path) -> None:
    """torch.save and torchao's safetensors give the same codes, and torchao's own numbers."""
    model = ao_model()
    weight: Any = model[0].weight
    torch.save({"state_dict": model.state_dict()}, tmp_path / "ao.pt")
    save_file({"0._weight_qdata": weight.qdata, "0._weight_scale": weight.scale}, tmp_path / "ao.safetensors")
    states = [read_state(tmp_path / f"ao.{kind}") for kind in ("pt", "safetensors")]
    for state in states:
        assert torch.equal(dequantize_state_dict(state)["0.weight"], weight.dequantize().bfloat16())
        assert torch.equal(state["0.weight"].view(torch.uint8), weight.qdata.view(torch.uint8))
    ours = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    ottava.convert(ours, "rowwise", filter=lambda name, layer: True)
    ours.load_state_dict(states[0])
    assert torch.equal(ours[0].weight, weight.dequantize().bfloat16())


def test_extra_state_stays_for_the_modules_that_read_it(tmp_path: Path) -> None:
    from ottava.compat.transformer_engine import pytorch as te

    module = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    with te.fp8_autocast(enabled=True):
        module(torch.randn(4, 32).bfloat16()).sum().backward()
    state = module.state_dict()
    torch.save(state, tmp_path / "te.pt")
    read = read_state(tmp_path / "te.pt")
    again = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    again.load_state_dict(read)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    scales = {name: value for name, value in module.named_buffers() if name.endswith(".scale")}
    assert len(scales) > 1
    for name, value in again.named_buffers():
        assert name not in scales or torch.equal(value, scales[name])


def test_a_file_becomes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a config its tensors; with one a checkpoint of Hugging Face's with the same codes, for load_fp8."""
    model = ao_model()
    named = nn.ModuleDict({"up_proj": model[0]})
    torch.save(named.state_dict(), tmp_path / "ao.pt")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    arguments = ["import", str(tmp_path / "ao.pt"), str(tmp_path / "plain"), "--json"]
    assert app(arguments, standalone_mode=False) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["codes"], said["tensors"]) == (1, 0)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(plain) == {"up_proj.weight", "up_proj.weight_scale_inv"}
    facts = import_checkpoint(tmp_path / "ao.pt", tmp_path / "hf", config=tmp_path / "config.json")
    assert (facts["layout"], facts["changed"]) == ("compressed-tensors-channel", [])
    ours = nn.ModuleDict({"up_proj": nn.Linear(64, 32, bias=False)}).bfloat16()
    ottava.load_fp8(ours, tmp_path / "hf", weights="fp8")
    weight: Any = ours["up_proj"].weight
    assert isinstance(weight, QuantizedWeight)
    assert weight.requires_grad
    assert torch.equal(weight.codes.view(torch.uint8), plain["up_proj.weight"].view(torch.uint8))
    assert app(["import", str(tmp_path / "hf"), str(tmp_path / "bf16")], standalone_mode=False) == 0
    decoded = load_file(tmp_path / "bf16" / "model.safetensors")["up_proj.weight"]
    assert torch.equal(decoded, model[0].weight.dequantize().bfloat16())
    with pytest.raises(UntrustedError, match="not empty"):
        import_checkpoint(tmp_path / "ao.pt", tmp_path / "plain")


@pytest.mark.skipif(sys.platform != "linux", reason="a file that opens and cannot be mapped")
def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    """The library's error names no file."""
    (tmp_path / "a.safetensors").symlink_to("/proc/self/stat")
    with pytest.raises(UntrustedError, match=r"a\.safetensors: is damaged, or no checkpoint \(No such device"):
        list(read_state(tmp_path / "a.safetensors"))

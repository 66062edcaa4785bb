"""Dumps come back bit for bit, stay within their quota, and are whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ottava
from ottava.recipe import GEMMS, RECIPES
from ottava.record.dumps import BatchDump, Dumper, DumpError, GemmDump, TensorDump, read_dump, save_batch
from ottava.record.random_state import random_states, set_random_states
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

KEY = SlotKey("layers.1.mlp/fc 2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
SPECS = {
    str(spec): spec
    for recipe in RECIPES.values()
    for gemm in GEMMS
    for spec in (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs)
    if spec is not None
}
MIB = 1 << 20


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "run")


def back(path: Path | None, kind: type) -> Any:
    assert path is not None
    dump = read_dump(path)
    assert isinstance(dump, kind)
    return dump


def dumped(writer: RunWriter, x: Tensor, spec: Any, rows: int = 0) -> TensorDump:
    """A cast, through a file."""
    return back(Dumper(writer, 64 * MIB, rows).dump(3, KEY, x, ottava.quantize(x, spec)), TensorDump)


@pytest.mark.parametrize("name", SPECS)
def test_every_cell_of_every_recipe_comes_back_bit_for_bit(name: str, writer: RunWriter) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 160).bfloat16()
    x_q = ottava.quantize(x, SPECS[name], scale=torch.tensor(2.0) if SPECS[name].predicted else None)
    dump = back(Dumper(writer, 64 * MIB, 0).dump(3, KEY, x, x_q), TensorDump)
    assert dump.x_q is not None
    assert (dump.step, dump.key, dump.rows) == (3, KEY, None)
    assert torch.equal(dump.x, x)
    assert torch.equal(dump.x_q.data.view(torch.uint8), x_q.data.view(torch.uint8))
    assert torch.equal(dump.x_q.scale_inv, x_q.scale_inv)
    assert (dump.x_q.spec, dump.x_q.dtype, dump.x_q.data.dtype) == (SPECS[name], x_q.dtype, x_q.data.dtype)


def test_a_transpose_and_a_spec_with_a_function_are_dumped_too(writer: RunWriter) -> None:
    x = torch.randn(32, 16)
    spec = replace(SPECS["E4M3[tensor, delayed]"], amax_compute_algo=lambda window: window.max())
    x_q = ottava.quantize(x, spec, scale=torch.tensor(2.0)).t()
    dump = back(Dumper(writer, MIB).dump(1, KEY, x.t(), x_q), TensorDump)
    assert dump.x_q is not None
    assert torch.equal(dump.x_q.dequantize(), x_q.dequantize())


def test_a_sample_has_the_row_of_the_largest_element(writer: RunWriter) -> None:
    x = torch.randn(100, 8)
    x[37, 2] = 1e4
    dump = dumped(writer, x, SPECS["E4M3[tensor]"], rows=10)
    assert dump.rows is not None
    assert dump.x.shape == (10, 8)
    assert 37 in dump.rows
    assert torch.equal(dump.x, x[dump.rows])
    assert dump.x_q is not None
    assert dump.x_q.shape == (100, 8)


def test_random_states_are_those_of_the_moment(writer: RunWriter) -> None:
    torch.manual_seed(9)
    dump = dumped(writer, torch.ones(4, 4), SPECS["E4M3[tensor]"])
    want = torch.rand(3)
    set_random_states(dump.random)
    assert torch.equal(torch.rand(3), want)


def test_quota_is_that_of_the_folder_and_refusal_is_said_once(writer: RunWriter) -> None:
    """Two fit; two more do not. A second dumper on the folder counts what lies there."""
    x = torch.randn(64, 64)
    x_q = ottava.quantize(x, SPECS["E4M3[tensor]"])
    dumper = Dumper(writer, 70_000, 0)
    got = [dumper.dump(step, KEY, x, x_q) is not None for step in (1, 2, 3, 4)]
    assert got == [True, True, False, False]
    assert dumper.refused == 2
    assert Dumper(writer, 70_000, 0).dump(5, KEY, x, x_q) is None
    assert sum(path.stat().st_size for path in writer.dumps.iterdir()) < 70_000
    events = Run.open(writer.path).events
    assert [e["kind"] for e in events] == ["dump", "dump", "warning", "warning"]
    assert "quota" in events[2]["text"]
    dump = events[0]
    assert (dump["layer"], dump["tensor"]) == (KEY.layer, "input")
    assert (writer.dumps / dump["file"]).stat().st_size == dump["nbytes"]


def test_gemms_of_a_layer(writer: RunWriter) -> None:
    x, w, dy = torch.randn(8, 16), torch.randn(4, 16), torch.randn(8, 4)
    recipe = RECIPES["delayed"].override("a.*", wgrad=None).for_layer("a.b")
    dump = back(Dumper(writer, MIB).dump_gemms(5, "a.b", recipe, x, w, dy), GemmDump)
    assert (dump.layer, dump.step, dump.recipe) == ("a.b", 5, recipe)
    for got, want in ((dump.x, x), (dump.w, w), (dump.dy, dy)):
        assert torch.equal(got, want)


def test_batches_keep_their_nesting(tmp_path: Path) -> None:
    ids = torch.arange(6).reshape(2, 3)
    batch = ({"ids": ids, "more": [ids[0], None, "text"]}, (2.5, True), ids)  # one tensor twice, and a view
    dump = read_dump(save_batch(tmp_path / "b.safetensors", batch, step=4))
    assert isinstance(dump, BatchDump)
    assert dump.step == 4
    assert torch.equal(dump.batch[0]["more"][0], ids[0])
    assert dump.batch[0]["more"][1:] == [None, "text"]
    assert dump.batch[1] == (2.5, True)
    assert torch.equal(dump.batch[2], ids)
    states = random_states()
    torch.rand(5)
    dump = read_dump(save_batch(tmp_path / "c.safetensors", ids, states))
    assert torch.equal(dump.random["cpu"], states["cpu"])


@pytest.mark.parametrize("batch", [{"model": object()}, {1: torch.ones(1)}])
def test_batches_of_anything_else_are_refused(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"needs tensors|strings"):
        save_batch(tmp_path / "b.safetensors", batch)
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, writer: RunWriter) -> None:
    path = save_batch(tmp_path / "b.safetensors", torch.arange(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DumpError, match="damaged"):
        read_dump(path)
    path.write_bytes(whole)
    tensors = load_file(path)
    header = {"format": "ottava.debug.dump/1", "kind": "batch", "step": "1"}
    for facts, why in (({}, "does not fit"), ({"structure": {"tensor": "batch.7"}}, "does not fit")):
        save_file(tensors, path, metadata={**header, "facts": json.dumps(facts)})
        with pytest.raises(DumpError, match=why):
            read_dump(path)
    save_file(tensors, path, metadata={**header, "kind": "movie", "facts": "{}"})
    with pytest.raises(DumpError, match="movie"):
        read_dump(path)
    save_file(tensors, path)
    with pytest.raises(DumpError, match="no dump of ottava") as caught:
        read_dump(path)
    assert caught.value.exit_code == 4
    with pytest.raises(DumpError, match="missing"):
        read_dump(tmp_path / "gone.safetensors")


def test_names_of_layers_make_safe_file_names(writer: RunWriter) -> None:
    dump = dumped(writer, torch.ones(2, 2), SPECS["E4M3[tensor]"])
    assert dump.path.parent == writer.dumps
    assert dump.path.name == "step-000003.rank-0.layers.1.mlp_fc_2.input.row.tensorwise.safetensors"
    assert [path.name for path in writer.dumps.iterdir()] == [dump.path.name]

"""The receipt says what ran, not what was asked for; and `assert_fp8` fails where that is not FP8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.kernels import scaled_mm
from ottava.nn.receipt import ReceiptRow, grouped
from ottava.ops import dispatch
from ottava.recipe import GEMMS, Recipe

ENGINES = ("native_gemm", "bf16_mm", "native_decoded", "reference")
"""What may run quantized operands on a CPU: it depends on the machine."""


pytestmark = pytest.mark.usefixtures("native_first")


def network(recipe: Recipe | str = "tensorwise") -> nn.Sequential:
    """up (64 -> 96), gelu, down (96 -> 64), and a head of 10 that the default filter leaves alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 10)).bfloat16()
    ottava.convert(model, recipe)
    return model


def data(rows: int = 8) -> Tensor:
    return torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)


def rows(model: nn.Module, field: str) -> dict[str, object]:
    return {f"{row.layer}.{row.gemm}": getattr(row, field) for row in ottava.receipt(model).rows}


def linear_rows(model: nn.Module) -> list[object]:
    return [row for row in ottava.receipt(model).rows if row.gemm != "all"]


def test_a_training_step_has_three_rows_a_layer(recipe: Recipe, torch_first: None) -> None:
    """Operands are those of the recipe's table, shapes M x N x K of each GEMM, the kernel the one that ran."""
    model = network(recipe)
    model(data(128)).sum().backward()  # whole groups of any rotation
    got = rows(model, "operands")
    assert list(got) == [f"{layer}.{gemm}" for layer in "02" for gemm in GEMMS] + ["3.all"]
    for gemm in GEMMS:
        cells = getattr(recipe, gemm)
        high = "bfloat16 x bfloat16" if recipe.quantized else "high precision"
        assert got[f"0.{gemm}"] == got[f"2.{gemm}"] == (str(cells) if cells.quantized else high)
    shapes = rows(model, "shape")
    wide, narrow = (128, 128) if recipe.name == "ms_eden" else (96, 64)  # dgrad's K in whole groups
    assert [shapes[f"0.{gemm}"] for gemm in GEMMS] == ["128 x 96 x 64", f"128 x 64 x {wide}", "96 x 64 x 128"]
    assert [shapes[f"2.{gemm}"] for gemm in GEMMS] == ["128 x 64 x 96", f"128 x 96 x {narrow}", "64 x 96 x 128"]
    kernels = {f"{row.gemm}": row.kernel for row in ottava.receipt(model).rows if row.layer == "0"}
    for gemm in GEMMS:
        quantized = getattr(recipe, gemm).quantized
        assert kernels[gemm] in (ENGINES if quantized else ["torch.mm bfloat16" if recipe.quantized else "torch"])


def test_fractions_weigh_by_the_weight(recipe: Recipe) -> None:
    """Weights of 6144, 6144 and 640, three GEMMs each; wgrad of rowwise_with_gw_hp is not FP8."""
    model = network(recipe)
    model(data()).sum().backward()
    quantized = sum(getattr(recipe, gemm).quantized for gemm in GEMMS)
    receipt = ottava.receipt(model)
    assert receipt.fp8_fraction == pytest.approx(quantized * 2 * 6144 / (3 * (2 * 6144 + 640)), abs=1e-15)
    assert receipt.native_fraction == 0  # no FP8 hardware in a CPU


def test_a_layer_that_has_not_run_says_so() -> None:
    """Before the first step, and for a layer that the forward does not reach; neither counts in the fraction."""
    model = network()
    assert set(rows(model, "note").values()) == {"has not run", "not converted: runs torch's own linear"}
    model[0](data()).sum().backward()
    notes = rows(model, "note")
    assert [notes[f"2.{gemm}"] for gemm in GEMMS] == ["has not run"] * 3
    assert [notes[f"0.{gemm}"] for gemm in GEMMS] == [""] * 3
    assert {row.weight for row in ottava.receipt(model).rows if row.layer == "2"} == {0}


def test_a_layer_with_a_forward_of_its_own_is_named() -> None:
    """torchao's Float8Linear is an nn.Linear, and what it multiplies nobody here knows."""
    torchao = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16()
    torchao.convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "1")
    plain, own = ottava.receipt(model).rows
    assert (plain.operands, plain.kernel) == ("high precision", "torch")
    assert (own.operands, own.kernel, own.fp8) == ("unknown", "unknown", False)
    assert own.note == "a Float8Linear of torchao: runs its own forward"
    with pytest.raises(AssertionError, match="a Float8Linear of torchao: runs its own forward"):
        ottava.assert_fp8(model)


def test_what_no_gradient_needs_has_not_run() -> None:
    """No backward yet; a frozen weight has no wgrad, the first layer of a model no dgrad."""
    model = network()
    y = model(data())
    assert [row.note for row in linear_rows(model) if row.gemm != "fprop"] == ["did not run in the last call"] * 4  # type: ignore[attr-defined]
    y.sum().backward()
    assert {row.note for row in linear_rows(model)} == {""}  # type: ignore[attr-defined]
    model[2].weight.requires_grad_(False)
    model(data().detach()).sum().backward()
    kernels = rows(model, "kernel")
    assert (kernels["0.dgrad"], kernels["2.wgrad"]) == ("-", "-")
    assert {kernels["0.wgrad"], kernels["2.dgrad"]} <= set(ENGINES)


def test_autocast_is_seen(torch_first: None) -> None:
    """The receipt is of the call, not of the conversion; the note names the recipe that had the word."""
    model = network("tensorwise")
    with ottava.autocast("mxfp8"):
        model(data()).sum().backward()
    assert rows(model, "operands")["0.wgrad"] == "E4M3[1x32, e8m0] x E4M3[1x32, e8m0]"
    with ottava.autocast(ottava.RECIPES["tensorwise"].override("0", wgrad=None)):
        model(data()).sum().backward()
    notes = rows(model, "note")
    assert "keeps it in high precision" in str(notes["0.wgrad"])
    assert rows(model, "kernel")["0.wgrad"] == "torch.mm bfloat16"
    assert notes["0.fprop"] == ""
    with ottava.autocast(enabled=False):
        model(data()).sum().backward()
    assert {row.kernel for row in ottava.receipt(model).rows} == {"torch"}
    assert ottava.receipt(model).fp8_fraction == 0


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_an_evaluation_hides_no_training(reentrant: bool | None) -> None:
    """A BF16 evaluation and a calibration after a step: assert_fp8 still judges the step; the last call is shown where
    asked. Under activation checkpointing, the forward without grad mode is part of a training call."""
    model = network("tensorwise")

    def forward(x: Tensor) -> Tensor:
        return model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    for _ in range(2):
        forward(data()).sum().backward()
    before = ottava.receipt(model)
    with ottava.autocast(enabled=False), torch.no_grad():
        model(data())
        model(data())
    with ottava.autocast("delayed", calibrating=True):
        model(data()).sum().backward()
    ottava.assert_fp8(model)
    assert ottava.receipt(model) == before
    assert ottava.receipt(model, training=False).fp8_fraction == 0
    with ottava.autocast(enabled=False):
        forward(data()).sum().backward()
    assert ottava.receipt(model).fp8_fraction == 0  # a step in BF16 is one


def test_evaluations_alone_are_shown() -> None:
    """Where nothing was trained, the last call of all."""
    model = network("tensorwise")
    with torch.no_grad():
        model(data())
        with ottava.autocast("mxfp8"):
            model(data())
    assert rows(model, "operands")["0.fprop"] == "E4M3[1x32, e8m0] x E4M3[1x32, e8m0]"


def test_an_override_of_the_model_is_named_as_such() -> None:
    """Why a layer is not FP8: its own override, or the recipe's table for all."""
    model = network(ottava.RECIPES["tensorwise"].override("2", "bf16"))
    model(data()).sum().backward()
    assert rows(model, "note")["2.fprop"] == (
        "recipe 'tensorwise' keeps it in high precision, by its table or an override"
    )
    model = network("rowwise_with_gw_hp")
    model(data()).sum().backward()
    assert rows(model, "note")["0.wgrad"] == "recipe 'rowwise_with_gw_hp' keeps it in high precision"


@contextmanager
def kernels_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The order of an accelerator on this CPU: torch's scaled GEMM first, which runs here too."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "CPU_KERNELS", dispatch.ACCELERATOR_KERNELS)
        yield


@pytest.mark.scaled_mm_on_cpu
def test_padding_and_refusals_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 100 is padded to 112, and 3 tokens to 16 where they are contracted; blocks of 32 are refused, aloud."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 64)).bfloat16()
    ottava.convert(model, "tensorwise")
    x = torch.randn(3, 100, dtype=torch.bfloat16, requires_grad=True)
    with kernels_of_a_cluster(monkeypatch):
        model(x).sum().backward()
        assert rows(model, "padding") == {
            "0.fprop": "K 100->112",
            "0.dgrad": "N 100->112",
            "0.wgrad": "K 3->16, N 100->112",
        }
        assert set(rows(model, "kernel").values()) == {scaled_mm.NAME}
        assert ottava.receipt(model).native_fraction == 1
        ottava.assert_fp8(model, 1.0, native=True)
        with ottava.autocast("mxfp8"):
            model(x).sum().backward()
        note = (
            "scaled_mm: torch multiplies blocks of 1x32 on cuda only; got cpu; "
            "decoded_bf16: runs on cuda; got cpu; "
            "triton_gemm: takes scales per tensor, per row, 1x128 and 128x128; got 1x32"
        )
        assert rows(model, "note")["0.fprop"] == note
        with pytest.raises(AssertionError, match="on FP8 hardware") as failure:
            ottava.assert_fp8(model, native=True)
        assert note in str(failure.value)
        ottava.assert_fp8(model, 1.0)


@pytest.mark.scaled_mm_on_cpu
def test_mixed_precision_reaches_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 parameters with biases under torch.autocast: an FP32 bias must not send fprop to the emulation."""
    model = nn.Sequential(nn.Linear(64, 64))
    ottava.convert(model, "tensorwise")
    with kernels_of_a_cluster(monkeypatch):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(4, 64, requires_grad=True))
        y.sum().backward()
    assert rows(model, "note") == dict.fromkeys(("0.fprop", "0.dgrad", "0.wgrad"), "")
    assert ottava.receipt(model).native_fraction == 1


def test_saved_bytes_are_those_of_the_autograd_graph(recipe: Recipe, torch_first: None) -> None:
    """What saved_tensors_hooks counts for the layer, less the weight, which lives anyway; and torch's own count."""
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.Linear(64, 96)).bfloat16(), nn.Linear(64, 96).bfloat16()
    ottava.convert(model, recipe)
    counts = []
    for layer in (model[0], plain):
        kept: dict[int, Tensor] = {}
        x = data(32)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.setdefault(id(t), t), lambda t: t):
            layer(x).sum().backward()
        counts.append(sum(t.nbytes for t in kept.values() if t.data_ptr() != layer.weight.data_ptr()))
    row = ottava.receipt(model).rows[0]
    if recipe.quantized:
        assert (row.saved_bytes, row.high_precision_bytes) == (counts[0], counts[1])
        assert f"{counts[0] / 1024:.0f} KiB of {counts[1] / 1024:.0f}" in str(ottava.receipt(model))
    else:
        assert (row.saved_bytes, row.high_precision_bytes) == (0, 0)


def test_inference_keeps_nothing() -> None:
    """Without grad mode no byte waits for a backward, though the parameters require gradients."""
    model = network()
    with torch.no_grad():
        model(data())
    assert {(row.saved_bytes, row.high_precision_bytes) for row in ottava.receipt(model).rows} == {(0, 0)}


def test_compiled_calls_say_that_they_were() -> None:
    """Kernels are chosen when compiled code runs; operands are what the recipe asked for when it was traced."""
    model = network("rowwise_with_gw_hp")
    torch.compile(model, backend="aot_eager", fullgraph=True)(data()).sum().backward()
    receipt = ottava.receipt(model)
    fprop, _, wgrad = receipt.rows[:3]
    assert (fprop.kernel, fprop.operands, fprop.fp8, fprop.native) == (
        "compiled",
        "E4M3[row, pow2] x E4M3[row, pow2]",
        True,
        False,
    )
    assert fprop.shape == "? x 96 x 64"
    assert not wgrad.fp8
    assert receipt.fp8_fraction == pytest.approx(2 * 2 * 6144 / (3 * (2 * 6144 + 640)))
    model(data()).sum().backward()
    assert ottava.receipt(model).rows[0].kernel in ENGINES


def test_a_layer_that_failed_does_not_look_as_if_it_had_run() -> None:
    """A forward that raises leaves no fprop row of an earlier call behind."""
    model = network()
    model(data()).sum().backward()
    with pytest.raises(ValueError, match="needs"):
        model[0](torch.ones(4, 63, dtype=torch.bfloat16))
    assert rows(model, "kernel")["0.fprop"] == "-"


# --- assert_fp8 -----------------------------------------------------------------------------------------------------


def test_assert_fp8_passes_where_the_work_is_fp8() -> None:
    """12288 of 12928 weights, 95.05% of this model's linear work; the head is the rest."""
    model = network()
    model(data()).sum().backward()
    ottava.assert_fp8(model)
    ottava.assert_fp8(model, 0.95)
    with pytest.raises(AssertionError, match=r"95\.0% of the linear work ran in FP8; at least 96\.0% is required"):
        ottava.assert_fp8(model, 0.96)


def test_assert_fp8_names_the_offenders_and_why() -> None:
    """One line each, with the reason."""
    model = network(ottava.RECIPES["tensorwise"].override("2", wgrad=None))
    model(data()).sum().backward()
    with pytest.raises(AssertionError) as failure:
        ottava.assert_fp8(model)
    lines = str(failure.value).splitlines()
    assert lines[0].endswith("Not in FP8:")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["2.wgrad", "3.all"]
    assert "not converted" in lines[2]


@pytest.mark.parametrize("prepare", ["never_run", "not_converted", "evaluated_in_bf16", "no_linear_at_all"])
def test_assert_fp8_is_not_fooled(prepare: str) -> None:
    """A model that ran nothing in FP8 has no FP8 share: not by having run nothing, nor by having no layers."""
    model: nn.Module = network()
    if prepare == "not_converted":
        model = nn.Sequential(nn.Linear(64, 64))
    elif prepare == "evaluated_in_bf16":
        with ottava.autocast(enabled=False):
            model(data()).sum().backward()
    elif prepare == "no_linear_at_all":
        model = nn.Sequential(nn.GELU())
    with pytest.raises(AssertionError, match=r"0\.0% of the linear work"):
        ottava.assert_fp8(model, 0.01)


# --- its forms ------------------------------------------------------------------------------------------------------


def test_dict_is_json_and_has_every_field(recipe: Recipe) -> None:
    """Rows as plain values, and both fractions."""
    model = network(recipe)
    model(data()).sum().backward()
    receipt = ottava.receipt(model)
    values = json.loads(json.dumps(receipt.to_dict()))
    assert set(values) == {"rows", "collectives", "fp8_fraction", "native_fraction"}
    assert len(values["rows"]) == 7
    assert values["rows"][0]["layer"] == "0"
    assert values["fp8_fraction"] == receipt.fp8_fraction


def test_text_is_an_aligned_table() -> None:
    """Every column begins where its header does; the last line sums up."""
    model = network()
    model(data()).sum().backward()
    *table, threads, total = str(ottava.receipt(model)).splitlines()
    header = table[0]
    assert len(table) == 1 + 7
    for title in ("gemm", "operands", "kernel", "M x N x K"):
        column = header.index(title)
        assert all(line[column - 1] == " " and line[column] != " " for line in table[1:])
    assert threads == "on a CPU the bits of bf16_mm, scaled_mm, torch and torch.mm may depend on the number of threads"
    assert total == "95.0% of the linear work in FP8, 0.0% on FP8 hardware"


def test_equal_layers_share_a_row_of_the_text() -> None:
    """Two blocks of seven layers and a head: 22 rows instead of 43. What differs is told apart; data are complete."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def llama(blocks: int, recipe: Recipe) -> nn.Module:
        layers = nn.ModuleList(nn.ModuleDict({name: nn.Linear(64, 64) for name in names}) for _ in range(blocks))
        model = nn.ModuleDict({"layers": layers, "lm_head": nn.Linear(64, 32)}).bfloat16()
        ottava.convert(model, recipe)
        x = data()
        for block in layers:
            for layer in block.values():  # type: ignore[operator]
                x = layer(x)
        model["lm_head"](x).sum().backward()
        return model

    receipt = ottava.receipt(llama(2, ottava.RECIPES["tensorwise"]))
    assert len(receipt.rows) == len(receipt.to_dict()["rows"]) == 43
    table = str(receipt).splitlines()[1:-2]
    assert [line.split()[0] for line in table] == [f"layers.0-1.{name}" for name in names for _ in GEMMS] + ["lm_head"]

    differing = ottava.RECIPES["tensorwise"].override("layers.1.q_proj", wgrad=None)
    model = llama(4, differing)
    lines = [line.split()[:2] for line in str(ottava.receipt(model)).splitlines() if "q_proj" in line]
    assert lines == [
        ["layers.0,2-3.q_proj", "fprop"],
        ["layers.0-3.q_proj", "dgrad"],
        ["layers.0,2-3.q_proj", "wgrad"],
        ["layers.1.q_proj", "fprop"],  # it keeps its input in BF16
        ["layers.1.q_proj", "wgrad"],
    ]


def test_numbers_in_two_places_are_ranges_only_where_they_make_all_pairs() -> None:
    """Experts 0 and 1 of layers 0 and 1 but for one: a name of two ranges would claim it."""
    row = ReceiptRow("", "all", "", "", "", "", True, True, 0, 0, "", 1)
    every = [replace(row, layer=f"layers.{i}.experts.{j}.w1") for i in range(2) for j in range(2)]
    assert [name for name, _ in grouped(every)] == ["layers.0-1.experts.0-1.w1"]
    assert [name for name, _ in grouped(every[:3])] == [one.layer for one in every[:3]]

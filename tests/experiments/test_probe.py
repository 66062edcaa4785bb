"""The four-GEMM probe attributes errors to where they were put."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ottava
from ottava.experiments.bisect import GemmOperands, GemmProbe, captured, cast_evidence, operands_of, probe_gemms
from ottava.recipe import RECIPES
from ottava.record.dumps import Dumper, GemmDump, read_dump
from ottava.record.writer import RunWriter


@pytest.fixture
def healthy() -> GemmOperands:
    """Gaussian x (64, 128), w (32, 128), dy (64, 32)."""
    torch.manual_seed(0)
    return GemmOperands(torch.randn(64, 128), torch.randn(32, 128), torch.randn(64, 32), {})


def test_errors_of_operands_add_as_powers(healthy: GemmOperands) -> None:
    """1 / SQNR_out = 1 / SQNR_x + 1 / SQNR_w (facts, 3.1), and native equals both: fp32 sums."""
    for probe in probe_gemms(healthy, RECIPES["tensorwise"]):
        predicted = -10 * math.log10(10 ** (-probe.only_lhs_db / 10) + 10 ** (-probe.only_rhs_db / 10))
        assert probe.both_db == pytest.approx(predicted, abs=0.5)
        assert probe.native_db == pytest.approx(probe.both_db, abs=0.05)
        assert probe.accumulation_share < 0.02
        assert probe.emulated
    dgrad = probe_gemms(healthy, RECIPES["tensorwise"])[1]
    assert dgrad.lhs.startswith("E5M2")
    assert dgrad.worse_operand == "lhs"  # E5M2 has a bit less


def test_names_the_operand_with_the_outliers(healthy: GemmOperands) -> None:
    """Massive tokens in x: their own rows are fine, all others are noise; the row median says so, per row cures it."""
    healthy.x[:2] *= 1e6
    fprop, _, wgrad = probe_gemms(healthy, RECIPES["tensorwise"])
    assert fprop.native_db > 25  # blind
    assert fprop.row_p50_db < 3
    assert (fprop.worse_operand, wgrad.gemm) == ("rhs", "wgrad")
    rowwise = probe_gemms(healthy, RECIPES["rowwise"])[0]
    assert rowwise.row_p50_db > 25


def test_accumulation_is_what_the_operands_do_not_explain() -> None:
    """Half of the noise power on top: share one half."""
    probe = GemmProbe("fprop", "a", "b", 30.0, 30.0, 27.0, 27.0 - 10 * math.log10(2), 20.0, emulated=False)
    assert probe.accumulation_share == pytest.approx(0.5)
    exact = GemmProbe("fprop", "a", "b", math.inf, math.inf, math.inf, math.inf, math.inf, emulated=True)
    assert exact.accumulation_share == 0.0
    assert json.loads(json.dumps(exact.to_dict(), allow_nan=False))["native_db"] is None


def test_predicted_scales_are_those_of_the_doors(healthy: GemmOperands) -> None:
    """A scale 1000 times too large clips in the probe as in training; evidence says so."""
    stale = GemmOperands(healthy.x, healthy.w, healthy.dy, {"input": torch.tensor(1e5)})
    spec = RECIPES["delayed"].fprop.lhs
    assert spec is not None
    assert probe_gemms(stale, RECIPES["delayed"])[0].only_lhs_db < 1
    assert probe_gemms(healthy, RECIPES["delayed"])[0].only_lhs_db > 30
    assert cast_evidence(stale, "fprop", "lhs", spec)["overflow_pct"] > 90
    assert cast_evidence(healthy, "fprop", "lhs", spec)["overflow_pct"] == 0


def test_captures_what_the_doors_got() -> None:
    """x, w and dy of a layer in the middle, of the first call only, and the scales it had."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    ottava.convert(model, "delayed", filter=lambda name, layer: True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(8, 64)
    inner = []
    model[2].register_forward_pre_hook(lambda _, args: inner.append(args[0].detach().clone()))
    with captured(model[2]) as seen:
        model(x).sum().backward()
        optimizer.step()
        model(2 * x).sum().backward()
    operands = operands_of(seen)
    assert operands is not None
    assert torch.equal(operands.x, inner[0])
    assert torch.equal(operands.w, model[2].weight)
    assert operands.dy is not None
    assert torch.equal(operands.dy, torch.ones(8, 32))
    assert not operands.scales  # the first call had no history yet
    with captured(model[2]) as seen:
        model(x).sum().backward()
    assert seen["scales"]["input"] == model[2].quantizers.input.scale
    with captured(model[2]) as seen, ottava.autocast(enabled=False):
        model(x)
    assert operands_of(seen) is None


def test_without_backward_only_fprop(healthy: GemmOperands) -> None:
    probes = probe_gemms(GemmOperands(healthy.x, healthy.w, None, {}), RECIPES["blockwise"])
    assert [probe.gemm for probe in probes] == ["fprop"]
    assert probe_gemms(healthy, RECIPES["bf16"]) == []


def test_dumped_operands_give_the_same_probe(healthy: GemmOperands, tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        assert healthy.dy is not None
        path = Dumper(writer, 1 << 20).dump_gemms(1, "fc1", RECIPES["mxfp8"], healthy.x, healthy.w, healthy.dy)
    assert path is not None
    dump = read_dump(path)
    assert isinstance(dump, GemmDump)
    assert probe_gemms(dump, dump.recipe) == probe_gemms(healthy, RECIPES["mxfp8"])

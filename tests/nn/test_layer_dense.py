"""Layers in BF16 on a CPU where torch's GEMM is not the fastest: what runs, what is said, and what stays torch's."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.kernels import reference
from ottava.kernels.native import gemm as native_gemm
from ottava.ops import dispatch

FIRST = reference if native_gemm.fastest().built.reason else native_gemm


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if torch's had been measured to be the slowest."""
    order = (*dict.fromkeys((FIRST, reference)), dispatch.torch_mm)
    monkeypatch.setattr(dispatch, "_dense_in_order", lambda kernels, native: order)
    dispatch.torch_is_beaten.cache_clear()
    yield
    dispatch.torch_is_beaten.cache_clear()


def make(
    recipe: ottava.Recipe | str = "bf16", dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> ottava.nn.Linear:
    torch.manual_seed(0)
    return ottava.nn.Linear(72, 40, recipe=recipe, dtype=dtype, **settings)


def kernels(layer: nn.Module) -> set[str]:
    return {row.kernel for row in ottava.receipt(layer).rows}


def test_all_three_gemms_are_what_the_receipt_says(emulated: None) -> None:
    """y, dx, dw and db against fp64, within one fp32 sum and one rounding; parameters in BF16, or in FP32 under
    torch.autocast; with and without a bias; inputs of one to three dimensions."""
    torch.manual_seed(0)
    for dtype, bias, shape in itertools.product(
        (torch.bfloat16, torch.float32), (True, False), ((72,), (9, 72), (2, 5, 72))
    ):
        layer = make(dtype=dtype, bias=bias)
        x = torch.randn(shape).bfloat16().requires_grad_()
        dy = torch.randn(*shape[:-1], 40).bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.backward(dy)
        rows = x.detach().reshape(-1, 72).double()
        d_rows = dy.reshape(-1, 40).double()
        w = layer.weight.bfloat16().double()
        added = layer.bias.bfloat16().double() if bias else torch.zeros(40).double()
        for got, a, b, extra in (
            (y.reshape(-1, 40), rows, w, added),
            (x.grad.reshape(-1, 72), d_rows, w.t(), 0.0),
            (layer.weight.grad, d_rows.t(), rows.t(), 0.0),
        ):
            exact, size = a @ b.t() + extra, a.abs() @ b.abs().t() + abs(extra)
            bound = exact.abs() * 2**-8 + size * (a.shape[1] + 2) * 2**-24
            assert ((got.double() - exact).abs() <= bound * (1 + 2**-6)).all()
        if bias:
            assert torch.allclose(layer.bias.grad.double(), d_rows.sum(0), rtol=2**-8, atol=1e-5)
        assert kernels(layer) == {f"{FIRST.NAME} bfloat16"}
        report = ottava.receipt(layer)
        assert {row.note for row in report.rows} == {"recipe 'bf16' keeps it in high precision"}
        assert (report.fp8_fraction, report.native_fraction) == (0.0, 0.0)


def test_cells_that_a_recipe_leaves_in_bf16(emulated: None) -> None:
    """Overrides and high-precision cells beside quantized ones, and codes that are decoded to BF16."""
    x = torch.randn(16, 72).bfloat16().requires_grad_()
    for recipe, gemms in (
        ("rowwise_with_gw_hp", ["wgrad"]),
        ("tensorwise/fp8_inputs_bf16_gemm", ["fprop", "dgrad", "wgrad"]),
    ):
        layer = make(recipe)
        layer(x).sum().backward()
        ran = [row.gemm for row in ottava.receipt(layer).rows if row.kernel == f"{FIRST.NAME} bfloat16"]
        assert ran == gemms
    model = nn.Sequential(nn.Linear(72, 72), nn.Linear(72, 72)).bfloat16()
    ottava.convert(model, ottava.RECIPES["tensorwise"].override("0", "bf16"))
    model(x).sum().backward()
    assert kernels(model[0]) == {f"{FIRST.NAME} bfloat16"}
    with ottava.autocast("bf16"):
        model(x).sum().backward()
    assert kernels(model) == {f"{FIRST.NAME} bfloat16"}


def test_what_stays_torchs_own_linear(emulated: None) -> None:
    """enabled=False, bit for bit and with second derivatives, also when it is recomputed later; other dtypes; tensors
    that are not plain; compiled code."""
    layer, x = make(), torch.randn(8, 72).bfloat16().requires_grad_()
    truth = linear(x, layer.weight, layer.bias)
    with ottava.autocast(enabled=False):
        y = layer(x)
        again = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(y, truth)
    assert kernels(layer) == {"torch"}
    again.sum().backward()  # recomputed outside of the autocast
    assert kernels(layer) == {"torch"}
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dx.sum().backward()  # a second derivative
    with pytest.raises(NotImplementedError, match="enabled=False"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert kernels(layer) == {f"{FIRST.NAME} bfloat16"}
    for dtype in (torch.float32, torch.float16):
        other, z = make(dtype=dtype), torch.randn(8, 72, dtype=dtype)
        assert torch.equal(other(z), linear(z, other.weight, other.bias))
        assert kernels(other) == {"torch"}
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own sentence
        layer(x.float())
    for transform in (torch.func.grad, torch.func.jacrev):
        found = transform(lambda z: layer(z).float().square().sum())(x.detach())
        assert found.shape == x.shape
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), truth)


def test_a_calibration_sees_what_is_evaluated(emulated: None) -> None:
    """Both run torch's own linear: the same bits."""
    model = nn.Sequential(nn.Linear(72, 72)).bfloat16()
    ottava.convert(model, "delayed")
    x = torch.randn(8, 72).bfloat16()
    with ottava.autocast(enabled=False):
        y = model(x)
    with ottava.autocast(enabled=False, calibrating=True):
        assert torch.equal(model(x), y)


PROGRAM = """
import json, torch, ottava
from ottava.ops import dispatch
layer = ottava.nn.Linear(64, 64, recipe="bf16", dtype=torch.bfloat16)
x = torch.randn(32, 64).bfloat16().requires_grad_()
y = layer(x)
y.sum().backward()
ranking = dispatch.dense_ranking()
kernels = sorted({row.kernel for row in ottava.receipt(layer).rows})
print(json.dumps({"order": ranking.order, "times": dict(ranking.choice.milliseconds), "kernels": kernels}))
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_where_torch_emulates_bf16_it_is_beaten(tmp_path: Path) -> None:
    """oneDNN and torch told that this CPU has AVX2 only stand in for one without BF16 units."""
    tmp_path.chmod(0o700)
    variables = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OTTAVA_CACHE": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=800, check=True)
    found = json.loads(ran.stdout)
    assert found["order"][-1] == "torch.mm"
    assert found["times"]["torch.mm"] > 1.5 * min(found["times"].values())
    assert found["kernels"] == [f"{found['order'][0].split()[0]} bfloat16"]

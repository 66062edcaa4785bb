"""Tuning a model: each distinct GEMM that it ran is measured once, under the name by which it is looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels import gemm_choice, reference, scaled_mm
from ottava.kernels.gemm_choice import Store, call_name
from ottava.kernels.native import gemm as native_gemm
from ottava.ops import dispatch


def model(recipe: str, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64, bias=bias), nn.GELU(), nn.Linear(64, 64, bias=bias)).bfloat16()
    ottava.convert(made, recipe)
    return made


def timer(run: Callable[[], Tensor]) -> float:
    return 1.0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "tensorwise/fp8_inputs_bf16_gemm"])
def test_what_is_measured_is_what_is_looked_up(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every native GEMM of a step asks for a name that was measured; a second layer of one shape adds none."""
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (native_gemm, scaled_mm, reference))
    asked: list[str] = []
    monkeypatch.setattr(gemm_choice, "known", lambda *call: asked.append(call_name(*call)))
    net, store = model(recipe), Store(None, "this machine")
    net(torch.randn(16, 64, dtype=torch.bfloat16)).sum().backward()
    names = set(asked)
    assert bool(names) == ("bf16_gemm" not in recipe)
    if not names:
        with pytest.raises(ValueError, match="tune: no layer has run a quantized GEMM"):
            ottava.nn.tune(net, timer=timer, store=store)
        return
    asked.clear()
    before = torch.get_rng_state()
    choices = ottava.nn.tune(net, timer=timer, store=store)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(choices) == names
    assert all(store.known(name) == choice for name, choice in choices.items())
    assert all({"scaled_mm", "native_gemm"} >= set(choice.milliseconds) > set() for choice in choices.values())


def test_a_model_that_has_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="convert the model and run a forward and a backward first"):
        ottava.nn.tune(model("tensorwise"), timer=timer)
    with pytest.raises(ValueError, match="no layer has run a quantized GEMM"):
        ottava.nn.tune(nn.Linear(4, 4), timer=timer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_tuned_model_trains_on(recipe: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: its GEMMs are measured, and the next step runs what won."""
    net = model(recipe, bias=False).cuda()
    x = torch.randn(256, 64, dtype=torch.bfloat16, device="cuda")
    net(x).sum().backward()
    choices = ottava.nn.tune(net, store=Store(None, "test"))
    monkeypatch.setattr(gemm_choice, "known", lambda *call: choices.get(call_name(*call)))
    net(x).sum().backward()
    for layer in (net[0], net[2]):
        for record in layer.last_call.records.values():
            assert record.kernel in {way.split()[0] for choice in choices.values() for way in choice.milliseconds}

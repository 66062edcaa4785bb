"""Bytes, predicted: equal to those counted after a real step, and to what receipts say was kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.optim import SGD, AdamW, Lion, Muon
from ottava.optim.storage import STORAGES
from ottava.plan.memory import Memory
from ottava.recipe import RECIPES
from sweep import sweep

TORCHS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    torch.optim.SGD,
    lambda p: torch.optim.SGD(p, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, momentum=0.5),
)
OURS = (
    AdamW,
    Lion,
    lambda p, **options: SGD(p, momentum=0.9, **options),
    lambda p, **options: Muon([{"params": list(p), "adamw": True}], **options),
)


def small(recipe: str, weights: Any = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 64)).to(dtype)
    ottava.convert(model, recipe, weights=weights, keep_high_precision=weights is not None)
    model[2].bias.requires_grad_(weights is None)
    return model


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Bytes after a step: weights, kept, buffers, gradients, masters, moments."""
    model(torch.randn(32, 128, dtype=model[0].weight.dtype)).float().square().sum().backward()  # type: ignore[index]
    optimizer.step()
    states = [item for state in optimizer.state.values() for item in state.items() if isinstance(item[1], Tensor)]
    masters = sum(value.nbytes for name, value in states if name in ("master", "remainder"))
    kept = [getattr(p, "high_precision", None) for p in model.parameters()]
    return (
        sum(p.nbytes for p in model.parameters()),
        sum(values.nbytes for values in kept if values is not None),
        sum(b.nbytes for b in model.buffers()),
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        masters,
        sum(value.nbytes for _, value in states) - masters,
    )


def predicted(found: Memory) -> tuple[int, ...]:
    return found.weights, found.kept, found.buffers, found.gradients, found.masters, found.moments


def test_prediction_is_what_torchs_optimizers_make() -> None:
    for make in TORCHS:
        model = small("tensorwise", dtype=torch.float32)
        optimizer = make(model.parameters())
        before = ottava.memory(model, optimizer)
        assert not optimizer.state
        assert predicted(before) == counted(model, optimizer)
        assert predicted(ottava.memory(model, optimizer)) == predicted(before)


@sweep(make=OURS, moments=tuple(STORAGES), weights=(None, "fp8"), master=("fp32", "remainder"))
def test_prediction_is_what_our_optimizers_make(make: Any, moments: str, weights: Any, master: str) -> None:
    model = small("tensorwise", weights)
    optimizer = make(model.parameters(), moments=moments, master=master)
    before = ottava.memory(model, optimizer)
    assert predicted(before) == counted(model, optimizer)
    assert before.state == sum(predicted(before))


def test_gradients_in_fp32_count_as_such() -> None:
    model = small("bf16")
    ottava.optim.accumulate_fp32(model.parameters())
    optimizer = AdamW(model.parameters())
    assert predicted(ottava.memory(model, optimizer)) == counted(model, optimizer)


@sweep(recipe=tuple(name for name, recipe in RECIPES.items() if recipe.quantized), weights=(None, "fp8"))
def test_activations_are_those_of_the_receipt(recipe: str, weights: Any) -> None:
    try:
        model = small(recipe, weights)
    except ValueError as error:
        pytest.skip(str(error))
    found = ottava.memory(model, tokens=96)
    for step in range(2):  # a predicted scale has a history then
        model(torch.randn(96, 128).bfloat16().requires_grad_()).float().sum().backward()
        saved = sum(row.saved_bytes for row in ottava.receipt(model).rows)
        assert found.activations + found.weight_casts == saved, step


def test_1b_in_training_takes_seven_tenths_of_bf16() -> None:
    """On the meta device: FP8 weights, 16-bit remainder and FP8 moments, beside AdamW in BF16 with FP32 states."""

    def llama() -> nn.Module:
        block = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)]
        layers = nn.ModuleList(nn.ModuleList(nn.Linear(*size, bias=False) for size in block) for _ in range(16))
        return nn.ModuleDict({"embedding": nn.Embedding(128256, 2048), "layers": layers}).bfloat16()

    with torch.device("meta"):
        plain, stored = llama(), llama()
    ottava.convert(stored, "delayed", weights="fp8")
    bases = [
        ottava.memory(plain, AdamW(plain.parameters(), master="fp32")),
        ottava.memory(plain, AdamW(plain.parameters())),
    ]
    own = ottava.memory(stored, AdamW(stored.parameters(), master="remainder", moments="fp8"))
    assert own.parameters > 1.2e9
    assert [round(base.state / base.parameters) for base in bases] == [16, 12]
    assert own.state / bases[0].state < 0.47
    assert own.state / bases[1].state < 0.62
    assert "per parameter" in str(own)


def test_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match=r"memory: got a dict; needs a torch.nn.Module"):
        ottava.memory({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"needs a torch.optim.Optimizer, or None"):
        ottava.memory(nn.Linear(2, 2), "adamw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens is 0"):
        ottava.memory(nn.Linear(2, 2), tokens=0)
    with pytest.raises(TypeError, match=r"tokens is 1\.5; needs a whole number"):
        ottava.memory(nn.Linear(2, 2), tokens=1.5)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="steps no parameter of this model"):
        ottava.memory(model, AdamW(nn.Linear(2, 2).parameters()))
    for make in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.ASGD):
        with pytest.raises(ValueError, match=rf"states of {make.__name__} are not known before its first step"):
            ottava.memory(model, make(model.parameters()))

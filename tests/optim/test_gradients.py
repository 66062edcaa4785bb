"""FP32 gradients of BF16 parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ottava.optim import AdamW, accumulate_fp32


def test_micro_batches_add_up_in_fp32() -> None:
    """The sum of 200 BF16 gradients: exact to FP32's errors; BF16 accumulation is off by more than a per cent."""
    weights = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(2)]
    accumulate_fp32(weights[:1])
    exact = torch.zeros(64, dtype=torch.float64)
    for _ in range(200):
        part = torch.rand(64).bfloat16()
        exact += part.double()
        for weight in weights:
            (weight * part).sum().backward()
    errors = [float(((w.grad.double() - exact).abs() / exact).max()) for w in weights]  # type: ignore[union-attr]
    assert errors[0] < 200 * 2.0**-24
    assert errors[1] > 0.01


def test_optimizer_clipping_and_scaler_take_them() -> None:
    model = nn.Linear(16, 16).bfloat16()
    accumulate_fp32(model.parameters())
    optimizer = AdamW(model.parameters(), 1e-2, master="remainder", moments="fp8")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for _ in range(2):
        scaler.scale(model(torch.randn(4, 16).bfloat16()).float().square().sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype == torch.float32
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(total) == pytest.approx(1e-3, rel=1e-3)
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_gradient_that_is_there_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="call zero_grad first"):
        accumulate_fp32([weight])
    with pytest.raises(TypeError, match=r"got a Linear; needs parameters: model\.parameters"):
        accumulate_fp32(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[arg-type]

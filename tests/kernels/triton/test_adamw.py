"""AdamW by its kernel inside the optimizer: who is stepped by it, who is not and why; on a GPU with -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava.kernels.triton import step as triton_adamw
from ottava.kernels.triton.step import supports_adamw
from ottava.optim import AdamW, Lion
from ottava.optim.storage import join
from sweep import sweep
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()
STEPS, LR, EPS = 4, 1e-2, 2.0**-24
FP32, BF16 = torch.float32, torch.bfloat16


def optimized(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: bool, **options: Any) -> AdamW:
    """After some steps, with the kernel or without."""
    answer = None if wanted else "not wanted in this pass"
    monkeypatch.setattr(triton_adamw, "supports_adamw", lambda *_: answer)
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype).to(DEVICE)) for shape in ((33, 65), (7,), (0,))]
    optimizer = AdamW(parameters, LR, **options)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(dtype).to(DEVICE)
        optimizer.step()
    assert optimizer.ran == [{"triton": 3} if wanted else {"foreach (not wanted in this pass)": 3}]
    return optimizer


@sweep(options=((FP32, {}), (BF16, {"master": "fp32"}), (BF16, {"master": "remainder"})))
def test_a_run_is_that_of_foreach(options: Any) -> None:
    """On a GPU to the bit. On a CPU torch's foreach rounds three products elsewhere, each time by an eps or less.

    With T steps and gradients up to G: moments differ by 4 T eps of G or of G squared, the mean divided by 1 - beta1 by
    10 times that, and sqrt(v) is at least 0.9 G / sqrt(T). So a quotient differs by 44 T sqrt(T) eps, and a weight
    (below 6) by lr times that and by 3 roundings of its own, each step.
    """
    dtype, own = options
    with pytest.MonkeyPatch.context() as patch:
        one, two = (optimized(patch, dtype, wanted, **own) for wanted in (True, False))
    for a, b in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        mine, torchs = one.state[a], two.state[b]
        assert mine.keys() == torchs.keys()
        if ON_GPU:
            assert torch.equal(a, b)
            assert all(torch.equal(value, torchs[name]) for name, value in mine.items())
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], torchs[name], rtol=0, atol=4 * STEPS * EPS * 25)
        wide = [
            join(p, s["remainder"]) if "remainder" in s else s.get("master", p) for p, s in ((a, mine), (b, torchs))
        ]
        torch.testing.assert_close(*wide, rtol=0, atol=STEPS * (LR * 44 * STEPS**1.5 + 3 * 6) * EPS)


def test_refusals_say_why() -> None:
    """Device, storages, order in memory, kind of tensor."""
    assert supports_adamw(*[torch.ones(2)] * 5) == "triton: runs on cuda; got cpu"
    with FakeTensorMode():
        wide = torch.ones(4, 4, device="cuda")
        narrow, codes, half = wide.bfloat16(), wide.to(torch.float8_e4m3fn), wide.half()
        cases = {
            "with a master in float32 or as a remainder; got torch.bfloat16 without a master": (
                narrow,
                None,
                *[wide] * 3,
            ),
            "got torch.float16 with torch.float32": (half, *[wide] * 4),
            "got torch.float64 without a master": (wide.double(), None, *[wide] * 3),
            "a gradient in torch.float32, moments in torch.float8_e4m3fn and torch.float32": (
                wide,
                None,
                wide,
                codes,
                wide,
            ),
            "takes contiguous tensors; got strides (4, 1), (1, 4), (4, 1), (4, 1)": (wide, None, wide.t(), wide, wide),
            "triton: takes plain tensors; got a FakeTensor": (narrow, wide, narrow, wide, narrow),
        }
        for reason, tensors in cases.items():
            assert reason in str(supports_adamw(*tensors))


def test_what_ran_can_be_asked() -> None:
    """Each group by itself, with the reason; a rule without a kernel says so; capturable steps stay in torch."""
    one, two, three = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([{"params": [one, two]}, {"params": [three], "capturable": True}])
    assert optimizer.ran == ()
    for parameter in (one, three):
        parameter.grad = torch.ones(3)
    optimizer.step()
    reasons = "runs on cuda; got cpu", "takes step and lr as numbers; got capturable=True"
    assert optimizer.ran == [{f"foreach (triton: {reason})": 1} for reason in reasons]
    lion = Lion([one])
    lion.step()
    assert lion.ran == [{"foreach (no kernel has this rule)": 1}]

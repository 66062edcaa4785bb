"""AdamW by its kernel inside the optimizer: who is stepped by it, who is not and why; on a GPU with -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from optim.samples import copies, same
from ottava.kernels.triton import step as triton_adamw
from ottava.kernels.triton.step import supports_adamw
from ottava.nn.graphed import graphed_step
from ottava.optim import AdamW, Lion
from ottava.optim.storage import join
from sweep import sweep
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()
STEPS, LR, EPS = 4, 1e-2, 2.0**-24
FP32, BF16 = torch.float32, torch.bfloat16


def trained(dtype: torch.dtype, make: Callable[[list[nn.Parameter]], Any]) -> Any:
    """An optimizer after some steps of parameters of an odd, a small and no size."""
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype).to(DEVICE)) for shape in ((33, 65), (7,), (0,))]
    optimizer = make(parameters)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(dtype).to(DEVICE)
        optimizer.step()
    return optimizer


def optimized(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: bool, **options: Any) -> AdamW:
    """With the kernel or without."""
    answer = None if wanted else "not wanted in this pass"
    monkeypatch.setattr(triton_adamw, "supports_adamw", lambda *_: answer)
    optimizer: AdamW = trained(dtype, lambda parameters: AdamW(parameters, **{"lr": LR, **options}))
    assert optimizer.ran == [{"triton": 3} if wanted else {"foreach (not wanted in this pass)": 3}]
    return optimizer


def wide(optimizer: Any) -> list[torch.Tensor]:
    """The weights in FP32."""
    pairs = [(p, optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]
    return [join(p, s["remainder"]) if "remainder" in s else s.get("master", p).detach() for p, s in pairs]


CASES = ((FP32, {}), (BF16, {"master": "fp32"}), (BF16, {"master": "remainder"}))
READ = {"capturable": True, "lr": torch.tensor(LR, device=DEVICE)}
"""Step and learning rate lie on the device."""
NUMBERS = {"lr": float(torch.tensor(LR))}
OFF = STEPS * (LR * 44 * STEPS**1.5 + 3 * 6) * EPS
"""What other roundings change in a weight: see below."""


@sweep(options=CASES)
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
    for mine, torchs in zip(wide(one), wide(two), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=OFF)


@sweep(options=CASES, moments=("fp32", "bf16"))
def test_a_capturable_run_has_the_bits_of_numbers(options: Any, moments: str) -> None:
    """The corrections, which the host has in FP64, are those of the device (`test_adamw_device_code`)."""
    dtype, own = options
    with pytest.MonkeyPatch.context() as patch:
        one, two = (optimized(patch, dtype, True, moments=moments, **own, **where) for where in (READ, NUMBERS))
    for a, b in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        assert one.state[a]["step"].device == a.device
        assert all(torch.equal(value.cpu(), two.state[b][name].cpu()) for name, value in one.state[a].items())


@sweep(options=CASES)
def test_a_capturable_run_is_near_that_of_foreach(options: Any) -> None:
    """torch has the powers in FP32. 1 - beta**t, at least 0.997 t (1 - beta), is off by t + 2 eps, so its root at t = 1
    by a share of 1500 eps, and for beta1 by 30 eps itself. The quotient of the corrected moments is below 1.1."""
    dtype, own = options
    with pytest.MonkeyPatch.context() as patch:
        one, two = (optimized(patch, dtype, wanted, **own, **READ) for wanted in (True, False))
    for mine, torchs in zip(wide(one), wide(two), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=OFF + STEPS * LR * 1.1 * 1600 * EPS)


def test_a_capturable_run_is_near_fp64() -> None:
    """torch's AdamW in FP64, which shares no line with ours."""
    with pytest.MonkeyPatch.context() as patch:
        one = optimized(patch, FP32, True, **READ)
    two = trained(torch.float64, lambda parameters: torch.optim.AdamW(parameters, float(READ["lr"]), foreach=False))
    for mine, torchs in zip(wide(one), wide(two), strict=True):
        torch.testing.assert_close(mine.double(), torchs, rtol=0, atol=OFF)


@sweep(read=(False, True))
def test_parameters_come_go_and_resume(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a gradient, one that is added later, a state that is loaded: each has the bits that it has alone.

    One that is not contiguous stays with foreach, and `ran` says so.
    """
    refuse = lambda *given: None if all(x is None or x.is_contiguous() for x in given) else "strides"  # noqa: E731
    monkeypatch.setattr(triton_adamw, "supports_adamw", refuse)
    numbers = [torch.randn(33, 65), torch.randn(16), torch.randn(6, 5).t(), torch.randn(48)]
    ours = [nn.Parameter(x.to(DEVICE)) for x in numbers]
    twins = copies(ours)
    alone = [AdamW([twin], LR, capturable=read and not twin.is_contiguous()) for twin in twins]
    optimizer = AdamW(ours[:3], LR, capturable=read)
    for number in range(6):
        if number == 2:
            optimizer.add_param_group({"params": ours[3:]})
        if number == 4:
            state, optimizer = optimizer.state_dict(), AdamW([{"params": ours[:3]}, {"params": ours[3:]}], LR)
            for group in optimizer.param_groups:
                group["capturable"] = read
            optimizer.load_state_dict(state)
        for index, (parameter, twin) in enumerate(zip(ours, twins, strict=True)):
            if index != number and (index < 3 or number >= 2):
                parameter.grad = torch.randn(parameter.shape, device=DEVICE)
                twin.grad = parameter.grad.clone()
        for one in (optimizer, *alone):
            one.step()
            one.zero_grad()
        assert same(ours, twins)
    assert optimizer.ran == [{"triton": 2, "foreach (strides)": 1}, {"triton": 1}]


def test_a_graph_steps_as_eager_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are made in the capture, and lr changes between replays. Without a GPU both runs are eager."""
    monkeypatch.setattr(triton_adamw, "supports_adamw", lambda *_: None)
    found = []
    for eager in (True, not ON_GPU):
        torch.manual_seed(2)
        model, lr = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 7)).to(DEVICE), torch.tensor(LR, device=DEVICE)
        optimizer = AdamW(model.parameters(), lr, capturable=True)

        def train_step(x: torch.Tensor, model: nn.Module = model, optimizer: AdamW = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        step = graphed_step(train_step, torch.ones(4, 32, device=DEVICE), eager=eager)
        for number in range(7):
            lr.fill_(LR / (number + 1))
            step(torch.randn(4, 32, device=DEVICE))
        assert optimizer.ran == [{"triton": 4}]
        assert all(float(optimizer.state[p]["step"]) == 7 for p in model.parameters())
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


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
            "reads step and lr in float32 on cuda:0; got torch.float32 on cpu": (
                *(wide, None, *[wide] * 3),
                torch.ones((), device="cpu"),
            ),
        }
        for reason, tensors in cases.items():
            assert reason in str(supports_adamw(*tensors))


def test_what_ran_can_be_asked() -> None:
    """Each group by itself, with the reason; a rule without a kernel says so; an lr is not read for the host."""
    one, two, three = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([{"params": [one, two]}, {"params": [three], "lr": torch.tensor(1e-3)}])
    assert optimizer.ran == ()
    for parameter in (one, three):
        parameter.grad = torch.ones(3)
    optimizer.step()
    reasons = "runs on cuda; got cpu", "takes lr as a number; got a tensor with capturable=False"
    assert optimizer.ran == [{f"foreach (triton: {reason})": 1} for reason in reasons]
    lion = Lion([one])
    lion.step()
    assert lion.ran == [{"foreach (no kernel has this rule)": 1}]

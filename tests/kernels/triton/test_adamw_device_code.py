"""AdamW's kernel against the formula of torch's foreach kernels on a GPU, bit by bit; on a GPU with -m gpu."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ottava.kernels.triton.step import step_adamw
from ottava.optim.storage import _split, join
from sweep import sweep
from triton_mode import DEVICE, with_triton
from witnesses import fused_multiply_add

pytestmark = with_triton()


def expected(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, lr: float, betas: tuple[float, float]
) -> list[Tensor]:
    """Weight, mean and square of fp32 numbers after a step with eps 1e-8 and weight decay 0.1, in numpy."""
    beta1, beta2 = betas
    w, g, m, v = (x.cpu().float().numpy() for x in (weight, gradient, mean, square))
    share, size = np.float32(1 - beta1), np.float32(-(lr / (1 - beta1**step)))
    with np.errstate(all="ignore"):
        near = share < np.float32(0.5)
        m = fused_multiply_add(share if near else share - np.float32(1), g - m, m if near else g)
        v = fused_multiply_add(np.float32(1 - beta2), g * g, v * np.float32(beta2))
        ratio = m / (np.sqrt(v) / np.float32((1 - beta2**step) ** 0.5) + np.float32(1e-8))
        w = fused_multiply_add(size, ratio, w * np.float32(1 - lr * 0.1))
    return [torch.from_numpy(np.asarray(x)) for x in (w, m, v)]


@sweep(
    kind=("plain", "master", "remainder"),
    moments=(torch.float32, torch.bfloat16),
    betas=((0.9, 0.999), (0.3, 0.5), (0.0, 0.0)),
)
def test_bits_are_those_of_torchs_kernels_on_a_gpu(kind: str, moments: torch.dtype, betas: tuple[float, float]) -> None:
    """Odd, empty and single shapes; zeros, subnormals, infinities and NaN among the gradients; three steps each."""
    for shape in ((33, 65), (1,), (), (0, 3)):
        master = torch.randn(shape)
        weight = master.clone() if kind == "plain" else master.bfloat16()
        extra = None if kind == "plain" else master.clone()
        if kind == "remainder":
            extra = torch.empty(shape, dtype=torch.int16)
            _split(master, weight, extra)
        mean, square = torch.zeros(shape, dtype=moments), torch.zeros(shape, dtype=moments)
        weight, extra, mean, square = (None if x is None else x.to(DEVICE) for x in (weight, extra, mean, square))
        for step in (1, 2, 3):
            gradient = torch.randn(shape) * 10 ** torch.randn(shape)
            if gradient.numel() > 8:
                odd = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 3e38, float("inf"), -float("inf"), float("nan")])
                gradient.view(-1)[:8] = odd
            gradient = gradient.to(weight.dtype).to(DEVICE)
            master, *states = expected(master, gradient, mean, square, step, 1e-2, betas)
            before = weight._version
            step_adamw(
                weight, extra, gradient, mean, square, step=step, lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1
            )
            assert weight._version == before + (weight.numel() > 0)
            found = [mean, square, join(weight, extra) if kind == "remainder" else weight if extra is None else extra]
            wanted = [*(x.to(moments) for x in states), master]
            if kind != "plain":
                found.append(weight)
                upper = torch.empty_like(weight, device="cpu")
                _split(master, upper, torch.empty(shape, dtype=torch.int16))
                wanted.append(upper if kind == "remainder" else master.bfloat16())
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.cpu().nan_to_num(7.0), other.nan_to_num(7.0))
                assert torch.equal(one.cpu().isnan(), other.isnan())


def test_what_was_written_is_the_weight() -> None:
    """A step with lr 0 after half of a weight was zeroed: masters follow there, and keep their bits elsewhere."""
    options = {"step": 1, "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    master = torch.randn(64)
    for remainder in (False, True):
        weight, extra = master.bfloat16(), master.clone()
        if remainder:
            extra = torch.empty(64, dtype=torch.int16)
            _split(master, weight, extra)
        weight[:32] = 0.0
        weight, extra, ones = weight.to(DEVICE), extra.to(DEVICE), torch.ones(64, device=DEVICE)
        step_adamw(weight, extra, ones, ones.clone(), ones.clone(), **options)
        found = (join(weight, extra) if remainder else extra).cpu()
        assert torch.equal(found[32:], master[32:])
        assert float(found[:32].abs().max()) <= (2.0**-133 if remainder else 0.0)
        assert not weight[:32].any()


def test_ties_and_every_nan_are_split_as_torch_splits_them() -> None:
    """A step with lr 0 keeps the master: ties of both signs and parities, the largest NaN, and zero."""
    upper = torch.tensor([0x3F80, 0x3F81, -0x4080, -0x407F, 0x7FFF, 0x0000], dtype=torch.int16)
    remainder = torch.tensor([-0x8000, -0x8000, -0x8000, -0x8000, 0x7FFF, 0], dtype=torch.int16)
    weight = upper.view(torch.bfloat16).clone()
    wanted, kept = weight.clone(), remainder.clone()
    _split(join(weight, remainder), wanted, kept)
    assert torch.equal(kept[:4], remainder[:4])
    weight, remainder, ones = weight.to(DEVICE), remainder.to(DEVICE), torch.ones(6, device=DEVICE)
    options = {"step": 1, "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    step_adamw(weight, remainder, ones, ones.clone(), ones.clone(), **options)
    assert torch.equal(weight.view(torch.int16).cpu(), wanted.view(torch.int16))
    assert torch.equal(remainder.cpu(), kept)

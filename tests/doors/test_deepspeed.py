"""DeepSpeed needs no door: a converted model trains in its engine with the bits of a plain loop, and resumes.

DeepSpeed compiles an extension once, which takes minutes; this file is for machines that have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from scaling_samples import two_linears

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"DS_ACCELERATOR": "cpu", **ranks}.items():
            patch.setenv(name, value)
        host = pytest.importorskip("deepspeed")
        store = tmp_path_factory.mktemp("deepspeed") / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield host
        torch.distributed.destroy_process_group()


net = partial(two_linears, hidden=256)


def loss_of(model: Any) -> Tensor:
    return (model(X) - X.roll(1, 1)).float().square().mean()


def with_masters(recipe: str, steps: int) -> list[float]:
    """A plain loop: AdamW on FP32 copies, which are cast to the BF16 weights after each step."""
    model = net(recipe)
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer, state, losses = torch.optim.AdamW(masters, 1e-3), ottava.ScalingState(model), []
    for _ in range(steps):
        (loss := loss_of(model)).backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
        state.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_the_bits_of_a_plain_loop(deepspeed: Any, stage: int, recipe: str, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 32, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}

    def engine() -> Any:
        model = net(recipe)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ottava.ScalingState(model).attach(optimizer)  # it steps copies of the weights
        stages = {"zero_optimization": {"stage": stage}}
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**config, **stages})[0]

    def train(host: Any) -> list[float]:
        losses = []
        for _ in range(3):
            host.backward(loss := loss_of(host))
            host.step()
            losses.append(loss.item())
        return losses

    first = engine()
    early = train(first)
    first.save_checkpoint(tmp_path)
    late = train(first)
    assert early + late == with_masters(recipe, 6)
    again = engine()
    again.load_checkpoint(tmp_path)
    assert train(again) == late

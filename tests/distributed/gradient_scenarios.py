"""Gradients on the wire as FP8 codes; run in several processes by test_gradients. The witness sums in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fsdp_scenarios import Counted
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.distributed import FP8ReduceScatter, each_gradient_hook, fp8_gradient_hook
from scaling_samples import two_linears

EPS = 2.0**-4
"""Half an ulp of E4M3 over the number, at most."""


def gradients(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of layers whose magnitudes differ by octaves."""
    generator = torch.Generator().manual_seed(rank)
    octaves = torch.arange(count).div(1000, rounding_mode="floor") % 30 - 20
    return (torch.randn(count, generator=generator) * 2.0**octaves).to(dtype)


def hooked(numbers: Tensor) -> Tensor:
    """What DistributedDataParallel gets for a bucket."""
    bucket = SimpleNamespace(buffer=lambda: numbers)
    return fp8_gradient_hook(None, bucket).wait()


def noise(got: Tensor, wanted: Tensor) -> float:
    """SQNR, in decibels."""
    return float(10 * torch.log10(wanted.square().sum() / (got.double() - wanted).square().sum()))


def a_sum_of_each_gradient_has_one_order(world: World) -> None:
    """The first backward has the bits of the later ones; in torch's own sum of three ranks or more it has not."""
    differ = {}
    for hook in (None, each_gradient_hook):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
        ddp = DistributedDataParallel(model)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(world.rank))
        sums = []
        for _ in range(3):
            model.zero_grad()
            ddp(x).square().sum().backward()
            sums.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert torch.equal(sums[1], sums[2])
        differ[hook] = int((sums[0] != sums[1]).sum()), sums[1]
    assert differ[each_gradient_hook][0] == 0
    assert (differ[None][0] > 0) == (world.size > 2)
    torch.testing.assert_close(differ[each_gradient_hook][1], differ[None][1], rtol=2**-20, atol=2**-20)
    print(f"{differ[None][0]} of {sums[0].numel()} sums of {world.size} ranks differ in torch's own order", flush=True)


def a_mean_within_its_bound(world: World) -> None:
    """Two roundings and no more, in every dtype and for every length; all ranks get the same bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (0, 1, 127, 128 * world.size, 30_001):
            every = torch.stack([gradients(rank, count, dtype).double() for rank in range(world.size)])
            wanted, got = every.mean(0), hooked(gradients(world.rank, count, dtype))
            assert got.dtype == dtype
            # a number below 2**-6 of its block's top is a subnormal of E4M3, off by 2**-10 of 2**-7 of that top
            top = nn.functional.pad(every.abs().amax(0), (0, -count % 128)).view(-1, 128).amax(1)
            tiny = top.repeat_interleave(128)[:count] * 2.0**-16
            # blocks of a part begin where the part begins, so a number may lie in a block beside this one
            tiny = torch.stack([tiny, tiny.roll(128), tiny.roll(-128)]).amax(0) * 4 if count > 128 else tiny
            info = torch.finfo(dtype)
            bound = EPS * every.abs().mean(0) * 2.2 + tiny + wanted.abs() * info.eps + info.tiny * info.eps
            assert bool(((got.double() - wanted).abs() <= bound).all()), (dtype, count)
            if count > 10_000 and dtype != torch.float16:
                assert noise(got, wanted) > 27, noise(got, wanted)
                print(f"SQNR of {dtype} mean of {world.size}: {noise(got, wanted):.1f} dB", flush=True)
            mine = got.view(torch.uint8).clone()
            first = mine.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, mine)


def no_sum_saturates(world: World) -> None:
    """Numbers at the top of E4M3 on every rank, and near that of fp32 in blocks of their own."""
    numbers = torch.full((256 * world.size,), 448.0)
    numbers[128:] = 2.0**126  # three of them are a number of fp32
    assert torch.equal(hooked(numbers.clone()), numbers)
    small = torch.full((1000,), 1e-37)
    assert bool(((hooked(small.clone()) - 1e-37).abs() <= 1e-37 * 2.2 * EPS).all())


def what_is_not_finite_arrives(world: World) -> None:
    """An infinity or a NaN of one rank, at its place on all; the numbers of other blocks are as they were."""
    for bad in (float("inf"), float("-inf"), float("nan")):
        numbers = torch.ones(1024 * world.size)
        if world.rank == world.size - 1:
            numbers[300] = bad
        got = hooked(numbers)
        expected = torch.ones(1024 * world.size)
        expected[300] = bad
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0)), (bad, got[256:384])


def train(world: World, model: nn.Module, micro: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        for i in range(micro):
            waits = model.no_sync() if i < micro - 1 and hasattr(model, "no_sync") else nullcontext()
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(10 * i + world.rank)).bfloat16()
            with waits:
                loss = model(x).float().square().mean()
                loss.backward()
        if step == 0:
            grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.first = grads
    return losses


network = partial(two_linears, width=128, hidden=333)


def distributed_data_parallel(world: World) -> None:
    """Half of the bytes; all ranks hold one model; a run ends where BF16 gradients end, within a twentieth."""
    models, sent = [], []
    for hook in (None, fp8_gradient_hook):
        model = DistributedDataParallel(network("delayed"), bucket_cap_mb=0.1)
        if hook is not None:
            model.register_comm_hook(None, hook)
        with Counted() as counted:
            losses = train(world, model, micro=2)
        models.append((model, losses))
        sent.append(counted)
    (plain, one), (coded, other) = models
    assert other[-1] < 0.9 * other[0]
    assert abs(other[-1] - one[-1]) < 0.05 * one[0]
    ottava.distributed.verify(coded)
    for a, b in zip(plain.first, coded.first, strict=True):
        assert noise(b, a.double()) > 25
    numbers = sum(p.numel() for p in plain.parameters())
    share = (world.size - 1) / world.size  # of a ring in BF16: 2 * share * 2 bytes a number
    filled = 1.02 + 2 * 130 * world.size * 4 / numbers  # parts are filled up to blocks of 128
    assert sent[1].bytes["exchange"] / 6 * share + sent[1].bytes["gather"] / 6 * (world.size - 1) <= (
        0.5 * filled * numbers * 2 * share * 2
    ), (sent[1].bytes, numbers)


def fsdp2(world: World) -> None:
    """Half of the bytes of the reduce-scatter, in front of BF16 and of fp32 sums; other divisions are refused."""
    mesh = init_device_mesh("cpu", (world.size,))
    for policy in (fsdp.MixedPrecisionPolicy(), fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        runs, sent = [], []
        for comm in (None, FP8ReduceScatter()):
            model = network()
            for module in (model[0], model[2], model):
                ottava.distributed.fully_shard(module, mesh=mesh, mp_policy=policy)
                if comm is not None:
                    module.set_custom_reduce_scatter(comm)
            with Counted() as counted:
                runs.append((model, train(world, model)))
            sent.append(counted.bytes)
        (plain, one), (coded, other) = runs
        assert abs(other[-1] - one[-1]) < 0.05 * one[0]
        for a, b in zip(plain.first, coded.first, strict=True):
            if a.to_local().numel():
                assert noise(b.to_local(), a.to_local().double()) > 25
        size = 4 if policy.reduce_dtype else 2
        assert sent[1]["exchange"] <= 1.03 / size * sent[0]["scatter"], sent
    coded[0].set_gradient_divide_factor(7.0)
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        coded(torch.ones(4, 128).bfloat16()).sum().backward()

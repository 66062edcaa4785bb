"""Processes whose models DistributedDataParallel takes, and that run inside its `join`; test_state_ddp runs them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from state_scenarios import World, ddp, same_everywhere, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.engine import groups
from scaling_samples import WIDTH, loss_of, network, sgd, windows


def uneven_batches(world: World) -> None:
    """DDP.join, 3 batches against 5, micro-batches too: windows of all that ran, the same on all, and training goes on.

    The last batch of the others is their largest: a rank that kept it would show it in the step after `join`.
    """
    others = range(1, world.size)
    for micro in (1, 2):
        model = network()
        wrapped = ddp(model)
        optimizer = sgd(wrapped, lr=0.0)
        factors = [1, 1, 1, 1, 8]
        with wrapped.join():
            for step in range(3 if world.rank == 0 else 5):
                for i in range(micro):
                    wrapped.require_backward_grad_sync = i == micro - 1
                    loss_of(wrapped, world.data(step) * factors[step] * (i + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        ran = [world.largest(step) if step < 3 else world.largest(step, *others) for step in range(5)]
        expected = [micro * amax * factor for amax, factor in zip(ran, factors, strict=True)][::-1]
        assert windows(model)[0] == expected
        same_everywhere(world, model)
        with wrapped.join():
            train(world, wrapped, range(5, 6))
        assert windows(model)[0] == [world.largest(5), *expected]
        train(world, wrapped, range(6, 7))
        assert windows(model)[0] == [world.largest(6), world.largest(5), *expected]
        same_everywhere(world, model)


def join_refuses(world: World) -> None:
    """Settings under which a rank without batches could not take part."""
    wrapped = ddp(network(), broadcast_buffers=False)
    with pytest.raises(RuntimeError, match=r"broadcast_buffers=False: set it"), wrapped.join():
        train(world, wrapped, range(1))
    wrapped = ddp(network())
    with (
        pytest.raises(RuntimeError, match=r"autocast\(update='autocast'\): use 'step'"),
        wrapped.join(),
        ottava.autocast(update="autocast"),
    ):
        loss_of(wrapped, world.data(0))


def wrapped_before_it_was_converted(world: World) -> None:
    """The first forward finds the wrapper, also when a second wrapper takes the model; ranks share their amaxes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16()
    for _ in range(2):
        wrapped = ddp(model)
        ottava.convert(model, "delayed")
        train(world, wrapped, range(2))
        assert windows(model)[0][:2] == [world.largest(1), world.largest(0)]
        same_everywhere(world, model)


def one_comparison_a_wrapper(world: World) -> None:
    """With layers and without; a rank without layers answers too, so that the others name it instead of waiting."""
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]

    def turn() -> int:
        return int(store.add(f"ottava/turn of {world.rank}", 0))

    for recipe in ("delayed", "tensorwise"):
        before = turn()
        ddp(network(recipe))
        assert turn() == before + 1
    plain, before = nn.Linear(2, 2), turn()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="no ottava layer"):
            ddp(network("delayed"))
    ddp(plain)  # the first wrapper of the others takes part in the collectives of this one
    if world.rank != 0:
        groups.agree(dist.group.WORLD, (), ())  # the turns stay in step
    assert turn() == before + 2


def codes_of_the_first_rank(world: World) -> None:
    """A wrapper gives all ranks the codes of rank 0; what it sends itself changes none."""
    model = network("tensorwise", seed=world.rank)
    ottava.convert(model, "tensorwise", weights="fp8")
    weight = model[0].weight
    codes = [torch.empty_like(weight.codes) for _ in range(world.size)]
    dist.all_gather([c.view(torch.uint8) for c in codes], weight.codes.view(torch.uint8))
    assert not torch.equal(codes[0].view(torch.uint8), codes[1].view(torch.uint8))
    assert isinstance(ddp(model), DistributedDataParallel)
    assert torch.equal(weight.codes.view(torch.uint8), codes[0].view(torch.uint8))
    assert weight.sent

"""What travels in a step, by dtype, operation and group; run in several processes by test_collectives."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fsdp_scenarios import losses, network, shard
from state_scenarios import World
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, parallel
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.distributed import Collectives, ColwiseParallel, RowwiseParallel, fully_shard
from ottava.engine.groups import CollectiveRow

NUMBERS = 2 * 128 * 512 + 512 + 128
"""Of `network`."""


def found(sent: Collectives, operation: str) -> list[CollectiveRow]:
    return [row for row in sent.rows if row.operation == operation]


def replicas_sum_in_the_dtype_of_their_gradients(world: World) -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = DistributedDataParallel(network("tensorwise", dtype=dtype))
        with Collectives() as sent:
            losses(world, model, steps=1)
        (row,) = [row for row in found(sent, "all_reduce") if row.reduction != "MAX"]
        assert (row.dtype, row.reduction, row.ranks) == (str(dtype)[6:], "SUM", world.size), str(sent)
        assert row.bytes == NUMBERS * size, str(sent)
        assert str(row) in str(ottava.receipt(model, collectives=sent.rows))


def a_policy_for_reductions_is_what_travels(world: World) -> None:
    """FSDP2 of torch and ours; the dtype that a policy names, which two settings must change."""
    for way in (fsdp.fully_shard, fully_shard):
        for reduce, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
            mesh = init_device_mesh("cpu", (world.size,))
            model = shard(way, network("tensorwise", dtype=torch.float32), mesh=mesh, mp_policy=policy)
            with Collectives() as sent:
                losses(world, model, steps=1)
            (row,) = found(sent, "reduce_scatter")
            assert (row.dtype, row.ranks, row.group) == (str(reduce)[6:], world.size, ""), str(sent)
            assert row.reduction in ("SUM", "AVG"), str(sent)
            assert row.bytes == NUMBERS * size, str(sent)
            (row,) = found(sent, "all_gather")
            code, wide = (1, "uint8") if way is fully_shard else (2, "bfloat16")
            assert row.dtype == wide, str(sent)
            # in the forward and again in the backward; biases travel in BF16, among the codes
            assert row.bytes == 2 * ((NUMBERS - 640) * code + 640 * 2) // world.size, str(sent)


def the_path_that_ignores_a_policy_is_seen(world: World) -> None:
    """pytorch #190626: FSDP2 sums the gradients of a norm over the tensor-parallel ranks in BF16, whatever reduce_dtype
    says; where torch has mended it the row says float32."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    plan = {"0": parallel.SequenceParallel(), "1": parallel.ColwiseParallel(input_layouts=Shard(1))}
    parallel.parallelize_module(model, mesh["tp"], plan)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    with Collectives() as sent:
        model(torch.randn(2, 4, 32)).float().sum().backward()
    (row,) = found(sent, "all_reduce")  # of the norm's weight and bias
    assert (row.reduction, row.ranks, row.calls) == ("SUM", world.size, 2), str(sent)
    assert row.bytes == 2 * 32 * {"bfloat16": 2, "float32": 4}[row.dtype], str(sent)
    assert row.dtype == "bfloat16" or not torch.__version__.startswith("2.13"), str(sent)


def tensor_parallel_layers_are_recorded(world: World) -> None:
    """Their sums in BF16."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = network("tensorwise")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)
    with Collectives() as sent:
        losses(world, model, steps=1)
    sums = [row for row in found(sent, "all_reduce") if row.dtype == "bfloat16" and row.reduction == "SUM"]
    assert [(row.ranks, row.group) for row in sums] == [(world.size, "")], str(sent)


def a_record_keeps_every_bit_and_ends_with_its_context(world: World) -> None:
    def run(record: bool) -> list[torch.Tensor]:
        model = shard(fully_shard, network("delayed"))
        if not record:
            return losses(world, model)
        with Collectives() as sent:
            made = losses(world, model)
        before = sent.rows
        dist.all_reduce(torch.ones(3))
        assert sent.rows == before
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for one, other in zip(run(False), run(True), strict=True):
            assert torch.equal(one, other)


def every_operation_has_its_name(world: World) -> None:
    """All of torch.distributed that takes tensors; a barrier is none."""
    x, parts = torch.ones(4), [torch.ones(4) for _ in range(world.size)]
    with Collectives() as sent, Collectives() as inner:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_gather(parts, x)
        dist.all_to_all_single(torch.empty(2 * world.size), torch.ones(2 * world.size))
        dist.broadcast(x, 0)
        dist.reduce(x.double(), 0, dist.ReduceOp.PRODUCT)
        dist.gather(x, parts if world.rank == 0 else None, 0)
        dist.scatter(x, parts if world.rank == 0 else None, 0)
        dist.barrier()
        functional.wait_tensor(functional.all_reduce(x, "min", dist.new_group(group_desc="pair")))
        if world.rank < 2:
            dist.send(x, 1 - world.rank) if world.rank else dist.recv(x, 1)
    n = world.size
    wanted = [
        *(f"all_reduce float32 MAX over {n} ranks x 1 (16 bytes)", f"all_gather float32 over {n} ranks x 1 (16 bytes)"),
        f"all_to_all float32 over {n} ranks x 1 ({8 * n} bytes)",
        *(f"broadcast float32 over {n} ranks x 1 (16 bytes)", f"reduce float64 PRODUCT over {n} ranks x 1 (32 bytes)"),
        f"gather float32 over {n} ranks x 1 (16 bytes)",
        f"scatter float32 over {n} ranks x 1 ({0 if world.rank else 16 * n} bytes)",
        f"all_reduce float32 MIN over {n} ranks (pair) x 1 (16 bytes)",
        *([f"{'send' if world.rank else 'recv'} float32 over {n} ranks x 1 (16 bytes)"] if world.rank < 2 else []),
    ]
    assert [str(row) for row in sent.rows] == wanted, str(sent)
    assert inner.rows == sent.rows


def nn_linear_alone_sends_nothing(world: World) -> None:
    with Collectives() as sent:
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    assert (sent.rows, str(sent)) == ((), "no collectives")

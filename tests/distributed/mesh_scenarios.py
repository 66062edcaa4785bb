"""Sequences split over ranks (context parallelism), and meshes of several dimensions; run by test_styles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_scenarios import moe
from parallel_layers_scenarios import WIDTH, grads, noise
from parallel_scenarios import EPS, ends, mesh_of, mlp, nearest, tensors
from parallel_scenarios import step as plain_step
from state_scenarios import World, same_everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import parallelize_module

import ottava
from ottava.distributed import ColwiseParallel, ContextParallel, ExpertParallel, RowwiseParallel, tensor_parallel_plan
from ottava.distributed.context import GatheredKeys
from ottava.nn.rope import RotaryTable
from ottava.numerics.tensor import QuantizedTensor


def encoder(recipe: Any) -> ottava.nn.TransformerLayer:
    """torch's context parallelism has rules for CPUs in the plain formulas only, without a mask."""
    torch.manual_seed(0)
    return ottava.nn.TransformerLayer(
        WIDTH, 256, 4, kv_heads=4, mask="no_mask", backend="math", recipe=recipe, dtype=torch.bfloat16
    )


def near(got: Tensor, wanted: Tensor, bound: float) -> bool:
    return bool((got.float() - wanted.float()).norm() <= bound * wanted.float().norm())


def in_context(mesh: Any, model: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx of all tokens; the gradients of weights are this rank's."""
    x, dy = x.clone(), dy.clone()
    with context_parallel(mesh, buffers=[x, dy], buffer_seq_dims=[1, 1], no_restore_buffers={x, dy}):
        y, dx = ends(model, x, dy)
    whole_y, dx = context_parallel_unshard(mesh, [y.contiguous(), dx.contiguous()], [1, 1])
    return whole_y, dx


def sequences_split_over_ranks(world: World) -> None:
    """torch's context_parallel around FP8 linears: one scale for the sequence, the numbers of one process."""
    mesh = mesh_of(world)
    x, dy = noise(2, 64 * world.size, WIDTH), noise(2, 64 * world.size, WIDTH, seed=2)
    for recipe, bound in (("bf16", 4 * world.size * EPS), ("tensorwise", 0.11), ("rowwise", 0.11)):
        whole, model = encoder(nearest(recipe)), encoder(nearest(recipe))
        parallelize_module(model, mesh, {"": ContextParallel()})
        scales: list[Tensor] = []

        def note(door: Any, inputs: Any, made: Any, scales: list[Tensor] = scales) -> None:
            scales.extend(one.scale_inv for one in made[:1] if isinstance(one, QuantizedTensor))

        handles = [m.attention.qkv.quantizers.input.register_forward_hook(note) for m in (whole, model)]
        wanted, wanted_dx = ends(whole, x, dy)
        y, dx = in_context(mesh, model, x, dy)
        for handle in handles:
            handle.remove()
        if recipe == "tensorwise":
            assert torch.equal(scales[0], scales[1])
        assert near(y, wanted, bound), recipe
        assert near(dx, wanted_dx, bound), recipe
        references = grads(whole)
        for name, grad in grads(model).items():
            dist.all_reduce(grad)
            assert near(grad, references[name], 2 * bound), (recipe, name)


def gathered_keys(world: World) -> None:
    """Each rank's queries see the keys of all ranks before them: any mask, any backend, the numbers of one process."""
    mesh, tokens = mesh_of(world), 32 * world.size
    x, dy = noise(2, tokens, WIDTH), noise(2, tokens, WIDTH, seed=2)
    rotary = ottava.nn.RotaryEmbedding(WIDTH // 4)(torch.arange(tokens))
    mine = slice(32 * world.rank, 32 * world.rank + 32)
    for recipe, bound in (("bf16", 4 * world.size * EPS), ("tensorwise", 0.11)):
        for mask, window in (("causal", None), ("causal", (20, 0)), ("no_mask", None)):
            torch.manual_seed(0)
            own: dict[str, Any] = {"mask": mask, "window": window, "recipe": nearest(recipe), "dtype": torch.bfloat16}
            whole = ottava.nn.TransformerLayer(WIDTH, 256, 4, kv_heads=2, **own)
            model = parallelize_module(copy.deepcopy(whole), mesh, {"": ContextParallel(gather_keys=True)})
            wanted, wanted_dx = ends(whole, x, dy, rotary=rotary)
            table = RotaryTable(rotary.cos[mine], rotary.sin[mine], rotary.interleaved)
            y, dx = ends(model, x[:, mine], dy[:, mine], rotary=table)
            assert near(y, wanted[:, mine], bound), (recipe, mask)
            assert near(dx, wanted_dx[:, mine], bound), (recipe, mask)
            references = grads(whole)
            for name, grad in grads(model).items():
                dist.all_reduce(grad)
                assert near(grad, references[name], 2 * bound), (recipe, mask, name)
    q = noise(2, 8, 4, 16)
    attention = ottava.nn.DotProductAttention(window=(3, None), mask="no_mask")
    for layer, given, match in (
        (attention, {}, "needs mask 'causal'"),
        (ottava.nn.DotProductAttention(), {"key_lengths": torch.tensor([3, 4])}, "no lengths"),
    ):
        layer.keys = GatheredKeys(mesh.get_group())
        with pytest.raises(ValueError, match=match):
            layer(q, q, q, **given)
    with pytest.raises(ValueError, match="so no cache"):
        layer(q[:, :1], q, q)
    packed = nn.ModuleList([ottava.nn.Linear(16, 16), ottava.nn.DotProductAttention(layout="thd")])
    with pytest.raises(ValueError, match="1 takes packed sequences"):
        parallelize_module(packed, mesh, {"": ContextParallel(gather_keys=True)})


def replicas_of_shards_of_split_layers(world: World) -> None:
    """Three dimensions: HSDP around tensor parallelism; one history for all ranks."""
    if world.size < 4:
        return
    for shape in ((2, world.size // 4, 2), (1, world.size // 2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp"))
        data = mesh["replicas", "shards"]
        dp, mine = world.size // 2, world.rank // 2
        x, dy = tensors(batch=dp)
        for recipe, bound in (("bf16", 2 * dp * EPS), ("delayed", 0.11)):  # as in with_sharded_data_parallelism
            whole = mlp(recipe)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            model = parallelize_module(mlp(recipe), mesh["tp"], plan)
            for layer in (model.up, model.down, model):
                fully_shard(layer, mesh=data)
            for _ in range(2):
                wanted = plain_step(whole, x, dy)
                got = plain_step(model, x.chunk(dp)[mine], dy.chunk(dp)[mine])
                assert near(got[0], wanted[0].chunk(dp)[mine], bound), (shape, recipe)
                for i, (one, other) in enumerate(zip(got[2:], wanted[2:], strict=True)):
                    assert near(one * dp, other, bound), (shape, recipe, i)  # FSDP2 averages
                torch.optim.SGD(whole.parameters(), lr=1e-3).step()
                torch.optim.SGD(model.parameters(), lr=1e-3 * dp).step()
            same_everywhere(world, model)


def experts_beside_sharded_data(world: World) -> None:
    """dp x ep: experts are divided by ep and sharded by dp, the router is sharded by both."""
    if world.size < 4:
        return
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "ep"))
    x, dy = noise(16 * world.size, WIDTH), noise(16 * world.size, WIDTH, seed=2)
    own = [t.chunk(world.size)[world.rank] for t in (x, dy)]
    for recipe, bound in (("bf16", 4 * world.size * EPS), ("blockwise", 0.11)):
        whole = moe(nearest(recipe), 2 * world.size)
        model = parallelize_module(copy.deepcopy(whole), mesh["ep"], ExpertParallel())
        for experts in (model.up, model.down):
            fully_shard(experts, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp", "ep"]._flatten())
        y, dx = ends(model, *own)
        wanted, wanted_dx = ends(whole, x, dy)
        assert near(y, wanted.chunk(world.size)[world.rank], bound), recipe
        assert near(dx, wanted_dx.chunk(world.size)[world.rank], bound), recipe
        references = grads(whole)
        for name, grad in grads(model).items():
            averaged = world.size if name.startswith("router") else world.size // 2  # over the ranks of its mesh
            assert near(grad * averaged, references[name], bound), (recipe, name)


def data_context_and_heads(world: World) -> None:
    """dp x cp x tp: batches, sequences and heads; FSDP2 over the first two."""
    if world.size < 4:
        return
    dp = world.size // 4
    mesh = init_device_mesh("cpu", (dp, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    x, dy = noise(2 * dp, 128, WIDTH), noise(2 * dp, 128, WIDTH, seed=2)
    mine = world.rank // 4
    for recipe, bound in (("bf16", 4 * world.size * EPS), ("rowwise", 0.11)):
        whole, model = encoder(nearest(recipe)), encoder(nearest(recipe))
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
        parallelize_module(model, mesh["cp"], {"": ContextParallel()})
        fully_shard(model, mesh=mesh["dp", "cp"]._flatten())
        y, dx = in_context(mesh["cp"], model, x.chunk(dp)[mine], dy.chunk(dp)[mine])
        wanted, wanted_dx = ends(whole, x, dy)
        assert near(y, wanted.chunk(dp)[mine], bound), recipe
        assert near(dx, wanted_dx.chunk(dp)[mine], bound), recipe
        references = grads(whole)
        for name, grad in grads(model).items():
            assert near(grad * 2 * dp, references[name], 2 * bound), (recipe, name)

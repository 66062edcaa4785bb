"""What several processes do with TransformerEngine's parallel arguments; run in each of them by test_te_ranks.

The witness is one process with the whole weights and all tokens. Each rank loads its rows or columns of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_scenarios import close, ends, nearest
from state_scenarios import World
from torch import Tensor, nn

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.distributed import verify

HIDDEN, FFN, HEADS, GROUPS, TOKENS, BATCH = 64, 128, 8, 4, 32, 4
RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise")
FP32 = torch.finfo(torch.float32).eps


def data(width: int = HIDDEN, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> tuple[Tensor, ...]:
    """All tokens and their gradients, sequence first."""
    rng = torch.Generator().manual_seed(1)
    return tuple(torch.randn(TOKENS * 4, BATCH, width, generator=rng).mul(scale).to(dtype) for _ in range(2))


def own_tokens(world: World, x: Tensor, sequence: bool) -> Tensor:
    return x.chunk(world.size, 0)[world.rank] if sequence else x


def shard(world: World, whole: Tensor, dim: int, pieces: int = 1) -> Tensor:
    """This rank's part along dim, of each of the pieces that lie one after the other there."""
    parts = whole.chunk(pieces, dim) if dim >= 0 else (whole,)
    return torch.cat([p.chunk(world.size, dim)[world.rank] for p in parts], dim) if dim >= 0 else whole


def step(module: nn.Module, x: Tensor, dy: Tensor, recipe: ottava.Recipe | None) -> tuple[Tensor, ...]:
    """(y, dx); gradients of parameters are in the parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with ottava.autocast(recipe, enabled=recipe is not None):
        y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def load(world: World, module: nn.Module, whole: nn.Module, dims: Mapping[str, tuple[int, int]]) -> None:
    """Parameters by their ends: (dimension that is split, pieces); others are whole on each rank."""
    own = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            part = next((how for end, how in dims.items() if name.endswith(end)), (-1, 1))
            parameter.copy_(shard(world, own[name], *part))


def summed(parameter: nn.Parameter) -> Tensor:
    """Its gradient; where ranks hold other tokens the trainer sums, as TransformerEngine wants it."""
    assert parameter.grad is not None
    grad = parameter.grad.float()
    if getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(grad)
    return grad.to(parameter.dtype)


def linears_and_mlps_have_the_gradients_of_one_process(world: World) -> None:
    """Bits of the weights' gradients under every kind of recipe; y, dx and sums over ranks within their roundings."""
    group = dist.group.WORLD
    gated = {"fc1.weight": (0, 2), "fc1.bias": (0, 2), "fc2.weight": (1, 1)}
    sides = {"column": {"weight": (0, 1), "bias": (0, 1)}, "row": {"weight": (1, 1)}}
    column, row = {"parallel_mode": "column"}, {"parallel_mode": "row"}
    norms = {"norm.weight": (-1, 1), "norm.bias": (-1, 1)}
    cases: list[tuple[Any, tuple[int, int], dict[str, Any], dict[str, Any], dict[str, tuple[int, int]]]] = [
        (te.Linear, (HIDDEN, FFN), {}, column, sides["column"]),
        (te.Linear, (FFN, HIDDEN), {}, row, sides["row"]),
        (te.LayerNormLinear, (HIDDEN, FFN), {}, column, norms | sides["column"]),
        (te.LayerNormMLP, (HIDDEN, FFN), {"activation": "swiglu"}, {"set_parallel_mode": True}, gated),
    ]
    for make, sizes, settings, mode, dims in cases:
        settings = {**settings, "params_dtype": torch.bfloat16}
        torch.manual_seed(0)
        whole = make(*sizes, **settings)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        x, dy = data(sizes[0])[0], data(sizes[1] if make is not te.LayerNormMLP else sizes[0], scale=2)[1]
        for name in RECIPES:
            wanted = world.once(
                lambda whole=whole, x=x, dy=dy, name=name: (
                    *step(whole, x, dy, nearest(name)),
                    *(p.grad for p in whole.parameters()),
                )
            )
            for sequence in (False, True):
                module = make(*sizes, **settings, **mode, tp_group=group, sequence_parallel=sequence)
                load(world, module, whole, dims)
                own_x = shard(world, x, 2) if mode == row else own_tokens(world, x, sequence)
                own_dy = shard(world, dy, 2) if mode == column else own_tokens(world, dy, sequence)
                y, dx = step(module, own_x, own_dy, nearest(name))
                said = make.__name__, mode, name, sequence
                if mode == column:
                    assert torch.equal(y, shard(world, wanted[0], 2)), said
                else:
                    assert close(y, own_tokens(world, wanted[0], sequence), 2 * world.size), said
                if mode == row:
                    assert torch.equal(dx, shard(world, wanted[1], 2)), said
                else:
                    assert close(dx, own_tokens(world, wanted[1], sequence), 8 * world.size), said
                for (key, one), grad in zip(module.named_parameters(), wanted[2:], strict=True):
                    part = next((how for end, how in dims.items() if key.endswith(end)), (-1, 1))
                    expected = shard(world, grad, *part)
                    if part[0] >= 0:
                        assert getattr(one, "tensor_model_parallel", False), (said, key)
                        assert torch.equal(one.grad, expected), (said, key)
                    else:  # a sum over tokens, by ranks in another order; of a norm, of a dx that was rounded
                        assert close(summed(one), expected, 64), (said, key)
                layer = module.fc1 if make is te.LayerNormMLP else module
                assert f"split over {world.size} ranks" in ottava.receipt(layer).rows[0].note, said


def a_layer_shares_its_heads(world: World) -> None:
    """TransformerLayer in fp32: encoder and decoder, both norms, grouped queries, a learned sink, split tokens."""
    group = dist.group.WORLD
    for settings in (
        {"num_gqa_groups": GROUPS, "activation": "swiglu", "normalization": "RMSNorm", "softmax_type": "learnable"},
        {"qk_norm_type": "RMSNorm", "output_layernorm": True, "apply_residual_connection_post_layernorm": True},
        {"layer_type": "decoder", "attn_input_format": "sbhd"},
    ):
        common: dict[str, Any] = {**settings, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        torch.manual_seed(0)
        whole = te.TransformerLayer(HIDDEN, FFN, HEADS, **common)
        pieces = 2 if settings.get("activation") == "swiglu" else 1
        dims = {"fc1.weight": (0, pieces), "fc1.bias": (0, pieces), "fc2.weight": (1, 1), "out.weight": (1, 1)}
        dims |= {"q.weight": (0, 1), "q.bias": (0, 1), "kv.weight": (0, 2), "kv.bias": (0, 2), "sink": (0, 1)}
        shared = {"num_gqa_groups": GROUPS} if "num_gqa_groups" in settings else {}
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        x, dy = data(dtype=torch.float32)
        for sequence in (False, True):
            modes: dict[str, Any] = {"set_parallel_mode": True, "tp_group": group, "sequence_parallel": sequence}
            layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **common, **modes)
            full = dict(whole.named_parameters())
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    parameter.copy_(split_heads(world, name, full[name], dims, bool(shared)))
            memory = {"encoder_output": x.flip(0)} if "layer_type" in settings else {}
            own = {k: own_tokens(world, v, sequence) for k, v in memory.items()}
            results = []
            for module, rows, grad, more in (
                (whole, x, dy, memory),
                (layer, own_tokens(world, x, sequence), own_tokens(world, dy, sequence), own),
            ):
                results.append(ends(module, rows, grad, **more))
            for got, expected in zip(results[1], results[0], strict=True):
                expected = own_tokens(world, expected, sequence)
                # some hundred roundings of fp32, in another order
                assert (got - expected).abs().max() <= 1024 * FP32 * expected.abs().max(), (settings, sequence)
            for (name, one), other in zip(layer.named_parameters(), whole.parameters(), strict=True):
                grad = one.grad
                if getattr(one, "sequence_parallel", False):
                    dist.all_reduce(grad)
                expected = split_heads(world, name, other.grad, dims, bool(shared))
                bound = 4096 * FP32 * other.grad.abs().max()
                assert (grad - expected).abs().max() <= bound, (settings, sequence, name)


def split_heads(world: World, name: str, whole: Tensor, dims: Mapping[str, tuple[int, int]], grouped: bool) -> Tensor:
    """This rank's part of a parameter; of qkv the rows of its heads."""
    if name.endswith(("qkv.weight", "qkv.bias")):
        dim = HIDDEN // HEADS
        groups = GROUPS if grouped else HEADS
        parts = whole.split([HEADS * dim, groups * dim, groups * dim])
        return torch.cat([part.chunk(world.size)[world.rank] for part in parts])
    part = next((how for end, how in dims.items() if name.endswith(f".{end}")), (-1, 1))
    return shard(world, whole, *part)


def ranks_keep_their_amaxes_if_asked(world: World) -> None:
    """reduce_amax=False: each rank has the scales of one process alone, also with a group or under a wrapper."""
    from ottava.compat.transformer_engine.common.recipe import DelayedScaling

    apart = [torch.tensor(448.0) / (1 + rank) for rank in range(world.size)]
    for reduce, wrapped in itertools.product((False, True), (False, True)):
        layer = te.Linear(32, 32)
        model = nn.parallel.DistributedDataParallel(layer) if wrapped else layer
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for _ in range(3):
            recipe = DelayedScaling(amax_history_len=2, reduce_amax=reduce)
            with te.autocast(recipe=recipe, amax_reduction_group=None if wrapped else dist.group.WORLD):
                model(torch.full((4, 32), 1.0 + world.rank)).sum().backward()
            optimizer.step()
        assert layer.quantizers.input.scale == apart[-1 if reduce else world.rank], (reduce, wrapped)
    split = te.Linear(32, 32, tp_group=dist.group.WORLD, parallel_mode="column")
    with te.autocast(recipe=DelayedScaling(reduce_amax=False)), pytest.raises(NotImplementedError, match="reduce_amax"):
        split(torch.ones(4, 32))


def training_agrees_on_scales(world: World) -> None:
    """Delayed scaling over three steps: histories are those of all ranks; the loss falls; bias is handed out."""
    from ottava.compat.transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(world.rank)
    modes: dict[str, Any] = {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "sequence_parallel": True}
    sizes: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **sizes, **modes)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    x, target = (own_tokens(world, t, True) for t in data())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            loss = (layer(x) - target).float().square().mean()
        loss.backward()
        for parameter in layer.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert len(verify(layer)) == 64  # all that ranks hold alike is alike
    for name, buffer in layer.named_buffers():
        if name.endswith("scale"):
            everywhere = [torch.empty_like(buffer) for _ in range(world.size)]
            dist.all_gather(everywhere, buffer)
            assert all(torch.equal(one, buffer) for one in everywhere), name
    mode: dict[str, Any] = {"tp_size": world.size, "parallel_mode": "row", "return_bias": True}
    linear = te.Linear(FFN, HIDDEN, **mode)
    with pytest.raises(RuntimeError, match="has no group; give tp_group, or call"):
        linear(torch.ones(2, FFN // world.size))
    linear.set_tensor_parallel_group(dist.group.WORLD)
    y, bias = linear(torch.ones(2, FFN // world.size))
    assert bias is linear.bias
    expected = linear.weight.sum(1)
    dist.all_reduce(expected)
    assert (y[0] - expected).abs().max() <= 64 * FP32 * expected.abs().max()

"""Megatron's tensor parallelism with ottava's linears, on two ranks, against one rank with the whole weights."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from state_scenarios import World
from torch import Tensor, nn

import ottava
from ottava.compat.on_cpu import on_cpu


def _pair(sequence_parallel: bool, recipe: str) -> tuple[nn.Module, nn.Module]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ottava.doors import megatron as doors

    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        fp8="hybrid",
        fp8_recipe=recipe,
    )
    torch.manual_seed(0)
    common = {"config": config, "init_method": nn.init.normal_, "bias": True, "skip_bias_add": False}
    up = doors.OttavaColumnParallelLinear(64, 128, **common)
    return up, doors.OttavaRowParallelLinear(128, 64, input_is_parallel=True, **common)


def _step(up: nn.Module, down: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    y = down(torch.relu(up(x)[0]))[0]
    y.backward(dy)
    return y.detach()


def shards_run_as_the_whole(world: World) -> None:
    """Outputs and gradients of weights have the bits of one process, with and without sequence parallelism."""
    with warnings.catch_warnings(), on_cpu():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(2)
        numbers = torch.Generator().manual_seed(1)
        rows, grads = (torch.randn(32, 2, 64, generator=numbers).bfloat16() for _ in range(2))
        for recipe in ("tensorwise", "mxfp8"):
            for sequence in (False, True):
                up, down = _pair(sequence, recipe)
                own_x, own_dy = ((t.chunk(2)[world.rank] if sequence else t).clone() for t in (rows, grads))
                y = _step(up, down, own_x.requires_grad_(), own_dy)
                whole = _whole(up, down)
                expected = whole(rows)
                expected.backward(grads)
                wanted = expected.detach().chunk(2)[world.rank] if sequence else expected.detach()
                # a rank rounds its part of the sum to BF16 before ranks add
                torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))
                assert up.last_call.recipe.quantized
                assert up.sharding is not None
                assert torch.equal(up.weight.grad, whole[0].weight.grad.chunk(2)[world.rank])
                assert torch.equal(down.weight.grad, whole[2].weight.grad.chunk(2, dim=1)[world.rank])
        parallel_state.destroy_model_parallel()


def _whole(up: nn.Module, down: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    with torch.no_grad():
        for mine, theirs, dim in ((up.weight, model[0].weight, 0), (up.bias, model[0].bias, 0)):
            theirs.copy_(_joined(mine, dim))
        model[2].weight.copy_(_joined(down.weight, 1))
        model[2].bias.copy_(down.bias)
    ottava.convert(model, up.recipe)
    return model


def _joined(part: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, dim)

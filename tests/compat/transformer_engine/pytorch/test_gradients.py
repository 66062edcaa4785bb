"""Where gradients of weights go: into main_grad, or later; beside autograd's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common import recipe as recipes
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling, Recipe

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def modules(**settings: Any) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Each module with the further arguments of its forward."""
    made: list[tuple[nn.Module, tuple[Any, ...]]] = []
    for make, sizes, more in (
        (te.Linear, (32, 64), ()),
        (te.LayerNormLinear, (32, 64), ()),
        (te.LayerNormMLP, (32, 64), ()),
        (te.GroupedLinear, (3, 32, 64), ([16, 0, 16],)),
    ):
        torch.manual_seed(1)
        made.append((make(*sizes, params_dtype=torch.bfloat16, **settings), more))
    return made


def backward(module: nn.Module, more: tuple[Any, ...], recipe: Recipe | None, **call: Any) -> Tensor:
    x = X.clone().requires_grad_()
    with te.autocast(recipe is not None, recipe=recipe):
        module(x, *more, **call).float().square().sum().backward()
    assert x.grad is not None
    return x.grad


def weights(module: nn.Module) -> list[Any]:
    return [p for name, p in module.named_parameters() if name.endswith("weight") and "norm" not in name]


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), MXFP8BlockScaling()], ids=str)
def test_gradients_are_added_to_main_grad_unrounded(recipe: Recipe | None) -> None:
    plain, fused = modules(), modules(fuse_wgrad_accumulation=True)
    for (one, more), (other, _) in zip(plain, fused, strict=True):
        dx = backward(one, more, recipe)
        for parameter in weights(other):
            parameter.main_grad = torch.full(parameter.shape, 3.0)
            parameter.grad_added_to_main_grad = False
        assert torch.equal(backward(other, more, recipe, is_first_microbatch=True), dx)
        first = [p.main_grad.clone() for p in weights(other)]
        for parameter, wanted in zip(weights(other), weights(one), strict=True):
            rows = wanted.grad.flatten(0, -2).any(1)  # what an empty group never wrote stays
            got = parameter.main_grad.flatten(0, -2)
            assert torch.equal(got.bfloat16()[rows], wanted.grad.flatten(0, -2)[rows])  # FP32 sums, rounded there only
            empty = wanted is getattr(one, "weight1", None)  # a group without rows
            assert torch.equal(got[rows], got[rows].bfloat16().float()) == empty
            assert parameter.grad_added_to_main_grad
            assert not parameter.grad.any()  # autograd's gradient is a dummy
        for name, bias in other.named_parameters():
            assert not name.endswith("bias") or bias.grad.any() == (name != "groups.1.bias")
        backward(other, more, recipe, is_first_microbatch=False)
        for parameter, before in zip(weights(other), first, strict=True):
            rows = (before != 3.0).flatten(0, -2).any(1)
            assert torch.equal(parameter.main_grad.flatten(0, -2)[rows], (before + before).flatten(0, -2)[rows])
    with pytest.raises(RuntimeError, match=r"a weight \(64, 32\) without main_grad; give it a tensor of that shape"):
        backward(te.Linear(32, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True), (), recipe)


def test_gradients_come_later_and_have_the_same_bits() -> None:
    for fuse in (False, True):
        plain = modules(fuse_wgrad_accumulation=fuse)
        late = modules(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True)
        for (one, more), (other, _) in zip(plain, late, strict=True):
            called: list[int] = []
            other.register_wgrad_accumulation_and_reduce_hooks(lambda called=called: called.append(1))
            for module in (one, other):
                for parameter in weights(module):
                    parameter.main_grad = torch.zeros(parameter.shape)
            for _ in range(2):  # two micro-batches, whose gradients wait side by side
                assert torch.equal(backward(other, more, MXFP8BlockScaling()), backward(one, more, MXFP8BlockScaling()))
            assert all(p.grad is None and not p.main_grad.any() for p in weights(other))
            assert [other.need_backward_dw(), one.need_backward_dw()] == [True, False]
            other.backward_dw()
            other.backward_dw()
            one.backward_dw()  # nothing to do
            assert called == [1, 1]
            for parameter, wanted in zip(weights(other), weights(one), strict=True):
                assert parameter.skip_backward_post_hook
                mine, theirs = (p.main_grad if fuse else p.grad for p in (parameter, wanted))
                assert torch.equal(mine, theirs)
                assert theirs.any() == (wanted is not getattr(one, "weight1", None))
            with pytest.raises(RuntimeError, match="no backward waits for its weight gradients"):
                other.backward_dw()


def test_initial_weights_and_dropout_draw_from_a_trackers_state() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    tracker.add("experts", 8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    common = {"get_rng_state_tracker": lambda: tracker, "device": "cpu"}
    layer = te.Linear(8, 4, **common)
    other = te.Linear(8, 4, rng_tracker_name="experts", **common)
    assert torch.equal(torch.get_rng_state(), before)
    for made, seed in ((layer, 7), (other, 8)):
        drawn = torch.empty(4, 8).normal_(std=0.023, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(made.weight, drawn)
    attention = te.DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    q = torch.randn(4, 1, 2, 8)
    before, own = torch.get_rng_state(), tracker.get_states()
    y = attention(q, q, q)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(attention(q, q, q), y)
    tracker.set_states(own)
    assert torch.equal(attention(q, q, q), y)
    for again in (("experts", 9), ("new", 8)):
        with pytest.raises(RuntimeError, match="exists already; give another, or call reset"):
            tracker.add(*again)
    with pytest.raises(KeyError, match="no state 'nobody'"), tracker.fork("nobody"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


def test_the_first_micro_batch_of_a_step_moves_delayed_scales() -> None:
    """Without a step of an optimizer that ottava sees, as with Megatron's; beside SGD's steps, which it sees."""
    for make, sizes in ((te.Linear, (32, 32)), (te.LayerNormMLP, (32, 64)), (te.TransformerLayer, (32, 64, 4))):
        losses = []
        for seen in (True, False):
            torch.manual_seed(1)
            more = {} if make is not te.TransformerLayer else {"hidden_dropout": 0.0, "attention_dropout": 0.0}
            module = make(*sizes, params_dtype=torch.bfloat16, **more)
            masters = [p.detach().clone() for p in module.parameters()]
            held = list(module.parameters()) if seen else masters
            optimizer = torch.optim.SGD(held, 0.1)
            found = []
            for step in range(4):
                for micro in range(2):
                    x = (X.unflatten(0, (16, 2)) * (1 + step + micro)).requires_grad_()
                    call = {} if seen else {"is_first_microbatch": micro == 0}
                    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                        loss = module(x, **call).float().square().mean()
                    loss.backward()
                    found.append(float(loss))
                for master, parameter in zip(held, module.parameters(), strict=True):
                    master.grad = parameter.grad
                optimizer.step()
                with torch.no_grad():
                    for master, parameter in zip(held, module.parameters(), strict=True):
                        parameter.copy_(master)
                        parameter.grad = None
            losses.append(found)
        assert losses[0] == losses[1], make.__name__


def test_micro_batches_share_casts_that_a_script_can_see() -> None:
    """In the bits of a quantizer, and in buffers that stay; none of a weight that is stored as codes."""
    for recipe, quantizer, ordered in (
        (MXFP8BlockScaling(), te.MXFP8Quantizer(te.DType.kFloat8E4M3), True),
        (recipes.NVFP4BlockScaling(), te.NVFP4Quantizer(with_2d_quantization=True), True),
        (recipes.NVFP4BlockScaling(disable_2d_quantization=True), te.NVFP4Quantizer(), False),
        (recipes.Float8CurrentScaling(), te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3), False),
    ):
        quantizer.optimize_for_gemm, x = ordered, torch.randn(32, 128)
        for module, names in (
            (te.LayerNormMLP(128, 256), ["fc1_weight", "fc2_weight"]),
            (te.GroupedLinear(2, 128, 128), ["weight0", "weight1"]),
        ):
            more = ([16, 16],) if isinstance(module, te.GroupedLinear) else ()
            with te.autocast(recipe=recipe):
                y = module(x, *more)
                assert module._fp8_workspaces == {}
                assert torch.equal(module(x, *more, is_first_microbatch=True), y)
                assert [one.optimize_for_gemm for one in module._get_weight_quantizers()] == [ordered] * 2
            assert module._get_weight_quantizers() == [None] * 2
            shared = module._fp8_workspaces
            assert [*shared] == names
            places = [one._rowwise_scale_inv.data_ptr() for one in shared.values()]
            with torch.no_grad(), te.autocast(recipe=recipe):
                for parameter in module.parameters():
                    parameter.mul_(3)
                module(x, *more, is_first_microbatch=True)
            assert not ordered or places == [one._rowwise_scale_inv.data_ptr() for one in shared.values()]
            for name in names:
                cast = quantizer(getattr(module, name).detach())
                for part in ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"):
                    assert torch.equal(getattr(shared[name], part), getattr(cast, part)), (recipe, name, part)
        with te.quantized_model_init(recipe=recipe):
            stored = te.Linear(128, 128)
        with te.autocast(recipe=recipe):
            stored(x, is_first_microbatch=True).sum().backward()
            assert stored._fp8_workspaces == {}

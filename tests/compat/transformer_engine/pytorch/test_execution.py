"""CUDA graphs by TransformerEngine's name, which run eagerly on a CPU, and its offload of activations."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from ottava.compat.transformer_engine.pytorch import restore_fp8_tensors, save_fp8_tensors

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 16)).bfloat16()


def test_graphed_modules_run_under_their_autocast_and_say_that_they_are_eager() -> None:
    plain, graphed = made(), made()
    how = {"fp8_enabled": True, "fp8_recipe": Float8CurrentScaling()}
    with pytest.warns(UserWarning, match="the samples are on a CPU, which has no CUDA graphs: the modules run eagerly"):
        both = te.make_graphed_callables(tuple(graphed), ((X,), (X,)), **how)
    assert both == tuple(graphed)
    y = both[1](both[0](X))
    with te.autocast(recipe=Float8CurrentScaling()):
        wanted = plain(X)
    assert torch.equal(y, wanted)
    assert not torch.equal(y, plain(X))  # without an autocast
    with warnings.catch_warnings(action="ignore"):
        off = [te.make_graphed_callables(made(), (X,), enabled=said) for said in (False, None)]
        on = te.make_graphed_callables(made(), (X,), enabled=None, **how)
    assert all(torch.equal(one(X), plain(X)) for one in off)
    assert torch.equal(on(X), wanted)
    with warnings.catch_warnings(action="ignore"):
        te.make_graphed_callables(made(), (X,), enabled=False, pool=None, _order=[1, -1])
    with pytest.raises(TypeError, match="unknown argument 'fp8_enable'; did you mean 'fp8_enabled'"):
        te.make_graphed_callables(made(), (X,), fp8_enable=True)
    with pytest.raises(ValueError, match="got enabled and fp8_enabled, two names of one argument"):
        te.make_graphed_callables(made(), (X,), enabled=False, fp8_enabled=True)
    with pytest.raises(ValueError, match="got 2 modules, 2 sample_args and 1 of enabled"):
        te.make_graphed_callables(tuple(made()), ((X,), (X,)), enabled=(True,))


def test_histories_are_kept_and_put_back() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved: list[list[dict[str, torch.Tensor]]] = []
    for factor in (1, 5):
        with te.autocast(recipe=DelayedScaling()):
            model(X * factor).float().sum().backward()
        optimizer.step()
        saved.append(save_fp8_tensors([model], DelayedScaling()))
    assert any(not torch.equal(a, b) for a, b in zip(saved[0][0].values(), saved[1][0].values(), strict=True))
    restore_fp8_tensors([model], saved[0])
    now = save_fp8_tensors([model], None)
    assert all(torch.equal(now[0][name], t) for name, t in saved[0][0].items())


def test_an_offload_keeps_every_bit_and_leaves_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from ottava.compat.transformer_engine.pytorch import execution

    moved: list[torch.Tensor] = []
    real = execution._to_cpu
    monkeypatch.setattr(execution, "_to_cpu", lambda t: (moved.append(t), real(t))[1])
    results = []
    for enabled in (False, True):
        model = made()
        context, after = te.get_cpu_offload_context(enabled, 1, 2)
        for _ in range(2):
            h = X.clone().requires_grad_()
            for layer in model:
                with context, te.autocast(recipe=DelayedScaling()):
                    h = layer(h)
                h = after(h)
            h.float().square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert moved
    # codes and scales of W.T and x.T of the first layer; nothing of the second, whose weight is (16, 32)
    assert {tuple(t.shape) for t in moved if t.dtype == torch.float8_e4m3fn} == {(32, 32), (32, 4)}
    device = torch.device("meta")  # a device that is not the CPU
    for stays in (nn.Parameter(torch.ones(2, device=device)), nn.Parameter(torch.ones(2, 2, device=device)).t()):
        assert real(stays)[1] is stays
    te.mark_not_offload(marked := torch.ones(2, device=device))
    assert real(marked)[1] is marked
    for refused in ("manual_synchronization", "offload_weights"):
        with pytest.raises(NotImplementedError, match=f"{refused}=True is not in ottava"):
            te.get_cpu_offload_context(True, **{refused: True})


def test_a_reset_takes_the_autocast_back() -> None:
    layer = te.Linear(16, 16, device="cpu")
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        te.make_graphed_callables(layer, (torch.ones(2, 16),), enabled=True).reset()
    assert torch.equal(layer(torch.ones(2, 16)), torch.nn.functional.linear(torch.ones(2, 16), layer.weight))


def test_a_stored_weight_under_another_recipe_is_told() -> None:
    with te.quantized_model_init(recipe=DelayedScaling()):
        layer = te.LayerNormMLP(32, 32)
    for length, told in ((1024, 0), (1, 1), (1, 0)):
        with warnings.catch_warnings(record=True) as found, te.autocast(recipe=DelayedScaling(amax_history_len=length)):
            warnings.simplefilter("always")
            layer(torch.ones(32, 32))
        assert sum("Quantizer is being updated" in str(one.message) for one in found) == told

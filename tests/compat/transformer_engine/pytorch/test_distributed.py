"""TransformerEngine's checkpoint: the gradients of a plain forward, under FP8."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_gives_the_same_bits(use_reentrant: bool) -> None:
    for recipe in (DelayedScaling(), MXFP8BlockScaling()):
        torch.manual_seed(0)
        model = nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 32)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = torch.randn(4, 32).bfloat16().requires_grad_()
        results = []
        for recomputed in (False, True):
            model.zero_grad()
            x.grad = None
            with te.autocast(recipe=recipe):
                y = te.checkpoint(model, x, use_reentrant=use_reentrant) if recomputed else model(x)
            y.square().sum().backward()
            results.append((y, x.grad, *(p.grad for p in model.parameters())))
            if not recomputed and recipe == DelayedScaling():
                optimizer.step()
                with te.autocast(recipe=recipe):  # the first step has no history yet
                    model(x)
                results.clear()
                model.zero_grad()
                x.grad = None
                with te.autocast(recipe=recipe):
                    y = model(x)
                y.square().sum().backward()
                results.append((y, x.grad, *(p.grad for p in model.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="distribute_saved_activations=True is not in ottava"):
        te.checkpoint(nn.ReLU(), torch.ones(2), distribute_saved_activations=True)
    assert te.checkpoint(nn.ReLU(), torch.ones(2), use_reentrant=False, tp_group=None).tolist() == [1.0, 1.0]

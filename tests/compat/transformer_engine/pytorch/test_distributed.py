"""TransformerEngine's checkpoint: the gradients of a plain forward, under FP8."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling
from ottava.compat.transformer_engine.pytorch import distributed


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_gives_the_same_bits(use_reentrant: bool) -> None:
    for recipe in (DelayedScaling(), MXFP8BlockScaling()):
        torch.manual_seed(0)
        model = nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 32)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = torch.randn(4, 32).bfloat16().requires_grad_()
        results = []
        for recomputed in (None, False, True):  # the first step has no history yet
            model.zero_grad()
            x.grad = None
            with te.autocast(recipe=recipe):
                y = te.checkpoint(model, x, use_reentrant=use_reentrant) if recomputed else model(x)
            y.square().sum().backward()
            results.append((y, x.grad, *(p.grad for p in model.parameters())))
            if recomputed is None:
                optimizer.step()
                results.clear()
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_draws_the_same_numbers(use_reentrant: bool) -> None:
    """From torch's generator and from a tracker's state; keywords reach the function; ranks: tests/distributed."""
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    drawn = []

    def function(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        with tracker.fork():
            drawn.append((torch.rand(2), torch.rand(2)))
        return x.square() * scale * drawn[-1][0].sum()

    x = torch.ones(2, requires_grad=True)
    for number in range(2):
        y = te.checkpoint(
            function, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker, tp_group=None, scale=3.0
        )
        after = tracker.get_states()
        y.sum().backward()
        assert len(drawn) == 2 * number + 2
        assert all(torch.equal(a, b) for a, b in zip(*drawn[-2:], strict=True))
        assert torch.equal(tracker.get_states()["model-parallel-rng"], after["model-parallel-rng"])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((2,), 6.0) * (drawn[0][0].sum() + drawn[2][0].sum()))


def test_cross_entropy_is_torchs() -> None:
    """In one process; on two ranks: tests/distributed."""
    rng = torch.Generator().manual_seed(0)
    for dtype, smoothing, reduce in (
        (torch.float32, 0.0, False),
        (torch.float32, 0.1, True),
        (torch.bfloat16, 0.1, False),
        (torch.bfloat16, 0.0, True),
    ):
        logits = torch.randn(3, 5, 17, generator=rng).mul(4).to(dtype).requires_grad_()
        target = torch.randint(0, 17, (3, 5), generator=rng)
        target[0, 2] = target[1, 1] = -100
        wide = logits.detach().float().requires_grad_()
        kind = "mean" if reduce else "none"
        wanted = nn.functional.cross_entropy(
            wide.view(-1, 17), target.flatten(), label_smoothing=smoothing, reduction=kind
        )
        got = te.parallel_cross_entropy(logits, target, smoothing, reduce)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.flatten(), wanted.flatten(), rtol=1e-6, atol=1e-6)
        for loss in (got, wanted):
            loss.square().sum().backward()
        assert logits.grad is not None
        assert wide.grad is not None
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=4 * eps, atol=1e-6)
    with pytest.raises(ValueError, match=r"got logits \(2, 3\) for targets \(3,\); needs \(3, classes\)"):
        te.parallel_cross_entropy(torch.ones(2, 3), torch.zeros(3, dtype=torch.int64))


def test_ranks_share_padded_sequences_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 3 and 6 tokens, padded to 4 and 8; two ranks; padding and tokens by hand."""
    ids = torch.tensor([[11, 12, 13, 21, 22, 23, 24, 25, 26]])
    starts = torch.tensor([0, 3, 9])
    padded, labels, cu_seqlens = distributed.pad_thd_sequences_for_cp(ids, ids + 100, starts, 4, padding_token_id=9)
    assert padded.tolist() == [11, 12, 13, 9, 21, 22, 23, 24, 25, 26, 9, 9]
    assert (labels[2:5].tolist(), cu_seqlens.tolist()) == ([113, -100, 121], [0, 4, 12])
    places = distributed.generate_positional_ids_for_cp(starts, 4)
    assert places.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    for rank, tokens, own in (
        (0, [11, 9, 21, 22, 9, 9], [0, 3, 0, 1, 6, 7]),
        (1, [12, 13, 23, 24, 25, 26], [1, 2, 2, 3, 4, 5]),
    ):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        batch = distributed.get_batch_on_this_cp_rank(cu_seqlens, padded[None], None, torch.stack([places] * 2, 1))
        assert batch[0] is not None
        assert batch[2] is not None
        assert (batch[0].tolist(), batch[1], batch[2][:, 1].tolist()) == ([tokens], None, own)
    with pytest.raises(ValueError, match="needs a dimension of 12 tokens"):
        distributed.get_batch_on_this_cp_rank(cu_seqlens, ids, None, None)
    with pytest.raises(ValueError, match="needs 'thd'"):
        distributed.get_batch_on_this_cp_rank(cu_seqlens, padded, None, None, qvk_format="bshd")


class Kept(nn.Parameter):
    """A `DistributedWeight` that gives twice its numbers to a forward, and four times to a backward."""

    is_distributed_weight, main_grad = True, torch.zeros(16, 32)
    materialize_group_for_forward, materialize_group_for_backward = (
        (lambda w: w.detach() * 2),
        (lambda w: w.detach() * 4),
    )
    finalize_group_grads, grad_buffer = (lambda w, dw: torch.zeros_like(w.main_grad.copy_(dw))), (lambda w: w.main_grad)


def test_a_layer_asks_a_distributed_weight() -> None:
    layer, x = te.Linear(32, 16, params_dtype=torch.float32), torch.randn(4, 32, requires_grad=True)
    plain, layer.weight = layer.weight, Kept(layer.weight.detach().clone())
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, nn.functional.linear(x, 2 * plain, layer.bias))
    wanted = (4 * plain.sum(0).expand(4, -1), x.sum(0).expand(16, -1), torch.zeros(16, 32), torch.full((16,), 4.0))
    for got, one in zip((x.grad, Kept.main_grad, layer.weight.grad, layer.bias.grad), wanted, strict=True):
        torch.testing.assert_close(got, one)
    assert isinstance(layer.weight, distributed.DistributedWeight)
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor subclass"):
        distributed.is_distributed_weight(SimpleNamespace(is_distributed_weight=True))


def test_masters_of_ranks_become_the_codes_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, whose sum is made by hand; the other rank holds the second half."""
    x = torch.randn(32, 64).bfloat16()
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda whole, group: whole[1024:].copy_(x.flatten()[1024:]))
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        stored = te.Linear(64, 32, params_dtype=torch.bfloat16).weight
    for weight in (te.MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty((32, 64), dtype=torch.bfloat16), stored):
        distributed.quantize_master_weights([weight], [x.float().flatten()[:1024]], [0], None)
        assert torch.equal(weight.dequantize(), te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x).dequantize())
    with pytest.raises(NotImplementedError, match="give whole weights"):
        distributed.quantize_master_weights([], [], [], None, [x])

"""What several processes do with TransformerEngine's context parallelism, split vocabulary and distributed checkpoints;
run in each of them by test_te_ranks. The witness is one process with whole sequences, classes and activations."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_scenarios import World
from torch import Tensor, nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import Float8CurrentScaling
from ottava.compat.transformer_engine.pytorch import distributed
from ottava.distributed.context import own_parts

EPS = torch.finfo(torch.float32).eps
BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 8


def near(got: Tensor, wanted: Tensor, bound: float) -> bool:
    return bool((got.float() - wanted.float()).abs().max() <= bound * wanted.float().abs().max())


def own(world: World, whole: Tensor, dim: int) -> Tensor:
    """Parts r and 2n - 1 - r, by hand."""
    parts = whole.chunk(2 * world.size, dim)
    return torch.cat((parts[world.rank], parts[-1 - world.rank]), dim)


def attention_on_parts_of_sequences(world: World) -> None:
    """Results and gradients, for masks, windows, layouts and both ways of communication, and packed sequences."""
    each = 6 * world.size
    kinds: list[dict[str, Any]] = [
        {"attn_mask_type": "causal"},
        {"attn_mask_type": "no_mask"},
        {"attn_mask_type": "causal", "window_size": (5, 0)},
    ]
    for layout, kind, comm in product(("sbhd", "bshd", "thd"), kinds, ("p2p", "all_gather")):
        rng, dim = torch.Generator().manual_seed(1), 1 if layout == "bshd" else 0
        lead = {"sbhd": (each, BATCH), "bshd": (BATCH, each), "thd": (3 * each,)}[layout]
        whole = [torch.randn(*lead, heads, DIM, generator=rng) for heads in (HEADS, GROUPS, GROUPS)]
        dy = torch.randn(*lead, HEADS * DIM, generator=rng)
        ends = torch.tensor([0, each, 3 * each], dtype=torch.int32)  # two sequences, of unlike lengths
        call: dict[str, Any] = {}
        if layout == "thd":
            kind = {**kind, "attn_mask_type": "padding" + ("_causal" if kind["attn_mask_type"] == "causal" else "")}
            call = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}

        def of(t: Tensor, layout: str = layout, dim: int = dim) -> Tensor:
            if layout == "thd":
                return torch.cat([own(world, one, 0) for one in t.split([each, 2 * each])])
            return own(world, t, dim)

        def run(layer: Any, qkv: list[Tensor], dy: Tensor, call: dict[str, Any] = call) -> list[Tensor]:
            qkv = [t.clone().requires_grad_() for t in qkv]
            y = layer(*qkv, **call)
            return [y.detach(), *torch.autograd.grad(y, qkv, dy)]

        layer = te.DotProductAttention(HEADS, DIM, GROUPS, qkv_format=layout, **kind)
        wanted = world.once(lambda layer=layer, whole=whole, dy=dy: run(layer, whole, dy))
        shared = te.DotProductAttention(HEADS, DIM, GROUPS, qkv_format=layout, cp_comm_type=comm, **kind)
        shared.set_context_parallel_group(dist.group.WORLD, [*range(world.size)], None, comm)
        got = run(shared, [of(t) for t in whole], of(dy))
        for one, other in zip(got, wanted, strict=True):
            assert near(one, of(other), 64 * EPS), (layout, kind, comm)
        assert shared.core.last_backend == ("ring" if comm == "p2p" else "flash"), shared.core.last_backend
        shared.set_context_parallel_group(None)
        assert torch.equal(run(shared, whole, dy)[0], run(layer, whole, dy)[0])
    assert torch.equal(own_parts(whole[0], world.size, world.rank, 0, balanced=True), own(world, whole[0], 0))


def what_parts_of_sequences_cannot_do(world: World) -> None:
    """Errors before anything is sent."""
    q = torch.randn(4, BATCH, HEADS, DIM)
    for settings, call, words in (
        (
            {"attn_mask_type": "padding"},
            {"attention_mask": torch.zeros(BATCH, 1, 1, 4, dtype=torch.bool)},
            "no lengths",
        ),
        ({"attention_dropout": 0.5}, {}, "knows no dropout"),
        ({"softmax_type": "off-by-one"}, {}, "no sink"),
        ({"window_size": (1, 1), "attn_mask_type": "no_mask"}, {}, "needs mask 'causal'"),
    ):
        layer = te.DotProductAttention(HEADS, DIM, cp_group=dist.group.WORLD, **settings)
        with pytest.raises(ValueError, match=words):
            layer(q, q, q, **call)
    layer = te.DotProductAttention(HEADS, DIM, cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="needs two equal parts"):
        layer(q[:3], q[:3], q[:3])
    with (
        pytest.raises(ValueError, match="the recipe casts for attention"),
        te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)),
    ):
        layer(q, q, q)
    with pytest.raises(NotImplementedError, match="cp_comm_type='a2a' is not in ottava"):
        te.DotProductAttention(HEADS, DIM, cp_group=dist.group.WORLD, cp_comm_type="a2a")


def a_layer_with_rotated_keys(world: World) -> None:
    """A whole layer: positions of this rank, and gradients of weights that add up over ranks."""
    each, width = 4 * world.size, HEADS * DIM
    for comm in ("p2p", "all_gather"):
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(te.TransformerLayer(width, 64, HEADS, hidden_dropout=0.0, attention_dropout=0.0))
        whole, shared = made
        shared.set_context_parallel_group(dist.group.WORLD, None, None, comm)
        rng = torch.Generator().manual_seed(2)
        x, dy = (torch.randn(each, BATCH, width, generator=rng) for _ in range(2))
        angles = te.RotaryPositionEmbedding(DIM)(each)

        def step(layer: Any, x: Tensor, dy: Tensor, angles: Tensor = angles) -> tuple[Tensor, list[Tensor]]:
            y = layer(x, rotary_pos_emb=angles)
            return y.detach(), list(torch.autograd.grad(y, list(layer.parameters()), dy))

        y, wanted = world.once(lambda whole=whole, x=x, dy=dy: step(whole, x, dy))
        got, grads = step(shared, own(world, x, 0), own(world, dy, 0))
        assert near(got, own(world, y, 0), 64 * EPS), comm
        for one, other in zip(grads, wanted, strict=True):
            dist.all_reduce(one)
            assert near(one, other, 256 * EPS), comm
        with pytest.raises(NotImplementedError, match=f"angles for all {each} positions"):
            shared(own(world, x, 0), rotary_pos_emb=angles[:1])


def classes_split_over_ranks(world: World) -> None:
    """torch's cross-entropy of whole rows, and its gradient."""
    rng, classes = torch.Generator().manual_seed(3), 6 * world.size
    for smoothing, reduce in product((0.0, 0.1), (False, True)):
        logits = torch.randn(3, 5, classes, generator=rng).mul(4)
        target = torch.randint(0, classes, (3, 5), generator=rng)
        target[0, 1] = -100
        whole = logits.clone().requires_grad_()
        kind = "mean" if reduce else "none"
        wanted = nn.functional.cross_entropy(
            whole.view(-1, classes), target.flatten(), label_smoothing=smoothing, reduction=kind
        )
        part = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
        loss = te.parallel_cross_entropy(part, target, smoothing, reduce, dist.group.WORLD)
        assert near(loss.flatten(), wanted.flatten(), 32 * EPS)
        loss.square().sum().backward()
        wanted.square().sum().backward()
        assert whole.grad is not None
        assert part.grad is not None
        assert near(part.grad, whole.grad.chunk(world.size, -1)[world.rank], 64 * EPS)


def a_checkpoint_whose_input_ranks_share(world: World) -> None:
    """Each rank keeps its part of the first argument; the gradients are those of a plain forward, bit for bit."""
    torch.manual_seed(0)
    layer = te.LayerNormLinear(16, 16)
    x = torch.randn(4 * world.size, 16, requires_grad=True)
    gathered: list[int] = []
    real, results = distributed.all_gather, []
    try:
        distributed.all_gather = lambda every, own, group: (gathered.append(own.numel()), real(every, own, group))[1]
        for shares in (False, True):
            layer.zero_grad()
            x.grad = None
            y = te.checkpoint(layer, x * 1.0, distribute_saved_activations=shares, tp_group=dist.group.WORLD)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    finally:
        distributed.all_gather = real
    assert gathered == [4 * 16]  # what each rank had kept
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="cannot share a first argument of 1 numbers"):
        te.checkpoint(lambda x: x, torch.ones(1, requires_grad=True), distribute_saved_activations=True)

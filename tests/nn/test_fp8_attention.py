"""FP8 attention: each GEMM is that of the codes its doors gave, and the whole is within what its formats round away."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from attention_samples import seen
from torch import Tensor

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.nn.attention import DotProductAttention
from ottava.nn.transformer import TransformerLayer
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import ATTENTION_TENSORS, AttentionRecipe, get_recipe
from ottava.record.reader import Run

ON = replace(get_recipe("tensorwise"), name="fp8_attention", attention=AttentionRecipe())
CODES = {E4M3: (ml_dtypes.float8_e4m3fn, 448.0), E5M2: (ml_dtypes.float8_e5m2, 57344.0)}
U32 = 2.0**-24


def cast(x: Tensor, spec: QuantizationSpec) -> Tensor:
    """What x becomes in FP8 with the scale of its amax, in fp64, by another implementation of the format."""
    dtype, top = CODES[spec.format]
    flat = x.detach().float().numpy()
    amax = np.float32(np.abs(flat).max(initial=0))
    scale = np.float32(1) if amax == 0 else np.float32(top) / amax
    codes = np.clip(flat * scale, -top, top).astype(dtype).astype(np.float64)
    return torch.from_numpy(codes * np.float64(np.float32(1) / scale)).reshape(x.shape)


def heads(dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    made = [size * torch.randn(2, n, h, 16, generator=rng) for n, h in ((7, 4), (9, 2), (9, 2), (7, 4))]
    return [t.to(dtype).requires_grad_(i < 3) for i, t in enumerate(made)]


def test_every_gemm_is_that_of_the_codes_its_doors_gave() -> None:
    """What a door is handed is, in fp64, the formula on what the doors before it gave; its codes are ml_dtypes'."""
    for dtype, sink, window, recipe in itertools.product(
        (torch.float32, torch.bfloat16),
        (None, 0.5, "learned"),
        (None, (3, 0)),
        (
            AttentionRecipe(),
            AttentionRecipe(o=None, dqkv=None, s=QuantizationSpec(E4M3, margin=1)),
        ),
    ):
        q, k, v, dy = heads(dtype)
        attention = DotProductAttention(
            mask="causal_bottom_right", window=window, sink=sink, heads=4, recipe=replace(ON, attention=recipe)
        )
        given: dict[str, tuple[Tensor, Tensor]] = {}
        for name, door in attention.quantizers.named_children():

            def note(door: object, args: tuple, output: tuple, name: str = name, given: dict = given) -> None:
                given[name] = args[0].detach().double(), output[0].dequantize(torch.float32).double()
                if args[1].margin == 0:
                    assert torch.equal(given[name][1].float(), cast(args[0], args[1]).float())

            door.register_forward_hook(note)
        y = attention(q, k, v)
        leaves = [q, k, v, *attention.parameters()]
        grads = torch.autograd.grad(y, leaves, dy)
        assert given.keys() == {t for t in ATTENTION_TENSORS if getattr(recipe, t) is not None}

        def cut(flat: Tensor) -> list[Tensor]:
            sizes = (2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16)
            parts = flat.flatten().split([torch.Size(size).numel() for size in sizes])
            return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

        def near(got: Tensor, wanted: Tensor, size: Tensor) -> bool:  # a sum of at most 16 terms and a few products
            return bool(((got.reshape(wanted.shape) - wanted).abs() <= 32 * U32 * size + 1e-30).all())

        assert torch.equal(
            given["qkv"][0].flatten(), torch.cat([t.transpose(1, 2).flatten() for t in (q, k, v)]).double()
        )
        qc, kc, vc = cut(given["qkv"][1])
        kc, vc = (t.repeat_interleave(2, 1) for t in (kc, vc))
        scores = (qc @ kc.mT / 4).masked_fill(~seen(7, 9, None if window is None else 3, 0, 2), -torch.inf)
        column = torch.full((2, 4, 7, 1), -torch.inf if sink is None else 0.0 if sink == "learned" else 0.5).double()
        p = torch.cat((scores, column), -1).softmax(-1)
        p, p_sink = p[..., :-1], p[..., -1:]
        error = 1 + (qc.abs() @ kc.abs().mT / 4).amax()  # of an exponent, relative
        assert near(given["s"][0], p, p * error)
        sc = given["s"][1].view(p.shape)
        o = sc @ vc
        if recipe.o is not None:
            assert near(given["o"][0], o, sc @ vc.abs())
            o = given["o"][1].view(o.shape)
        assert (y.transpose(1, 2).double() - o).abs().max() <= (torch.finfo(dtype).eps / 2 + 32 * U32) * o.abs().max()
        o = y.transpose(1, 2).double()
        doc = given["do"][1].view(o.shape)
        assert torch.equal(given["do"][0].view(o.shape), dy.transpose(1, 2).double())
        along = (doc * o).sum(-1, keepdim=True)
        size = p * (doc.abs() @ vc.abs().mT + (doc * o).abs().sum(-1, keepdim=True))
        assert near(given["dp"][0], p * (doc @ vc.mT - along), size * error)
        dsc = given["dp"][1].view(p.shape)

        def gathered(t: Tensor) -> Tensor:
            return t.unflatten(1, (2, 2)).sum(2)

        wanted = [dsc @ kc / 4, gathered(dsc.mT @ qc / 4), gathered(sc.mT @ doc)]
        sizes = [dsc.abs() @ kc.abs() / 4, gathered(dsc.mT.abs() @ qc.abs() / 4), gathered(sc.mT @ doc.abs())]
        if recipe.dqkv is not None:
            assert all(near(*three) for three in zip(cut(given["dqkv"][0]), wanted, sizes, strict=True))
            wanted = cut(given["dqkv"][1])
        for got, own, about in zip(grads, wanted, sizes, strict=False):
            off = (got.transpose(1, 2).double() - own).abs()
            assert bool((off <= torch.finfo(dtype).eps / 2 * own.abs() + 32 * U32 * about + 1e-30).all())
        if sink == "learned":
            assert near(grads[3].double(), -(p_sink * along).sum((0, 2, 3)), (p_sink * along).abs().sum((0, 2, 3)) * 4)


def test_a_recipe_says_where_it_is_on() -> None:
    """By autocast and by convert; padded, empty, compiled and recomputed."""
    q, k, v, dy = heads(torch.bfloat16)
    plain, on = DotProductAttention(), DotProductAttention(recipe=ON)
    wanted = on(q, k, v)
    with ottava.autocast(ON):
        assert torch.equal(plain(q, k, v), wanted)
    with ottava.autocast(enabled=False):
        assert torch.equal(on(q, k, v), plain(q, k, v))
    assert on.last_backend == "flash"
    lengths = torch.tensor([7, 4]), torch.tensor([9, 3])
    assert torch.equal(
        on(q, k, v, query_lengths=lengths[0], key_lengths=lengths[1])[1, 4:], torch.zeros(3, 4, 16).bfloat16()
    )
    assert on(q[:0], k[:0], v[:0]).shape == (0, 7, 4, 16)
    compiled = torch.compile(on, fullgraph=True, backend="aot_eager")(q, k, v)
    assert (compiled - wanted).float().norm() < 0.02 * wanted.float().norm()
    again = torch.utils.checkpoint.checkpoint(on, q, k, v, use_reentrant=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(torch.autograd.grad(t, (q, k, v), dy) for t in (again, wanted)), strict=True)
    )
    torch.manual_seed(0)
    layer = TransformerLayer(32, 48, 4, dtype=torch.bfloat16)
    ottava.convert(layer, ON.override("attention.attention", attention=None))
    assert layer.attention.attention.resolved.attention is None
    ottava.convert(layer, ON)
    layer(torch.randn(2, 8, 32).bfloat16()).sum().backward()
    row = next(row for row in ottava.receipt(layer).rows if row.gemm == "attention")
    assert (row.kernel, row.fp8, row.native, row.operands) == ("FP8 emulation", True, False, str(AttentionRecipe()))


def test_the_debugger_sees_every_operand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(32, 48, 4, recipe=ON, dtype=torch.bfloat16)
    x = torch.randn(2, 8, 32).bfloat16()
    with ottava.debug.observe(layer) as seen_once:
        layer(x).sum().backward()
    assert {row["tensor"] for row in seen_once.table() if row["layer"] == "attention.attention"} == set(
        ATTENTION_TENSORS
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with ottava.watch(layer, tmp_path / "run", every=1):
        for _ in range(2):
            layer(x).sum().backward()
            optimizer.step()
    run = Run.open(tmp_path / "run")
    keys = {(key.layer, key.tensor): key for key in run.table().keys()}  # noqa: SIM118  # no mapping
    assert {tensor for name, tensor in keys if name == "attention.attention"} == set(ATTENTION_TENSORS)
    casts = {row["tensor"]: row for row in run.table().dicts() if row["layer"] == "attention.attention"}
    assert casts.keys() == set(ATTENTION_TENSORS)  # each with its error: E4M3 has 3 bits behind the point, E5M2 2
    for tensor, row in casts.items():
        assert (25 if "E4M3" in row["format"] else 20) < row["sqnr_db"] < 45, tensor
        assert row["mse"] > 0
    assert run.manifest["coverage"]["linear"] == run.manifest["coverage"]["seen"] == 5
    assert not [event for event in run.events if event["kind"] == "check"]
    assert "saw 100 % of the linear layers" in diagnose(run).sentence
    plain = TransformerLayer(32, 48, 4, dtype=torch.bfloat16)  # its attention casts nothing, and is not missed
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ottava.watch(plain, tmp_path / "plain", every=1):
        plain(x).sum().backward()
        optimizer.step()
    assert Run.open(tmp_path / "plain").manifest["coverage"]["linear"] == 4


def test_mistakes_are_named() -> None:
    q, k, v, _ = heads(torch.float32)
    with pytest.raises(ValueError, match="FP8 attention knows no dropout"):
        DotProductAttention(dropout=0.1, recipe=ON)(q, k, v)
    with pytest.raises(NotImplementedError, match="a mask gets no gradient"):
        DotProductAttention(mask="no_mask", recipe=ON)(q, k, v, torch.zeros(7, 9, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(DotProductAttention(recipe=ON)(q, k, v).sum(), q, create_graph=True)


def test_what_is_not_finite_stays_visible() -> None:
    """One infinity or NaN in q, k, v or dy: y and the gradients are not finite where those of plain FP32 are not."""

    def results(recipe: object, place: int, value: float) -> list[Tensor]:
        tensors = heads(torch.bfloat16)
        with torch.no_grad():
            tensors[place][1, 3, 1, 5] = value
        if recipe is None:
            (q, k, v), dy = [t.detach().float().requires_grad_() for t in tensors[:3]], tensors[3].float()
            shared = [t.transpose(1, 2).repeat_interleave(n, 1) for t, n in ((q, 1), (k, 2), (v, 2))]
            y = ((shared[0] @ shared[1].mT / 4).softmax(-1) @ shared[2]).transpose(1, 2)
        else:
            q, k, v, dy = tensors
            y = DotProductAttention(mask="no_mask", heads=4, recipe=recipe)(q, k, v)
        return [y, *torch.autograd.grad(y, (q, k, v), dy)]

    recipes = (ON, replace(ON, attention=AttentionRecipe(o=None, dqkv=None)))
    for recipe, place, value in itertools.product(recipes, range(4), (torch.inf, torch.nan)):
        for name, exact, ours in zip(
            ("y", "dq", "dk", "dv"), results(None, place, value), results(recipe, place, value), strict=True
        ):
            assert not ours[~exact.isfinite()].isfinite().any(), (place, value, name)

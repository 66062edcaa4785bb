"""Attention is softmax(q k.T * scale + mask) v: against the formula in fp64, for every mask, layout and dtype."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_samples import formula, seen, within
from torch import Tensor

from ottava.nn.attention import MASKS, DotProductAttention, MaskRule, build_mask, mask_rule
from ottava.recipe import AttentionRecipe, get_recipe


def test_every_rule_is_its_definition() -> None:
    limits = (None, 0, 1, 3, 9)
    for queries, keys, left, right, at_end in itertools.product((1, 4, 7), (1, 4, 6), limits, limits, (True, False)):
        rule = MaskRule(left, right, at_end)
        wanted = seen(queries, keys, left, right, keys - queries if at_end else 0)
        mask = build_mask(rule, queries, keys)
        assert torch.equal(torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask[0, 0], wanted)
        assert rule.sees_all(queries, keys) == bool(wanted.all()), (rule, queries, keys)
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()  # torch's is_causal
        assert not rule.is_causal(queries, keys) or torch.equal(wanted, causal)


def test_lengths_and_given_masks_narrow_it() -> None:
    key_lengths, query_lengths = torch.tensor([6, 2, 4]), torch.tensor([4, 2, 1])
    for rule, given in itertools.product(
        (MaskRule(), MaskRule(right=0), MaskRule(2, 0, True)), (None, torch.bool, torch.float32)
    ):
        extra = torch.rand(3, 2, 4, 6, generator=torch.Generator().manual_seed(0))
        extra = None if given is None else extra > 0.3 if given == torch.bool else extra
        lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
        mask = build_mask(rule, 4, 6, **lengths, given=extra)
        for b, (n, m) in enumerate(zip(query_lengths.tolist(), key_lengths.tolist(), strict=True)):
            own = mask[b].expand(2, 4, 6) if mask.shape[0] == 3 else mask[0].expand(2, 4, 6)
            wanted = seen(n, m, rule.left, rule.right, m - n if rule.bottom_right else 0)
            if given is torch.float32:
                assert torch.equal(own[:, :n, :m], extra[b, :, :n, :m].masked_fill(~wanted, -torch.inf))
                assert bool((own[:, :, m:] == -torch.inf).all())
                continue
            assert torch.equal(
                own[:, :n, :m], wanted.expand(2, n, m) & (True if extra is None else extra[b, :, :n, :m])
            )
            assert not own[:, :, m:].any()


def test_names_and_windows() -> None:
    assert {name: mask_rule(name) for name in MASKS} == dict(MASKS)
    assert mask_rule("no_mask", (3, -1)) == MaskRule(left=3)
    assert mask_rule("causal_bottom_right", (2, 5)) == MaskRule(2, 0, bottom_right=True)
    with pytest.raises(ValueError, match="did you mean 'causal'"):
        mask_rule("casual")
    with pytest.raises(ValueError, match=r"window is \(-3, 0\)"):
        mask_rule("causal", (-3, 0))


DTYPES = (torch.float32, torch.bfloat16)


def heads(
    batch: int, queries: int, keys: int, h: int, g: int, dim: int, dtype: torch.dtype, v_dim: int = 0, seed: int = 0
) -> list[Tensor]:
    """q, k, v that want gradients, and dy."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, queries, h, dim),
        (batch, keys, g, dim),
        (batch, keys, g, v_dim or dim),
        (batch, queries, h, v_dim or dim),
    )
    made = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    return [t.requires_grad_(i < 3) for i, t in enumerate(made)]


def check(
    attention: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, witness: object, **call: object
) -> None:
    y = attention(q, k, v, **call)
    assert within(y, witness.y, witness.y_bound)
    for got, wanted, bound in zip(torch.autograd.grad(y, (q, k, v), dy), witness.grads, witness.bounds, strict=True):
        assert within(got, wanted, bound)


CASES = (
    # mask, window, left, right, whether the last query stands at the last key
    ("no_mask", None, None, None, False),
    ("causal", None, None, 0, False),
    ("causal_bottom_right", None, None, 0, True),
    ("causal", (3, -1), 3, 0, False),
    ("causal_bottom_right", (2, 0), 2, 0, True),
    ("no_mask", (2, 1), 2, 1, False),
    ("no_mask", (None, 4), None, 4, False),
    ("no_mask", (0, 0), 0, 0, False),
)


def test_every_mask_shape_and_dtype_is_the_formula() -> None:
    shapes = ((2, 7, 7, 4, 2, 16), (1, 1, 9, 3, 1, 8), (2, 5, 12, 2, 2, 24), (1, 13, 4, 6, 3, 40), (3, 1, 1, 1, 1, 1))
    for (mask, window, left, right, at_end), shape, dtype in itertools.product(CASES, shapes, DTYPES):
        q, k, v, dy = heads(*shape, dtype)
        allowed = seen(q.shape[1], k.shape[1], left, right, k.shape[1] - q.shape[1] if at_end else 0)
        attention = DotProductAttention(mask=mask, window=window)
        check(attention, q, k, v, dy, formula(q, k, v, dy, allowed))
        assert attention.last_backend == "flash", attention.last_note


def test_a_given_mask_a_bias_a_scale_and_other_value_heads() -> None:
    for dtype in DTYPES:
        q, k, v, dy = heads(2, 6, 9, 4, 2, 16, dtype)
        given = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(1)) > 0.4
        given[0, 0, 3] = False  # of this row nothing is seen
        y = DotProductAttention(mask="no_mask")(q, k, v, given)
        assert not y[0, 3].any()
        assert y.isfinite().all()
        check(DotProductAttention(mask="no_mask"), q, k, v, dy, formula(q, k, v, dy, given), attention_mask=given)
        causal = seen(6, 9, None, 0)
        check(DotProductAttention(), q, k, v, dy, formula(q, k, v, dy, given & causal), attention_mask=given)
        slopes = 2.0 ** -torch.arange(1, 5).view(4, 1, 1)
        bias = (slopes * (torch.arange(9) - torch.arange(6)[:, None])).to(dtype)  # ALiBi
        attention = DotProductAttention(softmax_scale=0.7)
        check(attention, q, k, v, dy, formula(q, k, v, dy, causal, scale=0.7, bias=bias), attention_mask=bias)
        q, k, v, dy = heads(2, 6, 6, 4, 2, 16, dtype, v_dim=10)
        attention = DotProductAttention()
        check(attention, q, k, v, dy, formula(q, k, v, dy, seen(6, 6, None, 0)))
        assert (attention.last_backend, attention.last_note) == (
            "math",
            "no fused kernel takes values of 10 entries for keys of 16: all scores are held in memory",
        )


def test_padding_is_not_seen_and_gives_zeros() -> None:
    lengths = torch.tensor([5, 1, 7])
    for (mask, window, left, right, at_end), dtype in itertools.product(CASES, DTYPES):
        q, k, v, dy = heads(3, 7, 7, 4, 2, 16, dtype)
        y = DotProductAttention(mask=mask, window=window)(q, k, v, query_lengths=lengths, key_lengths=lengths)
        grads = torch.autograd.grad(y, (q, k, v), dy)
        for b, n in enumerate(lengths.tolist()):
            one = [t[b : b + 1, :n] for t in (q, k, v, dy)]
            witness = formula(*one, seen(n, n, left, right))
            assert within(y[b : b + 1, :n], witness.y, witness.y_bound), (mask, window, at_end)
            assert not y[b, n:].any()
            for got, wanted, bound in zip(grads, witness.grads, witness.bounds, strict=True):
                assert within(got[b : b + 1, :n], wanted, bound)
                assert not got[b, n:].any()


def test_packed_sequences_give_the_bits_of_each_alone() -> None:
    for dtype, (mask, window, *_) in itertools.product(DTYPES, CASES):
        cut, cut_k = torch.tensor([0, 5, 5, 6, 17]), torch.tensor([0, 3, 5, 9, 20])
        for ends_k in (None, cut_k):
            keys = 17 if ends_k is None else 20
            q, k, v, dy = (t[0] for t in heads(1, 17, keys, 4, 2, 16, dtype))
            attention = DotProductAttention(mask=mask, window=window, layout="thd")
            y = attention(q, k, v, cu_seqlens=cut, cu_seqlens_k=ends_k)
            grads = torch.autograd.grad(y, (q, k, v), dy)
            alone = DotProductAttention(mask=mask, window=window)
            for (a, b), (c, d) in zip(
                *(itertools.pairwise(e.tolist()) for e in (cut, cut if ends_k is None else ends_k)), strict=True
            ):
                one = [
                    t[None, s].detach().requires_grad_()
                    for t, s in zip((q, k, v), (slice(a, b), slice(c, d), slice(c, d)), strict=True)
                ]
                wanted = alone(*one)
                assert torch.equal(y[a:b], wanted[0])
                if b > a:
                    for got, own, s in zip(
                        grads,
                        torch.autograd.grad(wanted, one, dy[None, a:b]),
                        (slice(a, b), slice(c, d), slice(c, d)),
                        strict=True,
                    ):
                        assert torch.equal(got[s], own[0])


def as_documented(
    q: Tensor, k: Tensor, v: Tensor, cut: Tensor, cut_k: Tensor, *most: int, scale: float, window_size: Any
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn of T x H x D by its documentation: windows end at the last key."""
    assert {t.shape[1:] for t in (q, k, v)} == {q.shape[1:]}
    assert cut.dtype == cut_k.dtype == torch.int32
    left, right = (None if limit == -1 else limit for limit in window_size)
    results, sizes = [], []
    for (a, b), (c, d) in zip(*(itertools.pairwise(e.tolist()) for e in (cut, cut_k)), strict=True):
        mask = seen(b - a, d - c, left, right, (d - c) - (b - a))
        one = (t[s].transpose(0, 1) for t, s in ((q, slice(a, b)), (k, slice(c, d)), (v, slice(c, d))))
        results.append(F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale).nan_to_num(0).transpose(0, 1))
        sizes.append((b - a, d - c))
    assert most == tuple(map(max, zip(*sizes, strict=True)))
    return torch.cat(results)


@pytest.mark.parametrize("of_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["documented", "gpu"])
def test_packed_sequences_in_one_call(of_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's kernel is asked, by its documentation on a CPU: the numbers of each sequence alone."""
    refuse = DotProductAttention._refuse_varlen
    if not of_gpu:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_documented)

    def on_a_gpu(self: DotProductAttention, *of: Any) -> str | None:
        reason = refuse(self, *of)
        return None if not of_gpu and reason and "flash runs on NVIDIA's" in reason else reason

    cut, cut_k = torch.tensor([0, 5, 5, 6, 17]), torch.tensor([0, 3, 5, 9, 20])
    ran = set()
    for (mask, window, *_), ends_k in itertools.product(CASES, (None, cut_k)):
        q, k, v, dy = (t[0] for t in heads(1, 17, 17 if ends_k is None else 20, 4, 2, 16, torch.bfloat16))
        if of_gpu:
            q, k, v, dy = (t.detach().cuda().requires_grad_() for t in (q, k, v, dy))
        results = []
        for hooked in (False, True):
            monkeypatch.setattr(DotProductAttention, "_refuse_varlen", on_a_gpu if hooked else lambda *_: "not now")
            attention = DotProductAttention(mask=mask, window=window, layout="thd")
            y = attention(q, k, v, cu_seqlens=cut, cu_seqlens_k=ends_k)
            results.append([y, *torch.autograd.grad(y, (q, k, v), dy)])
        at_once = attention.last_note == "all packed sequences in one call"
        ran.add((mask, ends_k is None, at_once))
        for one, wanted in zip(*results, strict=True):
            # both round results and probabilities to BF16; what cancels in dq has the size of dy
            assert torch.allclose(one.float(), wanted.float(), rtol=2**-6, atol=2**-6 * float(dy.abs().amax()))
    assert ran >= {("causal", True, True), ("causal", False, False), ("causal_bottom_right", False, True)}


def test_packed_sequences_that_go_one_by_one() -> None:
    """Each reason by itself; and a CPU's."""
    q, k, v = (t[0] for t in heads(1, 17, 17, 4, 2, 16, torch.bfloat16)[:3])
    rule = MASKS["causal"]
    reasons = {
        "dropout": (DotProductAttention(dropout=0.1), q, k, v),
        "a sink": (DotProductAttention(sink=0.5), q, k, v),
        "the backend 'math'": (DotProductAttention(backend="math"), q, k, v),
        "FP8": (DotProductAttention(recipe=replace(get_recipe("tensorwise"), attention=AttentionRecipe())), q, k, v),
        "heads of [12] entries": (DotProductAttention(), *(t[..., :12] for t in (q, k, v))),
        "4 heads of q, 3 of k": (DotProductAttention(), q, k[:, [0, 1, 1]], v[:, [0, 1, 1]]),
        "4 heads of q, 0 of k": (DotProductAttention(), q, k[:, :0], v[:, :0]),
        "other dtypes than one of 16 bits": (DotProductAttention(), q.float(), k.float(), v.float()),
    }
    for reason, (attention, *operands) in reasons.items():
        assert attention._refuse_varlen(*operands, rule, True) == f"varlen_attn: knows no {reason}"
    assert "got cpu" in str(DotProductAttention()._refuse_varlen(q, k, v, rule, True))
    with pytest.raises(ValueError, match="heads of q that are a multiple of those of k and v"):
        DotProductAttention(layout="thd")(q, k[:, :0], v[:, :0], cu_seqlens=torch.tensor([0, 17]))


def test_a_sink_adds_to_the_denominator_and_learns() -> None:
    for dtype, learned in itertools.product(DTYPES, (True, False)):
        q, k, v, dy = heads(2, 7, 7, 4, 2, 16, dtype)
        attention = DotProductAttention(sink="learned" if learned else 0.5, heads=4, window=(4, -1), dtype=dtype)
        logits = torch.tensor([-1.0, 0.0, 0.5, 2.0]) if learned else torch.full((4,), 0.5)
        if learned:
            attention.sink.data.copy_(logits)
        check(attention, q, k, v, dy, formula(q, k, v, dy, seen(7, 7, 4, 0), sink=logits))
        assert attention.last_backend == ("math" if learned else "flash")
        if not learned:
            continue
        sink = attention.sink.detach().double().requires_grad_()
        qd, kd, vd = (t.detach().double().transpose(1, 2) for t in (q, k, v))
        scores = (qd @ kd.repeat_interleave(2, 1).mT / 4).masked_fill(~seen(7, 7, 4, 0), -torch.inf)
        p = torch.cat((scores, sink.view(1, 4, 1, 1).expand(2, 4, 7, 1)), -1).softmax(-1)
        y = p[..., :-1] @ vd.repeat_interleave(2, 1)
        (wanted,) = torch.autograd.grad(y, sink, dy.double().transpose(1, 2))
        (got,) = torch.autograd.grad(attention(q, k, v), attention.sink, dy)
        # each of 14 rows of a head adds p_sink * (dy . y), rounded a few times
        size = (p[..., -1] * (dy.double().transpose(1, 2).abs() * y.abs()).sum(-1)).sum((0, 2))
        assert within(got, wanted, (8 * torch.finfo(dtype).eps + 64 * 2.0**-24) * size)
        with torch.no_grad():
            attention(q, k, v)
        assert attention.last_backend == "flash"


def test_dropout_is_on_in_training_only_and_named() -> None:
    q, k, v, _ = heads(2, 64, 64, 4, 2, 16, torch.float32)
    attention, plain = DotProductAttention(dropout=0.5), DotProductAttention()
    assert torch.equal(attention.eval()(q, k, v), plain(q, k, v))
    ones = torch.ones_like(v)
    y = attention.train()(q, k, ones)  # the share of the probabilities that stayed, twice as large
    assert attention.last_note == "no fused kernel takes dropout: all scores are held in memory"
    assert abs(y[:, 32:].mean().item() - 1) < 0.05
    assert y[:, 32:].std().item() > 0.02


def test_the_fused_kernel_is_torchs_own_bit_for_bit() -> None:
    for dtype in DTYPES:
        q, k, v, _ = heads(2, 33, 33, 4, 2, 16, dtype)
        wanted = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        assert torch.equal(DotProductAttention(backend="flash")(q, k, v), wanted.transpose(1, 2))


def test_empty_tensors() -> None:
    for batch, queries, keys in ((0, 5, 5), (2, 0, 4), (2, 3, 0)):
        q, k, v, dy = heads(batch, queries, keys, 4, 2, 16, torch.float32)
        y = DotProductAttention(mask="no_mask")(q, k, v)
        assert y.shape == dy.shape
        assert not y.any()


def test_compiles_whole_with_eager_results_and_says_so() -> None:
    """Also for a second length, which torch compiles for any length."""
    for options in ({}, {"window": (3, 0)}, {"sink": 0.5}, {"backend": "flash"}):
        torch.compiler.reset()
        attention = DotProductAttention(**options)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        for length in (16, 24):
            q, k, v, dy = heads(2, length, length, 4, 2, 16, torch.float32)
            wanted = attention(q, k, v)
            assert within(compiled(q, k, v), wanted.double(), 2 * formula(q, k, v, dy).y_bound)
            assert attention.last_backend == "compiled"


def test_mistakes_are_named() -> None:
    q, k, v, _ = heads(2, 5, 5, 4, 2, 16, torch.float32)
    for make, words in (
        ({"mask": "casual"}, "unknown mask 'casual'; did you mean 'causal'?"),
        ({"layout": "bsdh"}, "did you mean 'bshd'?"),
        ({"backend": "flsh"}, "did you mean 'flash'?"),
        ({"window": (-2, 0)}, "window is (-2, 0); needs (left, right)"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"sink": "learned"}, "give heads="),
    ):
        with pytest.raises(ValueError, match=r"^(attention|DotProductAttention)") as error:
            DotProductAttention(**make)
        assert words in str(error.value)
    for attention, args, call, words in (
        (DotProductAttention(), (q, k[:, :3], v), {}, "k and v of one S"),
        (DotProductAttention(), (q[:, :, :3], k, v), {}, "heads of q that are a multiple"),
        (DotProductAttention(), (q[0], k[0], v[0]), {}, "needs four dimensions each"),
        (DotProductAttention(layout="thd"), (q[0], k[0], v[0]), {}, "needs q (T, H, D) and cu_seqlens"),
        (
            DotProductAttention(layout="thd"),
            (q[0], k[0], v[0]),
            {"cu_seqlens": torch.tensor([0, 3])},
            "rise from 0 to 5",
        ),
        (DotProductAttention(dropout=0.1, backend="flash"), (q, k, v), {}, "'flash' does not take this call on cpu"),
    ):
        with pytest.raises(ValueError, match=r"^DotProductAttention") as error:
            attention(*args, **call)
        assert words in str(error.value)

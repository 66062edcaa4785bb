"""Multi-head attention is linear, heads, rotation, softmax, linear, in fp64; a cache gives what was written."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_samples import formula, seen, within
from torch import Tensor

from ottava.nn.attention import DotProductAttention
from ottava.nn.rope import RotaryEmbedding, packed_positions
from ottava.nn.transformer import KVCache, MultiheadAttention
from ottava.recipe import RECIPES


def test_decoding_is_the_full_forward() -> None:
    """In chunks of any size, with a window, under grouped-query attention."""
    for dtype, window, chunks in itertools.product(
        (torch.float32, torch.bfloat16), (None, (3, 0)), ((1,) * 9, (5, 1, 3), (9,))
    ):
        rng = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 9, h, 16, generator=rng).to(dtype) for h in (4, 2, 2))
        attention, cache = DotProductAttention(window=window), KVCache(2, 2, 12, 2, 16, dtype=dtype)
        full, parts, start = attention(q, k, v), [], 0
        for new in chunks:
            assert cache.positions(new).tolist() == list(range(start, start + new))
            part = slice(start, start + new)
            cached = cache.append(1, k[:, part], v[:, part])
            parts.append(attention(q[:, part], cached.keys, cached.values, mask="causal_bottom_right"))
            cache.advance(new)
            start += new
        witness = formula(q, k, v, q, seen(9, 9, None if window is None else 3, 0))
        assert within(torch.cat(parts, 1), witness.y, witness.y_bound)
        assert within(torch.cat(parts, 1), full.double(), 2 * witness.y_bound)
        assert torch.equal(cache.keys[1, :, :9], k)
        assert torch.equal(cache.values[1, :, :9], v)
        assert not cache.keys[0].any()


def test_memory_is_taken_once_and_mistakes_are_named() -> None:
    cache = KVCache(2, 3, 8, 4, 16, value_dim=8, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 3 * 8 * 4 * (16 + 8) * 2
    k, v = torch.ones(3, 5, 4, 16, dtype=torch.bfloat16), torch.ones(3, 5, 4, 8, dtype=torch.bfloat16)
    assert cache.append(0, k, v).keys.data_ptr() == cache.keys.data_ptr()
    cache.advance(5)
    with pytest.raises(ValueError, match="5 tokens behind 5 need 10 positions; the cache has 8"):
        cache.append(0, k, v)
    with pytest.raises(ValueError, match=r"got keys \(3, 5, 4, 16\) torch.float32; needs \(3, new, 4, 16\) torch.bfl"):
        cache.append(0, k.float(), v)
    with pytest.raises(ValueError, match="needs a count for each of 3 sequences"):
        cache.advance([1, 2])
    with pytest.raises(ValueError, match="each needs 1 or more"):
        KVCache(0, 1, 1, 1, 1)
    cache.reset()
    assert cache.lengths == [0, 0, 0]


def test_sequences_come_and_go() -> None:
    """What is kept has its keys and its length, in the new order; padding is not written; a new one is empty."""
    cache = KVCache(2, 3, 6, 1, 2)
    k = torch.arange(18.0).view(3, 3, 1, 2)
    for layer in range(2):
        read = cache.append(layer, k + layer, k - layer, [3, 1, 2])
        assert read.keys.shape[1] == 3
        assert read.lengths is not None
        assert read.lengths.tolist() == [3, 1, 2]
    assert not cache.keys[:, 1, 1:].any()
    cache.advance([3, 1, 2])
    cache.select([2, None, 0])
    assert cache.lengths == [2, 0, 3]
    assert torch.equal(cache.keys[1, 2, :3], k[0] + 1)
    assert torch.equal(cache.values[1, 0, :2], k[2, :2] - 1)
    cache.select([2])
    assert torch.equal(cache.append(0, k[:1], k[:1]).keys[0, :3], k[0])
    for rows in ([], [0, 0, 0, 0], [1]):
        with pytest.raises(ValueError, match="needs 1 to 3 of its 1 sequences, or None"):
            cache.select(rows)
    with pytest.raises(ValueError, match="3 tokens behind 3 need 6 positions; the cache has 5"):
        (short := KVCache(1, 2, 5, 1, 2)).advance([3, 0]), short.append(0, k[:2], k[:2], [3, 3])
    assert short.append(0, k[:2], k[:2], [1, 3]).lengths.tolist() == [4, 3]  # padding may lie beyond the end


EXACT = 1e-12
"""fp64: a few hundred roundings of numbers of size 10 or less, eps 2.2e-16."""


def written_out(
    layer: MultiheadAttention, x: Tensor, memory: Tensor | None, positions: Tensor | None, mask: Tensor
) -> Tensor:
    """(B, S, H), every step by its definition; rotation of pairs (i, i + D / 2) as complex numbers."""

    def normed(t: Tensor, norm: torch.nn.Module | None) -> Tensor:
        if norm is None:
            return t
        centred = t - t.mean(-1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else t
        scaled = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        return scaled + norm.bias if getattr(norm, "bias", None) is not None else scaled

    first = layer.q if layer.cross else layer.qkv
    rows = normed(x, getattr(first, "norm", None))
    if memory is None:
        wide, h, g = rows @ first.weight.T, layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        wide = wide if first.bias is None else wide + first.bias
        q, k, v = wide[..., :h], wide[..., h : h + g], wide[..., h + g :]
    else:
        q, (k, v) = (
            F.linear(rows, first.weight, first.bias),
            F.linear(memory, layer.kv.weight, layer.kv.bias).chunk(2, -1),
        )
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for t in (q, k, v))
    q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    if positions is not None:
        half = layer.head_dim // 2
        # the angles are fp32's, as everywhere
        frequency = RotaryEmbedding(layer.head_dim).scaling.frequencies(layer.head_dim, 10_000.0)
        angle = positions[:, None].float() * frequency
        turn = torch.complex(angle.cos().double(), angle.sin().double())
        q, k = (
            torch.view_as_real(torch.complex(t[..., :half], t[..., half:]) * turn).transpose(-1, -2).flatten(-2)
            for t in (q, k)
        )
    k, v = (t.repeat_interleave(layer.heads // layer.kv_heads, 1) for t in (k, v))
    scores = (q @ k.mT) / layer.head_dim**0.5
    y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(-2) @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


CASES = (
    {},
    {"kv_heads": 2, "norm": "rmsnorm", "bias": False},
    {"kv_heads": 1, "head_dim": 6, "norm": "layernorm", "out_bias": False, "qk_norm": "rmsnorm"},
    {"qk_norm": "layernorm", "bias": False, "out_bias": True, "window": (2, -1)},
    {"cross": True, "norm": "rmsnorm", "kv_heads": 2, "qk_norm": "rmsnorm"},
    {"cross": True, "memory_size": 20, "head_dim": 10},
)


def made(case: dict, seed: int = 0, **more: object) -> MultiheadAttention:
    torch.manual_seed(seed)
    layer = MultiheadAttention(32, 4, **({"recipe": "bf16", "dtype": torch.float64} | case | more))
    for name, parameter in layer.named_parameters():
        if "norm" in name:  # not the ones and zeros that they begin with
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def test_every_kind_is_what_is_written_out_with_all_gradients() -> None:
    for case, turned in itertools.product(CASES, (True, False)):
        layer = made(case)
        x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
        memory = (
            torch.randn(2, 9, case.get("memory_size", 32), dtype=torch.float64, requires_grad=True)
            if case.get("cross")
            else None
        )
        positions = torch.arange(3, 10) if turned and memory is None else None
        table = None if positions is None else RotaryEmbedding(layer.head_dim, dtype=torch.float64)(positions)
        mask = seen(7, 9, None, None) if memory is not None else seen(7, 7, case.get("window", (None,))[0], 0)
        y, wanted = layer(x, memory, rotary=table), written_out(layer, x, memory, positions, mask)
        assert (y - wanted).abs().max() < EXACT, case
        dy, leaves = torch.randn_like(y), [t for t in (x, memory, *layer.parameters()) if t is not None]
        for got, own in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
            assert (got - own).abs().max() < 100 * EXACT * max(1.0, own.abs().max().item()), case


def test_layouts_and_packed_sequences_are_the_same_layer() -> None:
    lengths = (5, 1, 7)
    rows = [torch.randn(1, n, 32, dtype=torch.float64) for n in lengths]
    rope, cut = RotaryEmbedding(8), torch.tensor([0, 5, 6, 13])
    bshd, sbhd, thd = (made({"kv_heads": 2, "norm": "rmsnorm", "layout": layout}) for layout in ("bshd", "sbhd", "thd"))
    packed = thd(torch.cat(rows, 1)[0], rotary=rope(packed_positions(cut)), cu_seqlens=cut)
    padded = torch.cat([F.pad(one, (0, 0, 0, 7 - one.shape[1])) for one in rows])
    together = bshd(padded, rotary=rope(torch.arange(7)), key_lengths=torch.tensor(lengths))
    for i, (one, part) in enumerate(zip(rows, packed.split(lengths), strict=True)):
        n = one.shape[1]
        alone = bshd(one, rotary=rope(torch.arange(n)))
        assert (part - alone[0]).abs().max() < EXACT  # GEMMs of other sizes may sum in another order
        assert (together[i, :n] - alone[0]).abs().max() < EXACT
        turned = sbhd(one.transpose(0, 1), rotary=rope(torch.arange(n)[:, None]))
        assert (turned.transpose(0, 1) - alone).abs().max() < EXACT


def test_every_recipe_trains_it_and_the_receipt_names_what_ran() -> None:
    """Against the same linears and attention called one by one: the module adds no number of its own."""
    from ottava.nn.receipt import receipt

    for name in RECIPES:
        layer = made({"kv_heads": 2, "norm": "rmsnorm", "recipe": name, "dtype": torch.bfloat16})
        x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        table = RotaryEmbedding(8)(torch.arange(16))
        torch.manual_seed(1)  # for stochastic rounding
        y = layer(x, rotary=table)
        y.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in (x, *layer.parameters()))
        rows = [row for row in receipt(layer).rows if row.layer == "attention"]
        assert [(row.gemm, row.kernel, row.shape) for row in rows] == [("attention", "flash", "2 x 4/2 x 16 x 16 x 8")]
        fp8 = {row.fp8 for row in receipt(layer).rows if row.gemm == "fprop"}
        assert fp8 == {RECIPES[name].fprop.quantized}
        exact = made({"kv_heads": 2, "norm": "rmsnorm", "dtype": torch.bfloat16})(x, rotary=table)
        off = (y - exact).float().norm() / exact.float().norm()
        narrow = "E2M1" in str(RECIPES[name].fprop)
        assert off < 0.35 if narrow else off < 0.12, (name, off)  # eps of E4M3 and E2M1, a few casts


def test_mistakes_are_named() -> None:
    x = torch.ones(2, 5, 32)
    for settings, words in (
        ({"heads": 5}, "needs heads that divide hidden"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads that divide heads"),
        ({"heads": 4, "layout": "bhsd"}, "needs 'bshd', 'sbhd' or 'thd'"),
    ):
        with pytest.raises(ValueError, match=r"^MultiheadAttention: ") as error:
            MultiheadAttention(32, **settings)
        assert words in str(error.value)
    plain, cross = MultiheadAttention(32, 4, recipe="bf16"), MultiheadAttention(32, 4, cross=True, recipe="bf16")
    cache = KVCache(1, 2, 9, 4, 8).of(0)
    for layer, call, words in (
        (plain, {"memory": x}, "got a memory;"),
        (cross, {}, "got no memory;"),
        (cross, {"memory": x, "cache": cache}, "got a memory and a cache;"),
    ):
        with pytest.raises(ValueError, match=r"^MultiheadAttention\(") as error:
            layer(x, **call)
        assert words in str(error.value)

"""A cache gives what was written, and attention to it what attention to all of the text gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_samples import formula, seen, within

from ottava.nn.attention import DotProductAttention
from ottava.nn.kv_cache import KVCache


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


def test_prompts_of_other_lengths_in_one_batch_are_each_as_alone() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths, new = [6, 2, 4], 3
    q, k, v = (torch.randn(3, 9, h, 16, generator=rng) for h in (4, 2, 2))
    attention, cache = DotProductAttention(), KVCache(1, 3, 9, 2, 16)
    read = cache.append(0, k[:, :6], v[:, :6])  # what lies past a prompt's length is padding
    attention(q[:, :6], read.keys, read.values, mask="causal_bottom_right")
    cache.advance(lengths)
    for step in range(new):
        places = cache.positions(1)
        assert places.tolist() == [[n + step] for n in lengths]
        rows = torch.arange(3)[:, None], places
        cached = cache.append(0, k[rows], v[rows])
        y = attention(q[rows], cached.keys, cached.values, mask="causal_bottom_right", key_lengths=cached.lengths)
        cache.advance(1)
        for b, n in enumerate(lengths):
            end = n + step + 1
            one = q[b : b + 1, end - 1 : end], k[b : b + 1, :end], v[b : b + 1, :end]
            witness = formula(*one, one[0])
            assert within(y[b : b + 1], witness.y, witness.y_bound)


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

"""One rule makes every mask: against the definition, pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_samples import seen

from ottava.nn.masks import MASKS, MaskRule, build_mask, mask_rule


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

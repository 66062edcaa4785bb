"""Losses, KL and intervals against witnesses; what runs in a block and out of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ottava.serving.answers import block_errors, chunks_of, greedy, interval, logit_error, sums_of, total
from serving_samples import CONFIG, LENGTH, TEXT, learned, view


def test_sums_are_those_of_torch() -> None:
    a, b = view(learned()), view(learned("nvfp4"))
    text = chunks_of(a.encode, "sums", TEXT, length=LENGTH, most=8)
    assert text.ids.shape == (8, LENGTH + 1)
    sums = sums_of(a, b, text)
    x, y = (v.logits(text.ids[:, :-1]).double() for v in (a, b))
    for own, logits in ((sums.loss_a, x), (sums.loss_b, y)):
        wanted = F.cross_entropy(logits.flatten(0, 1), text.ids[:, 1:].flatten(), reduction="none").view(8, -1).sum(1)
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-4)
    kl = F.kl_div(y.log_softmax(-1), x.log_softmax(-1), log_target=True, reduction="none").sum((1, 2))
    torch.testing.assert_close(sums.kl, kl, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sums.agreed, (x.argmax(-1) == y.argmax(-1)).double().sum(1))
    answers, double = sums.answers("t"), total([sums, sums]).answers("t")
    assert answers.tokens == 8 * LENGTH
    assert abs(answers.loss_a - double.loss_a) < 1e-12
    assert answers.change.low <= answers.change.mean <= answers.change.high


def test_an_interval_covers_the_mean_of_the_source_as_often_as_it_says() -> None:
    """Of 200 samples of 64 normal numbers about 190 intervals hold 0; fewer than 178 are a chance of one in 2,000."""
    generator = torch.Generator().manual_seed(0)
    intervals = [interval(torch.randn(64, generator=generator), seed) for seed in range(200)]
    assert 178 <= sum(one.low <= 0 <= one.high for one in intervals) <= 200
    width = sum(one.high - one.low for one in intervals) / 200
    assert abs(width - 2 * 1.96 / 8) < 0.05


def test_only_the_block_that_was_changed_differs_alone() -> None:
    a, other = view(learned()), learned()
    with torch.no_grad():
        other.get_submodule("layers.1.mlp.down_proj").weight.mul_(1.5)
    ids = torch.tensor([list(TEXT[:LENGTH].encode())])
    b = view(other)
    first, second = block_errors(a, b, ids)
    assert (first.total, first.own) == (0.0, 0.0)
    assert second.own == second.total > 0.01
    assert logit_error(a, b, ids) > 0.01


def test_greedy_takes_the_most_likely_token_and_sees_the_last_ones() -> None:
    a = view(learned())
    prompts = torch.tensor([list(TEXT[:20].encode()), list(TEXT[40:60].encode())])
    got = greedy(a, prompts, LENGTH)
    ids = prompts
    for _ in range(LENGTH):
        ids = torch.cat((ids, a.logits(ids[:, -LENGTH:])[:, -1:].argmax(-1)), 1)
    assert torch.equal(got, ids[:, 20:])
    assert CONFIG.layers == len(a.blocks)

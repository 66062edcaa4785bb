"""Views compute as their recipe says; their answers and the noise of a text, against plain formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.answers import (
    block_errors,
    bytes_only,
    chunks_of,
    decode_bytes,
    encode_bytes,
    engine_recipe,
    greedy,
    interval,
    logit_error,
    of_hugging_face,
    sums_of,
    total,
)
from ottava.serving.evaluate import evaluate
from ottava.serving.source import Source, Weight
from ottava.train.llama import open_view
from serving_samples import CONFIG, LENGTH, TEXT, exported, learned, view


def test_bytes_are_tokens() -> None:
    assert decode_bytes(encode_bytes("größe\n")) == "größe\n"
    assert decode_bytes([255]) == "\N{REPLACEMENT CHARACTER}"


def test_the_engine_of_codes() -> None:
    def source(*specs: QuantizationSpec, static: float | None = None) -> Source:
        x = torch.randn(128, 128)
        return Source(tuple(Weight("a.weight", x, True, "", quantize(x, spec), static) for spec in specs), {})

    blocks = engine_recipe(source(QuantizationSpec(E4M3, BLOCK_128X128, "pow2")))
    assert blocks.fprop.lhs == QuantizationSpec(E4M3, BLOCK_1X128, "pow2")
    for bad, words in (
        (source(), "no FP8 weights"),
        (source(QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW)), "no one recipe"),
        (source(QuantizationSpec(E4M3), static=0.1), "static scales"),
    ):
        with pytest.raises(ValueError, match=words):
            engine_recipe(bad)


def test_transformers_views_are_ours(tmp_path: Path) -> None:
    """The same folder through transformers and through the trainer's model: one loss, in BF16 and in FP8."""
    pytest.importorskip("transformers")
    for layout in ("bf16", "fp8-block", "compressed-tensors-channel"):
        folder = exported(layout)
        assert bytes_only(folder)
        for recipe in (None, "engine")[: 1 if layout == "bf16" else 2]:
            theirs, ours = of_hugging_face(folder, recipe), open_view(str(folder), recipe)
            result = evaluate(ours, theirs, {"sums": TEXT}, chunks=8, generate=2)
            assert result.verdict.kind == "same", (layout, recipe, result.verdict)
            assert abs(result.answers.change.mean) < 0.005
    rowwise = of_hugging_face(exported("bf16"), "rowwise")
    assert rowwise.casts_weights
    assert rowwise.casts_activations
    with pytest.raises(ValueError, match="no FP8 weights"):
        of_hugging_face(exported("bf16"), "engine")


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

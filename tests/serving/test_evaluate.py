"""Two checkpoints, with and without a fault: the verdict names it, from the command line and in the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ottava.nn.convert import convert
from ottava.report.frame import write_page
from ottava.serving.answers import Answers, ChunkMean, View
from ottava.serving.evaluate import RULES, Compared, Difference, Differences, Evaluation, Generation, evaluate, judge
from ottava.serving.page import render_page
from ottava.serving.source import Source, Weight
from ottava.serving.trained import cast_of
from ottava.train.llama import open_view
from ottava.train.model import ByteTransformer
from ottava.weights.layouts import LAYOUTS
from serving_samples import PROSE, TEXT, exported, learned, view

UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
TEXTS = {"sums": TEXT}


def found(a: View, b: View, **options: object) -> Evaluation:
    return evaluate(a, b, TEXTS, **{"chunks": 12, "generate": 0, **options})  # type: ignore[arg-type]


def changed(layout: str, change: Callable[[dict[str, Tensor]], None], **config: object) -> View:
    """A view of a checkpoint whose file was changed after it was written."""
    folder = exported(layout)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(tree | config))
    return open_view(str(folder))


def doubled(t: dict[str, Tensor]) -> None:
    t[f"{UP}.weight_scale"] *= 2


def inverted(t: dict[str, Tensor]) -> None:
    t[f"{UP}.weight_scale"] = 1 / t[f"{UP}.weight_scale"]


def one_row(t: dict[str, Tensor]) -> None:
    t[f"{UP}.weight_scale"][5] *= 3


def exponent(t: dict[str, Tensor]) -> None:
    t[f"{UP}.weight_scale_inv"] += 1


def swapped(t: dict[str, Tensor]) -> None:
    for kind in ("weight", "weight_scale"):
        q, k = f"{QUERY}.{kind}", f"{QUERY.replace('q_proj', 'k_proj')}.{kind}"
        t[q], t[k] = t[k], t[q]


def norm_lost(t: dict[str, Tensor]) -> None:
    t["model.norm.weight"] = torch.ones_like(t["model.norm.weight"]) * 2


def nothing(t: dict[str, Tensor]) -> None:
    pass


@pytest.mark.parametrize(
    ("layout", "change", "config", "evidence"),
    [
        ("compressed-tensors-tensor", doubled, {}, f"{UP}.weight: B holds 2 times"),
        ("compressed-tensors-block", doubled, {}, f"{UP}.weight: B holds 2 times"),
        ("compressed-tensors-tensor", inverted, {}, f"{UP}.weight: B's scales fit when inverted"),
        ("compressed-tensors-channel", one_row, {}, f"{UP}.weight: the scales of 1 of its 128 blocks"),
        ("mxfp8", exponent, {}, f"{UP}.weight: B holds 2 times"),
        ("compressed-tensors-tensor", swapped, {}, f"{QUERY}.weight: B holds other numbers"),
        ("compressed-tensors-tensor", norm_lost, {}, "model.norm.weight: B holds"),
        ("compressed-tensors-tensor", nothing, {"rms_norm_eps": 0.1}, "rms_norm_eps is 1e-05 in A, and 0.1 in B"),
    ],
)
def test_wrong_values_are_named(
    layout: str, change: Callable[[dict[str, Tensor]], None], config: dict[str, object], evidence: str
) -> None:
    verdict = found(view(learned()), changed(layout, change, **config)).verdict
    assert verdict.kind == "wrong-values", verdict
    assert evidence in verdict.evidence[0]
    assert "nats a token" in verdict.evidence[-1]
    assert not verdict.good


def test_other_layers_are_named() -> None:
    """Each list of layers, and the head that should have stayed."""
    kept = open_view(str(exported("compressed-tensors-tensor", keep=["*.layers.1.mlp.down_proj"])))
    whole = open_view(str(exported("compressed-tensors-tensor")))
    for a, b, side in ((kept, whole, "B"), (whole, kept, "A")):
        verdict = found(a, b).verdict
        assert verdict.kind == "other-layers"
        assert verdict.evidence[0].startswith(f"only {side} quantizes model.layers.1.mlp.down_proj.weight")
    head = learned("tensorwise")
    convert(head, "tensorwise", filter=lambda name, _: name == "lm_head" or "layers" in name)
    source = Source(tuple(_with_head(head)), view(head).source.config)
    b = View("head", head, kept.blocks, source, kept.encode, kept.decode, mixed=True, longest=32)
    verdict = found(view(learned()), b).verdict
    assert (verdict.kind, "B quantizes lm_head.weight" in verdict.evidence[0]) == ("other-layers", True)


def _with_head(model: ByteTransformer) -> list[Weight]:
    weights = view(model).source.weights
    cast = cast_of(model.lm_head)
    return [replace(one, codes=cast) if one.name == "lm_head.weight" else one for one in weights]


def test_a_coarse_recipe_is_called_coarse_and_fp8_that_is_served_in_bf16_is_to_be_served_in_fp8() -> None:
    plain, rough = view(learned()), view(learned("nvfp4"))
    there = evaluate(plain, rough, {"prose": PROSE}, chunks=12, generate=0)
    assert (there.verdict.kind, there.verdict.sentence) == ("too-coarse", "The casts of B are too coarse")
    assert "E2M1" in there.verdict.evidence[0]
    assert "largest errors of single blocks: layers." in there.verdict.evidence[1]
    assert there.answers.kl.low > 0.01
    back = evaluate(rough, plain, {"prose": PROSE}, chunks=12, generate=0)
    assert (back.verdict.kind, "ottava export" in back.verdict.remedy) == ("serve-fp8", True)
    both = evaluate(plain, rough, {"sums": TEXT, "prose": PROSE}, chunks=12, generate=0)
    assert both.verdict.sentence == "The casts of B are too coarse for prose"
    assert "only these texts leave the tolerance: prose" in both.verdict.evidence


def test_clean_pairs_are_clean() -> None:
    """A model and what was exported of it, in every layout, as weights and as an engine computes."""
    plain = view(learned())
    for layout, form in LAYOUTS.items():
        if layout == "modelopt":
            continue  # has scales of activations, from histories
        folder = str(exported(layout))
        for name in (folder, f"{folder}@engine")[: 1 if form.spec is None else 2]:
            result = found(plain, open_view(name))
            assert result.verdict.kind == "same", (layout, name, result.verdict)
            if name != folder:
                casts = "nvfp4" not in layout  # these have no activations
                assert all(bool(one.activation_b) == bool(one.cast_b and casts) for one in result.weights.linears)
            assert result.answers.agreement.mean > 0.95
    trained = view(learned("tensorwise"))
    result = found(trained, open_view(str(exported("compressed-tensors-tensor", "tensorwise"))), generate=4)
    assert result.verdict.kind == "same"
    assert "14 of 14 quantized weights stand for the same numbers" in result.verdict.evidence
    assert [one.tokens for one in result.generations] == [4, 4, 4]
    assert json.loads(json.dumps(result.to_dict()))["verdict"]["kind"] == "same"
    itself = found(trained, trained, generate=4)
    assert itself.logits == 0.0
    assert {one.own for one in itself.blocks} == {0.0}
    assert all(one.same == 4 and one.a == one.b for one in itself.generations)


def test_another_step_is_no_wrong_scale() -> None:
    other = learned()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    assert found(view(learned()), view(other)).verdict.kind == "other-weights"


def test_a_number_that_is_none_is_wrong() -> None:
    """A NaN in one weight, and one in both, which no cast of B has made."""
    other, both = learned(), learned()
    with torch.no_grad():
        other.get_submodule("layers.0.mlp.down_proj").weight[3, 5] = torch.nan
        both.get_submodule("layers.0.mlp.down_proj").weight[3, 5] = torch.nan
    verdict = found(view(learned()), view(other)).verdict
    assert verdict.kind == "wrong-values"
    assert "model.layers.0.mlp.down_proj.weight: the numbers of 1 of its" in verdict.evidence[0]
    assert not found(view(other), view(both)).weights.wrong


def test_a_formula_that_differs_behind_equal_weights_is_unexplained() -> None:
    other = learned()
    for module in other.modules():
        if hasattr(module, "head_dim"):
            module.attention = torch.nn.Module()
            module.attention.forward = lambda q, k, v: v.repeat_interleave(q.shape[2] // v.shape[2], 2)  # type: ignore[method-assign]
    verdict = found(view(learned()), view(other)).verdict
    assert (verdict.kind, verdict.evidence[0]) == ("unexplained", "the first block that differs alone is layers.0")


def test_bad_input_ends_in_a_sentence() -> None:
    one = view(learned())
    with pytest.raises(ValueError, match="needs a text"):
        evaluate(one, one, {})
    with pytest.raises(ValueError, match=r"has 3 tokens; needs at least 65"):
        evaluate(one, one, {"t": "abc"})
    with pytest.raises(ValueError, match="repeats itself"):
        evaluate(one, one, {"t": "a" * 200})
    empty = View("b", one.model, one.blocks, Source((), {}), one.encode, one.decode)
    with pytest.raises(ValueError, match="no linear of one name in common"):
        found(one, empty)
    shifted = View("b", one.model, one.blocks, one.source, lambda text: [0, *text.encode()], one.decode)
    with pytest.raises(ValueError, match="tokenizers differ"):
        found(one, shifted)


CLEAN = Difference("m.up.weight", "", "", "", "", True, None, 0.0, 1.0, 1.0, False)


def case(one: Difference = CLEAN, kl: float = 0.0, change: float = 0.0, a: bool = False, b: bool = False) -> Compared:
    def interval(x: float) -> ChunkMean:
        return ChunkMean(x, x - 0.001, x + 0.001)

    answers = Answers("t", 64, 1.0, 1.0 + change, interval(change), interval(kl), interval(0.9))
    return Compared(Differences((one,), (), (), ()), answers, (answers,), (), (a, a), (b, b))


def test_each_rule_answers_to_its_facts_and_an_earlier_one_wins() -> None:
    wrong = replace(CLEAN, outside=1.0, factor=2.0)
    cast = replace(CLEAN, cast_b="E4M3[tensor]", activation_b="E4M3[tensor]")
    mixed = replace(cast, cast_a="E4M3[row]", activation_a="E4M3[row]")
    for facts, kind in (
        (case(), "same"),
        (case(kl=0.0109), "same"),  # the interval still touches the tolerance
        (case(kl=0.02), "unexplained"),
        (case(change=-0.02), "unexplained"),
        (case(cast, b=True), "same"),
        (case(cast, kl=0.02, b=True), "too-coarse"),
        (case(mixed, a=True, b=True), "same"),
        (case(mixed, kl=0.02, a=True, b=True), "other-layers"),
        (case(replace(CLEAN, cast_a="E4M3[row]"), kl=0.02, a=True), "serve-fp8"),
        (case(replace(CLEAN, cast_a="E4M3[row]"), a=True, b=True), "other-layers"),
        (case(replace(cast, name="lm_head.weight"), b=True), "other-layers"),
        (case(wrong, kl=0.02, b=True), "wrong-values"),
    ):
        verdict = judge(facts)
        assert verdict.kind == kind, verdict
        assert verdict.good == (kind == "same")
        assert verdict.evidence
        assert verdict.remedy
    assert len(RULES) == 7
    quiet = case(cast, b=True)  # two texts, too noisy each; together they show it
    loud = replace(case(cast, kl=0.02, b=True), texts=(quiet.answers, quiet.answers))
    verdict = judge(loud)
    assert verdict.sentence == "The casts of B are too coarse for all texts"
    assert not any("only these texts" in line for line in verdict.evidence)
    for broken in (float("nan"), float("inf")):
        assert judge(case(kl=broken)).kind == judge(case(change=broken)).kind == "unexplained"


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    found = evaluate(view(learned()), view(learned("rowwise")), {"a & b": TEXT}, chunks=4, generate=0)
    said = Generation("p", "<script>alert(1)</script>\n", "y", 0, 2)
    path = write_page(tmp_path / "new" / "page.html", render_page(answers=replace(found, generations=(said,))))
    page = path.read_text(encoding="utf-8")
    assert found.verdict.sentence in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;⏎" in page
    assert "a &amp; b" in page
    assert "src=" not in page
    assert f"{found.answers.perplexity_b:.4g}" in page
    for tensor in found.weights.tensors:
        assert tensor.name.replace(".", ".<wbr>") in page
    assert "<svg" in page
    assert "<svg" not in render_page(answers=replace(found, blocks=()))
    with pytest.raises(ValueError, match="needs a certificate"):
        render_page()
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]

"""Why a rollout and training differ: parts sum to the KL, each cause is named, and rounding is no cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.serving.conftest import plain, rowwise_fp32
from torch import Tensor

from command import run
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from ottava.serving.attribution import CAUSES, _kl, _Lab, _left, _real, attribute, kl_of
from ottava.serving.rollout import Rollout, Sampler
from ottava.serving.sides import Model, Side, trained, under
from ottava.serving.suspects import Guess, hypotheses, in_part, misread, nats
from ottava.serving.twin import ModelState, Twin

pytest.importorskip("transformers")
IDS = torch.randint(0, 256, (6, 48), generator=torch.Generator().manual_seed(5))
AT = (torch.arange(6).repeat_interleave(40), torch.arange(8, 48).repeat(6))


@pytest.fixture(scope="module")
def bare() -> Model:
    """A Llama that casts nothing, with logits that are not flat."""
    return _sharp(trained(plain("llama", dtype=torch.bfloat16)))


def _sharp(model: Model) -> Model:
    head = model.linears["lm_head"]
    return replace(model, linears={**model.linears, "lm_head": replace(head, weight=2 * head.weight)})


def logp(state: ModelState, sampler: Sampler | None = None, *, chunk: int = 6) -> Tensor:
    """(240,): of the last 40 tokens of each sequence."""
    twin = Twin(state, torch.bfloat16)
    logits = torch.cat([twin.logits(state, ids) for ids in IDS.split(chunk)])
    return (sampler or Sampler()).log_probabilities(logits[AT[0], AT[1] - 1], IDS, AT)


def rollout(engine: Tensor, training: Tensor, **more: Any) -> Rollout:
    return Rollout("plain", tuple(IDS), (torch.arange(8, 48),) * 6, engine, training, **more)


def older(model: Model, pattern: str = "") -> Model:
    torch.manual_seed(3)
    sides = {n: replace(s, weight=s.weight + 0.05 * s.weight.float().std() * torch.randn(s.weight.shape).bfloat16())
             for n, s in model.linears.items() if pattern in n}  # fmt: skip
    return replace(model, linears={**model.linears, **sides})


def test_a_cause_is_named_and_parts_sum_to_the_kl(bare: Model) -> None:
    state = ModelState.of(bare)
    own = logp(state, chunk=1)  # another batch than the experiments'
    cast = ModelState.of(_sharp(trained(under(plain("llama", dtype=torch.bfloat16), rowwise_fp32()))))
    before = older(bare, "layers.1.mlp")
    engines: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "temperature": (logp(state, Sampler(0.7)), {}),
        "processed": (logp(state, Sampler(penalty=1.2)), {}),
        "kv-cache": (logp(replace(state, cache=E4M3)), {}),
        "layers": (logp(cast), {}),
        "stale": (logp(ModelState.of(before)), {"before": [("step 3", before)]}),
        "scaled": (own / 0.8, {}),
        "shift": (own.view(6, 40).roll(1, 1).flatten(), {}),
        "padded": (own.where(torch.arange(240) % 9 > 0, torch.tensor(0.0)), {}),
    }
    for cause, (engine, more) in engines.items():
        found = attribute(rollout(engine, own), bare, **more)
        assert found.first is not None, cause
        assert found.first.cause == cause, str(found)
        assert found.kl == pytest.approx(float(kl_of(engine, own).mean()))
        assert sum(part.kl for part in found.parts) == pytest.approx(found.kl)
        assert found.rest.kl < 0.1 * found.kl, str(found)
        assert not found.good
        assert CAUSES[cause] in str(found)


def test_casts_of_some_linears_are_found_by_their_kind(bare: Model) -> None:
    state = ModelState.of(bare)
    cast = ModelState.of(_sharp(trained(under(plain("llama", dtype=torch.bfloat16), rowwise_fp32()))))
    some = {n: side for n, side in cast.linears.items() if "down_proj" in n}
    found = attribute(rollout(logp(replace(state, linears={**state.linears, **some})), logp(state)), bare)
    assert found.first is not None
    assert (found.first.cause, found.first.said) == ("layers", "mlp.down_proj cast with a scale a row and a token")


def test_what_one_module_or_training_itself_does_is_found(bare: Model) -> None:
    """One layer's stale projection, one limit of a cache, training's own list, and casts that training leaves out."""
    state, before, name = ModelState.of(bare), older(older(older(older(bare)))), "model.layers.1.mlp.up_proj"
    own, half = logp(state, chunk=1), torch.arange(6).repeat_interleave(40) < 3
    found = attribute(rollout(logp(state.given(name, before.linears[name])), own), bare, before=[("step 3", before)])
    assert found.first is not None
    assert found.first.said == "mlp.up_proj of block 1 of step 3"
    found = attribute(rollout(logp(replace(state, cache=E4M3, cache_top=0.9)), own), bare)
    assert found.first is not None
    assert found.first.cause == "kv-cache"
    found = attribute(rollout(own, torch.where(half, own.view(6, 40).roll(-1, 1).flatten(), own)), bare)
    assert found.first is not None
    assert found.first.cause == "shift"
    recipe = _sharp(trained(under(plain("llama", dtype=torch.bfloat16), rowwise_fp32())))
    full = ModelState.of(recipe)
    left = {n: bare.linears[n] for n in full.linears if n.endswith("gate_proj")}
    training = logp(replace(full, linears={**full.linears, **left}), chunk=1)
    found = attribute(rollout(logp(full), training), recipe)
    assert found.first is not None
    assert found.first.cause == "layers"
    assert "those with mlp.gate_proj in BF16" in found.notes[0]


def test_a_cause_may_hold_in_some_sequences(bare: Model) -> None:
    state = ModelState.of(bare)
    own, some = logp(state, chunk=1), torch.arange(6).repeat_interleave(40) % 3 == 1
    late = own.view(6, 40).roll(1, 1).flatten()
    for cause, engine in (("temperature", logp(state, Sampler(0.7))), ("shift", late)):
        found = attribute(rollout(torch.where(some, engine, own), own), bare)
        assert found.first is not None
        assert found.first.cause == cause, str(found)
        assert found.first.said.endswith(", in 2 of 6 sequences")
        assert found.rest.kl < 0.1 * found.kl


def test_other_kernels_are_no_cause(bare: Model) -> None:
    state = ModelState.of(bare)
    own = logp(state)
    found = attribute(rollout(logp(replace(state, split=True)), own), bare)
    assert found.good
    assert found.rest.cause == "batch variance"
    assert found.kl > 0
    exact = attribute(rollout(own, own.clone(), trained=own.clone()), bare)
    assert (exact.kl, exact.good, exact.equality.equal) == (0, True, True)


def test_the_scale_of_what_runs_together_is_no_cause() -> None:
    """One scale for all inputs is another one where each sequence runs alone."""
    model = _sharp(trained(under(plain("llama", dtype=torch.bfloat16), RECIPES["tensorwise"])))
    shared = ModelState.of(model)
    found = attribute(rollout(logp(shared, chunk=1), logp(shared)), model)
    assert found.good, str(found)
    assert "sequences that run alone" in str(found)


def test_what_nothing_explains_is_said(bare: Model) -> None:
    own = logp(ModelState.of(bare))
    noisy = (own + 0.5 * torch.randn(240, generator=torch.Generator().manual_seed(1))).clamp(max=0)
    found = attribute(rollout(noisy, own), bare)
    assert (found.first, found.rest.cause) == (None, "not-fp8")  # neither side casts
    blind = attribute(rollout(noisy, own))
    assert (blind.first, blind.rest.cause) == (None, "untold")
    assert not blind.good


def test_training_that_is_not_its_checkpoint(bare: Model) -> None:
    state = ModelState.of(bare)
    own = logp(state, chunk=2)
    found = attribute(rollout(own, logp(ModelState.of(older(bare)))), bare)
    assert found.first is not None
    assert found.first.cause == "trainer"
    warm = attribute(rollout(own, logp(state, Sampler(0.6))), bare)  # training divides, and nobody said so
    assert warm.first is not None
    assert warm.first.cause == "temperature"
    assert "divided by 0.6" in warm.notes[0]


def test_a_dump_alone_shows_lists_only(bare: Model) -> None:
    own = logp(ModelState.of(bare))
    shown = {one.cause for one in hypotheses(rollout(own, own), None, None, ())}
    assert shown <= {"shift", "scaled", "padded", "temperature", "processed"}
    found = attribute(rollout(logp(ModelState.of(bare), Sampler(0.5)), own))
    assert found.first is not None
    assert found.first.cause == "temperature"


def test_another_model_is_refused(bare: Model) -> None:
    own = logp(ModelState.of(bare))
    other = -torch.rand(240, generator=torch.Generator().manual_seed(2)) * 9
    with pytest.raises(ValueError, match="another checkpoint, or the tokens are of another tokenizer"):
        attribute(rollout(other, other + 0.01), bare)
    far = replace(rollout(own, own), ids=(torch.full((48,), 256),) * 6)
    with pytest.raises(ValueError, match="the dump has token 256, and the checkpoint 256 tokens"):
        attribute(far, bare)
    head = bare.linears["lm_head"]
    broken = replace(bare, linears={**bare.linears, "lm_head": replace(head, weight=head.weight * torch.nan)})
    with pytest.raises(ValueError, match="log-probabilities that are not finite"):
        attribute(rollout(own, own), broken)
    with pytest.raises(ValueError, match="temperature 0; needs a number above 0"):
        attribute(rollout(own, own), bare, temperature=0)


def test_a_sampler_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

    z, at = torch.randn(6, 256) * 3, (torch.arange(6), torch.full((6,), 12))
    target = IDS[at][:, None]
    for sampler, processor in (
        (Sampler(top_p=0.8), TopPLogitsWarper(0.8)),
        (Sampler(top_k=9), TopKLogitsWarper(9)),
        (Sampler(penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
    ):
        wanted = processor(IDS[:, :12], z.clone()).log_softmax(-1).gather(-1, target)[:, 0]
        kept = wanted.isfinite()
        got = sampler.log_probabilities(z, IDS, at)
        torch.testing.assert_close(got[kept], wanted[kept])
        assert torch.equal(got[~kept], F.log_softmax(z, -1).gather(-1, target)[:, 0][~kept])


def test_the_command(pair: Callable[..., Any], bare: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = pair("llama", "blockwise_fp32", "fp8-block", torch.bfloat16)
    source = trained(one.source)
    theirs = ModelState.of(
        replace(source, linears={n: replace(s, activations=None) for n, s in source.linears.items()})
    )
    ours = logp(ModelState.of(source))
    dump = {"token_ids": IDS, "mask": (torch.arange(48) > 7).expand(6, -1).long(), "lengths": torch.full((6,), 48)}
    for name, values in (("rollout_raw_logprob", logp(theirs)), ("prev_recompute_raw_logprob", ours)):
        dump[name] = torch.cat((torch.zeros(6, 8), values.view(6, 40)), 1)
    torch.save(dump, tmp_path / "dump.pt")

    dumped = ("--logprobs", tmp_path / "dump.pt")
    assert run("parity", "--json", *dumped) == 1
    assert json.loads(capsys.readouterr().out)["first"] is None
    from ottava.serving.export import export

    export(plain("llama", dtype=torch.bfloat16), tmp_path / "bf16", layout="bf16")
    words = (tmp_path / "bf16", one.folder, "-e", "transformers", "--device", "cpu", "--recipe", "blockwise_fp32")
    assert run("parity", *words, *dumped, "-o", tmp_path / "out.json") == 1
    assert "activations" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["first"]["cause"] == "activations"


def test_casts_are_searched(bare: Model) -> None:
    """Scales rounded down, inputs of other blocks, and a cache of one layer that clips; nobody lists them."""
    model = _sharp(trained(under(plain("llama", dtype=torch.bfloat16), rowwise_fp32())))
    state, casts = ModelState.of(model), {n: s for n, s in model.linears.items() if s.cast is not None}
    down = {n: replace(s, cast=quantize(s.weight, QuantizationSpec(E4M3, PER_ROW, "pow2", margin=-1)))
            for n, s in casts.items()}  # fmt: skip
    rows = {n: replace(s, inputs=QuantizationSpec(E5M2, PER_ROW)) for n, s in casts.items()}
    for cause, sides, said in (("weights", down, "rounded down"), ("activations", rows, "E5M2[row]")):
        engine = logp(replace(state, linears={**state.linears, **sides}))
        found = attribute(rollout(engine, logp(state, chunk=1)), model)
        assert found.first is not None
        assert found.first.cause == cause, str(found)
        assert said in found.first.said
    one = attribute(rollout(logp(replace(ModelState.of(bare), cache=E4M3, cached=1, cache_top=0.3)),
                            logp(ModelState.of(bare), chunk=1)), bare)  # fmt: skip
    assert one.first is not None
    assert one.first.said.startswith("keys and values of layer 1 in E4M3, by a scale that holds 0.")


def test_a_limit_of_logits_is_no_temperature(bare: Model) -> None:
    state = ModelState.of(bare)
    found = attribute(rollout(logp(state, Sampler(cap=3.0)), logp(state, chunk=1)), bare)
    assert (found.first, found.rest.cause) == (None, "not-fp8")
    assert found.rest.said.startswith("as if logits z were 3 tanh(z / 3)")
    raw = attribute(rollout(logp(state) / 1.3, logp(state, Sampler(1.3), chunk=1)), bare, temperature=1.3)
    assert raw.first is not None  # of raw logits, and training divides its own
    assert (raw.first.cause, raw.first.said) == ("scaled", "raw log p divided by 1.3")


def test_few_tokens_may_have_most_of_a_kl() -> None:
    """Three of 600 tokens take another expert: a cause that says so is told, one of other tokens is not."""
    draw = torch.Generator().manual_seed(0)
    gap = 0.01 * torch.randn(600, generator=draw)
    gap[[50, 300, 301]] += torch.tensor([0.6, -0.5, 0.7])
    left = gap.clone().index_fill(0, torch.tensor([50, 300, 301]), 0.0)
    noise = 0.01 * torch.randn(600, generator=draw)
    whole = float(nats(gap).mean())
    assert not _real(gap, left + noise, whole)
    assert _real(gap, left + noise, whole, alike=True)
    assert not _real(gap, gap - (gap - left).roll(7) + noise, whole, alike=True)


def test_where_and_how_far_is_found(bare: Model) -> None:
    """Stale prompts, lists elsewhere, tokens left out, one rank's share, and keys whose scale flushes."""
    state, before = ModelState.of(bare), older(older(older(older(bare))))
    own, lists = logp(state, chunk=1), logp(state).view(6, 40)
    twin = Twin(state, torch.bfloat16)
    cached = twin.logits(replace(state, prompt=ModelState.of(before)), IDS, None, torch.full((6,), 8))
    allowed = torch.rand(256, generator=torch.Generator().manual_seed(2)) < 0.7
    kept = twin.logits(state, IDS)[AT[0], AT[1] - 1]
    cases: dict[str, tuple[str, Tensor]] = {
        "cached keys and values of prompts by step 3": (
            "stale",
            Sampler().log_probabilities(cached[AT[0], AT[1] - 1], IDS, AT),
        ),
        "each list moved": ("shift", torch.stack([one.roll(3 * i + 3) for i, one in enumerate(lists)]).flatten()),
        "the lists of sequences are exchanged": ("not-fp8", lists[[1, 0, 3, 2, 5, 4]].flatten()),
        "no token became less likely": (
            "processed",
            kept.log_softmax(-1).gather(-1, IDS[AT][:, None])[:, 0] - kept.softmax(-1)[:, allowed].sum(-1).log(),
        ),
        "self_attn.o_proj of step 3, rank 1 of 2": (
            "stale",
            logp(replace(state, linears={**state.linears, **_half(bare, before, "o_proj")})),
        ),
        "keys in E4M3, by a scale that holds 5.73e+04": (
            "kv-cache",
            logp(replace(state, cache=E4M3, cache_top=57344.0, held="k")),
        ),
    }
    for said, (cause, engine) in cases.items():
        found = rollout(engine, own)
        lab = _Lab(found, bare, 1.0)
        gap = lab.gap(lab.start)
        tried = [*hypotheses(found, bare, None, [("step 3", before)]), *in_part(found, bare, [("step 3", before)])]
        none = torch.zeros_like(gap, dtype=torch.bool)
        some = [one for one in tried if one.cause == cause]
        best = min((x for one in some for x in lab.tries(lab.start, one, gap, none, True)), key=_left)
        assert best.said.startswith(said), best.said
        assert _left(best) < 0.1 * _kl(gap)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_noise_on_short_lists_is_no_cause(size: int) -> None:
    """Among many short answers one has nearly the same numbers, and a moved one has hardly any of its own."""
    noise = 0.3 * torch.randn(200 * size, generator=torch.Generator().manual_seed(1))
    p = -2 * torch.rand(200 * size, generator=torch.Generator().manual_seed(0))
    at = (torch.arange(1, size + 1),) * 200
    found = attribute(Rollout("plain", (torch.arange(size + 1),) * 200, at, (p + noise).clamp(max=0), p))
    assert found.first is None, str(found)
    assert "exchanged" not in str(found)


def _half(new: Model, old: Model, end: str) -> dict[str, Side]:
    """The second half of some linears' columns by an older model."""
    return {n: replace(s, weight=torch.cat((s.weight[:, : s.weight.shape[1] // 2],
                                            old.linears[n].weight[:, s.weight.shape[1] // 2 :]), 1))
            for n, s in new.linears.items() if n.endswith(end)}  # fmt: skip


def test_scales_that_a_kernel_reads_otherwise(bare: Model) -> None:
    model = _sharp(trained(under(plain("llama", dtype=torch.bfloat16), RECIPES["blockwise_fp32"])))
    state = ModelState.of(model)
    own, moved = logp(state), {}
    for suspect in misread({n: s for n, s in model.linears.items() if s.cast is not None}):
        ((guess, said),) = suspect.settings(Guess(state), lambda _: 0.0)
        assert guess.state is not None
        moved[said] = float(kl_of(logp(guess.state), own).mean())
    assert min(moved.values()) > 0
    assert len(moved) > 15

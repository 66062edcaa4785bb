"""Diagnosis of runs that are recorded here from real casts: what fires, what is explained, what was not asked.

Which rule names which fault in watched training is in tests/diagnose/test_faults.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ottava
from ottava.diagnose.diagnose import Diagnosis, diagnose
from ottava.diagnose.rules import RulesError
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

Change = Callable[[str, str, int, Tensor], Tensor]
LAYERS = [f"layers.{i}.mlp.{name}" for i in range(4) for name in ("up_proj", "down_proj")]
STEPS = (1, 2, 4, 8, 12, 16)


def record(
    folder: Path,
    change: Change = lambda layer, tensor, step, x: x,
    *,
    loss: Callable[[int], float] = lambda step: 3.0 - 0.01 * step,
    seed: int = 0,
    last: int = STEPS[-1],
    source: str = "door",
    **manifest: object,
) -> Run:
    generator = torch.Generator().manual_seed(seed)
    formats = {"input": ottava.E4M3, "weight": ottava.E4M3, "grad_output": ottava.E5M2}
    noise = torch.Generator().manual_seed(seed + 50)
    with RunWriter(folder) as writer:
        writer.describe(coverage={"linear": 8, "seen": 8, "skipped": []}, **manifest)
        for step in range(1, last + 1):
            writer.step(step, loss=loss(step) + 0.005 * float(torch.randn((), generator=noise)))
        for step in STEPS:
            for layer in LAYERS:
                for tensor, fmt in formats.items():
                    x = change(layer, tensor, step, torch.randn(64, 128, generator=generator))
                    key = SlotKey(layer, tensor, "row", "tensorwise", fmt.name, "tensor", "fp32", "current", source)
                    writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(fmt))))
    return Run.open(folder)


def massive(layer: str, tensor: str, factor: float = 1e5, since: int = 1) -> Change:
    def change(name: str, which: str, step: int, x: Tensor) -> Tensor:
        if (name, which) == (layer, tensor) and step >= since:
            x[:4] *= factor
        return x

    return change


def ids(result: Diagnosis) -> list[str]:
    return [finding.id for finding in result.findings]


def test_a_clean_run_is_not_called_healthy(tmp_path: Path) -> None:
    result = diagnose(record(tmp_path / "run"))
    assert result.findings == []
    assert result.verdict == "none"
    assert result.sentence.startswith("no FP8 evidence found; coverage 100 %")
    assert "healthy" not in json.dumps(result.to_dict())
    assert not result.fails("warning")


def test_a_diverging_run_without_a_finding_says_so(tmp_path: Path) -> None:
    result = diagnose(record(tmp_path / "run", loss=lambda s: 3 - 0.02 * s + 0.2 * max(s - 40, 0), last=80))
    assert result.findings == []
    assert (
        "But the loss leaves the band of its own noise at step 41, and its running median stays outside."
        in result.sentence
    )


def test_massive_tokens_in_fc2_come_with_evidence_and_remedies_in_order_of_cost(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive("layers.1.mlp.down_proj", "input", since=4))
    result = diagnose(run)
    first = result.findings[0]
    assert ids(result) == ["N1"]
    assert (first.layers, first.tensors, first.steps) == (["layers.1.mlp.down_proj"], ["input"], [4, 16])
    assert first.severity == result.verdict == "critical"
    evidence = first.evidence[0]
    measured = run.table().where(layer=first.layers[0], tensor="input", step=evidence.step).metric(evidence.metric)
    assert evidence.value == measured[0]
    assert any(text.startswith("N3 ") for text in first.also)
    rungs = [remedy["rung"] for remedy in first.remedies]
    assert rungs == sorted(rungs)
    assert all("Current scaling" not in remedy["text"] for remedy in first.remedies)  # the run has it
    patches = [remedy["patch"].get("ottava", "") for remedy in first.remedies]
    assert 'override("layers.1.mlp.down_proj", fprop=ottava.get_recipe("rowwise").fprop, wgrad=None)' in patches[0]
    assert 'override("layers.1.mlp.down_proj", fprop=None, wgrad=None)' in patches[1]  # of equal cures FP8 comes first
    assert result.fails("critical")


def test_one_noisy_look_among_many_is_no_finding(tmp_path: Path) -> None:
    def once(layer: str, tensor: str, step: int, x: Tensor) -> Tensor:
        return massive("layers.1.mlp.down_proj", "input")(layer, tensor, step, x) if step == 8 else x

    assert diagnose(record(tmp_path / "run", once)).findings == []


def test_support_raises_and_refutation_lowers_confidence(tmp_path: Path) -> None:
    rule = "rules:\n  - {id: MINE, title: t, stage: numeric, when: looks > 0, cause: c, refute_by: r, confidence: 0.5"
    run = record(tmp_path / "run")
    for extra, expected in (
        ("", 0.5),
        (", support: [looks > 1]", 0.6),
        (", support: [looks > 99]", 0.47),
        (", refuted_when: looks > 1", 0.1),
        (", support: [answer.downstream == 'fine']", 0.5),
    ):
        path = tmp_path / "mine.yaml"
        path.write_text(rule + extra + "}\n", encoding="utf-8")
        result = diagnose(run, rules=path)
        assert result.findings[0].confidence == expected


def test_bugs_come_before_configuration_before_numerics(tmp_path: Path) -> None:
    run = record(
        tmp_path / "run",
        massive("layers.1.mlp.down_proj", "input"),
        loss=lambda s: 3 + 0.1 * max(s - 20, 0),
        last=60,
        config={"optimizer_cpu_offload": True},
    )
    with RunWriter(run.path, append=True) as writer:
        writer.event(8, "check", check="stale_weight", layer=LAYERS[0], tensor="weight", value=12.0)
    result = diagnose(Run.open(run.path))
    assert ids(result) == ["B2", "C1", "N1"]
    assert result.findings[0].evidence[0].value == 12.0


def test_a_bug_explains_the_noise_that_it_makes(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive("layers.1.mlp.down_proj", "input"))
    with RunWriter(run.path, append=True) as writer:
        writer.event(1, "check", check="stored_scale", layer="layers.1.mlp.down_proj", tensor="input", value=90.0)
    result = diagnose(Run.open(run.path))
    assert ids(result) == ["B6"]
    assert any(text.startswith("N1 ") for text in result.findings[0].also)


def test_not_tested_says_what_is_needed(tmp_path: Path) -> None:
    result = diagnose(record(tmp_path / "run"))
    needs = {rule["id"]: rule["needs"] for rule in result.untested}
    assert "max_logit" in needs["N9"]
    assert "BF16 twin" in needs["T2"]
    assert "scaling delayed or guarded" in needs["N5"]
    assert "more than one rank" in needs["B1"]
    assert "--answer downstream=" in needs["C7"]
    assert "B2" not in needs  # doors were watched, and no check failed
    assert result.tested == 39 - len(needs) or result.tested > 0
    hooked = diagnose(record(tmp_path / "hooked", source="hook"))
    assert "checks at the doors" in {r["id"]: r["needs"] for r in hooked.untested}["B2"]


def test_answers_are_heard(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    assert ids(diagnose(run, answers={"bisect_gemm": "wgrad"})) == ["N12b"]
    assert ids(diagnose(run, answers={"fp8_inputs_bf16_gemm": "cures"})) == ["N15"]
    assert ids(diagnose(run, answers={"bisect_cause": "accumulation"})) == ["N15"]
    both = diagnose(run, answers={"fp8_inputs_bf16_gemm": "cures", "bisect_cause": "quantization"})
    assert both.findings[0].confidence < diagnose(run, answers={"bisect_cause": "accumulation"}).findings[0].confidence
    assert ids(diagnose(run, answers={"downstream": "all_tasks"})) == ["C7"]
    assert ids(diagnose(run, answers={"shared_state": "yes"})) == ["B8"]
    with pytest.raises(RulesError, match="unknown question"):
        diagnose(run, answers={"downstrm": "fine"})


def test_the_triage_tree_is_walked_with_what_is_known(tmp_path: Path) -> None:
    calm, twin = record(tmp_path / "calm", last=60), record(tmp_path / "twin", seed=1, last=60)
    answers = {step["id"]: step["answer"] for step in diagnose(calm).questions}
    assert (answers["T0"], answers["T1"], answers["T2"]) == ("unknown", "no", "unknown")
    answers = {step["id"]: step["answer"] for step in diagnose(calm, baseline=twin).questions}
    assert answers["T2"] == "no"
    assert "T4" in answers
    spiky = record(tmp_path / "spiky", loss=lambda s: 3 + 2 * (s in (40, 50)), last=60)
    path = {step["id"]: step["answer"] for step in diagnose(spiky, baseline=twin).questions}
    assert (path["T1"], path["T1b"]) == ("yes", "yes")
    assert ids(diagnose(spiky, baseline=twin)) == ["T1"]
    sick = record(tmp_path / "sick", loss=lambda s: 3 + 0.1 * max(s - 20, 0), last=60)
    path = {step["id"]: step["answer"] for step in diagnose(sick, answers={"fp8_inputs_bf16_gemm": "same"}).questions}
    assert (path["T2"], path["T2a"], path["T2b"], path["T3"]) == ("yes", "yes", "no", "unknown")
    answers = {"fp8_inputs_bf16_gemm": "cures", "bisect_cause": "accumulation"}
    path = {step["id"]: step["answer"] for step in diagnose(sick, answers=answers).questions}
    assert (path["T2b"], path["T2c"], path["T3"]) == ("yes", "yes", "unknown")


def test_a_gap_to_the_twin_is_the_recipe_only_where_no_cast_is_ill(tmp_path: Path) -> None:
    twin = record(tmp_path / "twin", last=60)
    gap = {"loss": lambda s: 3.05 - 0.01 * s, "seed": 1, "last": 60}
    assert ids(diagnose(record(tmp_path / "gap", **gap), baseline=twin)) == ["N18"]  # type: ignore[arg-type]
    ill = record(tmp_path / "ill", massive("layers.1.mlp.down_proj", "input"), **gap)  # type: ignore[arg-type]
    assert ids(diagnose(ill, baseline=twin)) == ["N1"]
    refuted = diagnose(Run.open(tmp_path / "gap"), baseline=twin, answers={"gap_above_seed_spread": "no"})
    assert refuted.findings[0].confidence < 0.3


def test_simulated_recipes_beyond_the_first_are_what_ifs(tmp_path: Path) -> None:
    run = record(
        tmp_path / "run", massive(LAYERS[1], "input"), source="hook", settings={"recipes": ["mxfp8", "tensorwise"]}
    )
    assert diagnose(run).findings == []


def test_ranks_that_disagree(tmp_path: Path) -> None:
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")
    key = SlotKey(LAYERS[0], "input", "row", "delayed", "E4M3", "tensor", "fp32", "delayed", "door")
    x = torch.randn(64, 64)
    for rank, scale in ((0, 100.0), (1, 101.0)):
        with RunWriter(tmp_path / "run", rank=rank) as writer:
            writer.tally(1, key, measure(x, ottava.quantize(x, spec, scale=torch.tensor([[scale]]))))
    result = diagnose(Run.open(tmp_path / "run"))
    assert ids(result)[0] == "B1"
    value = next(e.value for e in result.findings[0].evidence if e.metric == "scale_rank_octaves")
    assert value == pytest.approx(math.log2(1.01), rel=1e-3)


def test_an_empty_run_says_that_nothing_was_seen(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"):
        pass
    result = diagnose(Run.open(tmp_path / "run"))
    assert result.findings == []
    assert "coverage unknown" in result.sentence


def test_the_result_is_plain_json(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive("layers.1.mlp.down_proj", "input"))
    values = diagnose(run).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    fields = [
        "id",
        "title",
        "severity",
        "layers",
        "tensors",
        "steps",
        "evidence",
        "cause",
        "confidence",
        "refute_by",
        "remedies",
        "source",
    ]
    assert set(values["findings"][0]) >= set(fields)
    assert set(values) >= {"verdict", "sentence", "coverage_pct", "findings", "questions"}


def test_evidence_is_what_was_measured_not_what_was_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "rules:\n  - {id: MINE, title: t, stage: bug, cause: c, refute_by: r, confidence: 0.5,\n"
        "     when: rms > 0.5 and looks >= 2 and age >= 0}\n"
    )
    result = diagnose(record(tmp_path / "run"), rules=tmp_path / "mine.yaml")
    assert {e.metric for e in result.findings[0].evidence} == {"rms"}
    assert "overage" not in result.sentence  # a field of its own, where there is a finding

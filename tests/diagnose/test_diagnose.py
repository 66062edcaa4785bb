"""Laws, experiments and differences on recorded facts: what is the answer, and what is no accusation.

Every law is broken by a record that differs from a healthy one in nothing else. Real trainings are in test_trained.py.
"""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ottava
from ottava.diagnose.diagnose import CONFIDENCE, Diagnosis, diagnose
from ottava.diagnose.laws import LAWS
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import EXPERIMENTS, TRACE, SlotKey
from ottava.record.writer import RunWriter

STEPS = 40
NAMES = ("embed.weight", "layers.0.fc1.weight", "layers.0.fc2.weight", "layers.1.fc1.weight", "head.weight")
HELD = {"optimizer": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "gradient": "torch.float32", "state": ["torch.float32"]}


def healthy(step: int) -> dict[str, float]:
    noise = 0.02 * np.random.default_rng(step).standard_normal()
    return {
        "loss": 4.0 - 0.02 * step + noise,
        "lr": 1e-3,
        "lr/0": 1e-3,
        "beta1/0": 0.9,
        "beta2/0": 0.95,
        "eps/0": 1e-8,
        "weight_decay/0": 0.1,
        "grad_norm": 1.0 + noise,
        "grad_norm_used": 1.0,
        "forwards": 1.0,
        "backwards": 1.0,
        "optimizer_steps": 1.0,
        "eval_forwards_in_train_mode": 0.0,
        "input_hash": 100.0 + step,
        "label_hash": 300.0 + step,
        "kept_gradient": 0.0,
        "written": 0.0,
        "extra_steps": 0.0,
        "restarts": 0.0,
        "shared_parameters": 0.0,
        "labels_ignored_pct": 0.0,
        "labels_equal_pct": 8.0,
        "input_nonfinite": 0.0,
    }


def rises(step: int, at: int = 20) -> dict[str, float]:
    return {"loss": 4.0 - 0.02 * min(step, at) + 0.3 * max(step - at + 1, 0)}


def moves(name: str, step: int) -> dict[str, float]:
    return {"ratio": 0.01, "still": 0.0, "gradient": 1e-3, "weight": 0.02, "spread": 1.0, "written": 0.0}


def parameters(**held: Any) -> list[dict[str, Any]]:
    facts = [{"name": n, "shape": [64, 64], "dtype": "float32", "trains": True, "held": HELD} for n in NAMES]
    return [{**p, "held": held.get(str(p["name"]).replace(".", "_"), HELD)} for p in facts]


def write_steps(
    writer: RunWriter,
    facts: Mapping[str, Any],
    change: Callable[[int], Mapping[str, float]],
    move: Callable[[str, int], Mapping[str, float]],
) -> None:
    writer.describe(**facts)
    for step in range(1, STEPS + 1):
        writer.step(step, **{**healthy(step), **change(step)})
        if step in (1, 2, 4, 8, 16, 32):
            rows = [{**moves(n, step), **move(n, step)} for n in NAMES]
            columns = {k: [row[k] for row in rows] for k in rows[0]}
            writer.training(step, "updates", parameters=list(NAMES), **columns)


def record(
    folder: Path,
    change: Callable[[int], Mapping[str, float]] = lambda step: {},
    *,
    move: Callable[[str, int], Mapping[str, float]] = lambda name, step: {},
    experiments: tuple[Mapping[str, Any], ...] = (),
    sizes: Mapping[tuple[str, str], Any] | None = None,
    casts: bool = False,
    recipe: str = "tensorwise",
    ranks: Mapping[int, Mapping[str, Any]] | None = None,
    modes: tuple[Mapping[str, Any], ...] = (),
    trace: tuple[Mapping[str, Any], ...] = (),
    **manifest: Any,
) -> Run:
    facts = {"parameters": parameters(), "weights": {n: f"{i:016x}" for i, n in enumerate(NAMES)}, "classes": 64}
    facts |= {"cast": {"ran": casts}, "framework": [], "softmax_twice": False, "tied": []}
    facts |= {"coverage": {"linear": 4, "seen": 4, "skipped": []}} | manifest
    for rank, how in (ranks or {}).items():
        with RunWriter(folder, rank=rank) as writer:
            write_steps(writer, facts, how.get("change", change), how.get("move", move))
    with RunWriter(folder) as writer:
        write_steps(writer, facts, change, move)
        for mode in modes:
            writer.training(1, **{"kind": "mode", **mode})
        for layer in ("layers.0.fc1", "layers.0.fc2", "layers.1.fc1"):
            for tensor in ("input", "weight", "grad_output"):
                x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
                x *= (sizes or {}).get((layer, tensor), 1.0)
                spec = ottava.QuantizationSpec(ottava.E4M3)
                key = SlotKey(layer, tensor, "row", recipe, "E4M3", "tensor", "fp32", "current", "door")
                key = key if casts else key._replace(source="hook")
                writer.tally(1, key, measure(x, ottava.quantize(x, spec)))
    lines = "".join(json.dumps(line) + "\n" for line in experiments)
    (folder / EXPERIMENTS).write_text(lines, encoding="utf-8")
    (folder / TRACE).write_text("".join(json.dumps(line) + "\n" for line in trace), encoding="utf-8")
    return Run.open(folder)


def pairs(made_by: str, trains: bool = True) -> tuple[Mapping[str, Any], ...]:
    """A trace with a difference of (8, 1), as a call made it, and (8)."""
    column, square = ["f32[8, 1]", 7, 0.1, 1.0, 0.2, 0], ["f32[8, 8]", 9, 0.1, 1.0, 0.2, 0]
    calls = [
        [made_by, 0, 0, ["f32[8, 4]"], [], [column]],
        ["__sub__", 1, 0, ["f32[8, 1]", "f32[8]"], [0], [square], 2 * trains],
    ]
    places = [["train.py", 7, "step", "y = head(x)", ""], ["train.py", 9, "step", "(y - wanted).square()", ""]]
    return ({"step": 1, "full": False, "places": places, "modules": [""], "calls": calls},)


def first_loss(value: float) -> tuple[Mapping[str, Any], ...]:
    """A trace with a cross-entropy over 64 classes."""
    call = ["cross_entropy", 0, 0, ["f32[8, 64]", "i64[8]"], [], [["f32[]", 7, value, value, value, 0]], 2]
    places = [["train.py", 9, "step", "F.cross_entropy(y, wanted)", ""]]
    return ({"step": 1, "full": False, "places": places, "modules": [""], "calls": [call]},)


def first(result: Diagnosis) -> str:
    return (result.findings or result.notes)[0].id if result.findings or result.notes else ""


def test_a_healthy_record_breaks_no_law_and_is_not_called_healthy(tmp_path: Path) -> None:
    for casts in (False, True):
        result = diagnose(record(tmp_path / str(casts), casts=casts))
        assert (result.findings, result.notes, result.verdict, result.event) == ([], [], "none", "")
        assert "healthy" not in json.dumps(result.to_dict())
    assert result.sentence.startswith("No fault found in 40 steps.")


def shadow(step: int, error: float, **more: Any) -> dict[str, Any]:
    line = {"step": step, "kind": "shadow", "mode": "real", "why": "schedule", "recipe": "tensorwise", "norm": 1.0}
    return {**line, "reproduces": True, "error": error, "noise": error * 2, "bias": 0.0, "worst": [], **more}


def trial(step: int, after: float, tenth: float = 0.9) -> dict[str, Any]:
    """A step that was made, and a tenth of it, on a batch with a loss of 1."""
    return shadow(step, 0.02, mode="simulated", loss=1.0, loss_after=after, loss_tenth=tenth)


def longer(step: int, wide: float = 0.5) -> dict[str, Any]:
    """A step that was made, and a hundred times of it, on a batch with a loss of 1."""
    return shadow(step, 0.02, mode="simulated", loss=1.0, loss_after=0.99, longer=100, loss_longer=wide)


BREAKS: dict[str, dict[str, Any]] = {
    "D1": {"change": lambda s: {"input_nonfinite": float(s > 12)}},
    "D3": {"change": lambda s: {"labels_ignored_pct": 100.0 * (s % 2)}},
    "D4": {"change": lambda s: {"input_hash": 1.0, "label_hash": 1.0}},
    "D6": {"change": lambda s: {f"labels_ahead_{k}_pct": 100.0 if k == 2 else 1.0 for k in range(3)}},
    "O1": {"change": lambda s: {"optimizer_steps": 0.0}},
    "O2": {"change": lambda s: {"lr": 0.0 if s > 20 else 1e-3, "lr/0": 0.0 if s > 20 else 1e-3}},
    "O3": {"parameters": parameters(layers_0_fc1_weight=None)},
    "O4": {
        "move": lambda n, s: {"gradient": 0.0} if n.startswith("layers") else {},
        "experiments": (
            {"step": 5, "kind": "shadow", "mode": "simulated", "silent": [n for n in NAMES if n.startswith("layers")]},
        ),
    },
    "O5": {"change": lambda s: {"kept_gradient": 1.0}},
    "O7": {"change": lambda s: {"written": float(s in (9, 17))}},
    "O8": {
        "move": lambda n, s: {"still": 0.97},
        "parameters": [{**p, "dtype": "bfloat16"} for p in parameters()],
    },
    "O12": {"change": rises, "experiments": tuple(trial(step, 3.0) for step in (5, 10, 20))},
    "R1": {"ranks": {1: {"move": lambda n, s: {"weight": 0.03} if s > 4 and n != "embed.weight" else {}}}},
    "O14": {
        "change": lambda s: {**rises(s), "forwards": 4.0, "backwards": 4.0, "loss_share": 4.0, "accumulated": 3.0},
        "parameters": [{**p, "held": {**HELD, "optimizer": "SGD"}} for p in parameters()],
        "experiments": tuple(trial(5 + k, 3.0) for k in range(3)),
    },
    "O13": {
        "change": lambda s: {"grad_norm": 317.0, "grad_norm_used": 1.0},
        "experiments": tuple(longer(step) for step in (5, 10, 20)),
    },
    "M6": {
        "change": lambda s: {"train_forwards_in_eval_mode": float(s > 20)},
        "modes": ({"gradients": True, "training": True, "recipe": "", "random": ["BatchNorm1d"]},),
    },
    "M7": {"trace": pairs("linear")},
    "M8": {
        "change": lambda s: {f"labels_ahead_{k}_pct": 100.0 * (k == 1) for k in range(3)},
        "experiments": ({"step": 5, "kind": "shadow", "mode": "simulated", "sees_later": True, "mixes": False},),
    },
    "M9": {"experiments": ({"step": 5, "kind": "shadow", "mode": "simulated", "sees_later": None, "mixes": True},)},
    "M10": {"experiments": ({"step": 5, "kind": "shadow", "mode": "simulated", "mixes": False, "padding": True},)},
    "M1": {"modes": ({"kind": "load", "own": 4, "given": 4, "mine": "0.weight", "theirs": "module.0.weight"},)},
    "M3": {"softmax_twice": True},
    "M4": {"change": rises, "trace": first_loss(80.0)},
    "M5": {
        "change": lambda s: {"loss": float("nan") if s > 25 else 4.0 - 0.02 * s},
        "experiments": (
            {
                "step": 26,
                "kind": "nonfinite",
                "module": "layers.1",
                "operation": "aten.log",
                "operand": "",
                "direction": "forward",
            },
        ),
    },
}


def test_short_steps_are_told_from_those_of_a_schedule(tmp_path: Path) -> None:
    """A step of which a hundred help a hundred times as much: in all trials or from one on, and what shortens it."""
    clipped, still = (lambda s: {"grad_norm": 317.0, "grad_norm_used": 1.0}), (lambda s: {})

    def said(name: str, steps: dict[int, float], change: Any = clipped) -> str:
        result = diagnose(record(tmp_path / name, change, experiments=tuple(starmap(longer, steps.items()))))
        return result.sentence if result.findings and first(result) == "O13" else ""

    short = {10: 0.5, 20: 0.5, 30: 0.5}
    assert "too short in 2 of 3 trials: at step 30" in said("late", {**short, 10: 0.9})
    assert not said("a cosine ends with short steps", {10: 0.9, 20: 0.9, 30: 0.9, 38: 0.5})
    assert not said("a warm-up begins with them", {5: 0.5, 10: 0.5, 20: 0.9, 30: 0.9})
    assert not said("no lower end", {10: -9.0, 20: -9.0, 30: -9.0})
    assert not said("a careful rate", short, still)  # a note
    assert "too short in 3 of 3" in said("a guess", short, lambda s: {"loss": 4.16})
    assert "Clipping shortens the gradient 317 times in the median step." in said("clipped", short)
    # norms 1.3 before clipping to 1, with the factor of a GradScaler inside; no length that was tried helps any more
    scaled = lambda s: {"grad_norm": 1.3, "grad_norm_used": 2.0**-16, "grad_scale": 2.0**16}  # noqa: E731
    assert "the GradScaler's factor, 65,500, is still in" in said("scaled", {10: 1.0, 20: 1.0, 30: 1.0}, scaled)
    unscaled = lambda s: {"grad_norm": 317.0, "grad_norm_used": 1.0, "grad_scale": 2.0**16}  # noqa: E731
    assert "GradScaler" not in said("unscaled first", short, unscaled)
    rates = {s: 0.1 * 0.8**s for s in range(1, 41)}
    falls = lambda s: {"lr": rates[s], "lr/0": rates[s]}  # noqa: E731
    for name, steps in (("falls", short), ("falls to nothing", {29: 0.99, 31: 1.0})):
        assert "; the largest is 0.08." in said(name, steps, falls)
    restarts = {s: 0.1 if s % 14 < 10 else 1e-3 for s in range(1, 41)}
    assert not said("restarts", {12: 0.5, 26: 0.5}, lambda s: {"lr": restarts[s], "lr/0": restarts[s]})
    grows = "rises up to the end of the run: it is {} at step 17, and {} at last."
    assert grows.format("0.017", "0.04") in said("rises", short, lambda s: {"lr": 1e-3 * s, "lr/0": 1e-3 * s})
    epochs, ends = (said(f"turn {t}", short, lambda s, t=t: {"lr": 1e-3 * (1 + (s > t))}) for t in (20, 10))
    assert grows.format("0.001", "0.002") in epochs
    assert not ends  # a warm-up that ends


def test_a_write_that_the_loss_pays_for_is_a_finding(tmp_path: Path) -> None:
    """Weights that are written every eighth step: a note, and a finding where the loss rises there each time, if no new
    optimizer begins a new task there."""
    for name, rise, new, severity in (("a", 0.0, 0.0, "note"), ("b", 0.5, 0.0, "warning"), ("c", 0.5, 1.0, "note")):
        rows = [{"loss": 4.0 - 0.02 * s + rise * (s % 8 == 1), "restarts": new * (s % 8 == 1)} for s in range(99)]
        change = lambda s, rows=rows: {**rows[s], "written": float(s % 8 == 1)}  # noqa: E731
        result = diagnose(record(tmp_path / name, change))
        told = {f.id: f.severity for f in (*result.findings, *result.notes)}
        assert told["O7"] == severity
        assert ("the loss rises at these steps" in result.sentence) == (severity == "warning")


def test_each_law_is_broken_by_what_it_says_and_by_nothing_else(tmp_path: Path) -> None:
    assert sorted(BREAKS) == sorted(law.id for law in LAWS)
    for law, how in BREAKS.items():
        result = diagnose(record(tmp_path / law, **how))
        assert first(result) == law, (law, first(result), result.sentence)
        assert result.fp8 == "none"
        assert all(f.stage != "fp8" for f in result.findings)


def test_micro_batches_of_which_the_last_alone_counts(tmp_path: Path) -> None:
    """Backwards that add to nothing, and whose sum is not what arrives; but no probe, and no gradient made by hand."""

    def said(name: str, *, backwards: float = 4.0, added: float = 0.0, used: float = 1.5, error: float = 0.8) -> bool:
        change = lambda s: {"backwards": backwards, "accumulated": added, "grad_norm": 1.5, "grad_norm_used": used}  # noqa: E731
        lines = tuple(shadow(step, 0.01, tail="replayed", replay_error=error) for step in (5, 10))
        result = diagnose(record(tmp_path / name, change, experiments=lines))
        return "none adds to the gradient of the one before" in result.sentence

    assert said("cleared before each backward")
    assert not said("a second pass", backwards=2.0)
    assert not said("accumulated", added=3.0)
    assert not said("put together by hand", used=1.2)
    assert not said("what arrives is the sum", error=0.01)


ABLATION = {
    "step": 10,
    "kind": "ablation",
    "set": [{"layer": "layers.0.fc2", "gemm": "fprop", "operand": "input"}],
    "error_before": 0.6,
    "error_after": 0.03,
    "trials": 9,
}


def test_fp8_is_blamed_by_an_experiment_only(tmp_path: Path) -> None:
    guilty = diagnose(record(tmp_path / "a", rises, casts=True, experiments=(shadow(10, 0.6), ABLATION)))
    assert (guilty.fp8, guilty.verdict, first(guilty)) == ("guilty", "critical", "FP8")
    assert guilty.findings[0].title == "FP8 casts hurt the gradient: X of layers.0.fc2's fprop"
    assert "falls from 60 % to 3 %" in " ".join(guilty.findings[0].tried)
    assert 'override("layers.0.fc2", "bf16")' in guilty.findings[0].remedies[0]["patch"]["ottava"]
    # the same error without a rise of the loss is a warning, inside the noise of the batch it is nothing
    assert diagnose(record(tmp_path / "b", casts=True, experiments=(shadow(10, 0.6),))).verdict == "warning"
    quiet = shadow(10, 0.6, noise=0.1)
    assert diagnose(record(tmp_path / "c", rises, casts=True, experiments=(quiet,))).fp8 == "innocent"
    innocent = diagnose(record(tmp_path / "d", rises, casts=True, experiments=(shadow(10, 0.04),)))
    assert innocent.fp8 == "innocent"
    assert innocent.sentence.endswith("differs by at most 4 % from that without (level 15 %).")
    # what has blown up before it was looked at says nothing about who began
    blown = (shadow(10, 0.04), shadow(22, 0.9, norm=1e6))
    assert diagnose(record(tmp_path / "e", rises, casts=True, experiments=blown)).fp8 == "unknown"
    assert (
        diagnose(record(tmp_path / "f", rises, casts=False, experiments=(shadow(10, 0.6, mode="simulated"),))).fp8
        == "none"
    )


def test_a_cast_that_loses_its_tensor_is_told_whatever_the_whole_gradient_says(tmp_path: Path) -> None:
    """One large parameter hides all others; a cast that lost its own once, not at last, met an odd batch."""
    for name, errors, said in (
        ("most", (0.3, 0.9, 1.0), "guilty"),
        ("at last", (0.05, 0.05, 0.05, 0.98), "guilty"),
        ("once", (0.05, 0.9, 0.05), "innocent"),
    ):
        lines = tuple(
            shadow(10 * (i + 1), 0.08, sites={"train.py:7": {"error": e, "flushed": 0.9 * e, "clipped": 0.0}})
            for i, e in enumerate(errors)
        )
        answer = diagnose(record(tmp_path / name, casts=True, experiments=lines))
        assert (answer.fp8, answer.verdict) == (said, "warning" if said == "guilty" else "none")
        if said == "guilty":
            assert answer.findings[0].title == "FP8 casts lose a tensor: the cast at train.py:7"


def test_a_loss_that_is_in_its_band_without_casts_says_who_raised_it(tmp_path: Path) -> None:
    """Behind the event: the weights are sound, for without casts their loss is what it was, or near the good run's."""
    good = record(tmp_path / "good", casts=True, experiments=(shadow(5, 0.02),))
    tried = (3.6, None, "inside the band"), (5.0, None, ""), (3.9, good, "casts make"), (5.2, good, "")
    for exact, beside, words in tried:
        lines = (shadow(5, 0.02), shadow(30, 0.7, loss=7.0, loss_without=exact))
        answer = diagnose(record(tmp_path / f"{exact}", rises, casts=True, experiments=lines), baseline=beside)
        assert answer.fp8 == ("guilty" if words else "unknown"), answer.sentence
        assert words in answer.sentence


def test_a_loss_that_stays_at_a_guess_asks_whether_the_last_layer_trains(tmp_path: Path) -> None:
    flat = lambda s: {"loss": math.log(64) - 0.01}  # noqa: E731
    for name, said in (("head.weight", "O3"), ("layers.0.fc1.weight", "")):
        mine = [{**p, "trains": p["name"] != name} for p in parameters()]
        answer = diagnose(record(tmp_path / name, flat, parameters=mine))
        assert first(answer) == said
        assert ("gives the classes does not train: head.weight." in answer.sentence) == bool(said)


def test_a_gradient_that_is_not_finite_comes_before_the_loss(tmp_path: Path) -> None:
    lost = lambda s: {"loss": math.nan if s > 24 else 4.0 - 0.02 * s, "grad_norm": math.nan if s > 23 else 1.0}  # noqa: E731
    assert "The gradient of step 24 is not finite, and its loss was" in diagnose(record(tmp_path / "a", lost)).sentence


def test_single_batches_are_no_event_of_a_run_without_a_finding(tmp_path: Path) -> None:
    """The running median stays; a rise that it follows is told."""
    for name, steps, said in (("one", (20,), ""), ("several", (20, 21, 22, 23, 24), "The loss leaves")):
        answer = diagnose(record(tmp_path / name, lambda s, steps=steps: {"loss": 4.0 - 0.02 * s + (s in steps)}))
        assert (answer.findings, answer.event[:15]) == ([], said)


def test_a_trial_behind_the_event_does_not_say_who_began(tmp_path: Path) -> None:
    """Casts of a model that went wrong for another reason hurt, too."""
    good = record(tmp_path / "good", casts=True, experiments=(shadow(10, 0.05),))
    late = record(
        tmp_path / "bad",
        lambda s: {**rises(s, 4), "lr": 0.1, "lr/0": 0.1},
        casts=True,
        experiments=(shadow(5, 0.6),),
    )
    result = diagnose(late, baseline=good)
    assert (first(result), result.fp8) == ("DIFF", "unknown")
    assert result.findings[0].title.startswith("The learning rate is 100 times")
    # where nothing else explains it, the casts are the answer
    alone = record(tmp_path / "alone", lambda s: rises(s, 4), casts=True, experiments=(shadow(5, 0.6),))
    assert first(diagnose(alone)) == "FP8"


def test_a_step_that_was_too_long_began_and_the_casts_follow(tmp_path: Path) -> None:
    """A loss leaves and comes back: before it a step overshoots and the casts are harmless; behind it they hurt."""

    def jump(step: int) -> dict[str, float]:
        return {"loss": 4.0 - 0.02 * step + 3.0 * (3 <= step < 15)}

    def run(name: str, *early: dict[str, Any], late: tuple[int, ...] = (5, 10)) -> Diagnosis:
        lines = (*early, *(shadow(step, 3.7, loss=2.0, loss_after=1.9) for step in late), shadow(20, 0.02))
        return diagnose(record(tmp_path / name, jump, casts=True, experiments=lines))

    long = {"why": "the step made its own batch worse", "loss": 4.0, "loss_after": 7.0, "loss_tenth": 3.9}
    began = run("began", shadow(2, 0.05, **long))
    assert (first(began), began.fp8, began.verdict) == ("O12", "innocent", "warning")
    assert "The loss left at step 3, so the casts did not begin it. At step 5 they move it by 370 %" in began.tried[0]
    # without the overshoot the cause is not known, and the casts are still not it
    calm = run("calm", shadow(2, 0.05))
    assert (calm.findings, calm.fp8) == ([], "innocent")
    # in a step that casts made too long they come first; so do they where the loss had come back, or no trial is near
    assert [first(run("casts", shadow(2, 0.6, **long)))] == ["FP8"]
    assert first(run("back", shadow(2, 0.05), late=(16, 18))) == "FP8"
    assert first(run("far", late=(10,))) == "FP8"


def test_casts_that_hurt_the_good_run_as_much_do_not_part_the_two(tmp_path: Path) -> None:
    """As of a normalisation that the bad run left out, in a model of which FP8 asks much in both."""
    good = record(tmp_path / "good", casts=True, experiments=(shadow(10, 0.23, noise=0.7),))
    bad = record(tmp_path / "bad", rises, casts=True, experiments=(shadow(10, 0.25, noise=0.7), ABLATION))
    worse = record(tmp_path / "worse", rises, casts=True, experiments=(shadow(10, 0.6), ABLATION))
    answer = diagnose(bad, baseline=good)
    assert answer.fp8 == "innocent"
    assert "The casts of the good run move its gradient by 23 %" in answer.tried[0]
    assert [diagnose(bad).fp8, diagnose(worse, baseline=good).fp8] == ["guilty", "guilty"]


def test_a_high_learning_rate_is_more_than_chance(tmp_path: Path) -> None:
    """A batch of a noisy game may get worse by a healthy step: in a trial of four, as the bound allows."""
    worse, better = trial(5, 3.0), trial(5, 0.9)
    for i, (trials, said) in enumerate(
        (((1, 1), []), ((1, 1, 1), ["O12"]), ((1, 1, 1, 0), []), ((1, 1, 1, 1, 0), ["O12"]))
    ):
        lines = tuple({**(worse if bad else better), "step": 5 + k} for k, bad in enumerate(trials))
        run = record(tmp_path / str(i), rises, casts=True, experiments=lines)
        assert [f.id for f in diagnose(run).findings] == said, trials


def test_a_loss_that_comes_back_a_part_of_the_way_is_said_so(tmp_path: Path) -> None:
    loss = lambda s: {"loss": 9.0 - 0.4 * s if s <= 20 else 5.0 if s < 24 else 1.9}  # noqa: E731
    part = diagnose(record(tmp_path / "part", loss))
    said = (
        "The loss leaves the band of its own noise at step 21 and comes back to 1.9 only; before, its median was 1.8."
    )
    assert part.event == said


def test_a_law_that_the_good_run_keeps_comes_before_the_place(tmp_path: Path) -> None:
    """It says what the place does. A law that both break says nothing of the difference."""
    others = [{**p, "held": None if p["name"] == NAMES[0] else HELD} for p in parameters()]

    good = record(tmp_path / "good", trace=pairs("linear", trains=False))
    bad = record(tmp_path / "bad", rises, trace=pairs("unsqueeze", trains=False), parameters=others)
    both = record(tmp_path / "both", trace=pairs("linear", trains=False), parameters=others)
    ids = [[f.id for f in diagnose(bad, baseline=one).findings] for one in (good, both)]
    assert [names[0] for names in ids] == ["O3", "DIFF"]


def test_what_a_clean_training_does_is_no_finding(tmp_path: Path) -> None:
    """A teacher without gradients, a second optimizer for a second task, missing values, a warm restart, a jump of the
    loss that comes back."""
    teacher = [{**p, "reached": p["held"] is not None} for p in parameters(layers_0_fc1_weight=None)]
    jump = lambda s: {"loss": 3.9 - 0.02 * s + 2.0 * (20 <= s < 23)}  # noqa: E731
    ways: dict[str, dict[str, Any]] = {
        "teacher": {"parameters": teacher},
        "tasks": {"change": lambda s: {**jump(s), "restarts": float(s in (10, 20, 30))}},
        "missing": {"change": lambda s: {**jump(s), "input_nonfinite": 3.0}},
        "restart": {"change": lambda s: {**rises(s), **dict.fromkeys(("lr", "lr/0"), 1e-3 / ((s - 1) % 10 + 1))}},
        "reset": {"change": lambda s: {**jump(s), "written": float(s == 20)}},
        "jump": {
            "change": lambda s: {**jump(s), **dict.fromkeys(("grad_norm", "grad_norm_used"), 1.0 + 99 * (s == 20))}
        },
        "rises": {"change": rises},
        "two losses": {"change": lambda s: {"loss": 80.0 + (3.0 * max(s - 20, 0))}, "trace": first_loss(4.0)},
        "every pair": {"trace": pairs("unsqueeze")},
        "a generator of data": {"trace": pairs("linear", trains=False)},
        "a policy": {"change": rises, "experiments": tuple(trial(step, 3.0, 1.1) for step in (5, 10, 20))},
        "nothing tried": {"move": lambda n, s: {"gradient": 0.0} if n.startswith("layers") else {}},
        "frozen statistics": {**BREAKS["M6"], "change": lambda s: {"train_forwards_in_eval_mode": 1.0}},
        "a long step": {
            "change": lambda s: {"loss": 4.0 - 0.02 * s + 2.0 * (s == 20)},
            "experiments": ({**trial(19, 3.0), "why": "the step made its own batch worse"},),
        },
        "hidden tokens": {
            "change": lambda s: {f"labels_ahead_{k}_pct": 10.0 for k in range(3)},
            "experiments": ({"step": 5, "kind": "shadow", "mode": "simulated", "sees_later": True, "mixes": False},),
        },
        "given back": {
            "change": lambda s: {f"labels_ahead_{k}_pct": 5.0 + 95.0 * (k == 0) for k in range(3)},
            "experiments": ({"step": 5, "kind": "shadow", "mode": "simulated", "sees_later": None},),
        },
        "next tokens": {"change": lambda s: {f"labels_ahead_{k}_pct": 100.0 for k in range(3)}},
    }  # fmt: skip
    for name, how in ways.items():
        result = diagnose(record(tmp_path / name, **how))
        assert (result.findings, result.verdict) == ([], "none"), (name, result.sentence)
        assert result.sentence.startswith("No fault found in 40 steps."), (name, result.sentence)


def test_a_trial_of_several_is_no_accusation(tmp_path: Path) -> None:
    """Of a healthy run an odd batch comes above the level; a batch that fits has a gradient of almost zero."""
    fine = tuple(shadow(step, 0.05) for step in (5, 10, 20))
    ways = {
        "odd": ((*fine, shadow(30, 0.25, noise=0.6)), "innocent"),
        "often": ((*fine, shadow(30, 0.25, noise=0.6), shadow(34, 0.25, noise=0.6)), "guilty"),
        "far": ((*fine, shadow(30, 0.6)), "guilty"),
        "fitted": ((*fine, shadow(30, 0.6, norm=1e-5)), "innocent"),
        "unknown": ((*fine, shadow(30, 0.25, noise=None)), "unknown"),
    }
    for name, (lines, part) in ways.items():
        assert diagnose(record(tmp_path / name, casts=True, experiments=lines)).fp8 == part, name


def test_a_replay_stands_above_a_shadow_step(tmp_path: Path) -> None:
    def arms(ran: float, without: float, reproduces: bool = True) -> dict[str, Any]:
        losses = {"as it ran": ran, "high precision": without, "blockwise": without}
        named = [{"name": n, "losses": [3.6, value]} for n, value in losses.items()]
        return {"step": 25, "kind": "replay", "from": 15, "reproduces": reproduces, "differs": None, "arms": named}

    for i, (line, part) in enumerate(
        [(arms(6.0, 3.6), "guilty"), (arms(6.0, 6.0), "innocent"), (arms(6.0, 3.6, False), "innocent")]
    ):
        result = diagnose(record(tmp_path / str(i), rises, casts=True, experiments=(shadow(10, 0.05), line)))
        assert result.fp8 == part, line
        if part == "guilty":
            assert result.findings[0].remedies[0]["text"] == "Train under blockwise: the loss is 3.6."


def test_a_damaged_cast_without_an_experiment_is_a_suspicion(tmp_path: Path) -> None:
    x = torch.randn(32, 64)
    x[:2] *= 1e5
    run = record(tmp_path / "run", rises, casts=True)
    with RunWriter(run.path, append=True, step=STEPS) as writer:
        key = SlotKey("layers.0.fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        writer.tally(2, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    result = diagnose(Run.open(run.path))
    assert (first(result), result.verdict, result.fp8) == ("CAST", "warning", "unknown")
    assert "Nothing was tried, so this is no proof." in result.findings[0].cause


def test_an_operand_that_is_not_its_cast_comes_first(tmp_path: Path) -> None:
    run = record(tmp_path / "run", rises, casts=True)
    with RunWriter(run.path, append=True, step=STEPS) as writer:
        writer.event(8, "check", check="stale_weight", layer="layers.0.fc1", tensor="weight", value=3.0)
    result = diagnose(Run.open(run.path))
    assert (first(result), result.verdict) == ("CHECK", "critical")


DIFFERS: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"change": lambda s: {**rises(s), "lr": 1.0, "lr/0": 1.0}}, "1,000 times that of the good run"),
    "decay": ({"change": lambda s: {**rises(s), "weight_decay/0": 9.0}}, "weight decay differs: 0.1 and 9"),
    "optimizer": (
        {
            "change": rises,
            "parameters": parameters(**{n.replace(".", "_"): {**HELD, "optimizer": "SGD"} for n in NAMES}),
        },
        "AdamW and SGD",
    ),
    "held": ({"change": rises, "parameters": parameters(head_weight=None)}, "head.weight"),
    "weights": (
        {"change": rises, "weights": {n: f"{i if i else 99:016x}" for i, n in enumerate(NAMES)}},
        "embed.weight",
    ),
    "program": (
        {"change": lambda s: {**rises(s), "written": float(s in (12, 15))}},
        "This run has weights that something else than an optimizer wrote in step 12, the good one has none. The two "
        "differ in 2 steps.",
    ),
    "count": ({"change": lambda s: {**rises(s), "backwards": 1.0 + (s > 13)}}, "Step 14 has 2 backwards"),
    "labels": ({"change": lambda s: {**rises(s), "label_hash": 300.0 + s + (s > 10)}}, "labels differ from step 11 on"),
}


def test_what_differs_from_a_good_run_is_named_in_the_order_of_computation(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    for name, (how, said) in DIFFERS.items():
        result = diagnose(record(tmp_path / name, **how), baseline=good)
        told = [f"{f.title} {f.cause}" for f in result.findings if f.stage in ("difference", "law")]
        assert said in " ".join(told), (name, result.sentence)
        assert all(f.stage != "fp8" for f in result.findings)
    assert diagnose(record(tmp_path / "same"), baseline=good).findings == []


def test_patches_are_those_of_the_framework_that_ran(tmp_path: Path) -> None:
    how = BREAKS["O12"]
    for frameworks, names in ((["transformers", "accelerate"], ["transformers", "torch"]), ([], ["torch"])):
        result = diagnose(record(tmp_path / str(len(frameworks)), framework=frameworks, **how))
        assert list(result.findings[0].remedies[0]["patch"]) == names
    asked = diagnose(record(tmp_path / "asked", **how), framework="megatron").findings[0].remedies[0]["patch"]
    assert list(asked) == ["megatron"]


def test_a_confidence_is_what_the_first_looks_gave() -> None:
    """`python benchmarks/blind.py --count`, over the answers and their judgements as they are stored."""
    blind = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "blind.py"))
    assert dict(CONFIDENCE) == blind["counted"]()


def test_casts_that_are_set_otherwise_come_first(tmp_path: Path) -> None:
    """A recipe of the same name is compared field by field, a layer format by format."""

    def run(name: str, length: int, head: dict[str, Any], error: float, *change: Callable[[int], Any]) -> Run:
        recipes = {"delayed": {"name": "delayed", "fprop": {"lhs": {"format": "E4M3", "amax_history_len": length}}}}
        casts = {"fc": {"input": {"format": "E4M3"}}, "head": head}
        layers = [{"name": n, "recipe": "delayed", "casts": c} for n, c in casts.items()]
        lines = (shadow(10, error),)
        return record(tmp_path / name, *change, casts=True, experiments=lines, recipes=recipes, layers=layers)

    good = run("good", 4, {}, 0.6)
    assert diagnose(run("same", 4, {}, 0.6), baseline=good).findings == []
    longer = diagnose(run("longer", 1024, {}, 0.05), baseline=good)
    assert (first(longer), longer.fp8) == ("DIFF", "unknown")
    assert longer.findings[0].title == "The casts are not set as in the good run"
    assert "The recipe 'delayed' has amax_history_len 1024 in fprop.lhs, in the good run 4." in longer.sentence
    four = diagnose(run("four", 4, {"input": {"format": "E2M1", "granularity": "1x16"}}, 0.05), baseline=good)
    assert four.findings[0].layers == ["head"]
    assert "head: operands are cast to E2M1[1x16], in the good run to nothing." in four.sentence
    # the good run's casts hurt as much: that clears casts that are set alike, and no others
    hurts = [diagnose(run(f"hurts {n}", n, {}, 0.6, rises), baseline=good) for n in (4, 1024)]
    assert [one.fp8 for one in hurts] == ["innocent", "guilty"]


def test_a_recipe_that_is_all_that_differs_is_tried_by_the_good_run(tmp_path: Path) -> None:
    """Behind the event a trial does not say who began; a good run does, if its casts are calm and all else is equal."""

    def run(name: str, recipe: str, error: float, change: Callable[[int], Mapping[str, float]]) -> Run:
        layers = [{"name": "fc", "recipe": recipe, "casts": {"input": {"format": "E4M3"}}}]
        tried = shadow(5, 0.02), shadow(30, error)
        return record(tmp_path / name, change, casts=True, recipe=recipe, experiments=tried, layers=layers)

    other = lambda s: {**rises(s), "input_hash": (100.0 if s == 1 else 900.0) + s}  # noqa: E731
    good = run("good", "mxfp8", 0.05, lambda s: {})
    guilty = diagnose(run("recipe", "mxfp4", 0.9, other), baseline=good)
    assert (guilty.fp8, first(guilty)) == ("guilty", "FP8")
    assert "Nothing else does, so the good run shows that the casts do it." in guilty.sentence
    remedy = guilty.findings[0].remedies[0]
    assert (remedy["text"], remedy["trial"]) == ("Train under mxfp8: the good run does.", {"recipe": "mxfp8"})
    rate = run("rate", "mxfp4", 0.9, lambda s: {**other(s), "lr": 0.01, "lr/0": 0.01})
    for bad, beside in ((run("of both", "mxfp4", 0.9, other), run("as bad", "mxfp8", 0.9, lambda s: {})), (rate, good)):
        assert diagnose(bad, baseline=beside).fp8 != "guilty"
    assert first(diagnose(run("data", "mxfp8", 0.05, other), baseline=good)) == "DIFF"


def test_a_cast_that_parts_two_runs_is_never_cleared(tmp_path: Path) -> None:
    """Guilty where no shadow step turned it off and all before is equal, else unknown; other code is no cast."""

    def calls(scale: float, kind: str = "float8_e4m3fn") -> tuple[Mapping[str, Any], ...]:
        codes, place = [f"{kind}[64, 64]", int(scale), 0.1 * scale, scale, 0.2, 0], ["train.py", 7, "cast", "", ""]
        call = ["to", 0, 0, ["f32[64, 64]", kind], [], [codes]]
        return ({"step": 1, "full": False, "places": [place], "modules": [""], "calls": [call]},)

    tried = (shadow(5, 0.02, sites={"train.py:7, called at train.py:30": {"error": 0.02}}),)
    for name, kind, lines, other, said in (
        ("untried", "float8_e4m3fn", (), {}, "guilty"),
        ("tried", "float8_e4m3fn", tried, {}, "unknown"),
        ("other weights", "float8_e4m3fn", (), {"weights": {NAMES[0]: "f" * 16}}, "unknown"),
        ("no cast", "bf16", (shadow(5, 0.02),), {}, "innocent"),
    ):
        good = record(tmp_path / f"{name} good", casts=True, experiments=lines, trace=calls(1.0, kind))
        bad = record(tmp_path / name, rises, casts=True, experiments=lines, trace=calls(2.0, kind), **other)
        result = diagnose(bad, baseline=good)
        assert result.fp8 == said, (name, result.fp8, result.sentence)
        assert ("innocent" in result.sentence) == (said == "innocent")
        assert "train.py:7" in result.sentence or other
        cures = [one["name"] for found in result.findings if found.id == "FP8" for one in found.remedies]
        assert cures[:1] == ["good_code"] * (said == "guilty")  # the good run casts at the place, too, and is healthy


def test_updates_that_rounding_loses_are_named(tmp_path: Path) -> None:
    low = [{**p, "dtype": "bfloat16"} for p in parameters()]
    for error, found in ((0.9, "O8"), (0.4, "")):
        line = {"step": 13, "from": 5, "kind": "optimizer", "error": error, "converts": False}
        result = diagnose(record(tmp_path / f"twin {error}", parameters=low, experiments=(line,)))
        assert first(result) == found, (error, result.sentence)


def test_a_conversion_that_nobody_tried_is_not_cleared(tmp_path: Path) -> None:
    """An average of the weights, or a moment, in FP8: the gradient says nothing of it."""
    elsewhere = {"step": 5, "kind": "conversion", "where": "train.py:7"}
    for error, ends in (
        (None, "No experiment tries that."),
        (0.0, "formula takes them, 0 % apart."),
        (0.03, "formula takes them, 3 % apart."),
    ):
        lines = (shadow(5, 0.01), shadow(10, 0.01), elsewhere)
        if error is not None:
            lines += ({"step": 14, "kind": "optimizer", "from": 6, "error": error, "converts": True},)
        result = diagnose(record(tmp_path / f"{error}", casts=True, experiments=lines))
        assert (result.fp8, result.findings) == ("unknown", [])
        assert "outside the model, too: train.py:7." in result.sentence
        assert ends in result.sentence
    assert diagnose(record(tmp_path / "none", casts=True, experiments=lines[:2])).fp8 == "innocent"


def test_a_state_in_fp8_that_takes_its_changes_not_along_is_guilty(tmp_path: Path) -> None:
    for name, shares, part in (
        ("lost", (0.01, 0.15, 0.9), "guilty"),
        ("taken", (1.0, 0.99, 0.01), "innocent"),  # a moment that has come to rest
        ("once", (0.0,), "innocent"),
    ):
        kept = tuple({"step": 2 + i, "kind": "stored", "sites": {"ema.py:9": x}} for i, x in enumerate(shares))
        answer = diagnose(record(tmp_path / name, casts=True, experiments=(shadow(5, 0.01), *kept)))
        assert answer.fp8 == part, answer.sentence
        if part == "guilty":
            assert answer.findings[0].title == "FP8 casts hurt the updates: the cast at ema.py:9"
            assert (
                "In 2 of 3 trials what the cast at ema.py:9 keeps from step to step moves by at most 15 %"
                in answer.sentence
            )
            assert answer.findings[0].remedies[0]["name"] == "stored"


def test_casts_that_hurt_late_or_for_a_moment_began_nothing(tmp_path: Path) -> None:
    """Ranks that part from the look at step 8 on, casts that hurt from step 30 on; scales that settle, or do not."""
    late = tuple(shadow(step, error) for step, error in ((2, 0.04), (7, 0.04), (30, 0.6), (33, 0.6), (36, 0.6)))
    ranks = {1: {"move": lambda n, s: {"weight": 0.03} if s > 4 and n != "embed.weight" else {}}}
    alone = diagnose(record(tmp_path / "alone", casts=True, experiments=late))
    beside = diagnose(record(tmp_path / "ranks", casts=True, experiments=late, ranks=ranks))
    assert (alone.fp8, beside.fp8, first(beside)) == ("guilty", "innocent", "R1")
    assert "The fault below began at step 8, so the casts did not begin it." in beside.tried[0]
    four = tuple(shadow(5 * k, 0.6 if k == 4 else 0.05, recipe="mxfp4") for k in range(1, 5))
    assert diagnose(record(tmp_path / "four bits", casts=True, experiments=four)).fp8 == "unknown"
    jump = lambda s: {"loss": 4.0 - 0.02 * s + 2.0 * (25 <= s < 28)}  # noqa: E731
    for name, errors, part in (("settles", (0.4, 0.2, 0.1), "innocent"), ("stays", (0.4, 0.2, 0.3), "guilty")):
        lines = tuple(shadow(step, error) for step, error in zip((3, 5, 10), errors, strict=True))
        assert diagnose(record(tmp_path / name, jump, casts=True, experiments=lines)).fp8 == part, name


def test_labels_that_turn_within_a_run_are_told_with_their_step(tmp_path: Path) -> None:
    """Shifted twice from step 25 on: without a good run, and beside one that has the same inputs."""

    def run(name: str, turn: int) -> Run:
        def change(s: int) -> dict[str, float]:
            ahead = {f"labels_ahead_{k}_pct": 100.0 * (k == (1 if s < turn else 2)) for k in range(3)}
            return {
                **ahead,
                "loss": 4.0 - 0.02 * s + (3.0 if s >= turn else 0.0),
                "input_hash": 7.0 * s,
                "label_hash": 3.0 * s + (s >= turn),
            }

        return record(tmp_path / name, change)

    bad, good = run("bad", 25), run("good", 99)
    alone = diagnose(bad)
    assert first(alone) == "D6"
    assert "From step 25 on the labels ask at each place for the token after the next one" in alone.sentence
    assert diagnose(good).findings == []
    beside = diagnose(bad, baseline=good)
    said = " ".join(f"{one.title}. {one.cause} {one.remedies}" for one in (*beside.findings, *beside.notes))
    assert "The inputs are those of the good run, and the labels are not" in said
    assert "in 100 % of the steps from there" in said
    assert "collator" in said

"""The trainer: it learns, repeats itself to the bit, survives kill -9, and does not disturb its neighbours."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import warm
from command import ended
from ottava.base.errors import PoisonError
from ottava.base.settings import ConfigError
from ottava.recipe import RECIPES, Recipe, get_recipe
from ottava.record.reader import Run
from ottava.train.checkpoint import CheckpointError, high_precision_weights, read_checkpoint
from ottava.train.config import TrainConfig, load_config
from ottava.train.data import DataError
from ottava.train.loop import Trainer
from ottava.train.run_folder import StepRecord
from train_samples import SHORT, STORED, TINY, curve, saved_curve, tiny, whole_curve


@pytest.mark.parametrize(
    "before, after, said",
    [
        (
            "microbatches=1",
            "microbatches=2",
            "microbatches was 1 and is 2 now: the run continues, but its bits may differ",
        ),
        ("microbatches=4", "microbatches=2", "microbatches was 4 and is 2 now"),
        ("optimizer.amax_every=1", "optimizer.amax_every=1", ""),
    ],
)
def test_a_run_of_an_older_version_or_other_microbatches_resumes(
    before: str,
    after: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The older version's checkpoints have its hash of the settings: microbatches counted, amax_every was unknown."""
    config, older = tiny(before), dict[str, Any](tiny(before)._decisive())
    del older["optimizer"]["amax_every"]
    older |= {"microbatches": config.microbatches} if config.microbatches > 1 else {}
    digest = hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(TrainConfig, "digest", lambda self: digest)
        first = Trainer(config, tmp_path / "run")
        first.advance(4)
        first.close()
    settings = tmp_path / "run" / "config.yaml"
    settings.write_text("".join(s for s in settings.read_text().splitlines(True) if "amax_every" not in s))
    resumed = Trainer(tiny(after), tmp_path / "run", resume=True)
    assert resumed.step == 4
    assert said in caplog.text
    whole = whole_curve(before)
    resumed.advance()
    same = curve(resumed.history) == whole
    assert same == (before == after)
    assert resumed.history[-1].loss == pytest.approx(whole[-1].loss, rel=0.05)


def test_run_folder_tells_the_whole_story(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny("recipe=tensorwise")
    trainer = Trainer(config, run)
    assert (trainer.step, trainer.done, trainer.history) == (0, False, [])
    trainer.advance(5)
    records = trainer.advance()
    assert (trainer.step, trainer.done) == (12, True)
    assert trainer.advance() == []
    assert [record.step for record in records] == list(range(6, 13))
    assert [record.step for record in trainer.history if record.val_loss is not None] == [5, 10, 12]
    assert {record.tokens for record in trainer.history} == {4 * 32}
    assert saved_curve(run) == curve(trainer.history)
    assert load_config(run / "config.yaml") == config
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000008.safetensors",
        "step-000012.safetensors",
    ]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["conversion"]["converted"] == list(trainer.conversion.converted)
    assert manifest["resumed"] == []
    rows = json.loads((run / "receipt.json").read_text())["rows"]
    ran = {(row["layer"], row["gemm"]) for row in rows if row["fp8"]}
    assert ran == {(layer, gemm) for layer in trainer.conversion.converted for gemm in ("fprop", "dgrad", "wgrad")}


def test_weight_decay_spares_the_gains(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), tmp_path / "run")
    decay = {id(p): group["weight_decay"] for group in trainer._optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.1), name


def test_two_trainers_in_turn_train_as_if_alone(tmp_path: Path) -> None:
    """nvfp4 rounds its gradients stochastically, from the global generator that both share."""
    recipes = ("nvfp4", "delayed", "bf16")
    together = {recipe: Trainer(tiny(f"recipe={recipe}"), tmp_path / recipe) for recipe in recipes}
    while not all(trainer.done for trainer in together.values()):
        for trainer in together.values():
            trainer.advance(random.randint(1, 3))
            torch.rand(7)
    for recipe, trainer in together.items():
        assert curve(trainer.history) == whole_curve(f"recipe={recipe}"), recipe


def test_trainer_leaves_the_global_random_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    trainer = Trainer(tiny("recipe=nvfp4"), tmp_path / "run")
    trainer.advance(2)
    trainer.evaluate()
    assert torch.equal(torch.rand(4), expected)


def stochastic_forward() -> Recipe:
    """nvfp4 that rounds its input stochastically, so that even evaluation draws random numbers."""
    nvfp4 = RECIPES["nvfp4"]
    assert nvfp4.fprop.lhs is not None
    lhs = replace(nvfp4.fprop.lhs, rounding="stochastic")
    return replace(nvfp4, name="stochastic", fprop=replace(nvfp4.fprop, lhs=lhs))


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], stochastic_forward()], ids=lambda recipe: recipe.name)
def test_evaluation_leaves_no_trace(recipe: Recipe, tmp_path: Path) -> None:
    config = tiny().model_copy(update={"recipe": recipe.to_dict()})
    quiet, curious = (Trainer(config, tmp_path / name) for name in ("quiet", "curious"))
    quiet.advance()
    while not curious.done:
        curious.advance(1)
        first, again = curious.evaluate(), curious.evaluate()
        assert first == again
        curious.evaluate(high_precision=True)
    assert curve(curious.history) == curve(quiet.history)
    assert curious.history[-1].val_loss == curious.evaluate()


def test_high_precision_evaluation_is_that_of_the_same_weights_under_bf16(tmp_path: Path) -> None:
    trainer = Trainer(tiny("recipe=tensorwise"), tmp_path / "fp8")
    trainer.advance()
    plain = Trainer(tiny("recipe=bf16"), tmp_path / "bf16")
    plain.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate(high_precision=True) == plain.evaluate() == plain.evaluate(high_precision=True)
    assert trainer.evaluate() != trainer.evaluate(high_precision=True)


def test_seed_decides_weights_and_data_but_not_the_validation_text(tmp_path: Path) -> None:
    runs = {name: Trainer(tiny(f"seed={name[0]}"), tmp_path / name) for name in ("0a", "0b", "1a")}
    for trainer in runs.values():
        trainer.advance(2)
    assert curve(runs["0a"].history) == curve(runs["0b"].history)
    assert runs["0a"].history[0].loss != runs["1a"].history[0].loss
    runs["1a"].model.load_state_dict(runs["0a"].model.state_dict())
    assert runs["1a"].evaluate(high_precision=True) == runs["0a"].evaluate(high_precision=True)


def test_divergence_stops_the_run_before_it_reaches_the_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = Trainer(tiny("recipe=bf16"), run)
    trainer.advance(2)
    with torch.no_grad():
        trainer.model.get_parameter("norm.weight")[0] = math.inf
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    (record,) = trainer.advance()
    assert (trainer.diverged, trainer.done, trainer.step) == (True, True, 2)
    assert math.isnan(record.loss)
    assert record.step == 3
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["loss"] is None
    assert math.isnan(StepRecord.from_json(last).loss)
    assert (run / "receipt.json").exists()


def test_folder_in_use_is_refused_unless_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(tiny(), run).advance(5)
    with pytest.raises(ConfigError, match="is not empty; give another run folder, or continue its run with --resume"):
        Trainer(tiny(), run)
    resumed = Trainer(tiny("evaluation.every=3"), run, resume=True)
    assert resumed.step == 4
    manifest = json.loads((run / "manifest.json").read_text())
    assert [entry["at_step"] for entry in manifest["resumed"]] == [4]
    resumed.close()
    with pytest.raises(ConfigError, match=r"other settings:\n  optimizer.eps: 1e-08, now 1e-06\n  seed: 0, now 1\n"):
        Trainer(tiny("seed=1", "optimizer.eps=1e-6"), run, resume=True)


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="is not empty" if not resume else "holds no run"):
            Trainer(tiny(), tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "ms_eden"])  # state in buffers; in the random generator
def test_resumed_run_passes_over_a_damaged_checkpoint(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, config = tmp_path / "run", tiny(f"recipe={recipe}")
    Trainer(config, run).advance(10)
    newest = run / "checkpoints" / "step-000008.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 11, "lo')  # what a killed process may leave
    with caplog.at_level("INFO", logger="ottava"):
        resumed = Trainer(config, run, resume=True)
    assert resumed.step == 4
    assert "step-000008.safetensors: is cut short" in caplog.text
    assert "resumed from" in caplog.text
    assert "step-000004.safetensors" in caplog.text
    resumed.advance()
    assert saved_curve(run) == curve(resumed.history) == whole_curve(f"recipe={recipe}")


def test_changed_text_and_lost_metrics_are_refused(tmp_path: Path) -> None:
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_bytes(b"To be, or not to be, that is the question. " * 200)
    config = tiny(f"data.path={text}")
    Trainer(config, run).advance(5)
    text.write_bytes(text.read_bytes().replace(b"not", b"yes"))
    with pytest.raises(CheckpointError, match="comes from a run with another text"):
        Trainer(config, run, resume=True)
    text.write_bytes(text.read_bytes().replace(b"yes", b"not"))
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="does not hold steps 1 to 4"):
        Trainer(config, run, resume=True)


def test_predicted_scales_start_calibrated_on_the_weights_of_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed before its first checkpoint, even in its first moment, the run goes on as if it had not been."""
    first = Trainer(tiny("recipe=bf16"), tmp_path / "first")
    first.advance()
    config = tiny("recipe=delayed", f"init={tmp_path / 'first'}", "checkpoint.every=0")
    with caplog.at_level("INFO", logger="ottava"):
        trainer = Trainer(config, tmp_path / "second")
    assert "starts from the weights of" in caplog.text
    assert "without its optimizer states, scaling histories and step count" in caplog.text
    assert "calibrated the predicted scales on the first 16 batches" in caplog.text
    weights = zip(trainer.model.parameters(), first.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    histories = [value for name, value in trainer.model.state_dict().items() if name.endswith("amax_history")]
    assert histories
    assert all(bool((history > 0).all()) for history in histories)
    trainer.advance(2)
    trainer.close()
    again = Trainer(config, tmp_path / "second", resume=True)  # from the checkpoint of step 0
    assert again.step == 0
    expected = curve(again.advance())
    assert saved_curve(tmp_path / "second")[:2] == curve(trainer.history)
    (record,) = (json.loads(line) for line in (tmp_path / "second" / "amax.jsonl").read_text().splitlines()[1:2])
    assert record["step"] == 1
    third = Trainer(config, tmp_path / "third")
    third.close()
    next((tmp_path / "third" / "checkpoints").iterdir()).unlink()  # killed a moment before it was written
    assert curve(Trainer(config, tmp_path / "third", resume=True).advance()) == expected


def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """Weights that do not fit, and a text that is too short."""
    Trainer(tiny("recipe=bf16"), tmp_path / "first").advance(4)
    (tmp_path / "text").write_bytes(b"short")
    init = f"init={tmp_path / 'first'}"
    for settings, error, words in (
        ([init, "model.layers=2"], CheckpointError, "does not fit"),
        ([f"init={tmp_path / 'none'}"], CheckpointError, "does not exist"),
        ([f"data.path={tmp_path / 'text'}"], DataError, "a sequence needs 33"),
    ):
        with pytest.raises(error, match=words):
            Trainer(tiny(*settings), tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "text"]


def test_folder_is_held_until_the_run_is_done_or_closed(tmp_path: Path) -> None:
    trainer = Trainer(tiny(), tmp_path)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on"):
            Trainer(tiny(), tmp_path, resume=resume)
    trainer.advance(5)
    trainer.close()
    resumed = Trainer(tiny(), tmp_path, resume=True)
    resumed.advance()
    assert Trainer(tiny(), tmp_path, resume=True).done
    assert resumed.done


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of a file as POSIX does")
def test_run_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    import resource

    trainer = Trainer(tiny(), tmp_path / "run")
    trainer.advance(5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "run" / "metrics.jsonl").stat().st_size + 1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written") as stopped:
            trainer.advance()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-000008.safetensors" in str(stopped.value)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 9, "l')  # the disk was full in the middle of a line
    trainer.close()
    resumed = Trainer(tiny(), tmp_path / "run", resume=True)
    assert resumed.step == 4
    resumed.advance()
    assert saved_curve(tmp_path / "run") == curve(resumed.history) == whole_curve()


TRAIN = """
import sys
from pathlib import Path
from typing import Any
from ottava.train.config import load_config
from ottava.train.loop import Trainer
Trainer(load_config(None, sys.argv[2:]), Path(sys.argv[1]), resume=True).advance()
"""
KILLED = """
import os, signal, sys, threading, time
def kill():
    while longer >= 0 and not (os.path.exists(metrics) and os.path.getsize(metrics) > longer):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
metrics, longer, seconds = sys.argv[1] + "/metrics.jsonl", int(sys.argv.pop()), float(sys.argv.pop())
threading.Thread(target=kill, daemon=True).start()
"""
"""Put in front of TRAIN. The process kills itself, since another one may sleep for long on a busy machine."""


def start(run: Path, config: list[str], *killed: object) -> warm.Warm:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # small tensors on many threads only wait for each other
    return warm.Warm(["-c", (KILLED if killed else "") + TRAIN, str(run), *config, *map(str, killed)], env=one_thread)


def test_killed_at_any_moment_the_curve_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """Checkpoints after every second step, so that half of the time the process dies while it writes one."""
    config = [*TINY, "recipe=delayed", "steps=60", "checkpoint.every=2", "evaluation.every=9"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    uninterrupted = start(whole, config)
    chance = random.Random("delayed")
    metrics = run / "metrics.jsonl"
    for kill in range(3):
        # the first kill hits the start; the others wait until it has trained a little
        longer = (metrics.stat().st_size if metrics.exists() else 0) + 500 if kill else -1
        killed = start(run, config, chance.uniform(0.0, 0.05), longer).wait()
        assert killed.returncode == -9, killed.stderr
    last = start(run, config)
    for process in (last, uninterrupted):
        ended = process.wait()
        assert ended.returncode == 0, ended.stderr
    assert len(saved_curve(run)) == 60
    assert saved_curve(run) == saved_curve(whole)
    newest = Path("checkpoints", "step-000060.safetensors")
    resumed, direct = read_checkpoint(run / newest), read_checkpoint(whole / newest)
    assert resumed.metadata == direct.metadata  # the hash of all tensors is part of it


@pytest.mark.parametrize("name", ["metrics.jsonl", "amax.jsonl"])
def test_a_number_that_changed_in_the_records_is_refused(name: str, tmp_path: Path) -> None:
    """The lines have no checksum of their own; the checkpoint has the hash of all of them."""
    trainer = Trainer(tiny(*SHORT, "recipe=delayed"), tmp_path)
    trainer.advance(2)
    trainer.close()
    path = tmp_path / name
    text = path.read_text()
    key = '"loss": ' if name == "metrics.jsonl" else '"amax": ['
    at = text.index(key) + len(key) + 2  # the first decimal
    assert text[at].isdigit()
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    with pytest.raises(ValueError, match=f"{name}: .* was edited|{name}: .* was written") as refused:
        Trainer(tiny(*SHORT, "recipe=delayed"), tmp_path, resume=True)
    assert "Restore the file" in str(refused.value)
    path.write_text(text)
    assert Trainer(tiny(*SHORT, "recipe=delayed"), tmp_path, resume=True).step == 2


def test_a_run_leaves_fp4_late_whole_or_forward_only(tmp_path: Path) -> None:
    """At a checkpoint of a run with the whole schedule: learning rates stay those of the run, and so do its steps until
    then; the next loss is that of the same weights under the other recipe."""
    whole = Trainer(tiny(*SHORT, "recipe=nvfp4", "steps=6", "checkpoint.every=4"), tmp_path / "fp4")
    whole.advance()
    fp8, fp4 = (get_recipe(name).to_dict() for name in ("tensorwise", "nvfp4"))
    forward = {"name": "fp8_forward", "fprop": fp8["fprop"], "dgrad": fp4["dgrad"], "wgrad": fp4["wgrad"]}
    losses = {}
    for name, recipe in {"bf16": "bf16", "tensorwise": "tensorwise", "forward": json.dumps(forward)}.items():
        start = f"init={tmp_path / 'fp4' / 'checkpoints' / 'step-000004.safetensors'}"
        late = Trainer(tiny(*SHORT, f"recipe={recipe}", "steps=6", start, "carry=optimizer"), tmp_path / name)
        assert curve(late.history) == curve(whole.history[:4])
        losses[name] = [record.loss for record in late.advance()]
        assert [record.lr for record in late.history] == [record.lr for record in whole.history]
    assert losses["forward"][0] == losses["tensorwise"][0]  # the same forward, other gradients
    assert losses["forward"][1] != losses["tensorwise"][1]
    assert len({whole.history[4].loss, *(own[0] for own in losses.values())}) == 3
    cells = json.loads((tmp_path / "forward" / "receipt.json").read_text())["rows"]
    formats = {row["gemm"]: row["operands"].partition("[")[0] for row in cells if row["fp8"]}
    assert formats == {"fprop": "E4M3", "dgrad": "E2M1", "wgrad": "E2M1"}


def test_a_run_switches_to_fp8_and_back_in_its_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BF16 -> FP8 weights with predicted scales -> BF16: steps, weights, masters and moments go on; the curve, too."""
    first = Trainer(tiny(*SHORT, "recipe=bf16", "steps=4"), tmp_path / "a")
    first.advance()
    there = tiny(*SHORT, "recipe=delayed", *STORED, f"init={tmp_path / 'a'}", "carry=optimizer", "rewarm=2", "steps=8")
    with caplog.at_level("INFO", logger="ottava"):
        second = Trainer(there, tmp_path / "b")
    assert "continues from step 4 of" in caplog.text
    assert "calibrated the predicted scales on the first 16 batches" in caplog.text
    assert "the learning rate rises to its schedule in 2 steps" in caplog.text
    assert second.step == 4
    assert curve(second.history) == curve(first.history)
    own = high_precision_weights(read_checkpoint(next((tmp_path / "b" / "checkpoints").glob("*4.safetensors"))))
    for name, parameter in first.model.named_parameters():
        error = (own[name].float() - parameter.detach()).norm() / parameter.detach().norm()
        assert float(error) < 2.0**-8, name
        state = second._optimizer.state[dict(second.model.named_parameters())[name]]
        assert float(state["step"]) == 4
        assert state["exp_avg"].dtype == torch.float8_e4m3fn
    records = second.advance(2)
    second.close()
    schedule = [there.optimizer.learning_rate * there.schedule.factor(step, 8) for step in (5, 6, 7)]
    assert [r.lr for r in records] == [schedule[0] * (1 / 3), schedule[1] * (2 / 3)]
    again = Trainer(there, tmp_path / "b", resume=True)
    assert [r.lr for r in again.advance(1)] == [schedule[2]]
    again.advance()
    back = tiny(*SHORT, "recipe=bf16", f"init={tmp_path / 'b'}", "carry=optimizer", "steps=10")
    third = Trainer(back, tmp_path / "c")
    assert third.step == 8
    masters = high_precision_weights(read_checkpoint(tmp_path / "b" / "checkpoints" / "step-000008.safetensors"))
    for name, parameter in third.model.named_parameters():
        assert torch.equal(parameter, masters[name].float())
        assert third._optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert [record.step for record in third.advance()] == [9, 10]
    assert third.history[-1].loss < first.history[0].loss
    facts = json.loads((tmp_path / "c" / "manifest.json").read_text())["init"]
    assert facts["carried"] == ["weights", "optimizer", "step"]


def test_switches_that_cannot_be_are_refused(tmp_path: Path) -> None:
    Trainer(tiny(*SHORT, "recipe=bf16", "steps=2"), tmp_path / "a").advance()
    source = f"init={tmp_path / 'a'}"
    for options, error, words in (
        (
            (source, "carry=optimizer", "optimizer.name=lion", "steps=4"),
            CheckpointError,
            "Set the same optimizer.name",
        ),
        ((source, "carry=optimizer", "steps=2"), ConfigError, "is of step 2, but this run ends at steps=2; set more"),
        (("carry=optimizer",), ConfigError, "set init=RUN, too"),
        (("init=nowhere",), CheckpointError, "nowhere: does not exist; needed: a run folder"),
        (("rewarm=3",), ConfigError, "set init=RUN, too"),
        (("optimizer.master=fp32",), ConfigError, "set weights=bf16 or weights=fp8, too"),
        (("optimizer.weights=fp8",), ConfigError, "set master=remainder or master=fp32"),
        ((*STORED, "recipe=bf16"), ConfigError, "casts no weight: set optimizer.weights=bf16"),
        ((*STORED, "optimizer.stochastic_rounding=true"), ConfigError, "set master=null, too"),
    ):
        with pytest.raises(error, match=words):
            Trainer(tiny(*SHORT, *options), tmp_path / "b")
        assert not (tmp_path / "b").exists()


POISONED = 30


def poisoned(trainer: Trainer) -> Trainer:
    """A trainer whose text is noise in one step."""
    honest = trainer.corpus.batch

    def batch(*, step: int, **sizes: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = honest(step=step, **sizes)
        if step == POISONED:
            targets = torch.randint_like(targets, 128, 256)
        return inputs, targets

    object.__setattr__(trainer.corpus, "batch", batch)  # frozen
    return trainer


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_watched_run_is_the_unwatched_one(recipe: str, tmp_path: Path) -> None:
    """Line for line, also when resumed; the folder holds the records of both."""
    bare = whole_curve(f"recipe={recipe}")
    config = tiny(f"recipe={recipe}", "watch={every: 3, triggers: {clipping: null}}")
    watched = Trainer(config, tmp_path / "watched")
    watched.advance(6)
    watched.close()
    resumed = Trainer(config, tmp_path / "watched", resume=True)
    resumed.advance()
    assert saved_curve(tmp_path / "watched") == bare
    run = Run.open(tmp_path / "watched")
    assert run.steps["step"].tolist() == list(range(1, 13))
    assert run.steps["loss"] == pytest.approx([record.loss for record in bare])
    assert sorted(set(run.table()["step"].tolist())) == [1, 2, 3, 6, 9, 12]
    assert run.manifest["config"]["recipe"] == recipe


KILLED_WITH_A_WATCH = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from train_samples import tiny
from ottava.train.loop import Trainer
for name, every in (("before", 100), ("after", 2)):
    settings = ("recipe=bf16", "watch={every: 1}", f"checkpoint.every={every}")
    Trainer(tiny(*settings), Path(sys.argv[1]) / name).advance(3)
os._exit(9)
"""


def test_a_kill_loses_nothing_that_a_checkpoint_holds_and_resumes_without_one(tmp_path: Path) -> None:
    """Killed before the first checkpoint, a watched run begins again in its folder; killed after one, the looks of the
    steps before it are on record."""
    assert warm.run(["-c", KILLED_WITH_A_WATCH, str(tmp_path), str(Path(__file__).parents[1])]).returncode == 9
    assert set(Run.open(tmp_path / "after").table()["step"].tolist()) >= {1, 2}
    resumed = Trainer(tiny("recipe=bf16", "watch={every: 1}", "checkpoint.every=100"), tmp_path / "before", resume=True)
    resumed.advance()
    run = Run.open(tmp_path / "before")
    assert run.steps["step"].tolist() == sorted(set(run.table()["step"].tolist())) == list(range(1, 13))


def test_a_poisoned_batch_is_skipped_and_training_goes_on(tmp_path: Path) -> None:
    """The guard rewinds, finds the spike in high precision too, and leaves the batch out; the records follow."""
    settings = ("recipe=tensorwise", "steps=40", "optimizer.learning_rate=1e-2", "watch={every: 10}")
    trainer = poisoned(Trainer(tiny(*settings, "guard={every: 10, z: 8}"), tmp_path / "run"))
    records = trainer.advance(35)
    assert trainer._guard is not None
    assert [(spike.step, spike.cause) for spike in trainer._guard.spikes] == [(POISONED, "data")]
    assert [record.step for record in records] == [record.step for record in trainer.history] == list(range(1, 36))
    assert [record.step for record in trainer.history if math.isnan(record.loss)] == [POISONED]
    assert not trainer.diverged
    assert saved_curve(tmp_path / "run") == curve(trainer.history)
    trainer.save()
    trainer.close()
    resumed = Trainer(tiny(*settings, "guard={every: 10, z: 8}"), tmp_path / "run", resume=True)
    assert resumed.step == 35
    resumed.advance()
    assert resumed.done
    events = [event["kind"] for event in Run.open(tmp_path / "run").events]
    assert "spike" in events
    assert "rewind" in events


@pytest.mark.parametrize("mode", ["propose", "apply"])
def test_a_badly_cast_layer_falls_back(mode: str, tmp_path: Path) -> None:
    """A column of huge products before down_proj: proposed with evidence, applied only when asked."""
    trainer = Trainer(
        tiny("recipe=tensorwise", "steps=16", "watch={every: 1, sample: 1}", f"auto_fallback={mode}"), tmp_path / "run"
    )
    for name, parameter in trainer.model.named_parameters():
        if name.endswith("gate_up_proj.weight"):
            with torch.no_grad():
                parameter[0] *= 3e3
                parameter[parameter.shape[0] // 2] *= 3e3
    before = {n: m.resolved for n, m in trainer.model.named_modules() if hasattr(m, "resolved")}
    trainer.advance(14)
    trainer.close()
    events = [event for event in Run.open(tmp_path / "run").events if event["kind"] == "fallback"]
    assert events
    assert events[0]["layer"] == "layers.0.mlp.down_proj"
    assert {event["applied"] for event in events} <= {mode == "apply", False}
    assert "limit" in events[0]["why"]
    changed = {n for n, m in trainer.model.named_modules() if hasattr(m, "resolved") and m.resolved != before[n]}
    applied = {event["layer"] for event in events if event["applied"]}
    assert changed == applied
    assert bool(applied) == (mode == "apply")
    assert json.dumps(events)


def test_a_weight_that_is_not_finite_is_not_saved_and_ends_the_run(tmp_path: Path) -> None:
    """The row of a byte that no text has: the loss is finite. A loop that asks for the checkpoint gets the error."""
    trainer = Trainer(tiny("checkpoint.every=2", "evaluation.every=0", "recipe=delayed"), tmp_path / "run")
    trainer.advance(2)
    with torch.no_grad():
        trainer.model.embedding.weight[255, 3] = float("inf")
    with pytest.raises(PoisonError, match=r"step 2: embedding\.weight is not finite: no checkpoint is written"):
        trainer.save()
    records = trainer.advance()
    assert [record.step for record in records] == [3, 4]
    assert math.isfinite(records[-1].loss)
    assert (trainer.diverged, trainer.done) == (True, True)
    assert trainer.poison.startswith("step 4: embedding.weight")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002.safetensors"]
    assert (tmp_path / "run" / "receipt.json").exists()


def test_a_command_whose_weights_overflow_exits_non_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate is beyond FP32: the first update makes infinities, and its checkpoint is due."""
    words = [word for value in (*TINY, "steps=3", "checkpoint.every=1", "optimizer.learning_rate=1e39",
                                "schedule.warmup_fraction=0") for word in ("--set", value)]  # fmt: skip
    assert ended("train", *words, "--run-dir", tmp_path / "run") == 1
    assert "not finite: no checkpoint is written" in capsys.readouterr().out
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))

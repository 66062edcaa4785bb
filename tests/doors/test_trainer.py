"""`OttavaCallback` in real trainers: transformers' Trainer, and TRL's SFT, DPO and GRPO."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from command import gone
from hf_samples import hf, made, rows, same, saved
from ottava.base.errors import PoisonError
from ottava.diagnose.diagnose import diagnose
from ottava.doors.trainer import OttavaCallback
from ottava.doors.transformers import OttavaConfig
from ottava.record.reader import Run

KEYS = ("fp8_share", "worst_sqnr_db", "worst_tensor", "grad_norm", "fp8_verdict")


class Recorder(hf.TrainerCallback):  # type: ignore[misc]
    """Stands where W&B's callback stands: before all callbacks of the user."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.lines.append(dict(logs))


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda report_to: [recorder])
    return recorder


def fp8(recipe: str = "delayed") -> Any:
    model = made()
    OttavaConfig(recipe).convert(model)
    return model


def trainer(folder: Path, callback: OttavaCallback | None, model: Any = None, **settings: Any) -> Any:
    own = {name: settings.pop(name) for name in ("compute_loss_func", "train_dataset") if name in settings}
    defaults = {"max_steps": 6, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    args = hf.TrainingArguments(folder, **defaults | {"use_cpu": True, "disable_tqdm": True} | settings)
    given = {"train_dataset": rows(), "callbacks": [callback] if callback else []} | own
    return hf.Trainer(model or fp8(), args, **given)


def of(line: dict[str, Any], key: str) -> Any:
    return line[f"ottava/{key}"]


def test_a_live_page_follows_the_training_and_ends_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`live=True` is the page of `ottava watch --live`: one process beside the training, gone some seconds after it."""
    monkeypatch.setenv("CI", "1")  # opens no browser
    told, pages = [""], []

    def look(line: Any) -> bool:
        while not (found := re.search(r"ottava live: (http://127\.0\.0\.1:\d+/\S+/)\n", told[0])):
            time.sleep(0.1)
            told[0] += capfd.readouterr().err
        pages.append((found[1], urllib.request.urlopen(found[1]).read()))
        return True

    trainer(tmp_path, OttavaCallback(live=True, stop_when=look), max_steps=2).train()
    assert b"ottava report" in pages[0][1]
    assert gone(pages[0][0]), "the server outlived the training"


def test_the_numbers_reach_a_logger_and_the_history(tmp_path: Path, logger: Recorder) -> None:
    callback = OttavaCallback()
    run = trainer(tmp_path, callback)
    run.train()
    lines = [line for line in logger.lines if "loss" in line]
    assert len(lines) == 3
    assert all({f"ottava/{key}" for key in KEYS} <= line.keys() for line in lines)
    assert [line for line in run.state.log_history if "loss" in line] == [
        line | {"step": step} for line, step in zip(lines, (2, 4, 6), strict=True)
    ]
    assert not any(key.startswith("ottava/") for key in logger.lines[-1])  # the summary of the run
    assert of(lines[0], "fp8_share") == pytest.approx(14 * 3 / (14 * 3 + 3), abs=0.1)
    table = Run.open(tmp_path / "ottava").table()
    last = table["step"] == table["step"].max()
    worst = table.metric("row_sqnr_p50_db")[last].min()
    assert of(lines[2], "worst_sqnr_db") == pytest.approx(worst)
    assert 15 < worst < 40
    names = {f"{key.layer}/{key.tensor}" for key, here in zip(table.keys(), last, strict=True) if here}
    assert of(lines[2], "worst_tensor") in names


def test_the_gradient_norm_is_that_before_clipping(tmp_path: Path, logger: Recorder) -> None:
    """Trap 6: after clipping every norm is max_grad_norm. Between two logs the largest counts."""
    for steps in (1, 3):
        trainer(tmp_path / str(steps), OttavaCallback(), max_grad_norm=1e-3, logging_steps=steps).train()
    each, some = ([line for line in logger.lines if "loss" in line][part] for part in (slice(6), slice(6, None)))
    assert [of(line, "grad_norm") for line in each] == pytest.approx([line["grad_norm"] for line in each], rel=0.01)
    assert min(of(line, "grad_norm") for line in each) > 0.1
    largest = [max(of(line, "grad_norm") for line in part) for part in (each[:3], each[3:])]
    assert [of(line, "grad_norm") for line in some] == largest


def test_training_keeps_every_bit(tmp_path: Path) -> None:
    states = []
    for callback in (None, OttavaCallback()):
        run = trainer(tmp_path / str(callback is None), callback)
        run.train()
        states.append(run.model.state_dict())
    assert same(*states)


def test_a_loss_that_leaves_is_an_event(tmp_path: Path, logger: Recorder) -> None:
    """It is the event of `diagnose`: told once 64 losses make a band, and at once where a loss is not finite."""
    seen = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(0)
        return outputs["logits"].float().square().mean() * (9.0 if len(seen) > 66 else 1.0)

    callback = OttavaCallback()
    train = {"max_steps": 76, "logging_steps": 38, "learning_rate": 0.0, "per_device_train_batch_size": 1}
    trainer(tmp_path, callback, compute_loss_func=loss, **train).train()
    lines = [line for line in logger.lines if "loss" in line]
    assert ["ottava/loss_event" in line for line in lines] == [False, True]
    assert callback.event is not None
    assert of(lines[1], "loss_event") == callback.event.step == 67
    seen.clear()

    def breaks(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(0)
        return outputs["logits"].float().square().mean() * (math.nan if len(seen) > 3 else 1.0)

    trainer(tmp_path / "nan", nan := OttavaCallback(), compute_loss_func=breaks).train()
    assert nan.event is not None
    assert (nan.event.kind, nan.event.step) == ("not finite", 4)


def test_the_verdict_is_that_of_the_diagnosis(tmp_path: Path, logger: Recorder) -> None:
    callback = OttavaCallback()
    trainer(tmp_path, callback).train()
    lines = [line for line in logger.lines if "loss" in line]
    (shadow,) = [e for e in Run.open(tmp_path / "ottava").experiments if e["kind"] == "shadow"]
    assert shadow["step"] == 5
    assert [of(line, "fp8_verdict") for line in lines] == ["unknown", "unknown", "innocent"]
    assert ["ottava/fp8_damage" in line for line in lines] == [False, False, True]
    assert 0 < of(lines[2], "fp8_damage") == shadow["error"] < 0.15
    assert callback.diagnosis is not None
    assert callback.diagnosis.fp8 == diagnose(Run.open(tmp_path / "ottava")).fp8


@pytest.mark.parametrize("times, titles", [(1, []), (300, ["The learning rate is too high"])])
def test_a_healthy_run_has_no_finding_and_a_high_learning_rate_is_named(
    times: float, titles: list[str], tmp_path: Path, logger: Recorder
) -> None:
    text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127).unfold(0, 32, 8)
    data = [{"input_ids": row, "labels": row} for row in text]
    settings = {"max_steps": 80, "learning_rate": 1e-3 * times, "per_device_train_batch_size": 8}
    trainer(tmp_path, OttavaCallback(), train_dataset=data, **settings).train()
    found = diagnose(Run.open(tmp_path / "ottava"))
    assert [finding.title for finding in found.findings] == titles
    assert any("ottava/loss_event" in line for line in logger.lines) is False or times > 1
    assert found.fp8 in (("innocent",) if times == 1 else ("innocent", "unknown"))  # as the shadow step comes in time


def test_it_stops_on_demand_with_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    callback = OttavaCallback(stop_when=lambda line: seen.append(line) or ("enough" if len(seen) == 2 else False))  # type: ignore[func-returns-value]
    run = trainer(tmp_path / "a", callback, max_steps=50, save_strategy="steps", save_steps=100)
    run.train()
    assert (run.state.global_step, callback.stopped) == (4, "enough")
    assert (tmp_path / "a" / "checkpoint-4").exists()
    assert any("stops at step 4: enough" in line for line in caplog.messages)
    callback = OttavaCallback(stop_when=lambda line: callback.stop("by hand") or False)  # type: ignore[func-returns-value]
    run = trainer(tmp_path / "b", callback, max_steps=50)
    run.train()
    assert (run.state.global_step, callback.stopped) == (2, "by hand")
    assert not list((tmp_path / "b").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("who", "step", "stopped", "asked"), [("line", 6, ["enough", ""], [3, 0]), ("hand", 4, ["", "by hand"], [0, 0])]
)
def test_ranks_stop_together(who: str, step: int, stopped: list[str], asked: list[int], tmp_path: Path) -> None:
    """Two ranks, of which one wants to stop: one that stopped alone would leave the other waiting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = [str(Path(__file__).with_name("trainer_ranks.py")), str(tmp_path), who]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", port, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8")) for rank in range(2)]
    assert [one["step"] for one in told] == [step, step]
    assert [one["stopped"] for one in told] == stopped
    assert [one["asked"] for one in told] == asked


def test_torch_gets_its_functions_back(tmp_path: Path) -> None:
    backward = torch.autograd.backward

    def fails(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("mine")

    callback = OttavaCallback()
    run = trainer(tmp_path, callback, compute_loss_func=fails)
    with pytest.raises(ArithmeticError, match="mine"):
        run.train()
    run.compute_loss_func = None
    run.train()  # the same callback, after a training that an exception ended
    assert torch.autograd.backward is backward
    assert [line for line in run.state.log_history if "loss" in line][-1]["ottava/grad_norm"] > 0


def test_records_go_on_or_begin_anew(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, OttavaCallback(), **settings).train()
    trainer(tmp_path, OttavaCallback(), **settings, max_steps=8).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert Run.open(tmp_path / "ottava").steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    trainer(tmp_path, OttavaCallback(), max_steps=2).train()
    assert Run.open(tmp_path / "ottava-2").steps["step"].tolist() == [1, 2]
    trainer(tmp_path, OttavaCallback(tmp_path / "mine", every=1), max_steps=3).train()
    assert set(Run.open(tmp_path / "mine").table()["step"].tolist()) == {1, 2, 3}


def test_one_more_number_is_one_more_function(tmp_path: Path, logger: Recorder) -> None:
    callback = OttavaCallback()
    callback.sources.append(lambda: {"mine": 7.0})
    trainer(tmp_path, callback).train()
    assert [line["mine"] for line in logger.lines if "loss" in line] == [7.0] * 3


def test_a_model_without_fp8_says_so(tmp_path: Path, logger: Recorder) -> None:
    trainer(tmp_path, OttavaCallback(), model=made()).train()
    assert of(logger.lines[0], "fp8_share") == 0.0
    assert of(logger.lines[0], "worst_sqnr_db") > 10  # of simulated casts


# --- TRL -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A tokenizer of single words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(100)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def texts(*columns: str) -> Any:
    datasets = pytest.importorskip("datasets")
    lines = [" ".join(f"w{(i * j) % 97}" for j in range(2, 12)) for i in range(1, 17)]
    return datasets.Dataset.from_dict({column: [f"{line} w{n}" for line in lines] for n, column in enumerate(columns)})


def trl_arguments(kind: str, folder: Path, **settings: Any) -> Any:
    trl = pytest.importorskip("trl")
    defaults = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"}
    always = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "bf16": False, "gradient_checkpointing": False}
    return getattr(trl, f"{kind}Config")(str(folder), **defaults | always | settings)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_trl_trains_and_logs(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    trl = pytest.importorskip("trl")
    columns = {"SFT": ("text",), "DPO": ("prompt", "chosen", "rejected"), "GRPO": ("prompt",)}[kind]
    more: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if kind == "GRPO":
        more["reward_funcs"] = lambda completions, **_: [float(len(set(text.split()))) for text in completions]
        settings = {"num_generations": 2, "max_completion_length": 6}
    config = OttavaConfig("delayed")
    model = hf.AutoModelForCausalLM.from_pretrained(saved(tmp_path / "hub"), quantization_config=config)
    run = getattr(trl, f"{kind}Trainer")(
        model,
        args=trl_arguments(kind, tmp_path, **settings),
        train_dataset=texts(*columns),
        processing_class=tokenizer,
        callbacks=[OttavaCallback()],
        **more,
    )
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert len(lines) == 2
    assert all({f"ottava/{key}" for key in KEYS} <= line.keys() for line in lines)
    assert of(lines[0], "fp8_share") > 0.8


def test_a_checkpoint_with_an_infinity_is_set_aside_and_ends_the_training(tmp_path: Path) -> None:
    """So that neither a resumption nor a script takes it for good."""

    class Poison(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 4:
                with torch.no_grad():
                    model.get_input_embeddings().weight[0, 0] = float("inf")

    run = trainer(tmp_path, OttavaCallback(), max_steps=6, save_strategy="steps", save_steps=2)
    run.add_callback(Poison())
    with pytest.raises(PoisonError, match=r"step 4: .*embed.* not finite; the checkpoint is set aside"):
        run.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4-not-finite"]

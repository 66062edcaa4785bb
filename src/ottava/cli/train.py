"""`ottava train`: trains one run from a config, and resumes it from any moment."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ottava.train.config import TrainConfig
    from ottava.train.display import RunView
    from ottava.train.loop import Trainer
    from ottava.train.run_folder import StepRecord

SCHEMA_VERSION = 1
_REDRAW_SECONDS = 0.25


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; a missing setting keeps its default.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: optimizer.eps=1e-6")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Run folder; default runs/<CONFIG>.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option("--init", metavar="PATH", help="Start from these weights: a run, a checkpoint, a folder."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in DIR.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Record statistics of every cast in the run folder; --set watch.every=10")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings and exit.")] = False,
) -> int:
    """Train a byte-level Llama on text under an FP8 recipe.

    Every setting has a default; --print-config shows them. The run folder holds the settings, a line per step
    (metrics.jsonl), checkpoints, and a receipt of the kernel of each GEMM. --resume continues a killed run; it ends
    with the same bits as an uninterrupted run. After Ctrl-C (exit code 130) or SIGTERM (143) the run saves a checkpoint
    and prints the command that continues it. --init starts from the weights of another run, also of another recipe, and
    calibrates predicted scales on them. After --watch, `ottava diagnose RUN` and `ottava report RUN` show where FP8
    hurt.

    Under torchrun several processes share the run: --set parallel.dp=2 (replicas), parallel.cp (parts of sequences),
    parallel.shard (FSDP2), parallel.tp (tensor parallelism) and parallel.pp (a pipeline). Their product is the number
    of processes. parallel.ep divides model.experts among replicas. batch_size counts the sequences of all processes.
    Each process writes its part of a checkpoint; any number of processes can read it.
    """
    from ottava.cli.interrupt import say_saved, stop_on_interrupt
    from ottava.cli.torchrun import joined
    from ottava.train.config import load_config
    from ottava.train.loop import Trainer

    folder = run_dir or Path("runs") / (config.stem if config else "train")
    # --resume without CONFIG reads the saved settings; load_config reports a folder without them
    overrides = ["watch={}"] if watch else []
    overrides += [f"init={json.dumps(str(init))}"] if init else []
    overrides += settings or ()
    resolved = load_config(folder / "config.yaml" if resume and config is None else config, overrides)
    if print_config:
        values = {"schema_version": SCHEMA_VERSION, **resolved.model_dump(mode="json")}
        typer.echo(json.dumps(values) if as_json else resolved.to_yaml(), nl=as_json)
        return 0
    with joined(resolved.parallel.timeout), stop_on_interrupt() as stopping:
        trainer = Trainer(resolved, folder, resume=resume)
        finished, stopped = _run(trainer, resolved, stopping, progress_on_stderr=as_json)
    if trainer.ranks.first and as_json:
        typer.echo(json.dumps(_result(trainer, resolved, interrupted=not finished)))
    elif trainer.ranks.first:
        typer.echo(_summary(trainer, resolved))
    if not finished:
        command = f"ottava train --resume --run-dir {shlex.quote(str(folder))}"
        return say_saved(stopped, command, quiet=not trainer.ranks.first)
    return 1 if trainer.diverged else 0


def _run(
    trainer: Trainer, config: TrainConfig, stopping: Callable[[], Signals | None], *, progress_on_stderr: bool
) -> tuple[bool, Signals | None]:
    """Trains to the end and shows progress. If `stopping` comes first on any process, saves a checkpoint.

    Returns:
        Whether all steps are done, and the signal that ended the run on all processes.
    """
    from rich.console import Console

    from ottava.train.display import open_display

    began, first, shown = time.monotonic(), trainer.step, 0.0
    with open_display(Console(stderr=progress_on_stderr, quiet=not trainer.ranks.first)) as display:
        display.say(str(trainer.conversion))
        display.say(f"{trainer.corpus.source}\nrun folder: {trainer.folder.path}")
        while not trainer.done and not trainer.ranks.any(bool(stopping())):
            (record,) = trainer.advance(1)
            now = time.monotonic()
            if now - shown > _REDRAW_SECONDS or trainer.done or record.val_loss is not None:
                per_step = (now - began) / max(1, trainer.step - first)
                display.show([_view(trainer, config)], per_step * (config.steps - trainer.step))
                shown = now
            if record.val_loss is not None:
                display.say(f"step {record.step}/{config.steps}: validation loss {record.val_loss:.4f} nats per byte")
        if not trainer.done:
            trainer.save()
            terminated = trainer.ranks.any(stopping() == Signals.SIGTERM)
            trainer.close()
            return False, Signals.SIGTERM if terminated else Signals.SIGINT
    return True, None


def _view(trainer: Trainer, config: TrainConfig) -> RunView:
    """The state of the run for the display."""
    from ottava.report.charts import smooth
    from ottava.train.display import RunView

    curve = smooth([record.loss for record in trainer.history])
    return RunView(
        recipe=config.build_recipe().name,
        seed=config.seed,
        step=trainer.step,
        steps=config.steps,
        loss=curve[-1],
        delta=None,
        tokens_per_second=_tokens_per_second(trainer.history[-50:]),
        curve=curve,
    )


def _tokens_per_second(records: Sequence[StepRecord]) -> float | None:
    """The rate of the median step, which a few slow steps do not change. None before the first step."""
    return records[-1].tokens / statistics.median(record.seconds for record in records) if records else None


def _result(trainer: Trainer, config: TrainConfig, *, interrupted: bool) -> dict[str, Any]:
    """The object that --json prints."""
    last = trainer.history[-1] if trainer.history else None
    validation = [record.val_loss for record in trainer.history if record.val_loss is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_dir": str(trainer.folder.path),
        "recipe": config.build_recipe().name,
        "step": trainer.step,
        "steps": config.steps,
        "interrupted": interrupted,
        "diverged": trainer.diverged,
        "loss": last.loss if last and not trainer.diverged else None,
        "val_loss": validation[-1] if validation else None,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tokens_per_second": _tokens_per_second(trainer.history),
    }


def _summary(trainer: Trainer, config: TrainConfig) -> str:
    """The last lines on the terminal."""
    result = _result(trainer, config, interrupted=False)
    head = f"{result['recipe']}: {trainer.step} of {config.steps} steps"
    if trainer.diverged:
        return (
            f"{head}, then it diverged: the loss or gradient of step {trainer.step + 1} is not finite. That "
            "update was not applied. If recipe=bf16 diverges too, FP8 is not the cause: lower optimizer.learning_rate"
        )
    parts = [head]
    if result["val_loss"] is not None:
        parts.append(f"validation loss {result['val_loss']:.4f} nats per byte")
    if result["tokens_per_second"] is not None:
        parts.append(f"{result['tokens_per_second']:,.0f} tokens/s")
    return ", ".join(parts)

"""`ottava train`, `demo` and `lab`: train one run, BF16 and FP8 side by side, or recipes as an experiment.

All three save themselves after Ctrl-C or SIGTERM, and print the command that continues them.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ottava.base.text import fixed, listed, signed, to_json
from ottava.cli.console import (
    SpeaksOption,
    answer,
    joined,
    open_page,
    print_table,
    print_verdict,
    say_saved,
    spoken,
    stop_on_interrupt,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ottava.lab.page import LabResult
    from ottava.lab.study import LabSettings
    from ottava.train.config import TrainConfig
    from ottava.train.demo import Demo, DemoFolder
    from ottava.train.loop import Trainer
    from ottava.train.verdict import DemoResult

_REDRAW_SECONDS = 0.25


def train(
    config: Annotated[
        Path | None, Argument(metavar="CONFIG.yaml", help="Settings; a missing setting keeps its default.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a setting: optimizer.eps=1e-6")
    ] = None,
    run_dir: Annotated[Path | None, Option(metavar="DIR", help="Run folder; default runs/<CONFIG>.")] = None,
    init: Annotated[
        Path | None, Option(metavar="PATH", help="Start from these weights: a run, a checkpoint, a folder.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in DIR.")] = False,
    watch: Annotated[
        bool, Option("--watch", help="Record statistics of every cast in the run folder; --set watch.every=10")
    ] = False,
    live: Annotated[bool, Option("--live", help="As --watch, and serve the report to this machine meanwhile.")] = False,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
    print_config: Annotated[bool, Option("--print-config", help="Print all settings and exit.")] = False,
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
    from ottava.train.config import load_config
    from ottava.train.loop import Trainer

    folder = run_dir or Path("runs") / (config.stem if config else "train")
    # --resume without CONFIG reads the saved settings; load_config reports a folder without them
    overrides = ["watch={sinks: [live]}"] if live else ["watch={}"] if watch else []
    overrides += [f"init={json.dumps(str(init))}"] if init else []
    overrides += settings or ()
    resolved = load_config(folder / "config.yaml" if resume and config is None else config, overrides)
    if print_config:
        answer(as_json, resolved.model_dump(mode="json"), resolved.to_yaml().rstrip("\n"))
        return 0
    with joined(resolved.parallel.timeout), stop_on_interrupt() as stopping:
        trainer = Trainer(resolved, folder, resume=resume)
        finished, stopped = _run(trainer, resolved, stopping, language, progress_on_stderr=as_json)
    if trainer.ranks.first:
        answer(as_json, _result(trainer, resolved, interrupted=not finished), _summary(trainer, resolved), language)
    if not finished:
        command = f"ottava train --resume --run-dir {shlex.quote(str(folder))}"
        return say_saved(stopped, command, quiet=not trainer.ranks.first)
    return 1 if trainer.diverged else 0


def _run(
    trainer: Trainer,
    config: TrainConfig,
    stopping: Callable[[], Signals | None],
    language: str,
    *,
    progress_on_stderr: bool,
) -> tuple[bool, Signals | None]:
    """Trains to the end and shows progress. If `stopping` comes first on any process, saves a checkpoint.

    Returns:
        Whether all steps are done, and the signal that ended the run on all processes.
    """
    from rich.console import Console

    from ottava.train.display import RunView, open_display

    name = config.build_recipe().name
    began, first, shown = time.monotonic(), trainer.step, 0.0
    with open_display(Console(stderr=progress_on_stderr, quiet=not trainer.ranks.first)) as display:
        display.say(
            spoken(f"{trainer.conversion}\n{trainer.corpus.source}\nrun folder: {trainer.folder.path}", language)
        )
        while not trainer.done and not trainer.ranks.any(bool(stopping())):
            (record,) = trainer.advance(1)
            now = time.monotonic()
            if now - shown > _REDRAW_SECONDS or trainer.done or record.val_loss is not None:
                per_step = (now - began) / max(1, trainer.step - first)
                display.show([RunView.of(trainer, name, config.seed, 50)], per_step * (config.steps - trainer.step))
                shown = now
            if record.val_loss is not None:
                said = f"step {record.step}/{config.steps}: validation loss {record.val_loss:.4f} nats per byte"
                display.say(spoken(said, language))
        if not trainer.done:
            trainer.save()
            terminated = trainer.ranks.any(stopping() == Signals.SIGTERM)
            trainer.close()
            return False, Signals.SIGTERM if terminated else Signals.SIGINT
    return True, None


def _result(trainer: Trainer, config: TrainConfig, *, interrupted: bool) -> dict[str, Any]:
    """The object that --json prints."""
    from ottava.train.display import tokens_per_second

    last = trainer.history[-1] if trainer.history else None
    validation = [record.val_loss for record in trainer.history if record.val_loss is not None]
    return {
        "run_dir": str(trainer.folder.path),
        "recipe": config.build_recipe().name,
        "step": trainer.step,
        "steps": config.steps,
        "interrupted": interrupted,
        "diverged": trainer.diverged,
        "loss": last.loss if last and not trainer.diverged else None,
        "val_loss": validation[-1] if validation else None,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tokens_per_second": tokens_per_second(trainer.history),
    }


def _summary(trainer: Trainer, config: TrainConfig) -> str:
    """The last lines on the terminal."""
    result = _result(trainer, config, interrupted=False)
    head = f"{result['recipe']}: {trainer.step} of {config.steps} steps"
    if trainer.poison:
        return f"{head}, then it diverged: {trainer.poison}"
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


# --- demo ---


def demo(
    recipes: Annotated[
        str | None, Option(metavar="A,B", help="FP8 recipes, or all; default tensorwise,blockwise.")
    ] = None,
    accumulator: Annotated[
        str | None, Option(metavar="A,B", help="Emulate the sums of these tensor cores, such as hopper.")
    ] = None,
    steps: Annotated[int | None, Option(help="Training steps of each run.")] = None,
    seeds: Annotated[int | None, Option(help="BF16 runs; their spread is the noise; default 3.")] = None,
    data: Annotated[
        Path | None, Option(metavar="PATH", help="A text file or a folder; default: Python's own sources.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a setting of the trainer.")
    ] = None,
    run_dir: Annotated[Path | None, Option(metavar="DIR", help="Default runs/demo.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the unfinished demo in DIR.")] = False,
    fresh: Annotated[bool, Option("--fresh", help="Discard an unfinished demo and start over.")] = False,
    no_open: Annotated[bool, Option("--no-open", help="Do not open the report in the browser.")] = False,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Train a small Llama on real text in BF16 and in FP8, and say whether FP8 cost accuracy.

    The demo writes report.html (one file, works offline), loss.svg and summary.json into the run folder. On a terminal
    with a display it opens the report. After Ctrl-C
    or SIGTERM it saves itself; the same command continues it.

    Exit code 0, or 1 if a recipe diverged or ended clearly above BF16. Clearly means farther than 95 of 100 pairs of
    BF16 runs with different seeds lie apart, estimated from the BF16 seeds (Student's t). With one seed only divergence
    counts.
    """
    from rich.console import Console

    from ottava.train.demo import DEFAULT_FOLDER, Demo, DemoFolder
    from ottava.train.display import open_display

    console = Console(stderr=as_json)
    choices = _choices(recipes, steps, seeds, data, settings, accumulator)
    folder = DemoFolder.open(run_dir or DEFAULT_FOLDER, choices, resume=resume, fresh=fresh)
    with stop_on_interrupt() as stopping, only_warnings():
        trained = Demo(folder)
        _introduce(console, folder, trained, language)
        with open_display(console) as display:
            finished = trained.train(display, stopping)
        if not finished:
            where = "" if run_dir is None else f" --run-dir {shlex.quote(str(run_dir))}"
            return say_saved(stopping(), f"ottava demo --resume{where}")
        console.print("[dim]evaluating every run in BF16, too, and measuring every cast ...[/]", highlight=False)
        result = trained.result()
        trained.write(result, language)
    if as_json:
        typer.echo(to_json(result.to_dict()))
    else:
        _conclude_demo(console, folder, result, language)
        if not no_open:
            open_page((folder.path / "report.html").resolve().as_uri())
    return 1 if any(verdict.is_bad for verdict in result.verdicts) else 0


@contextmanager
def only_warnings() -> Iterator[None]:
    """Hides the trainers' log lines about checkpoints: those of five runs would bury the table."""
    logger = logging.getLogger("ottava.train")
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.WARNING)
        yield


def _choices(
    recipes: str | None,
    steps: int | None,
    seeds: int | None,
    data: Path | None,
    settings: list[str] | None,
    accumulator: str | None = None,
) -> dict[str, Any]:
    """The options on the command line, as fields of `DemoSettings`."""
    from ottava.recipe import RECIPES
    from ottava.train.config import absolute
    from ottava.train.demo import DEFAULT_RECIPES

    names = [name.strip() for name in (recipes or "").split(",") if name.strip() not in ("", "bf16")]
    if names == ["all"]:
        names = [name for name in RECIPES if name != "bf16"]
    if accumulator is not None:
        profiles = [name.strip() for name in accumulator.split(",")]
        names = [f"{name}/{profile}" for name in names or DEFAULT_RECIPES for profile in profiles]
    options = {
        "recipes": tuple(names) if names or recipes is not None else None,
        "steps": steps,
        "seeds": seeds,
        "data": None if data is None else str(absolute(data)),
        "overrides": tuple(settings) if settings else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _introduce(console: Console, folder: DemoFolder, demo: Demo, language: str) -> None:
    """Prints the size, the data and the recipes of the demo."""
    settings = folder.settings
    for line in folder.news:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    size = f"{demo.parameters / 1e6:.2f} M parameters, {settings.steps} steps on {demo.runs[0].trainer.corpus.source}"
    seeds = f"BF16 with {settings.seeds} seed{'s' if settings.seeds > 1 else ''}"
    console.print("[bold]ottava demo[/]  ", end="")
    said = f"{size}\n             {listed([seeds, *settings.recipes])}, in turn\n"
    console.print(spoken(said, language), highlight=False, markup=False, soft_wrap=True)


def _conclude_demo(console: Console, folder: DemoFolder, result: DemoResult, language: str) -> None:
    """Prints results, verdicts and the path of the report."""
    console.print("\n" + spoken("Validation loss in nats per byte", language), highlight=False)
    deltas = {verdict.recipe: verdict.delta for verdict in result.verdicts}
    rows = [
        (
            run.recipe,
            run.seed,
            "diverged" if run.diverged else fixed(run.final_loss),
            "" if (delta := deltas.get(run.recipe)) is None else signed(delta),
            fixed(run.high_precision_loss),
            f"{run.tokens_per_second:,.0f}",
            f"{result.speed_ratio(run):.2f}",
        )
        for run in result.runs
    ]
    header = ("recipe", "seed", "loss", "Δ to BF16", "loss in BF16", "tokens/s", "× BF16")
    print_table(console, header, rows, left=["recipe"], language=language)
    for verdict in result.news:
        print_verdict(console, verdict.outcome, verdict.sentence, language=language)
    if result.emulated:
        line = "operands have the bits of a GPU, but the GEMMs are emulated: tokens/s says nothing about a GPU"
        console.print(f"      [dim]{spoken(line, language)}[/]", highlight=False, soft_wrap=True)
    console.print(
        spoken(f"\nreport: {folder.path / 'report.html'}", language), highlight=False, markup=False, soft_wrap=True
    )


_FOLDER = Path("runs/lab")
_QUICK_SEEDS, _QUICK_STEPS, _STEPS, _SEEDS = 2, 16, 120, 5


def lab(
    recipes: Annotated[
        list[str], Argument(metavar="RECIPES...", help="Names, or YAML files of recipes; BF16 is always there.")
    ],
    seeds: Annotated[int | None, Option(help="Seeds of each recipe; 2 or more give intervals [5].")] = None,
    steps: Annotated[int | None, Option(help="Training steps of each run [120].")] = None,
    quick: Annotated[bool, Option("--quick", help="2 seeds of 16 small steps, to see that all works.")] = False,
    out: Annotated[Path | None, Option(metavar="FILE", help="The page [DIR/lab.html].")] = None,
    run_dir: Annotated[Path, Option(metavar="DIR", help="Keeps what is measured.")] = _FOLDER,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Compare recipes with BF16: loss, errors of casts and GEMMs, bias, parts of errors, cost. Writes one page.

    A recipe of your own is a YAML file with what Recipe.to_dict gives; it needs no code. Every seed of a recipe is
    kept as soon as it is done, so a stopped or killed study goes on with the same command, and a new recipe joins the
    measured ones. Differences are paired by seed and claimed only if their 95 % interval excludes 0.

    Exit code 0, or 1 if a recipe diverged.
    """
    from rich.console import Console

    from ottava.lab.page import LabResult, lab_page
    from ottava.lab.study import LabSettings, Study, read_recipe
    from ottava.report.frame import write_page

    console = Console(stderr=as_json)
    settings = LabSettings(
        recipes=tuple(read_recipe(text) for text in recipes),
        seeds=(_QUICK_SEEDS if quick else _SEEDS) if seeds is None else seeds,
        steps=(_QUICK_STEPS if quick else _STEPS) if steps is None else steps,
        quick=quick,
    )
    page = out or run_dir / "lab.html"
    if page.is_dir():
        raise IsADirectoryError(f"--out {page}: is a folder; needed: a file such as {page / 'lab.html'}")
    study = Study(settings, run_dir)
    command = _command(recipes, settings, run_dir, out)
    with stop_on_interrupt() as stopping, only_warnings():
        kept = len(study.done())
        went_on = f"; {kept} of {len(study.tasks())} are measured already" if kept else ""
        names = ", ".join(recipe.name for recipe in settings.all)
        console.print("[bold]ottava lab[/]  ", end="")
        line = f"{names}: {settings.seeds} seeds of {settings.steps} steps each{went_on}"
        console.print(spoken(line, language), highlight=False, markup=False, soft_wrap=True)
        if not study.run(stopping):
            return say_saved(stopping(), command)
    result = LabResult(settings, study.done(), command)
    write_page(page, lab_page(result), language)
    if as_json:
        typer.echo(to_json(result.to_dict()))
    else:
        _conclude_lab(console, result, page, language)
    return 1 if any(finding.outcome == "diverged" for finding in result.findings) else 0


def _command(recipes: list[str], settings: LabSettings, run_dir: Path, out: Path | None) -> str:
    """The command that repeats the study."""
    words = ["ottava", "lab", *recipes, "--seeds", str(settings.seeds), "--steps", str(settings.steps)]
    words += ["--quick"] if settings.quick else []
    words += ["--run-dir", str(run_dir)] if run_dir != _FOLDER else []
    return shlex.join([*words, *(["--out", str(out)] if out else [])])


def _conclude_lab(console: Console, result: LabResult, page: Path, language: str) -> None:
    """Prints for each recipe its loss; on normal data the errors of Y, dX and dW, and whether that of dW is a bias."""
    rows = []
    for row in result.table():
        loss, half, said = row["difference"], row["half"], row["dw_is"]
        errors = (row[f"error_{name}"] for name in ("y", "dx", "dw"))
        rows.append(
            [
                row["recipe"],
                "" if loss is None else f"{loss:+.4f}" + ("" if half is None else f" ± {half:.4f}"),
                *("" if error is None else f"{100 * error:.2f} %" for error in errors),
                {"open": "not decided"}.get(said, said),
                f"{row['slowdown']:.2f}",
            ]
        )
    header = ("recipe", "loss - BF16", "error Y", "dX", "dW", "dW is", "s/step")
    print_table(console, header, rows, left=["recipe"], language=language)
    for finding in result.findings:
        print_verdict(console, finding.outcome, finding.sentence, ("--", "dim"), language)
    console.print(spoken(f"\npage: {page}", language), highlight=False, markup=False, soft_wrap=True)

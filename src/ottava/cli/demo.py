"""`ottava demo`: trains BF16 and FP8 side by side on real text, with a verdict and a report."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ottava.base.text import fixed, listed, signed, to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ottava.train.demo import Demo, DemoFolder
    from ottava.train.verdict import DemoResult


def demo(
    recipes: Annotated[
        str | None, typer.Option("--recipes", metavar="A,B", help="FP8 recipes, or all; default tensorwise,blockwise.")
    ] = None,
    accumulator: Annotated[
        str | None,
        typer.Option("--accumulator", metavar="A,B", help="Emulate the sums of these tensor cores, such as hopper."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps of each run.")] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="BF16 runs; their spread is the noise; default 3.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="PATH", help="A text file or a folder; default: Python's own sources."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the trainer.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Default runs/demo.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished demo in DIR.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard an unfinished demo and start over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Train a small Llama on real text in BF16 and in FP8, and say whether FP8 cost accuracy.

    The demo writes report.html (one file, works offline), loss.svg and summary.json into the run folder. After Ctrl-C
    or SIGTERM it saves itself; the same command continues it.

    Exit code 0, or 1 if a recipe diverged or ended clearly above BF16. Clearly means farther than 95 of 100 pairs of
    BF16 runs with different seeds lie apart, estimated from the BF16 seeds (Student's t). With one seed only divergence
    counts.
    """
    from rich.console import Console

    from ottava.cli.interrupt import say_saved, stop_on_interrupt
    from ottava.train.demo import DEFAULT_FOLDER, Demo, DemoFolder
    from ottava.train.display import open_display

    console = Console(stderr=as_json)
    choices = _choices(recipes, steps, seeds, data, settings, accumulator)
    folder = DemoFolder.open(run_dir or DEFAULT_FOLDER, choices, resume=resume, fresh=fresh)
    with stop_on_interrupt() as stopping, only_warnings():
        trained = Demo(folder)
        _introduce(console, folder, trained)
        with open_display(console) as display:
            finished = trained.train(display, stopping)
        if not finished:
            where = "" if run_dir is None else f" --run-dir {shlex.quote(str(run_dir))}"
            return say_saved(stopping(), f"ottava demo --resume{where}")
        console.print("[dim]evaluating every run in BF16, too, and measuring every cast ...[/]", highlight=False)
        result = trained.result()
        trained.write(result)
    if as_json:
        typer.echo(to_json(result.to_dict()))
    else:
        _conclude(console, folder, result)
    return 1 if any(verdict.is_bad for verdict in result.verdicts) else 0


@contextmanager
def only_warnings() -> Iterator[None]:
    """Hides the trainers' log lines about checkpoints: those of five runs would bury the table."""
    logger = logging.getLogger("ottava.train")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


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
        "data": None if data is None else str(data.expanduser().absolute()),
        "overrides": tuple(settings) if settings else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _introduce(console: Console, folder: DemoFolder, demo: Demo) -> None:
    """Prints the size, the data and the recipes of the demo."""
    from rich.markup import escape

    settings = folder.settings
    for line in folder.news:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    size = f"{demo.parameters / 1e6:.2f} M parameters, {settings.steps} steps on {demo.runs[0].trainer.corpus.source}"
    seeds = f"BF16 with {settings.seeds} seed{'s' if settings.seeds > 1 else ''}"
    console.print(f"[bold]ottava demo[/]  {escape(size)}", highlight=False, soft_wrap=True)
    console.print(f"             {listed([seeds, *settings.recipes])}, in turn\n", highlight=False, soft_wrap=True)


def _conclude(console: Console, folder: DemoFolder, result: DemoResult) -> None:
    """Prints results, verdicts and the path of the report."""
    console.print("\nValidation loss in nats per byte", highlight=False)
    console.print(_results_table(result))
    for verdict in result.news:
        mark, style = {
            "inside": ("ok", "green"),
            "better": ("ok", "green"),
            "worse": ("bad", "red"),
            "diverged": ("bad", "red"),
        }.get(verdict.outcome, ("??", "yellow"))
        console.print(f"[{style}]{mark:>4}[/]  {verdict.sentence}", highlight=False, soft_wrap=True)
    if result.emulated:
        line = "operands have the bits of a GPU, but the GEMMs are emulated: tokens/s says nothing about a GPU"
        console.print(f"      [dim]{line}[/]", highlight=False, soft_wrap=True)
    console.print(f"\nreport: {folder.path / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _results_table(result: DemoResult) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("recipe", no_wrap=True)
    for heading in ("seed", "loss", "Δ to BF16", "loss in BF16", "tokens/s", "× BF16"):
        table.add_column(heading, justify="right", no_wrap=True)
    deltas = {verdict.recipe: verdict.delta for verdict in result.verdicts}
    for run in result.runs:
        delta = deltas.get(run.recipe)
        table.add_row(
            run.recipe,
            str(run.seed),
            "diverged" if run.diverged else fixed(run.final_loss),
            "" if delta is None else signed(delta),
            fixed(run.high_precision_loss),
            f"{run.tokens_per_second:,.0f}",
            f"{result.speed_ratio(run):.2f}",
        )
    return table

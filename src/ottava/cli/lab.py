"""`ottava lab`: recipes against BF16, with seeds, intervals and a page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import duration, to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ottava.lab.page import LabResult
    from ottava.lab.study import LabSettings

_FOLDER = Path("runs/lab")
_QUICK_SEEDS, _QUICK_STEPS, _STEPS, _SEEDS = 2, 16, 120, 5


def lab(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPES...", help="Names, or YAML files of recipes; BF16 is always there.")
    ],
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds of each recipe; 2 or more give intervals [5].")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps of each run [120].")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 seeds of 16 small steps, to see that all works.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The page [DIR/lab.html].")] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Keeps what is measured.")] = _FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Compare recipes with BF16: loss, errors of casts and GEMMs, bias, parts of errors, cost. Writes one page.

    A recipe of your own is a YAML file with what Recipe.to_dict gives; it needs no code. Every seed of a recipe is
    kept as soon as it is done, so a stopped or killed study goes on with the same command, and a new recipe joins the
    measured ones. Differences are paired by seed and claimed only if their 95 % interval excludes 0.

    Exit code 0, or 1 if a recipe diverged.
    """
    from rich.console import Console

    from ottava.cli.demo import only_warnings
    from ottava.cli.interrupt import say_saved, stop_on_interrupt
    from ottava.lab.page import LabResult, write_page
    from ottava.lab.study import LabSettings, Study, read_recipe
    from ottava.train.checkpoint import atomic_write

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
        console.print(_introduction(settings, kept, len(study.tasks())), highlight=False, soft_wrap=True)
        with _progress(console) as tell:
            finished = study.run(tell, stopping)
        if not finished:
            return say_saved(stopping(), command)
    result = LabResult(settings, study.done(), command)
    page.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(page) as unfinished:
        unfinished.write_text(write_page(result), encoding="utf-8")
    if as_json:
        typer.echo(to_json(result.to_dict()))
    else:
        _conclude(console, result, page)
    return 1 if any(finding.outcome == "diverged" for finding in result.findings) else 0


def _command(recipes: list[str], settings: LabSettings, run_dir: Path, out: Path | None) -> str:
    """The command that repeats the study."""
    words = ["ottava", "lab", *recipes, "--seeds", str(settings.seeds), "--steps", str(settings.steps)]
    words += ["--quick"] if settings.quick else []
    words += ["--run-dir", str(run_dir)] if run_dir != _FOLDER else []
    return shlex.join([*words, *(["--out", str(out)] if out else [])])


def _introduction(settings: LabSettings, kept: int, total: int) -> str:
    names = ", ".join(recipe.name for recipe in settings.all)
    went_on = f"; {kept} of {total} are measured already" if kept else ""
    return f"[bold]ottava lab[/]  {names}: {settings.seeds} seeds of {settings.steps} steps each{went_on}"


class _progress:
    """A bar in a terminal, a line for each seed elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console, self.last = console, ("", -1)
        words = TextColumn("{task.description}")
        self.bar = Progress(BarColumn(46), words, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> _progress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, recipe: str, seed: int, step: int, steps: int, done: float, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"  {duration(round(seconds_left))} left"
        line = f"{100 * done:3.0f} %  {recipe}, seed {seed}, step {step}/{steps}{left}"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=line)
        elif (recipe, seed) != self.last:
            self.last = (recipe, seed)
            self.console.print(f"{100 * done:3.0f} %  {recipe}, seed {seed}{left}", highlight=False, soft_wrap=True)


def _conclude(console: Console, result: LabResult, page: Path) -> None:
    console.print(_table(result))
    for finding in result.findings:
        mark, style = {"worse": ("bad", "red"), "diverged": ("bad", "red"), "better": ("ok", "green")}.get(
            finding.outcome, ("--", "dim")
        )
        console.print(f"[{style}]{mark:>4}[/]  {finding.sentence}", highlight=False, soft_wrap=True)
    console.print(f"\npage: {page}", highlight=False, markup=False, soft_wrap=True)


def _table(result: LabResult) -> Table:
    """Loss; on normal data the errors of Y, dX and dW, and whether that of dW is a bias; time per step over BF16's."""
    from rich import box
    from rich.table import Table

    from ottava.recipe import GEMMS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("recipe", no_wrap=True)
    for heading in ("loss - BF16", "error Y", "dX", "dW", "dW is", "s/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for finding in result.findings:
        name, loss = finding.recipe, finding.difference
        errors = [result.interval(name, "normal", "gemms", gemm, "error") for gemm in GEMMS]
        said, _ = result.bias(name, "wgrad", "normal")
        table.add_row(
            name,
            "" if loss is None else f"{loss.mean:+.4f}" + ("" if loss.half is None else f" ± {loss.half:.4f}"),
            *("" if error is None else f"{100 * error.mean:.2f} %" for error in errors),
            {"open": "not decided"}.get(said, said),
            f"{result.slowdown(name).mean:.2f}",
        )
    return table

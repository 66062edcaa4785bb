"""The `ottava` command: its subcommands, and the exit code of each kind of error.

    exit code   0    done
                1    done, and a numerics problem was found (a run diverged, a recipe is clearly worse)
                2    the command line or a config is wrong
                3    hardware or an optional dependency is missing
                4    an input file is missing, damaged or unsuitable
                5    another process of the run failed or is gone, or the processes differ
                70   a bug in ottava
                130  Ctrl-C; 143  SIGTERM: what was done is saved, and stderr has the command that continues it

A subcommand returns its exit code (None is 0). An exception class may have an `exit_code`; ValueError and TypeError are
2, OSError is 4, ImportError is 3. The file of a subcommand imports torch and the engine only inside its function, so
--help is quick.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import logging
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option
from typer.core import TyperGroup

from ottava.base import __version__
from ottava.base.errors import unknown_name
from ottava.cli.console import print_error
from ottava.cli.diagnose import bisect, compare, diagnose, what_if
from ottava.cli.doctor import bench, doctor
from ottava.cli.export import consolidate, export, inspect, parity
from ottava.cli.formats import explorer, formats, recipes
from ottava.cli.plan import plan
from ottava.cli.prove import audit, certify, check, order
from ottava.cli.train import demo, lab, train
from ottava.cli.watch import import_run, live, plot, report, table, watch

BUG, INTERRUPTED = 70, 130


class Commands(TyperGroup):
    """Commands with whole sentences in the help; an unknown one is refused with all names and the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that was typed. While a shell completes a word, an unknown one is no error."""
        name = args[0]
        if name == "eval" and ctx.parent is None:  # what A and B answer, without an engine's rules
            name, args = "parity", ["parity", "--engine", "none", *args[1:]]
        if not (ctx.resilient_parsing or name.startswith("-")) and self.get_command(ctx, name) is None:
            ctx.fail(f"{unknown_name('command', name, self.list_commands(ctx))}; `{ctx.command_path} --help` explains")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands with the first paragraph of their help; click would cut it after 45 characters."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, " ".join((found.help or "").partition("\n\n")[0].split())) for name, found in commands if found]
            )


app = typer.Typer(
    name="ottava",
    cls=Commands,
    help="Train transformers in FP8 and see exactly where FP8 hurts.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(*commands: Callable[..., Any]) -> None:
    for command in commands:
        app.command()(command)


_add(demo, train, lab, plan, doctor, formats, recipes, explorer)
_add(report, live, table, plot, diagnose, compare, bisect, check)
app.command("what-if")(what_if)
app.command("import")(import_run)
_add(inspect, export, consolidate, parity, certify, order)
# every word after the script belongs to the script
for _one in (watch, audit):
    app.command(context_settings={"allow_interspersed_args": False})(_one)
app.add_typer(bench, name="bench", cls=Commands)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ottava {__version__}, torch {_torch_version()}")
        raise typer.Exit()


def _torch_version() -> str:
    """`torch.__version__` without importing torch. The wheel's metadata may lack the build (2.11.0+cu130)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed; install it with: pip install torch")
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def next_steps(folder: Path) -> list[tuple[str, str]]:
    """What to do next in a folder: a command, and what was found for it, the newest of each kind.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as empty:
        ...     next_steps(Path(empty))[0][0]
        'ottava demo'
    """
    kinds: dict[str, list[Path]] = {"watch.json": [], "receipt.json": [], "config.json": [], ".py": []}
    for pattern in ("*", "*/*", "*/*/*", "*/*/*/*"):
        for path in itertools.islice(folder.glob(pattern), _MOST_SEEN):
            if (kind := path.suffix if path.suffix == ".py" else path.name) in kinds and path.is_file():
                kinds[kind].append(path)
    watched, trained, models, scripts = (
        sorted(found, key=lambda path: path.stat().st_mtime, reverse=True) for found in kinds.values()
    )
    steps = []

    def named(path: Path) -> str:
        return shlex.quote(str(path.relative_to(folder)))

    if watched:
        steps.append((f"ottava report {named(watched[0].parent)} --open", "a watched run"))
    if len(watched) > 1:
        pair = f"{named(watched[0].parent)} --baseline {named(watched[1].parent)}"
        steps.append((f"ottava diagnose {pair}", "two watched runs; the good one comes second"))
    if trained:
        steps.append((f"ottava export {named(trained[0].parent)} NEW_FOLDER", "a run of ottava train"))
    exported = [path for path in models if any(path.parent.glob("*.safetensors"))]
    if exported:
        steps.append((f"ottava inspect {named(exported[0].parent)}", "a checkpoint"))
    users = [path for path in scripts if path.parent == folder and _imports_torch(path)]
    if users:
        steps.append((f"ottava watch -- {named(users[0])}", "a training script"))
    return [*steps, ("ottava demo", "a small Llama in BF16 and FP8, in a minute or two")]


def _imports_torch(script: Path) -> bool:
    from ottava.base.untrusted import UntrustedError, read_text

    try:
        return re.search(_TRAINS, read_text(script)) is not None
    except (OSError, UntrustedError):
        return False


_TRAINS = r"(?m)^\s*(import|from) (torch|transformers|(pytorch_)?lightning|trl|accelerate)\b"
_MOST_SEEN = 500  # files of a folder: a home folder must not make it slow


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, Option("--version", help="Show the versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options before the subcommand; without one, the help and what to do next here."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("ottava").setLevel(logging.DEBUG if debug else logging.INFO)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        typer.echo("\nNext, in this folder:")
        for command, why in next_steps(Path.cwd()):
            typer.echo(f"  {command}\n      {why}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line (None: sys.argv) and exits with its code. Errors go to stderr in a few lines."""
    if "_OTTAVA_COMPLETE" in os.environ:  # typer would import rich to strip markup, and our help has no markup
        sys.modules["rich"] = None  # type: ignore[assignment]  # for Python: this module does not exist
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    # a stable sort moves --debug to the front, wherever it was typed; after -- it belongs to the script
    words[:end] = sorted(words[:end], key=lambda word: word != "--debug")
    try:
        code = app(args=words, prog_name="ottava", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        sys.exit(_report(error))
    sys.exit(code or 0)


def _report(error: Exception) -> int:
    """Prints the error on stderr and returns its exit code."""
    show = getattr(error, "show", None)  # errors of the command line parser format themselves
    code = exit_code(error)
    text = f"ottava: {error}"
    if show is not None:
        show(file=(lines := io.StringIO()))
        text = lines.getvalue().rstrip()
    elif code == BUG:
        text = f"ottava: internal error: {type(error).__name__}: {error}\n"
        text += "This is a bug in ottava. Run the same command with --debug for the traceback."
    print_error(text)
    return code


def exit_code(error: Exception) -> int:
    """The exit code of an exception. The module's docstring lists them.

    Example:
        >>> exit_code(ValueError("steps: got 0")), exit_code(FileNotFoundError("a.yaml")), exit_code(KeyError("x"))
        (2, 4, 70)
    """
    number = getattr(error, "exit_code", None)
    if isinstance(number, int):
        return number
    for kind, code in ((ImportError, 3), (OSError, 4), ((ValueError, TypeError), 2)):
        if isinstance(error, kind):
            return code
    return BUG

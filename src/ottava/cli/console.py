"""What commands share: tables for people and pipes, Ctrl-C as a request, and the processes of torchrun.

A table on a terminal is rich's. In a pipe it is plain text with one row a line, not folded and without lines drawn, so
`grep`, `awk` and `sort` read it. A layer's name, or other text from a run or a file, is printed as it is: markup in it
is text.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ottava.base.text import columns_of, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from ottava.base.language import Language

PATIENCE = 5.0
"""Seconds that a process waits for the error of rank 0."""
_ERROR = "ottava/error"
_MARKS = MappingProxyType(
    {"inside": ("ok", "green"), "better": ("ok", "green"), "worse": ("bad", "red"), "diverged": ("bad", "red")}
)
_GAP = 2
SpeaksOption = Annotated[
    Literal["en", "zh"],
    typer.Option("--lang", envvar="OTTAVA_LANG", metavar="NAME", help="Language of the sentences: en or zh."),
]
"""The option of commands whose sentences, or page, there are in Chinese, too."""


def answer(as_json: bool, values: Mapping[str, Any], text: object, language: str = "en", writer: str = "") -> None:
    """Prints a command's result: its text, or JSON, which `ottava report FOLDER` shows if it names its writer."""
    named = {"written_by": writer, "sentence": str(text).partition("\n")[0]} if writer else {}
    typer.echo(to_json({"schema_version": 1, **named, **values}) if as_json else spoken(str(text), language))


def spoken(text: str, language: str) -> str:
    """A text of a command in the language of its --lang."""
    return text if language == "en" else _tongue(language)(text)


@functools.cache
def _tongue(language: str) -> Language:
    from ottava.base.language import Language

    return Language(language)


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
    language: str = "en",
) -> None:
    """Prints rows under a header; columns named in `left` hold words, the others numbers.

    Example:
        >>> from rich.console import Console
        >>> print_table(Console(file=sys.stdout), ["layer", "amax"], [["a[bold]{0}", 0.5], ["b", 12]], left=["layer"])
        layer       amax
        a[bold]{0}   0.5
        b             12
    """
    cells = [[spoken(str(cell), language) for cell in row] for row in rows]
    left, header = {spoken(name, language) for name in left}, [spoken(name, language) for name in header]
    if not console.is_terminal:
        widths = [max(map(columns_of, column)) for column in zip(header, *cells, strict=True)]
        for row in [header, *cells]:
            gaps = [" " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True)]
            shown = (
                cell + gap if name in left else gap + cell for name, cell, gap in zip(header, row, gaps, strict=True)
            )
            print("  ".join(shown).rstrip(), file=console.file)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="dim")
    for name in header:
        table.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def fits(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether `print_table` folds no cell of this table. Rich's own measure takes seconds for thousands of rows."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return not console.is_terminal or sum(widths) + _GAP * (len(widths) - 1) <= console.width


def print_verdict(
    console: Console, outcome: str, sentence: str, otherwise: tuple[str, str] = ("??", "yellow"), language: str = "en"
) -> None:
    """Prints a sentence behind a mark for its outcome: ok, bad, or `otherwise` (mark, style)."""
    from rich.text import Text

    mark, style = _MARKS.get(outcome, otherwise)
    console.print(Text(f"{mark:>4}", style), Text(f" {spoken(sentence, language)}"), highlight=False, soft_wrap=True)


def write_file(out: Path, data: bytes) -> None:
    """Writes a file whole or not at all; says if its folder is missing."""
    from ottava.base.files import replacing

    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}; make it first")
    with replacing(out) as scratch:
        scratch.write_bytes(data)


def open_page(address: str) -> bool:
    """Opens a page in the browser of a person: with a terminal and a display, not through ssh and not in CI."""
    import webbrowser

    shown = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    away = any(os.environ.get(name) for name in ("SSH_CONNECTION", "CI"))
    if not shown or away or not sys.stderr.isatty():
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


# --- signals ---------------------------------------------------------------------------------------------------------


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], signal.Signals | None]]:
    """Holds back the first Ctrl-C or SIGTERM; the yielded function returns it. The next Ctrl-C interrupts.

    A second SIGTERM does nothing: schedulers send several, and later kill a process that takes too long.

    Example:
        >>> with stop_on_interrupt() as stopping:
        ...     stopping()
        ...     signal.raise_signal(signal.SIGINT)
        ...     stopping().name
        'SIGINT'
    """
    request: signal.Signals | None = None

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal request
        request = request or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handlers = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_saved(stopped: signal.Signals | None, command: str, *, quiet: bool = False) -> int:
    """Prints on stderr that the run is saved and which command continues it, unless `quiet`.

    Returns:
        The exit code of a shell for the signal: 143 for SIGTERM, 130 for Ctrl-C. It is never 0, so that
        `ottava train && ottava export` exports no unfinished run.
    """
    terminated = stopped == signal.SIGTERM
    if not quiet:
        typer.echo(f"{'terminated' if terminated else 'interrupted'} and saved; continue with: {command}", err=True)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


# --- processes of torchrun -------------------------------------------------------------------------------------------


@contextmanager
def joined(timeout: float) -> Iterator[None]:
    """Joins the processes of torchrun to a process group in the block; without torchrun it does nothing.

    Args:
        timeout: seconds that a process waits for the others.
    Raises:
        RankError: another process failed, or does not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from ottava.train.ranks import RankError, connected

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **_meeting_place())
    except RuntimeError as error:
        raise RankError(f"cannot join the other processes: {error}. One of them has failed, or is not there") from error
    try:
        with connected():
            yield
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """The arguments by which processes of this start find each other: torchrun's store, if it has one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    return {"store": _store(300.0), "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def _store(timeout: float) -> Any:
    """This start's part of torchrun's store. In torch 2.13 all restarts share one store, which still holds the
    addresses of dead processes: new processes would wait for them."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them by name only

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    return PrefixStore(f"ottava, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def print_error(text: str) -> None:
    """Prints an error on stderr. Under torchrun a process stays silent about an error that rank 0 prints, too.

    Rank 0 prints its error and shares it in torchrun's store. Every other process waits for it at most PATIENCE
    seconds. If rank 0 shares no error, or an error that does not contain this one, the process prints its own, with its
    rank.
    """
    rank = int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
        _first_error(text)
    elif text.removeprefix("ottava: ") not in _first_error():
        print(f"[rank{rank}]: {text}", file=sys.stderr, flush=True)


def _first_error(text: str | None = None) -> str:
    """The error of rank 0 in torchrun's store; "" if there is none. With a text: stores it first."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    # torchrun ends all processes once one has ended: a process that still waits must print its error first
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        store = _store(PATIENCE)
        if text is not None:
            store.set(_ERROR, text)
        deadline = time.monotonic() + PATIENCE
        while not (stored := store.check([_ERROR])) and time.monotonic() < deadline:
            time.sleep(0.05)  # store.wait would print a warning of torch
        return str(store.get(_ERROR).decode()) if stored else ""
    except (ImportError, KeyError, RuntimeError, ValueError):  # no torch, or the store is gone
        return ""
    finally:
        signal.signal(signal.SIGTERM, handler)

"""`ottava report`: shows a watched run in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ottava.base.text import to_json

SCHEMA_VERSION = 1


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.", show_default=False)],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="GOOD", help="Folder of a good run to compare with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write; RUN/report.html by default.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Write RUN/report.html: the cause, the tensor, the first step and the remedy.

    The file needs no network and no server. Every picture in it is also there as a table.

    Exit code 1 if the verdict is critical, 4 if RUN is not the folder of a watched run.
    """
    from ottava.record.reader import Run
    from ottava.report.page import make_report

    page = make_report(Run.open(run), baseline=None if baseline is None else Run.open(baseline))
    path = page.write(out or run / "report.html")
    verdict, sentence, size = page.diagnosis["verdict"], page.diagnosis["sentence"], path.stat().st_size
    values = {"schema_version": SCHEMA_VERSION, "run_dir": str(run), "report": str(path), "bytes": size}
    values |= {"verdict": verdict, "sentence": sentence}
    typer.echo(to_json(values) if as_json else f"{sentence}\n{path}  {size / 1000:,.0f} kB")
    if open_it:
        typer.launch(path.resolve().as_uri())
    return int(verdict == "critical")

"""`ottava table` and `ottava plot`: the numbers of a watched run, one line per tensor and step, or as curves."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pyarrow as pa

    from ottava.record.reader import Table

_Layers = Annotated[
    list[str] | None,
    typer.Option("--layers", metavar="P", help="Only layers that match a pattern, '*.fc2' or 're:fc[12]'; repeatable."),
]
_Tensors = Annotated[str | None, typer.Option("--tensors", metavar="T", help="Some of X,W,dY,Y,dX,dW.")]
_Steps = Annotated[str, typer.Option("--steps", metavar="A:B", help="Only these steps: 100:200, :200, 100:, 150.")]


def table(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.")],
    layers: _Layers = None,
    tensors: _Tensors = None,
    steps: _Steps = "",
    statistics: Annotated[
        str | None,
        typer.Option("--statistics", metavar="A,B", help="Columns in place of the usual ones, or all."),
    ] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="A line for each rank, in place of merged numbers.")] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="F", help="text, csv, json or parquet; default: by FILE's name, or text."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a file.")] = None,
) -> int:
    """Print one line per tensor and step: amin, amax, current and delayed scale, cosine, MSE, underflow, overflow.

    Exit code 0; 2 for an unknown tensor, statistic or format; 4 if the run has no such numbers.
    """
    from ottava.base.errors import unknown_name
    from ottava.measure.statistics import STATISTICS
    from ottava.record.reader import Run
    from ottava.report.series import COLUMNS, select, tensor_table

    form = form or (out.suffix[1:].replace("txt", "text") if out is not None else "text")
    if form not in _FORMS:
        raise ValueError(f"--format: {unknown_name('format', form, list(_FORMS))}")
    if form == "parquet" and out is None:
        raise ValueError("--format parquet: needs a file; add --out FILE.parquet")
    names = tuple(STATISTICS) if statistics == "all" else _words(statistics) or COLUMNS
    chosen = select(Run.open(run), layers=layers or ["*"], tensors=_words(tensors), steps=steps, merge_ranks=not ranks)
    data = _FORMS[form](tensor_table(chosen, names, ranks=ranks))
    if out is not None:
        from ottava.base.files import replacing

        _check_folder(out)
        with replacing(out) as scratch:
            scratch.write_bytes(data)
        typer.echo(f"{out}  {len(chosen):,} lines", err=True)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    return 0


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Watched runs: a good one beside a bad one.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The picture: .svg or .png.")],
    statistics: Annotated[
        str | None,
        typer.Option("--statistics", metavar="A,B", help="One chart for each [mse,underflow_pct]."),
    ] = None,
    layers: _Layers = None,
    tensors: _Tensors = None,
    steps: _Steps = "",
) -> int:
    """Draw statistics of tensors by step, all runs in one picture: the first run solid, the others dashed.

    The six worst tensors get a name and a colour; --layers and --tensors narrow the choice. A .png needs the package
    resvg-py (pip install 'ottava[png]').

    Exit code 0; 2 for an unknown tensor, statistic or suffix; 3 without the package; 4 if a run has no such numbers.
    """
    from ottava.base.files import replacing
    from ottava.record.reader import Run
    from ottava.report.charts import standalone, to_png
    from ottava.report.series import CURVES, curves, known_statistics, run_names, select

    if out.suffix not in (".svg", ".png"):
        raise ValueError(f"--out {out}: needs a name that ends in .svg or .png")
    names = known_statistics(_words(statistics) or CURVES)
    tables = {}
    for name, path in zip(run_names(runs), runs, strict=True):
        tables[name] = select(Run.open(path), layers=layers or ["*"], tensors=_words(tensors), steps=steps)
        _need_numbers(path, tables[name], names)
    charts = [curves(tables, statistic) for statistic in names]
    picture = standalone(charts, title=" and ".join(tables), captions=[chart.description for chart in charts])
    data = to_png(picture) if out.suffix == ".png" else picture.encode()
    _check_folder(out)
    with replacing(out) as scratch:
        scratch.write_bytes(data)
    typer.echo(f"{out}  {len(data) / 1000:,.0f} kB", err=True)
    return 0


def _need_numbers(path: Path, chosen: Table, names: Iterable[str]) -> None:
    """Raises RunError if a run recorded no number of a statistic for the chosen tensors."""
    import numpy as np

    from ottava.measure.statistics import STATISTICS
    from ottava.record.schema import RunError

    recorded = [name for name in STATISTICS if not np.isnan(chosen.metric(name)).all()]
    if missing := [name for name in names if name not in recorded]:
        raise RunError(f"{path}: has no {', '.join(missing)} of these tensors; it has {', '.join(recorded)}")


def _check_folder(out: Path) -> None:
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}; make it first")


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _as_text(table: pa.Table) -> bytes:
    from ottava.base.text import columns, number
    from ottava.measure.statistics import STATISTICS

    def cell(name: str, value: Any) -> str:
        if name == "cosine" and value == value:  # with three digits 0.9997 would be 1.00
            return f"{value:.6f}"
        return number(value) if name in STATISTICS else str(value)

    head = [
        f"{name} [{STATISTICS[name].unit}]" if name in STATISTICS and STATISTICS[name].unit else name
        for name in table.column_names
    ]
    rows = ([cell(name, value) for name, value in row.items()] for row in table.to_pylist())
    return "\n".join([*columns(head, *rows), ""]).encode()


def _as_csv(table: pa.Table) -> bytes:
    import io

    from pyarrow import csv

    buffer = io.BytesIO()
    csv.write_csv(table, buffer)
    return buffer.getvalue()


def _as_json(table: pa.Table) -> bytes:
    from ottava.base.text import to_json

    return (to_json({"schema_version": 1, "rows": table.to_pylist()}, indent=None) + "\n").encode()


def _as_parquet(table: pa.Table) -> bytes:
    import io

    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


_FORMS = MappingProxyType({"text": _as_text, "csv": _as_csv, "json": _as_json, "parquet": _as_parquet})

"""`ottava watch`, and what reads its folder: `report`, `table` and `plot`; `import` makes one of another tool's record.

`ottava diagnose`, `compare`, `what-if` and `bisect` read it, too.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ottava.base.text import to_json
from ottava.cli.console import SpeaksOption, answer, open_page, spoken, stop_on_interrupt, write_file

if TYPE_CHECKING:
    import pyarrow as pa

    from ottava.record.reader import Table
    from ottava.watching.session import Watch

_FAILED, _INTERRUPTED = 1, 130


def watch(
    command: Annotated[
        list[str], Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The words after `python`: a file, or -m MODULE.")
    ],
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="The run folder; default runs/watch-SCRIPT-TIME.")
    ] = None,
    config: Annotated[Path | None, Option(metavar="FILE.yaml", help="Settings; options overrule them.")] = None,
    every: Annotated[
        int | None, Option(metavar="N", help="Steps from one full look, with all statistics, to the next [50].")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        Option(metavar="R", help="Recipe to simulate in layers of other packages; repeatable [tensorwise]."),
    ] = None,
    layers: Annotated[
        list[str] | None, Option(metavar="P", help="Only layers with names like '*.down_proj'; repeatable [*].")
    ] = None,
    tensors: Annotated[
        str | None, Option(metavar="T", help="Some of X,W,dY,Y,dX,dW, separated by commas [X,W,dY].")
    ] = None,
    sample: Annotated[
        int | None, Option(metavar="N", help="Measure one row in N [16], at least 32 rows of a tensor; 1: all.")
    ] = None,
    detail: Annotated[
        str | None, Option(metavar="D", help="Record numbers, exponents, blocks or anatomy (of errors) [blocks].")
    ] = None,
    sink: Annotated[
        list[str] | None, Option(metavar="S", help="terminal, live, tensorboard, wandb, trackio; repeatable.")
    ] = None,
    compiled: Annotated[
        str | None,
        Option(metavar="MODE", help="For compiled layers: warn, or eager (watched steps run uncompiled) [warn]."),
    ] = None,
    loss: Annotated[
        str | None,
        Option(
            metavar="HOW", help="Of micro-batches: mean, sum (the loop divides), or auto: as the graph says [auto]."
        ),
    ] = None,
    shadow: Annotated[
        int | None, Option(metavar="N", help="Steps from one gradient without casts to the next [100]; 0: none.")
    ] = None,
    replay: Annotated[
        int | None, Option(metavar="N", help="Snapshot every N steps, to replay a spike without casts [0: none].")
    ] = None,
    live: Annotated[bool, Option("--live", help="Serve the report to this machine while the script runs.")] = False,
    language: SpeaksOption = "en",
    append: Annotated[bool, Option("--append", help="Continue the watched run in DIR.")] = False,
    step: Annotated[
        int | None,
        Option(
            metavar="N",
            help="With --append: optimizer steps done so far; later records are removed [behind the last record].",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print a summary as one JSON object at the end.")] = False,
) -> int:
    """Run a training script, unchanged, and record what FP8 does to its tensors.

    Example: ottava watch --every 20 --recipe blockwise --out runs/a -- train.py --lr 1e-3

    Any PyTorch script works. In layers of ottava the watch measures the operands of the GEMMs; everywhere else it
    simulates the casts of the recipe. The watch changes no bit of the training. Under torchrun every rank writes its
    own files: torchrun --nproc-per-node 8 -m ottava watch --out runs/a -- train.py

    Then `ottava diagnose DIR` explains the run, and `ottava report DIR` shows it. The exit code is the script's.
    """
    from ottava.watching.session import watch as start

    _check(command, out)
    if step is not None and not append:
        raise ValueError(f"--step {step}: needs --append, which continues the watched run in --out DIR")
    options: dict[str, Any] = {"every": every, "recipes": recipe, "layers": layers, "sample": sample, "detail": detail}
    options |= {"sinks": [*(sink or ()), *["live"] * live], "compiled": compiled, "loss": loss, "shadow": shadow}
    options |= {"replay": replay, "tensors": tensors.split(",") if tensors is not None else None}
    settings = {name: value for name, value in options.items() if value not in (None, [])}
    session = start(None, out or _folder(command), config, step=step, append=append, **settings)
    _print_summary(session, code := run_inside(session, command), language, as_json=as_json)
    return code


def _check(command: list[str], out: Path | None) -> None:
    """Refuses words that no script follows, and a folder that several processes would choose for themselves."""
    from ottava.watching.launch import LaunchError, check_script

    check_script(command)
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError("watch: several processes write to one folder; name it with --out DIR")


def run_inside(session: AbstractContextManager[object], command: list[str]) -> int:
    """Runs the script in a context, and returns its exit code. Prints an exception of the script as Python would."""
    from ottava.base.settings import ConfigError
    from ottava.watching.launch import LaunchError, own_traceback, run_script

    try:
        with session:
            try:
                run_script(command)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
    except (LaunchError, ConfigError):
        raise
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)  # sys.exit("text") ends with 1, as Python does it
        return _FAILED
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(type(error), error.with_traceback(own_traceback(error)), error.__traceback__)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    return 0


def _folder(command: list[str]) -> Path:
    script = command[1].split(".")[-1] if command[0] == "-m" else Path(command[0]).stem
    return Path("runs") / f"watch-{script}-{datetime.now():%Y%m%d-%H%M%S}"


def _print_summary(session: Watch, code: int, language: str, *, as_json: bool) -> None:
    """Prints the summary of the watch: JSON on stdout, or text on stderr, where the script's output is not."""
    if session.rank != 0:
        return
    coverage = session.writer.manifest["coverage"]
    facts = {
        "folder": str(session.folder),
        "steps": session.steps_done,
        "layers": coverage["linear"],
        "layers_seen": coverage["seen"],
        "overhead": session.overhead,
        "script_exit_code": code,
    }
    if as_json:
        answer(True, facts, "")
        return
    steps = f"{facts['steps']} step{'s' * (facts['steps'] != 1)}"
    said = f"ottava watch: {steps}, {facts['layers_seen']} of {facts['layers']} linear layers seen, "
    said += f"{100 * session.overhead:.1f}% of the time; {session.folder}"
    if not session.steps_done:
        said += "\nottava watch: no torch optimizer finished a step in this process, so the watch recorded nothing. It "
        said += "does not follow a script into processes that the script starts (mp.spawn): use torchrun"
    typer.echo(spoken(said, language), err=True)


def import_run(
    source: Annotated[Path, Argument(metavar="SOURCE", help="Folder or file that another tool wrote.")],
    target: Annotated[Path, Argument(metavar="OUT", help="Run folder or checkpoint folder to write.")],
    kind: Annotated[str | None, Option(help="te_log, te_dump or tensorboard; default: all kinds in SOURCE.")] = None,
    recipe: Annotated[str | None, Option(help="Recipe of the run, if SOURCE does not name it.")] = None,
    tag: Annotated[list[str] | None, Option(metavar="TAG=NAME", help="Meaning of a scalar: 'my loss=loss'.")] = None,
    config: Annotated[
        Path | None, Option(metavar="FILE", help="config.json for a checkpoint file without one.")
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Read the statistics of another tool for compare, diagnose and report; or another tool's checkpoint.

    Reads the logs and tensor dumps of TransformerEngine's debug features (nvdlfw_inspect), also in BioNeMo's layout,
    and TensorBoard files of TransformerEngine, torchao, Megatron and others. No code of a file is executed.

    A checkpoint is a folder with config.json or safetensors, or a file .pt, .pth, .bin, .ckpt or .safetensors. A folder
    of Hugging Face's in FP8 becomes one in BF16; `ottava train --init`, `export` and `parity` also take it as it is. A
    file of TransformerEngine or torchao becomes OUT/model.safetensors with codes, scales and NAME._extra_state, for
    load_state_dict; with --config it becomes a folder of Hugging Face's, which those commands take.

    Exit code 0; 1 if no layout holds the codes of the file; 2 for an unknown kind, recipe or tag; 4 if nothing could be
    imported.
    """
    if kind is None and _is_checkpoint(source):
        return _import_checkpoint(source, target, config, as_json, language)
    from ottava.interop.importers import import_run as read
    from ottava.recipe import get_recipe

    tags = dict(_pair(text) for text in tag or ())
    run = read(source, target, kind=kind, recipe=get_recipe(recipe).name if recipe else None, tags=tags)
    table = run.table()
    facts = {
        "run_dir": str(target),
        "rows": len(table),
        "layers": len(run.manifest["layers"]),
        "ranks": run.ranks,
        "steps": run.manifest["imported"]["steps"],
        "losses": len(run.steps["step"]),
        **{name: run.manifest["imported"][name] for name in ("files", "not_understood", "notes")},
    }
    answer(as_json, facts, _imported(facts), language)
    return 0


def _is_checkpoint(source: Path) -> bool:
    if source.is_dir():
        return (source / "config.json").is_file() or any(source.glob("*.safetensors"))
    return source.is_file() and source.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def _import_checkpoint(source: Path, target: Path, config: Path | None, as_json: bool, language: str) -> int:
    if source.is_dir():
        from ottava.serving.export import export
        from ottava.serving.source import of_folder

        report = export(of_folder(source), target, layout="bf16")
        facts: dict[str, Any] = {"layout": "bf16", "bytes": report.nbytes, "changed": []}
        text = str(report)
    else:
        from ottava.compat.checkpoints import import_checkpoint

        facts = import_checkpoint(source, target, config=config)
        text = f"{target}: {facts['codes']} weights in FP8, {facts['tensors']} other tensors, {facts['bytes']:,} bytes"
        if changed := facts["changed"]:
            text += f"; no layout holds the codes of {len(changed)} weights, which were cast again"
    answer(as_json, {"checkpoint": str(target), **facts}, text, language)
    return int(bool(facts["changed"]))


def _pair(text: str) -> tuple[str, str]:
    tag, equals, name = text.rpartition("=")
    if not equals or not tag or not name:
        raise ValueError(f"--tag {text!r}: needs TAG=NAME, such as 'my loss=loss'")
    return tag, name


def _imported(facts: dict[str, Any]) -> str:
    files, unknown, notes = facts["files"], facts["not_understood"], facts["notes"]
    lines = [
        f"{facts['run_dir']}: {facts['rows']:,} rows of {facts['layers']:,} layers at {facts['steps']:,} steps, "
        f"{facts['losses']:,} of them with a loss or another number",
        "read: " + ", ".join(f"{count} {name} file{'s' if count != 1 else ''}" for name, count in files.items()),
    ]
    if unknown:
        shown = ", ".join(f"{name} ({count:,})" for name, count in list(unknown.items())[:6])
        lines.append(f"not understood: {shown}" + (", ..." if len(unknown) > 6 else ""))
    return "\n".join(
        [*lines, *(f"note: {note}" for note in notes[:12]), "next: ottava diagnose " + str(facts["run_dir"])]
    )


_Layers = Annotated[
    list[str] | None,
    Option("--layers", metavar="P", help="Only layers that match a pattern, '*.fc2' or 're:fc[12]'; repeatable."),
]
_Tensors = Annotated[str | None, Option("--tensors", metavar="T", help="Some of X,W,dY,Y,dX,dW.")]
_Steps = Annotated[str, Option("--steps", metavar="A:B", help="Only these steps: 100:200, :200, 100:, 150.")]


def table(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a watched run.")],
    layers: _Layers = None,
    tensors: _Tensors = None,
    steps: _Steps = "",
    statistics: Annotated[str | None, Option(metavar="A,B", help="Columns in place of the usual ones, or all.")] = None,
    ranks: Annotated[bool, Option("--ranks", help="A line for each rank, in place of merged numbers.")] = False,
    language: SpeaksOption = "en",
    form: Annotated[
        str | None,
        Option("--format", metavar="F", help="text, csv, json or parquet; default: by FILE's name, or text."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="As --format json.")] = False,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", help="Write a file.")] = None,
) -> int:
    """Print one line per tensor and step: amin, amax, current and delayed scale, cosine, MSE, underflow, overflow.

    As text, columns are separated by spaces, and each number is one that float() reads; nan is a missing one.

    Exit code 0; 2 for an unknown tensor, statistic or format; 4 if the run has no such numbers.
    """
    from ottava.base.errors import need_known
    from ottava.measure.statistics import STATISTICS
    from ottava.record.reader import COLUMNS, Run, select, tensor_table

    if as_json and form not in (None, "json"):
        raise ValueError(f"--json: is --format json; got --format {form}, too")
    if out is not None and not (as_json or form or out.suffix):
        raise ValueError(
            f"--out {out}: its name tells no format; end it in .txt, .csv, .json or .parquet, or add --format"
        )
    form = "json" if as_json else form or (out.suffix[1:].replace("txt", "text") if out is not None else "text")
    need_known("--format", "format", form, _FORMS)
    if form == "parquet" and out is None:
        raise ValueError("--format parquet: needs a file; add --out FILE.parquet")
    names = tuple(STATISTICS) if statistics == "all" else _words(statistics) or COLUMNS
    chosen = select(Run.open(run), layers=layers or ["*"], tensors=_words(tensors), steps=steps, merge_ranks=not ranks)
    data = _FORMS[form](tensor_table(chosen, names, ranks=ranks))
    if out is not None:
        write_file(out, data)
        typer.echo(f"{out}  {len(chosen):,} lines", err=True)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    if (hooks := [str(source) for source in chosen["source"]].count("hook")) > 0:
        said = f"{hooks:,} of {len(chosen):,} lines are of simulated casts, beside GEMMs that ran in the model's own"
        said += " precision. Casts that the script writes itself are in `ottava diagnose`."
        typer.echo(spoken(said, language), err=True)
    return 0


def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Watched runs: a good one beside a bad one.")],
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="The picture: .svg or .png.")],
    statistics: Annotated[str | None, Option(metavar="A,B", help="One chart for each [mse,underflow_pct].")] = None,
    layers: _Layers = None,
    tensors: _Tensors = None,
    steps: _Steps = "",
) -> int:
    """Draw statistics of tensors by step, all runs in one picture: the first run solid, the others dashed.

    The six worst tensors get a name and a colour; --layers and --tensors narrow the choice. A .png needs the package
    resvg-py (pip install 'ottava[png]').

    Exit code 0; 2 for an unknown tensor, statistic or suffix; 3 without the package; 4 if a run has no such numbers.
    """
    from ottava.record.reader import Run, known_statistics, select
    from ottava.report.charts import standalone, to_png
    from ottava.report.grid import CURVES, curves, run_names

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
    write_file(out, data)
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


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _as_text(table: pa.Table) -> bytes:
    from ottava.base.text import columns
    from ottava.measure.statistics import STATISTICS

    def cell(name: str, value: Any) -> str:
        if name not in STATISTICS:
            return str(value)
        return f"{value:.6f}" if name == "cosine" else f"{value:.4g}"  # with four digits 0.99997 would be 1

    units = {name: STATISTICS[name].unit.replace(" ", "_") for name in table.column_names if name in STATISTICS}
    head = [f"{name}[{unit}]" if (unit := units.get(name)) else name for name in table.column_names]
    rows = ([cell(name, value) for name, value in row.items()] for row in table.to_pylist())
    return "\n".join([*columns(head, *rows), ""]).encode()


def _written(module: str, write: str, table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    getattr(importlib.import_module(f"pyarrow.{module}"), write)(table, buffer)
    return buffer.getvalue()


_FORMS: Mapping[str, Callable[[pa.Table], bytes]] = MappingProxyType(
    {
        "text": _as_text,
        "csv": partial(_written, "csv", "write_csv"),
        "json": lambda table: f"{to_json({'schema_version': 1, 'rows': table.to_pylist()}, indent=None)}\n".encode(),
        "parquet": partial(_written, "parquet", "write_table"),
    }
)


def live(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run that goes on, or has ended.")],
    port: Annotated[int, Option(metavar="N", min=0, max=65_535, help="0: one that is free.")] = 0,
    no_open: Annotated[bool, Option("--no-open", help="Open no browser.")] = False,
    language: SpeaksOption = "en",
    parent: Annotated[int | None, Option(hidden=True)] = None,
) -> int:
    """Serve the report of a run while it goes on, to a browser on this machine.

    The address, on stderr, has a random token; the server listens on 127.0.0.1 alone and writes nothing. From another
    machine: ssh -L PORT:127.0.0.1:PORT. The page shows new steps at once, and verdict and heat map as they come.
    Several ranks of a run are one page. Ctrl-C ends the server; the page stays.

    Exit code 0; 2 if the port is taken; 4 if RUN is not the folder of a run.
    """

    def say(address: str) -> None:
        typer.echo(f"ottava live: {address}", err=True)
        if not no_open:
            open_page(address)

    if parent is not None:  # the training comes first, and this process is none of its ranks
        os.nice(10)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    from ottava.base.language import Language
    from ottava.report.live import follow

    with stop_on_interrupt() as stopping:
        follow(run, port=port, say=say, page=Language(language).page, stopping=stopping, parent=parent)
    return 0


def report(
    run: Annotated[
        Path, Argument(metavar="FOLDER", help="A watched run, or a folder that holds results.", show_default=False)
    ],
    baseline: Annotated[Path | None, Option(metavar="GOOD", help="Folder of a good run to compare with.")] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE", help="Where to write; in FOLDER by default.")
    ] = None,
    open_it: Annotated[bool, Option("--open", help="Open the report in the browser.")] = False,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Write FOLDER/report.html: the cause, the tensor, the first step and the remedy.

    What else is in FOLDER, or up to three levels below, is on the same page: other runs, and the pages of demo, lab,
    check, certify and parity, with a table of contents. If FOLDER itself is no run, the page is FOLDER/results.html.
    The file needs no network and no server. Every picture of a run in it is also there as a table.

    Exit code 1 if the verdict is critical, 4 if FOLDER holds no result.
    """
    from ottava.record.reader import Run
    from ottava.report.page import is_run, make_results

    page = make_results(run, baseline=None if baseline is None else Run.open(baseline))
    path = page.write(out or run / ("report.html" if is_run(run) else "results.html"), language)
    verdict, sentence, size = page.diagnosis["verdict"], page.diagnosis["sentence"], path.stat().st_size
    values = {"run_dir": str(run), "report": str(path), "bytes": size, "verdict": verdict, "sentence": sentence}
    answer(as_json, values, f"{sentence}\n{path}  {size / 1000:,.0f} kB", language)
    if open_it:
        typer.launch(path.resolve().as_uri())
    return int(verdict == "critical")

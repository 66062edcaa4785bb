"""`ottava import`: turns the record of another tool into a run folder, or its checkpoint into one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

SCHEMA_VERSION = 1


def import_run(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder or file that another tool wrote.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Run folder or checkpoint folder to write.")],
    kind: Annotated[
        str | None, typer.Option("--kind", help="te_log, te_dump or tensorboard; default: all kinds in SOURCE.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Recipe of the run, if SOURCE does not name it.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG=NAME", help="Meaning of a scalar: 'my loss=loss'.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="config.json for a checkpoint file without one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Read the statistics of another tool for compare, diagnose and report; or another tool's checkpoint.

    Reads the logs and tensor dumps of TransformerEngine's debug features (nvdlfw_inspect), also in BioNeMo's layout,
    and TensorBoard files of TransformerEngine, torchao, Megatron and others. No code of a file is executed.

    A checkpoint is a folder with config.json or safetensors, or a file .pt, .pth, .bin, .ckpt or .safetensors. A folder
    of Hugging Face's in FP8 becomes one in BF16; `ottava train --init`, `export` and `eval` also take it as it is. A
    file of TransformerEngine or torchao becomes OUT/model.safetensors with codes, scales and NAME._extra_state, for
    load_state_dict; with --config it becomes a folder of Hugging Face's, which those commands take.

    Exit code 0; 1 if no layout holds the codes of the file; 2 for an unknown kind, recipe or tag; 4 if nothing could be
    imported.
    """
    if kind is None and _is_checkpoint(source):
        return _import_checkpoint(source, target, config, as_json=as_json)
    from ottava.interop.importers import import_run as read
    from ottava.recipe import get_recipe

    tags = dict(_pair(text) for text in tag or ())
    run = read(source, target, kind=kind, recipe=get_recipe(recipe).name if recipe else None, tags=tags)
    table = run.table()
    facts = {
        "schema_version": SCHEMA_VERSION,
        "run_dir": str(target),
        "rows": len(table),
        "layers": len(run.manifest["layers"]),
        "ranks": run.ranks,
        "steps": run.manifest["imported"]["steps"],
        "losses": len(run.steps["step"]),
        **{name: run.manifest["imported"][name] for name in ("files", "not_understood", "notes")},
    }
    typer.echo(json.dumps(facts) if as_json else _text(facts))
    return 0


def _is_checkpoint(source: Path) -> bool:
    if source.is_dir():
        return (source / "config.json").is_file() or any(source.glob("*.safetensors"))
    return source.is_file() and source.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def _import_checkpoint(source: Path, target: Path, config: Path | None, *, as_json: bool) -> int:
    if source.is_dir():
        from ottava.serving.export import export
        from ottava.serving.source import of_folder

        report = export(of_folder(source), target, layout="bf16")
        facts: dict[str, object] = {"layout": "bf16", "bytes": report.nbytes, "changed": []}
        text = str(report)
    else:
        from ottava.compat.checkpoints import import_checkpoint

        facts = import_checkpoint(source, target, config=config)
        text = f"{target}: {facts['codes']} weights in FP8, {facts['tensors']} other tensors, {facts['bytes']:,} bytes"
        if changed := facts["changed"]:
            text += f"; no layout holds the codes of {len(changed)} weights, which were cast again"  # type: ignore[arg-type]
    values = {"schema_version": SCHEMA_VERSION, "checkpoint": str(target), **facts}
    typer.echo(json.dumps(values) if as_json else text)
    return int(bool(facts["changed"]))


def _pair(text: str) -> tuple[str, str]:
    tag, equals, name = text.rpartition("=")
    if not equals or not tag or not name:
        raise ValueError(f"--tag {text!r}: needs TAG=NAME, such as 'my loss=loss'")
    return tag, name


def _text(facts: dict[str, object]) -> str:
    files: dict[str, int] = facts["files"]  # type: ignore[assignment]
    unknown: dict[str, int] = facts["not_understood"]  # type: ignore[assignment]
    notes: list[str] = facts["notes"]  # type: ignore[assignment]
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

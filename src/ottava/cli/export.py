"""`ottava export`: writes a checkpoint that inference engines serve."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from ottava.serving.source import Source

SCHEMA_VERSION = 1


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A run of ottava train, one of its checkpoints, or a checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            "-l",
            metavar="L",
            help="bf16, compressed-tensors-{block,channel,tensor,mxfp8,mxfp4,nvfp4}, fp8-block, fp8-block-ue8m0, "
            "mxfp8, modelopt.",
        ),
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Write scales of activations, from histories.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="P", help="Linears that stay in BF16: '*.down_proj'; repeatable."),
    ] = None,
    recast: Annotated[
        bool, typer.Option("--recast", help="Cast the weights anew where the layout does not hold their cast.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", "-e", metavar="E", help="vllm, sglang, transformers or trtllm, which will serve it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> int:
    """Write an FP8 or FP4 checkpoint for transformers, vLLM, SGLang or TensorRT-LLM, with the trained numbers.

    Without --layout it is the first layout that holds the codes of training. A layout that does not hold them is an
    error, unless --recast asks for other codes. A run of `ottava train` becomes a Llama of Hugging Face's. The report
    says for each group of linears what was written, whether training multiplied these numbers, and if not, why.

    Exit code 0; 1 if numbers differ from those that training multiplied; 2 for a wrong layout, engine or pattern; 4 for
    a folder that cannot be read.
    """
    from ottava.serving.export import export as write

    report = write(_source(source), out, layout=layout, static=static, keep=keep or (), recast=recast, engine=engine)
    typer.echo(to_json({"schema_version": SCHEMA_VERSION, **asdict(report)}) if as_json else str(report))
    return int(bool(report.changed))


def _source(folder: Path) -> Source:
    from ottava.train.llama import of_run, run_of

    if (run_of(folder) / "config.yaml").is_file():
        return of_run(folder)
    from ottava.serving.source import of_folder

    return of_folder(folder)

"""`ottava bisect`: finds the cast and the layer that err most, from one batch of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ottava.record.dumps import GemmDump
    from ottava.train.checkpoint import Checkpoint
    from ottava.train.config import TrainConfig

SCHEMA_VERSION = 1


def bisect(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT|DUMP", help="Run folder or checkpoint of `ottava train`, or a dump."),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Replay this step's batch; default: the step after the checkpoint."),
    ] = None,
    batch: Annotated[Path | None, typer.Option("--batch", metavar="FILE", help="Replay this dumped batch.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="Recipe to bisect; default: the run's recipe.")
    ] = None,
    accumulator: Annotated[
        str | None,
        typer.Option("--accumulator", metavar="NAME", help="Emulate the sums of this tensor core, such as hopper."),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", metavar="gradient|loss", help="Quantity to compare with high precision.")
    ] = "gradient",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Replay one batch with parts of the recipe off, and name the GEMM, the layer and the operand that err most.

    bisect loads CHECKPOINT, or the newest checkpoint of RUN, and changes no file. Every probe keeps a few casts, turns
    the others off, and compares the gradient with that of high precision. A dump of a layer's GEMM operands needs no
    model. For a model of your own, call ottava.debug.bisect. With --accumulator, a CPU separates damage by quantization
    from damage by the accumulator of that tensor core.

    Exit code 0 if the error is spread over the layers, or there is none; 1 if one layer has most of it; 4 if there is
    no checkpoint or it is damaged.
    """
    from ottava.experiments.bisect import Probe
    from ottava.experiments.bisect import bisect as search

    if path.is_file() and path.parent.name != "checkpoints":
        return _operands(path, accumulator, as_json=as_json)
    checkpoint, config = _open(path)
    model, loss, data, states, position = _load(checkpoint, config, step, batch)

    def show(probe: Probe) -> None:
        typer.echo(f"  {probe.what}: error {probe.error:.4f}", err=True)

    quantity = _check_target(target)
    listener = None if as_json else show
    result = search(
        model, data, loss, recipe, target=quantity, random=states, on_probe=listener, accumulator=accumulator
    )
    facts = {"schema_version": SCHEMA_VERSION, "checkpoint": str(checkpoint.path), "step": position}
    facts |= result.to_dict()
    typer.echo(to_json(facts) if as_json else f"{checkpoint.path}, batch of step {position}\n\n{result}")
    return 1 if result.suspect is not None and not result.spread else 0


def _check_target(target: str) -> Literal["gradient", "loss"]:
    if target not in ("gradient", "loss"):
        raise ValueError(f"--target {target!r}: needs gradient or loss")
    return "gradient" if target == "gradient" else "loss"


def _open(path: Path) -> tuple[Checkpoint, TrainConfig]:
    """The checkpoint at a path, and the settings of its run."""
    from ottava.train.checkpoint import CheckpointError, find_checkpoint
    from ottava.train.config import load_config

    folder = path.parent.parent if path.is_file() or path.parent.name == "checkpoints" else path
    if not path.exists() or not folder.is_dir():
        raise CheckpointError(f"{path}: does not exist; needs a run folder or a checkpoint of `ottava train`")
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{folder}: has no config.yaml, so it is no run of `ottava train`. For a model of your own, call "
            "ottava.debug.bisect(model, batch, loss)"
        )
    if path == folder and not any(folder.glob("checkpoints/step-*")):
        raise CheckpointError(f"{folder}: has no checkpoint yet; train some steps, or lower checkpoint.every")
    return find_checkpoint(path)[0], load_config(folder / "config.yaml")


def _load(
    checkpoint: Checkpoint, config: TrainConfig, step: int | None, dumped: Path | None
) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any, dict[str, Tensor], int]:
    """The model of a checkpoint, its loss, a batch, the random states of the checkpoint, and the step of the batch."""
    import torch

    from ottava.nn.convert import convert
    from ottava.record.dumps import BatchDump, DumpError, read_dump
    from ottava.train.checkpoint import CheckpointError
    from ottava.train.data import ByteCorpus
    from ottava.train.model import ByteTransformer
    from ottava.train.model import loss as loss_of

    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(available if config.device == "auto" else config.device)
    if device.type == "cuda" and available == "cpu":
        typer.echo(
            f"the run was on {device}; this machine has no GPU, so the CPU replays it with emulated GEMMs", err=True
        )
        device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        model = ByteTransformer(config.model, config.sequence_length)
    convert(model, config.build_recipe())
    tensors = {n.removeprefix("model."): t for n, t in checkpoint.tensors.items() if n.startswith("model.")}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit the model of its run's config: {error}") from error
    model.to(device)
    states = {n.removeprefix("random."): t for n, t in checkpoint.tensors.items() if n == "random.cpu"}
    position = checkpoint.step + 1 if step is None else step
    if dumped is not None:
        dump = read_dump(dumped)
        if not isinstance(dump, BatchDump):
            raise DumpError(f"{dumped}: is a dump of a tensor, not of a batch")
        data, position = dump.batch, dump.step
    else:
        last = max(config.steps, checkpoint.step + 1)
        if not 1 <= position <= last:
            raise ValueError(f"--step {position}: is no step of the run; needs 1 to {last}")
        corpus = ByteCorpus.load(config.data)
        corpus.require(config.sequence_length)
        data = corpus.batch(
            seed=config.seed, step=position, batch_size=config.batch_size, length=config.sequence_length
        )

    def loss(net: nn.Module, pair: Any) -> Tensor:
        inputs, targets = pair
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            return loss_of(net, inputs.to(device), targets.to(device))

    return model, loss, data, states, position


def _operands(path: Path, accumulator: str | None, *, as_json: bool) -> int:
    """Prints the error of each GEMM of a dump, with one operand cast and with both."""
    from ottava.experiments.probe import probe_gemms
    from ottava.record.dumps import DumpError, GemmDump, read_dump

    dump = read_dump(path)
    if not isinstance(dump, GemmDump):
        raise DumpError(f"{path}: is not a dump of GEMM operands; dump a layer's x, w and dy with Dumper.dump_gemms")
    probes = probe_gemms(dump, dump.recipe if accumulator is None else dump.recipe.under(accumulator))
    facts = {"schema_version": SCHEMA_VERSION, "layer": dump.layer, "step": dump.step, "recipe": dump.recipe.name}
    facts |= {"gemms": [probe.to_dict() for probe in probes]}
    typer.echo(to_json(facts) if as_json else _table(dump, probes))
    return 0


def _table(dump: GemmDump, probes: list[Any]) -> str:
    lines = [f"{dump.layer}, step {dump.step}, recipe {dump.recipe.name}: SQNR of each GEMM's result in dB", ""]
    lines.append(f"{'gemm':6}  {'only lhs':>8}  {'only rhs':>8}  {'both':>8}  {'native':>8}  {'row p50':>8}  operands")
    for p in probes:
        cells = (p.only_lhs_db, p.only_rhs_db, p.both_db, p.native_db, p.row_p50_db)
        lines.append(f"{p.gemm:6}  " + "  ".join(f"{value:8.2f}" for value in cells) + f"  {p.lhs} x {p.rhs}")
    if probes and all(p.emulated for p in probes):
        lines += [
            "",
            "native GEMMs are emulated here, with fp32 sums: they say nothing about a tensor core's accumulator "
            "(--accumulator hopper emulates one)",
        ]
    return "\n".join(lines)

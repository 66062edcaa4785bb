"""`ottava plan`: predicts which layers gain from FP8, or the memory of training, or ranks amax histories of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ottava.cli.console import SpeaksOption, answer

if TYPE_CHECKING:
    from torch import nn

    from ottava.nn.plan import Device

Told = tuple[dict[str, Any], object]
_VOCABULARY = 128_256  # of Llama 3


def plan(
    model: Annotated[
        str,
        Argument(metavar="[MODEL]", help="llama-8b, llama-1b, or MODULE:FUNCTION, a function that returns a model."),
    ] = "",
    tokens: Annotated[int, Option(help="For MODEL: batch x sequence on one GPU.")] = 16384,
    recipe: Annotated[str, Option(help="For MODEL: the recipe to predict.")] = "tensorwise",
    device: Annotated[
        Path | None, Option(metavar="JSON", help="For MODEL: h200, or the constants from `ottava bench ceilings`.")
    ] = None,
    world: Annotated[int, Option(help="For MODEL: predict traffic, memory and step time on that many GPUs.")] = 0,
    mesh: Annotated[
        str, Option(metavar="dp=128,tp=8", help="For --world: dp, shard, tp and pp, with that product.")
    ] = "",
    microbatches: Annotated[int, Option(min=1, help="For --world: parts of a rank's batch.")] = 1,
    memory: Annotated[
        bool, Option("--memory", help="For MODEL: predict the bytes of training with AdamW instead.")
    ] = False,
    optimizer: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="For --memory: weights, master or moments, as in train.")
    ] = None,
    history: Annotated[
        Path | None, Option(metavar="RUN", help="Folder of a run with a recipe that predicts scales.")
    ] = None,
    language: SpeaksOption = "en",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Predict which linear layers of a model gain from FP8, or rank amax histories for a recorded run.

    With MODEL, plan computes a roofline of each GEMM and its casts. It names the layers that should stay in BF16, and
    the reason. The constants are those of an H200 unless --device names a file of measured constants.

    With --memory, plan adds up the bytes of weights, gradients, masters, moments and the tensors that linear layers
    save for backward, and compares them with BF16 weights under AdamW with FP32 masters and moments. It counts the
    whole model. Weights are BF16 unless --optimizer changes them. --optimizer weights=fp8 --optimizer master=remainder
    --optimizer moments=fp8 needs the least memory.

    With --world and --mesh, plan predicts the bytes that each GPU sends along each dimension of the mesh in a step, its
    memory, and the time of a step. --tokens are then those of one of the dp x shard parts of the batch.

    With --history, plan replays the amaxes in RUN/amax.jsonl under other window lengths, algorithms and margins. The
    setting with the fewest clipped casts is the best; among equal ones, the setting that loses the fewest bits. Lost
    bits are octaves at the bottom of the format that the scale leaves unused. "guard fires" counts the casts in which
    recipe guarded would have used the current scale instead of the predicted one.

    Exit code 4 if the run has no recording or it is damaged.
    """
    if bool(model) == bool(history):
        raise ValueError("plan: give either a MODEL to predict its layers, or --history to replay amaxes of a run")
    if optimizer and not memory:
        raise ValueError("plan: --optimizer is for --memory; give both")
    if bool(world) != bool(mesh) or (world and (memory or history is not None)):
        raise ValueError("plan: --world and --mesh go together, with a MODEL, without --memory")
    if memory and history is not None:
        raise ValueError("plan: --memory is for a MODEL; got --history")
    if world:
        found = _plan_fleet(model, tokens, recipe, device, world, mesh, microbatches)
    elif memory:
        found = _plan_memory(model, tokens, recipe, optimizer or [])
    else:
        found = _plan_model(model, tokens, recipe, device) if history is None else _plan_history(history)
    answer(as_json, *found, language)
    return 0


def _plan_model(name: str, tokens: int, recipe: str, device: Path | None) -> Told:
    import torch

    from ottava.nn.convert import plan_model

    with torch.device("meta"):  # the weights need no memory: only their shapes are read
        model = _build(name)
    result = plan_model(model, recipe, tokens=tokens, device=_device(device))
    return {"model": name, **result.to_dict()}, result


def _plan_fleet(
    name: str, tokens: int, recipe: str, device: Path | None, world: int, mesh: str, microbatches: int
) -> Told:
    import torch

    from ottava.nn.convert import convert
    from ottava.optim import AdamW
    from ottava.plan.fleet import Mesh, predict
    from ottava.plan.memory import memory

    shape = Mesh.parse(mesh, microbatches)
    if shape.world != world:
        raise ValueError(f"plan: --mesh {mesh} has {shape.world} processes; --world is {world}")
    with torch.device("meta"):
        model = _build(name, whole=True)
    model.bfloat16()
    convert(model, recipe)
    whole = memory(model, AdamW(model.parameters(), master="fp32"), tokens=tokens)
    prediction = predict(model, whole, shape, tokens=tokens, device=_device(device))
    values = {"model": name, "recipe": recipe, **prediction.to_dict()}
    return values, f"{name}, recipe {recipe!r}, {mesh}\n{prediction}"


def _device(name: Path | None) -> Device | None:
    from ottava.nn.plan import Device

    return None if name is None or str(name).lower() == "h200" else Device.read(name)


def _plan_memory(name: str, tokens: int, recipe: str, settings: list[str]) -> Told:
    import torch

    from ottava.base.settings import apply_override
    from ottava.optim import AdamW
    from ottava.plan.memory import memory
    from ottava.recipe import get_recipe
    from ottava.train.config import OptimizerConfig
    from ottava.train.model import make_optimizer, store

    tree: dict[str, object] = {"weights": "bf16", "master": "fp32"}
    for setting in settings:
        apply_override(tree, setting)
    config = OptimizerConfig.checked(tree, None)
    with torch.device("meta"):
        base, model = (_build(name, whole=True) for _ in range(2))
    base.bfloat16()
    report = store(model, get_recipe(recipe), config)
    needed = memory(report.model, make_optimizer(model, config), tokens=tokens)
    usual = memory(base, AdamW(base.parameters(), master="fp32"))
    share = needed.state / usual.state
    values: dict[str, Any] = {"model": name, "recipe": recipe, "optimizer": config.model_dump()}
    values |= {"memory": needed.to_dict(), "bf16": usual.to_dict(), "share_of_bf16": share}
    text = f"{name}, recipe {recipe!r}, {', '.join(f'{key} {value}' for key, value in tree.items())}\n{needed}\n"
    text += f"{share:.2f} of the {usual.state:,} bytes of BF16 with AdamW's masters and moments in FP32"
    return values, text


def _build(name: str, *, whole: bool = False) -> nn.Module:
    """Builds the named model. `whole`: with all blocks and the embedding; otherwise one block stands for all."""
    from torch import nn

    # hidden size, feed-forward size, width of all key (or value) heads; blocks, and matrices with a row for each token
    sizes = {"llama-8b": (4096, 14336, 1024, 32, 2), "llama-1b": (2048, 8192, 512, 16, 1)}
    if name in sizes:
        hidden, wide, kv, count, ends = sizes[name]
        blocks = [
            nn.ModuleDict(
                {
                    "attention": nn.ModuleDict(
                        {"qkv": nn.Linear(hidden, hidden + 2 * kv), "out": nn.Linear(hidden, hidden)}
                    ),
                    "mlp": nn.ModuleDict({"gate_up": nn.Linear(hidden, 2 * wide), "down": nn.Linear(wide, hidden)}),
                }
            )
            for _ in range(count if whole else 1)
        ]
        rows = [nn.Embedding(_VOCABULARY, hidden) for _ in range(ends)]
        return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "rows": nn.ModuleList(rows)}) if whole else blocks[0]
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(f"plan: unknown model {name!r}; needs one of {', '.join(sizes)} or MODULE:FUNCTION")
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"plan: {module} has no function {function!r}; needs one that returns a model")
    model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan: {name} returned {type(model).__name__}; needs a torch.nn.Module")
    return model


def _plan_history(history: Path) -> Told:
    from ottava.diagnose.history import replay
    from ottava.record.amaxes import RecordingError, read_series

    recording = read_series(history)
    if not bool(recording.amax.any()):
        raise RecordingError(f"{history}: no tensor was cast in its {len(recording.steps)} recorded steps; train some")
    result = replay(recording)
    layers = len({tensor.layer for tensor in recording.tensors})
    what = f"{history}: {len(recording.steps):,} steps, {len(recording.tensors)} tensors of {layers} layers"
    return {"run_dir": str(history), **result.to_dict()}, f"{what}\n\n{result}"

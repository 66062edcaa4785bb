"""accelerate: `prepare` converts a model, and then hands everything to `Accelerator.prepare`.

The order matters: layers keep their Parameters, so an optimizer made before stays valid, but a wrapped or sharded model
can no longer be converted. `save_state` and `load_state` need no hook: histories and codes are in the state dict.

    model, optimizer, loader = prepare(Accelerator(), model, optimizer, loader, recipe="delayed")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ottava.base.errors import need
from ottava.doors.entries import take_histories
from ottava.doors.host import need_host, refuse_model
from ottava.engine.functional import quantized_layers
from ottava.nn.convert import convert
from ottava.recipe import Recipe

need_host("accelerate")

from accelerate import Accelerator  # noqa: E402


def prepare(
    accelerator: Accelerator, model: nn.Module, *others: Any, recipe: Recipe | str = "tensorwise", **settings: Any
) -> Any:
    """Converts the model, and prepares it with the optimizer, the data and the rest.

    Args:
        accelerator: of mixed_precision "no" or "bf16": the recipe says what runs in FP8.
        model: not converted, wrapped, sharded or compiled yet; its optimizer may exist already.
        others: what `Accelerator.prepare` takes beside a model, in any order.
        recipe, settings: for `ottava.convert`.
    Returns:
        what `Accelerator.prepare(model, *others)` returns.
    Raises:
        ValueError: the accelerator runs an FP8 of its own, or somebody has changed the model already.

    Example:
        >>> prepare(Accelerator(cpu=True), nn.Linear(64, 64), recipe="rowwise").recipe.name      # doctest: +SKIP
        'rowwise'
    """
    need("prepare", accelerator, Accelerator, "an accelerate.Accelerator: prepare(accelerator, model, ...)")
    need("prepare", model, nn.Module, "the model behind the accelerator: prepare(accelerator, model, ...)")
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "prepare: got Accelerator(mixed_precision='fp8'), which converts layers itself; write "
            f"prepare(Accelerator(mixed_precision='bf16'), model, ..., recipe={getattr(recipe, 'name', recipe)!r})"
        )
    refuse_model("prepare", model)
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    on_meta = plugin is not None and bool(plugin.cpu_ram_efficient_loading)
    if on_meta and settings.get("weights") == "fp8":
        raise ValueError(
            "prepare: weights='fp8' has codes and scales, which FSDP2 cannot send from rank 0; write "
            "FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)"
        )
    convert(model, recipe, **settings)
    with _without_histories(model) if on_meta else nullcontext():
        return accelerator.prepare(model, *others)


@contextmanager
def _without_histories(model: nn.Module) -> Iterator[None]:
    """accelerate sends each entry of the state dict as a sharded parameter; histories are small, and on every rank."""
    histories = take_histories(model, model.state_dict())
    layers = quantized_layers(model)
    for layer in layers:
        for door in layer.quantizers.doors:
            door.drop()
    yield
    for layer in layers:
        layer.quantizers.prepare(layer.resolved, layer.parameter.device)
    model.load_state_dict(histories, strict=False)

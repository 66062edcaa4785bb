"""Fills the amax histories of a BF16 model before its first FP8 step.

A run that changes from BF16 to delayed scaling, or resumes a checkpoint that has no histories, has nothing to predict
scales from. Calibration runs some batches in high precision, forward and backward, and only notes amaxes.
(TransformerEngine's `calibrating=True` does nothing in its Linear and LayerNormLinear, and never sees a gradient.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.errors import need
from ottava.base.text import columns
from ottava.engine.autocast import autocast
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.engine.quantizer import Quantizer
from ottava.recipe import Recipe, get_recipe

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> scalar to run backward from."""


@dataclass(frozen=True, slots=True)
class CalibratedTensor:
    """The result of calibration for one tensor."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """input, weight or grad_output."""
    format: str
    """Number format of the cast."""
    steps: int
    """Entries of its history."""
    amax: float
    """Largest entry of the window."""
    scale: float
    """The factor of the first cast; 0: no history, so the current scale."""
    nonfinite: int
    """Batches with an amax of inf or nan; their amaxes do not count."""


@dataclass(frozen=True)
class CalibrationReport:
    """One row per tensor with a predicted scale.

    Example: see `calibrate`.
    """

    rows: tuple[CalibratedTensor, ...]
    """In the order of the model."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        header = tuple(field.name for field in fields(CalibratedTensor))
        rows = ((*astuple(r)[:4], f"{r.amax:.6g}", f"{r.scale:.6g}", r.nonfinite) for r in self.rows)
        return "\n".join(columns(header, *rows))


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | str | None = None,
    *,
    loss: Loss | None = None,
) -> CalibrationReport:
    """Fills the histories of a converted model from some batches, in high precision, forward and backward.

    Args:
        model: converted under a recipe with predicted scales (delayed, guarded), or give one as `recipe`.
        batches: each is one step of the histories: a tensor, or a tuple or mapping of the model's arguments.
        loss: (model, batch) -> scalar. Give yours: the scales of gradients are only as good as the loss they come from.
            None runs backward from the output's `.loss` if it has one, else from the sum of the output.
    Returns:
        CalibrationReport: the new scale of each tensor.
    Raises:
        ValueError: nothing in the model has predicted scales, or there is no batch.
    Edge cases: it puts gradients, module buffers and the random state back. Parameters never change; the numbers are
        bit for bit those of the high-precision model.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "delayed")
        >>> found = ottava.calibrate(model, [torch.ones(4, 64, dtype=torch.bfloat16)])
        >>> [(row.tensor, row.amax, row.scale) for row in found.rows if row.tensor != "weight"]
        [('input', 1.0, 448.0), ('grad_output', 1.0, 57344.0)]
    """
    need("calibrate", model, nn.Module)
    wanted = get_recipe(recipe) if recipe is not None else None
    _check(model, wanted)
    steps = 0
    with _put_back(model):
        for batch in batches:
            with autocast(wanted, calibrating=True, enabled=False):
                (loss or _default_loss)(model, batch).backward()
            steps += 1
    if not steps:
        raise ValueError("calibrate: got no batch; needs at least one, and one per entry of the history is better")
    return CalibrationReport(tuple(_rows(model)))


def _check(model: nn.Module, wanted: Recipe | None) -> None:
    layers = quantized_layers(model)
    recipes = [wanted.for_layer(m.name) if wanted else m.resolved for m in layers]
    predicted = (spec for m, r in zip(layers, recipes, strict=True) for _, spec in m.quantizers.predicted(r))
    if not any(spec is not None for spec in predicted):
        names = sorted({r.name for r in recipes}) or "no converted layer"
        raise ValueError(
            f"calibrate: found {names}; only predicted scales have a history: use recipe 'delayed' or 'guarded'. "
            "Current scaling needs no calibration"
        )


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        output = model(batch)
    elif isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch)
    own: Tensor | None = getattr(output, "loss", None)
    if own is not None:
        return own
    result: Tensor = getattr(output, "logits", output)
    return result.sum()


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and the random state of CPU and GPUs, after an error too."""
    gradients = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in _own_buffers(model)]
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for p in model.parameters():
        p.grad = None
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for buffer, before in zip(_own_buffers(model), buffers, strict=True):
                buffer.copy_(before)


def _own_buffers(model: nn.Module) -> list[Tensor]:
    """The model's buffers without the buffers that calibration fills."""
    return [b for m in model.modules() if not isinstance(m, Quantizer) for b in m.buffers(recurse=False)]


def _rows(model: nn.Module) -> list[CalibratedTensor]:
    rows = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        for tensor, door in layer.quantizers.named_children():
            if isinstance(door, Quantizer) and door.spec is not None:
                history = door.amax_history
                rows.append(
                    CalibratedTensor(
                        layer=name,
                        tensor=tensor,
                        format=door.spec.format.name,
                        steps=int((history > 0).sum()),
                        amax=float(history.max()),
                        scale=float(door.scale),
                        nonfinite=int(door.nonfinite_count),
                    )
                )
    return rows

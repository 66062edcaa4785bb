"""What the tests of scaling state share: recipes with other windows, small networks, batches of a known amax, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.engine.quantizer import LinearQuantizers, Quantizer
from ottava.engine.state import roll_windows
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import GEMMS, Recipe

BUFFERS = ("amax_history", "scale", "nonfinite_count", "guard_count")
ROLES = ("input", "weight", "grad_output")
WIDTH = 32
DELAYED = QuantizationSpec(ottava.E4M3, scaling="delayed", amax_history_len=4)
GUARDED = replace(DELAYED, scaling="guarded")


def with_cells(recipe: Recipe | str, **changes: Any) -> Recipe:
    """A registered recipe with other settings in all of its cells: with_cells("delayed", amax_history_len=4)."""

    def changed(spec: QuantizationSpec | None) -> QuantizationSpec | None:
        return None if spec is None else replace(spec, **changes)

    recipe = ottava.get_recipe(recipe)
    cells = {name: getattr(recipe, name) for name in GEMMS}
    gemms: dict[str, Any] = {
        name: replace(cell, lhs=changed(cell.lhs), rhs=changed(cell.rhs)) for name, cell in cells.items()
    }
    return replace(recipe, name=f"{recipe.name} {changes}", **gemms)


def network(recipe: Recipe | str = "delayed", seed: int = 0, layers: int = 2) -> nn.Sequential:
    """`layers` converted Linears with GELUs between them; the same bits for the same seed."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*parts[:-1]).bfloat16()
    ottava.convert(model, recipe)
    return model


def two_linears(
    recipe: Recipe | str = "tensorwise",
    dtype: torch.dtype = torch.bfloat16,
    *,
    width: int = 64,
    hidden: int = 64,
    bias: bool = True,
    **options: Any,
) -> nn.Sequential:
    """Two converted Linears with a GELU between them; the same bits each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, hidden, bias), nn.GELU(), nn.Linear(hidden, width, bias)).to(dtype)
    ottava.convert(model, recipe, **options)
    return model


def noise(step: int, rows: int = 8) -> Tensor:
    """The batch of a step: random, and the same for every model that asks."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + step)).bfloat16() * (1 + step % 3)


def batch(amax: float) -> Tensor:
    """A batch with that largest magnitude, exactly."""
    x = torch.full((4, WIDTH), amax / 4, dtype=torch.bfloat16)
    x[0, 0] = amax
    return x


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A scalar whose gradient differs from step to step."""
    return model(x).float().square().mean()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """Fast, and without state of its own."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model: Any, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """A plain loop, without a word about scaling; the losses."""
    optimizer = optimizer or sgd(model)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, noise(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def doors(model: nn.Module) -> dict[str, Quantizer]:
    """Every door by its full name, "0.quantizers.input"."""
    return {
        f"{name}.{role}": getattr(module, role)
        for name, module in model.named_modules()
        if isinstance(module, LinearQuantizers)
        for role in ROLES
    }


def door_of(model: nn.Module, layer: int | str = 0, role: str = "input") -> Quantizer:
    """One door."""
    return doors(model)[f"{layer}.quantizers.{role}"]


def windows(model: nn.Module, role: str = "input") -> list[list[float]]:
    """The entries of each layer's window that are filled, newest first."""
    return [
        [entry for entry in door.amax_history.tolist() if entry]
        for name, door in doors(model).items()
        if name.endswith(role) and door.spec is not None
    ]


def lengths(model: nn.Module) -> list[int]:
    """How often each door has rolled, where the windows are long enough."""
    return [int(door.amax_history.count_nonzero()) for door in doors(model).values() if door.spec is not None]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gradients and buffers, and what is staged."""
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    kept |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return kept | {f"{name}.staged": d.staged.clone() for name, d in doors(model).items() if d.spec is not None}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of the doors only."""
    return {name: tensor for name, tensor in snapshot(model).items() if name.split(".")[-1] in BUFFERS}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in a bit, or that only one of the two has."""
    names = one.keys() | other.keys()
    return sorted(n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n]))


def roll(*doors: Quantizer) -> None:
    """One boundary for doors that belong to no model."""
    lanes = [torch.cat([door.staged, torch.ones(1)]) for door in doors]
    roll_windows(list(doors), torch.stack(lanes, dim=1))


def same_operand(a: object, b: object) -> bool:
    """Bit for bit, codes and scales."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        codes = torch.equal(a.data.contiguous().view(torch.uint8), b.data.contiguous().view(torch.uint8))
        return codes and torch.equal(a.scale_inv, b.scale_inv) and (a.spec, a.dtype) == (b.spec, b.dtype)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def amax_of(value: float) -> Tensor:
    """A matrix whose largest magnitude is `value`."""
    return torch.tensor([[value, -value / 2], [0.0, value / 8]])


def cast(door: Quantizer, x: Tensor, spec: QuantizationSpec = DELAYED, *, record: bool = True) -> QuantizedTensor:
    """The operand of x."""
    row, _ = door(x, spec, spec, record=record)
    assert isinstance(row, QuantizedTensor)
    return row


def was_cast_with(operand: QuantizedTensor, scale: float) -> bool:
    """Whether an operand stores 1 / scale, rounded to fp32."""
    return operand.scale_inv.item() == torch.tensor(float(scale)).reciprocal().item()


def door_after(*amaxes: float, spec: QuantizationSpec = DELAYED) -> Quantizer:
    """A door that has seen one amax a step."""
    door = Quantizer()
    for value in amaxes:
        cast(door, amax_of(value), spec)
        roll(door)
    return door


def everything(door: Quantizer) -> dict[str, Tensor]:
    """Copies of a door's buffers and of what is staged."""
    return {name: getattr(door, name).clone() for name in (*BUFFERS, "staged")}


def unchanged(door: Quantizer, before: dict[str, Tensor]) -> bool:
    """Whether `everything` is still as it was."""
    return all(torch.equal(getattr(door, name), tensor) for name, tensor in before.items())

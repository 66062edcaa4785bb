"""What the user writes to a weight is the weight from then on: the table "writes" of docs/guarantees.md.

Each cell trains a layer, writes to its weight, and makes one step with every optimizer. The witness is an optimizer on
FP32 weights, built on what was written, with the same moments.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import ottava
from ottava.numerics.scaling import amax
from ottava.optim import SGD, AdamW, Lion, Muon
from ottava.optim.storage import join
from ottava.weights.parameter import is_quantized_weight
from sweep import sweep

LR = 1e-4
ROWS = 256  # two blocks
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **options: AdamW(p, **options),
    "AdamW, amax_every": lambda p, **options: AdamW(p, amax_every=8, **options),
    "Lion": lambda p, **options: Lion(p, **options),
    "Muon": lambda p, **options: Muon(p, **options),
    "SGD": lambda p, **options: SGD(p, momentum=0.9, **options),
}
STORAGES: dict[str, tuple[str | None, str]] = {
    "BF16, FP32 master": (None, "fp32"),
    "BF16, remainder": (None, "remainder"),
    "FP8, FP32 master": ("tensorwise", "fp32"),
    "FP8 in blocks, FP32 master": ("blockwise", "fp32"),
    "FP8, remainder": ("mxfp8", "remainder"),
}
Write = Callable[[nn.Module, Any, Tensor], None]


def layer(recipe: str | None) -> Any:
    model = nn.Sequential(nn.Linear(64, ROWS, bias=False, dtype=torch.bfloat16))
    if recipe:
        ottava.convert(model, recipe, weights="fp8")
    return model


def numbers(weight: Any) -> Tensor:
    return (weight.dequantize(torch.float32) if is_quantized_weight(weight) else weight).detach().float()


def master(optimizer: Any, weight: Tensor) -> Tensor:
    state = optimizer.state[weight]
    return (state["master"] if "master" in state else join(weight.detach(), state["remainder"])).clone()


def step(optimizer: Any, weight: Tensor, gradient: Tensor, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr
    weight.grad = gradient.to(weight.dtype)
    optimizer.step()


def load(model: nn.Module, optimizer: Any, other: Tensor) -> None:
    model.load_state_dict({"0.weight": other})


def load_before_the_optimizer(model: nn.Module, optimizer: Any, other: Tensor) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict({"0.weight": other})
    optimizer.load_state_dict(state)


def data(model: Any, optimizer: Any, other: Tensor) -> None:
    model[0].weight.data.copy_(other)


def assign(model: Any, optimizer: Any, other: Tensor) -> None:
    model[0].weight.data = other.clone()


def parts(model: Any, optimizer: Any, other: Tensor) -> None:
    for part, numbers_of_it in zip(model[0].weight.chunk(2), other.chunk(2), strict=True):
        part.copy_(numbers_of_it)


def masked(model: Any, optimizer: Any, other: Tensor) -> None:
    weight = model[0].weight
    weight.copy_(numbers(weight) * (other > 0))


def swapped(model: Any, optimizer: Any, other: Tensor) -> None:
    """The averaged weights in for an evaluation, and the trained ones back."""
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({"0.weight": other})
    model.load_state_dict(kept)


def resumed(model: Any, optimizer: Any, other: Tensor) -> None:
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model[0].weight.zero_()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


WRITES: dict[str, Write] = {
    "`model.load_state_dict(other)`": load,
    "the same, then `optimizer.load_state_dict(its own)`": load_before_the_optimizer,
    "`weight.copy_(other)`": lambda model, optimizer, other: model[0].weight.copy_(other),
    "`weight.data.copy_(other)`": data,
    "`weight.data = other`": assign,
    "`vector_to_parameters`": lambda model, _, other: vector_to_parameters(other.reshape(-1), model.parameters()),
    "`weight.view(-1).copy_(other)`": lambda model, _, other: model[0].weight.view(-1).copy_(other.view(-1)),
    "`weight.data.view(-1).mul_(0.5)`": lambda model, optimizer, other: model[0].weight.data.view(-1).mul_(0.5),
    "`weight[:128].zero_()`": lambda model, optimizer, other: model[0].weight[:128].zero_(),
    "both of `weight.chunk(2)`": parts,
    "`weight.zero_()`": lambda model, optimizer, other: model[0].weight.zero_(),
    "`weight.mul_(0.5)`": lambda model, optimizer, other: model[0].weight.mul_(0.5),
    "`weight.clamp_(-0.02, 0.02)`": lambda model, optimizer, other: model[0].weight.clamp_(-0.02, 0.02),
    "half of it pruned": masked,
    "averaged weights in, and back": swapped,
    "checkpoint of model and optimizer": resumed,
}


def followed(weight: Any, before: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """(what each master has to be, half a step of the storage): written numbers, or the master that rounds to them."""
    written = numbers(weight)
    if not is_quantized_weight(weight):
        return torch.where(written == stored, before, written), written.abs() * 2.0**-8 + 2.0**-133
    rows = weight.spec.granularity.expand(weight.scale_inv, tuple(weight.shape))
    scaled = before.bfloat16().float() / rows
    sides = [scaled * (1 + slack) for slack in (-(2.0**-22), 2.0**-22)]  # a factor in FP32 decides ties by its last bit
    sides = sides if weight.spec.scale_format == "fp32" else [scaled]
    codes = [side.clamp(-448, 448).to(torch.float8_e4m3fn).float() for side in sides]
    rounds = (codes[0] * rows == written) | (codes[-1] * rows == written)
    filled = weight.spec.granularity.expand(amax(written, weight.spec.granularity), tuple(weight.shape)) != 0
    rounds &= (scaled.abs() < 448.001) & filled  # no scale of theirs saturates them, and that of a block of zeros is 1
    return torch.where(rounds, before, written), written.abs() / 16 + rows * 2.0**-10


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(make: Callable[..., Any], storage: str, write: Write) -> str:
    """One word for what the first step after a write makes of the weight."""
    torch.manual_seed(0)
    recipe, kind = STORAGES[storage]
    model, other = layer(recipe), (torch.randn(ROWS, 64) / 10).bfloat16()
    weight = model[0].weight
    optimizer = make([weight], lr=1e-3, weight_decay=0.0, master=kind)
    for _ in range(5):
        step(optimizer, weight, torch.randn(ROWS, 64), 1e-3)
    before, stored = master(optimizer, weight), numbers(weight)
    twins, twin = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        write(model, optimizer, other)
    written, (start, half) = numbers(weight), followed(weight, before, stored)
    if kind == "remainder":  # it has no bit to tell which element was written
        start = before if torch.equal(written, stored) else written
    moments = {
        name: value.clone() for name, value in optimizer.state[weight].items() if name not in ("master", "remainder")
    }
    gradient = torch.randn(ROWS, 64).bfloat16()
    step(optimizer, weight, gradient, LR)
    reached = master(optimizer, weight)
    plain = nn.Parameter(start.clone())
    witness = make([plain], lr=LR, weight_decay=0.0)
    moments.pop("amax_bound", None)
    witness.load_state_dict({**witness.state_dict(), "state": {0: moments}})
    step(witness, plain, gradient, LR)
    moved = (plain.detach() - start).abs()
    assert float(moved.max()) < 20 * LR
    assert bool(((numbers(weight) - written).abs() <= 1.2 * moved + 2.2 * half).all()), "near what was written"
    if torch.equal(written, stored):
        step(twin, twins[0].weight, gradient, LR)
        assert torch.equal(reached, master(twin, twins[0].weight)), "as if nothing had happened"
        return "every bit kept"
    if torch.equal(reached, plain.detach()):
        return "bit-equal"
    assert kind == "remainder", "an FP32 master holds what was written"
    assert bool(((reached - plain.detach()).abs() <= half * 1.07).all()), "half a step, and BF16's own"
    return "within half a step"


def test_a_weight_is_what_was_written(table: Callable[..., None]) -> None:
    """Under every optimizer, in every storage."""
    rows = []
    for name, write in WRITES.items():
        cells = []
        for storage in STORAGES:
            with quiet():
                words = {
                    outcome(make, storage, write)
                    for optimizer, make in OPTIMIZERS.items()
                    if "amax" not in optimizer or storage == "FP8, FP32 master"
                }
            cells.append(" or ".join(sorted(words)))
        rows.append([name, *cells])
    table("writes", ["Write, then a step", *STORAGES], rows)


def test_a_write_is_said_once_and_a_loaded_checkpoint_is_none() -> None:
    model = layer(None)
    weight = model[0].weight
    optimizer = AdamW([weight], master="fp32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(optimizer, weight, torch.randn(ROWS, 64), LR)
        with torch.no_grad():
            resumed(model, optimizer, weight)
        step(optimizer, weight, torch.randn(ROWS, 64), LR)
    with torch.no_grad():
        weight[0].zero_()
    with pytest.warns(UserWarning, match=r"AdamW: 64 of 16384 elements of a weight \(256, 64\)"):
        step(optimizer, weight, torch.randn(ROWS, 64), LR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        weight.zero_()
        step(optimizer, weight, torch.randn(ROWS, 64), LR)


@sweep(recipe=("tensorwise", "blockwise", "mxfp8", "nvfp4", "rowwise"), write=(data, assign, load))
def test_numbers_kept_before_the_cast_follow_too(recipe: str, write: Write) -> None:
    """A first master starts from what was written, not from the numbers that the weight was made of."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    ottava.convert(model, recipe, weights="fp8", keep_high_precision=True)
    weight, other = model[0].weight, torch.randn(64, 64).bfloat16()
    with torch.no_grad():
        write(model, None, other)
    assert torch.equal(weight.high_precision, other)
    optimizer = SGD([weight], master="fp32")
    step(optimizer, weight, torch.zeros(64, 64), 0.0)
    assert torch.equal(master(optimizer, weight), other.float())


@sweep(recipe=("tensorwise", "blockwise", "mxfp8", "nvfp4"), kind=("fp32", "remainder"))
def test_an_expert_is_what_was_written(recipe: str, kind: str) -> None:
    """However the view of its matrix was made; the others stay."""
    views: dict[str, Callable[[Any], Any]] = {
        "weight[1]": lambda weight: weight[1],
        "unbind": lambda weight: weight.unbind()[1],
        "slice": lambda weight: weight[1:2],
        "of data": lambda weight: weight.data[1].view(-1),
    }
    for name, view in views.items():
        model = nn.Sequential(ottava.nn.GroupedLinear(2, 128, 128, bias=False, recipe=recipe, dtype=torch.bfloat16))
        ottava.convert(model, recipe, weights="fp8")
        weight = model[0].weight
        optimizer = AdamW([weight], lr=0.0, weight_decay=0.0, master=kind)
        step(optimizer, weight, torch.ones(2, 128, 128), 0.0)
        before = numbers(weight)[0]
        with torch.no_grad(), quiet():
            view(weight).fill_(0.5)
            step(optimizer, weight, torch.ones(2, 128, 128), 0.0)
        assert torch.equal(numbers(weight)[1], torch.full((128, 128), 0.5)), name
        assert torch.equal(numbers(weight)[0], before), name

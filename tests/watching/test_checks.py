"""Checks at the doors: silent for every real cast, and each bug gets its own name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.numerics.tensor import QuantizedTensor
from ottava.recipe import RECIPES, Recipe
from ottava.watching.checks import Checks, check_history, check_operands, share_beyond_a_step

SPECS = {str(spec): spec for r in RECIPES.values() for g in (r.fprop, r.dgrad) for spec in (g.lhs, g.rhs) if spec}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> ottava.QuantizationSpec:
    found: ottava.QuantizationSpec = request.param
    return found


def tensor(seed: int = 0, rows: int = 160, cols: int = 192) -> torch.Tensor:
    """Several octaves, zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    x[3] = 0
    x[:, 5] = 0
    return x.bfloat16()


def cast(x: torch.Tensor, spec: ottava.QuantizationSpec) -> tuple[QuantizedTensor, QuantizedTensor]:
    current = replace(spec, scaling="current")
    return ottava.quantize(x, current), ottava.quantize(x.t(), current)


def test_a_real_cast_is_never_reported(spec: ottava.QuantizationSpec) -> None:
    for seed in range(3):
        x = tensor(seed)
        row, col = cast(x, spec)
        assert share_beyond_a_step(row.transformed(x), row) == 0
        assert check_operands("weight", x, row, col) is None


def test_the_bound_is_half_a_step() -> None:
    """Between 1 and 1.125 lies one step of E4M3: 1.06 rounds to 1, 1.09 does not."""
    x_q = ottava.quantize(torch.tensor([[448.0, 1.0]]), SPECS["E4M3[tensor]"])
    assert share_beyond_a_step(torch.tensor([[448.0, 1.06]]), x_q) == 0
    assert share_beyond_a_step(torch.tensor([[448.0, 1.09]]), x_q) == 0.5


def test_clipped_elements_and_tensors_in_high_precision_are_no_news() -> None:
    x = tensor()
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")
    small = torch.tensor([[1e-3 * 448]])
    assert check_operands("input", x, ottava.quantize(x, spec, scale=small * 1e6), None) is None
    assert check_operands("input", x, x, None) is None


def test_another_tensor_is_reported(spec: ottava.QuantizationSpec) -> None:
    x, other = tensor(0), tensor(1)
    row, col = cast(other, spec)
    facts = check_operands("weight", x, row, col)
    assert facts is not None
    assert facts["check"] == "stale_weight"
    assert facts["value"] > 20
    facts = check_operands("input", x, row, col)
    assert facts is not None
    assert facts["check"] == "wrong_tensor"


def test_one_side_of_another_tensor_is_row_against_column(spec: ottava.QuantizationSpec) -> None:
    x = tensor(0)
    row, col = cast(x, spec)
    _, wrong = cast(tensor(1), spec)
    facts = check_operands("grad_output", x, row, wrong)
    assert facts is not None
    assert (facts["check"], facts["direction"]) == ("row_col", "col")
    assert check_operands("grad_output", x, row, col) is None


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0, 8.0])
def test_a_scale_of_its_own_is_told_from_another_tensor(spec: ottava.QuantizationSpec, factor: float) -> None:
    x = tensor()
    row, col = cast(x, spec)
    wrong = [replace(x_q, scale_inv=x_q.scale_inv * factor) for x_q in (row, col)]
    facts = check_operands("weight", x, *wrong)
    assert facts is not None
    assert facts["check"] == "stored_scale"
    assert facts["factor"] == pytest.approx(1 / factor, rel=0.05)


def test_a_scale_rounded_to_a_power_of_two_without_casting_again() -> None:
    x = tensor()
    row, col = cast(x, ottava.QuantizationSpec(ottava.E4M3, ottava.Granularity(1, 128)))
    rounded = [replace(x_q, scale_inv=torch.exp2(x_q.scale_inv.log2().ceil())) for x_q in (row, col)]
    facts = check_operands("input", x, *rounded)
    assert facts is not None
    assert facts["check"] == "stored_scale"


@pytest.mark.parametrize("lag", [1e-3, 1e-2])
def test_a_weight_that_moved_little_is_still_stale(lag: float) -> None:
    """An update of a thousandth of the weights moves 1 to 2 % of them across a boundary of rounding."""
    x = tensor().float()
    row, col = cast(x, SPECS["E4M3[tensor]"])
    moved = x + lag * x.std() * torch.randn_like(x)
    facts = check_operands("weight", moved, row, col)
    assert facts is not None
    assert facts["check"] == "stale_weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(value: float) -> None:
    x = tensor()
    row, col = cast(x, SPECS["E4M3[row, pow2]"])
    scale_inv = row.scale_inv.clone()
    scale_inv[3] = value
    facts = check_operands("input", x, replace(row, scale_inv=scale_inv), col)
    assert facts is not None
    assert facts["check"] == "nonfinite_scale"


def door_with(history: list[float]) -> Quantizer:
    door = Quantizer()
    door.prepare(ottava.QuantizationSpec(ottava.E4M3, scaling="delayed", amax_history_len=len(history)))
    door.amax_history.copy_(torch.tensor(history))
    return door


@pytest.mark.parametrize(
    "history, twice",
    [
        ([5, 5, 4, 4, 3, 3, 2, 2], True),
        ([6, 5, 5, 4, 4, 3, 3, 0], True),
        ([5, 4, 3, 2, 1, 6, 7, 8], False),
        ([5, 5, 5, 5, 5, 5, 5, 5], False),  # an input that never changes
        ([5, 5, 5, 4, 4, 4, 3, 3], False),
        ([5, 5, 0, 0, 0, 0, 0, 0], False),
        ([0, 0, 0, 0, 0, 0, 0, 0], False),
    ],
)
def test_a_history_that_moves_twice_a_step(history: list[float], twice: bool) -> None:
    facts = check_history(door_with(history))
    assert (facts is not None) == twice
    assert check_history(Quantizer()) is None


def test_a_place_is_reported_once() -> None:
    found: list[dict[str, object]] = []
    checks, x = Checks(found.append), tensor()
    row, col = cast(tensor(1), SPECS["E4M3[tensor]"])
    for _ in range(3):
        checks("fc1", "weight", Quantizer(), x, row, col)
    checks("fc2", "weight", Quantizer(), x, row, col)
    assert [fact["layer"] for fact in found] == ["fc1", "fc2"]


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if r.quantized], ids=lambda r: r.name)
def test_training_with_every_recipe_is_silent(recipe: Recipe) -> None:
    """Real operands of real steps, predicted scales that clip included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)).bfloat16()
    ottava.convert(model, recipe)
    found: list[dict[str, object]] = []
    checks = Checks(found.append)
    for name, module in model.named_modules():
        if isinstance(module, Quantizer):
            layer, _, kind = name.partition(".quantizers.")
            module.register_forward_hook(
                lambda door, args, output, layer=layer, kind=kind: checks(layer, kind, door, args[0], *output)
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(6):
        model(torch.randn(32, 64).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == []

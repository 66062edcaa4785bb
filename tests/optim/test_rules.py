"""The rules of the optimizers: torch's bits, the formulas in fp64, and the bound of AdamW's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from optim.samples import copies, follows_torch, made, same, steps
from ottava.optim import SGD, AdamW, Lion, Muon
from ottava.optim.engine import Work
from ottava.optim.rules import BOUND, grow, measure, outer_amax, update_adamw
from ottava.weights.parameter import QuantizedWeight, quantized_weight


def test_bits_are_those_of_torch() -> None:
    cases: tuple[tuple[Any, Any, bool, dict[str, Any]], ...] = (
        (AdamW, torch.optim.AdamW, False, {"lr": 1e-2, "weight_decay": 0.1}),
        (AdamW, torch.optim.AdamW, False, {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0}),
        (SGD, torch.optim.SGD, False, {"lr": 0.1}),
        (SGD, torch.optim.SGD, False, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (SGD, torch.optim.SGD, False, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Muon, torch.optim.Muon, True, {"lr": 0.1}),
        (Muon, torch.optim.Muon, True, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    )
    for ours, theirs, matrices, options in cases:
        follows_torch(
            lambda p, kind=ours, o=options: kind(p, **o),
            lambda p, kind=theirs, o=options: kind(p, **o),
            matrices=matrices,
        )


def test_adamw_is_near_fp64() -> None:
    """Against the formula in fp64; 100 steps of errors of some eps each."""
    weight = nn.Parameter(torch.randn(500))
    optimizer = AdamW([weight], 1e-2, weight_decay=0.1)
    w, m, v = weight.detach().double().clone(), torch.zeros(500).double(), torch.zeros(500).double()
    for t in range(1, 101):
        g = torch.randn(500)
        weight.grad = g
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
        w = w - 1e-2 * (0.1 * w + (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
    assert float((weight.detach() - w).abs().max()) < 100 * 2.0**-24 * 8


# --- lion ---


def test_lion_is_its_formula() -> None:
    weight = nn.Parameter(torch.randn(500))
    optimizer = Lion([weight], 1e-2, weight_decay=0.1)
    w, m = weight.detach().double().clone(), torch.zeros(500).double()
    for _ in range(50):
        g = torch.randn(500)
        weight.grad = g
        optimizer.step()
        w = w * (1 - 1e-3) - 1e-2 * (0.9 * m + 0.1 * g.double()).sign()
        m = 0.99 * m + 0.01 * g.double()
    assert float((weight.detach() - w).abs().max()) < 50 * 2.0**-24 * 4


# --- muon ---


def test_a_group_of_adamw_is_adamw() -> None:
    parameters = made()
    twins = copies(parameters)
    muon = Muon([{"params": parameters, "adamw": True}], 1e-2, moments="fp8")
    adamw = AdamW(twins, 1e-2, (0.9, 0.95), weight_decay=0.1, moments="fp8")
    steps([(muon, parameters), (adamw, twins)], 10)
    assert same(parameters, twins)


def test_updates_are_nearly_orthogonal() -> None:
    """All singular values of the update, in units of lr: from 0.4 to 1.3, by the witness of an SVD."""
    for shape in ((16, 96), (96, 16)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([weight], 1.0, weight_decay=0.0).step()
        values = torch.linalg.svdvals(weight.detach()) / max(1.0, shape[0] / shape[1]) ** 0.5
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.3


# --- bound ---

STEPS, ELEMENTS = 10_000, 8


def families(step: int, rate: float) -> Tensor:
    """(families, elements): gradients of a step. `rate` is the growth for which Cauchy and Schwarz have equality."""
    place = torch.arange(1.0, ELEMENTS + 1)
    phase, spike = step % 500, float(step % 97 == 0)
    worst = rate ** (phase - 250.0)
    rows = [
        torch.ones(ELEMENTS),
        place * (-1.0) ** step,
        place * (-1.0) ** (step // 50),
        place * spike * 1e4,
        place * (1e-3 + spike * 1e6 * (-1.0) ** (step // 97)),
        worst * torch.ones(ELEMENTS),
        worst * (-1.0) ** (step // 500) * place,
        torch.full((ELEMENTS,), rate ** -(phase / 2.0)),
        torch.randn(ELEMENTS),
        torch.randn(ELEMENTS) / torch.randn(ELEMENTS),
        torch.zeros(ELEMENTS),
        place * 1e-22,
        place * 10.0 ** (phase % 30 - 26),
        place * 1e18,
        torch.where(place == 1, math.inf if step == 300 else 1.0, place),
        torch.where(place == 2, math.nan if step == 7000 else 1.0, -place),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("betas", "decay", "itemsize"), [((0.9, 0.95), 0.0, 4), ((0.9, 0.999), 0.1, 2)])
def test_10000_steps_do_not_violate_it(betas: tuple[float, float], decay: float, itemsize: int) -> None:
    """Each family is a weight of its own; the learning rate swings, and for a while exceeds 1 / weight_decay. The
    quotient is measured at the first step alone, so every later bound of it is predicted, and so is every amax."""
    torch.manual_seed(0)
    group: dict[str, Any] = {"betas": betas, "eps": 1e-8, "weight_decay": decay, "capturable": False}
    count = len(families(1, 1.0))
    weight, mean, square = torch.randn(count, ELEMENTS), *torch.zeros(2, count, ELEMENTS)
    bounds = torch.zeros(count, 2, dtype=torch.float64)
    tightest = math.inf
    for step in range(1, STEPS + 1):
        group["lr"] = 20.0 if 5000 < step < 5010 else 1e-2 * (1.001 + math.sin(step / 100))
        if step == 6000:
            group["betas"] = (0.8, betas[1])  # a scheduler may change them
        gradient = families(step, betas[1] / betas[0])
        work = Work([weight], [gradient], {"exp_avg": [mean], "exp_avg_sq": [square]}, [torch.tensor(float(step))])
        update_adamw(work, group)
        for row in range(count):
            parts = weight[row], mean[row], square[row]
            if step == 1:
                bounds[row] = measure(*parts, itemsize, step, group)
            else:
                bounds[row] = grow(bounds[row], itemsize, step, group)
        if itemsize == 2:  # as they are stored
            mean, square = mean.bfloat16().float(), square.bfloat16().float()
        found = torch.where(weight.isfinite(), weight, 0.0).abs().amax(1)
        assert bool((found <= bounds[:, 0]).all()), (step, found / bounds[:, 0])
        if step == 400:
            tightest = float((bounds[:, 0] / found).amin())
    if itemsize == 4:
        assert tightest < 1.005, "the family with equality is met"


def weights(spec: str = "tensorwise", dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(1)
    cell = ottava.get_recipe(spec).cells("weight")[0]
    assert cell is not None
    return nn.Parameter(quantized_weight(torch.randn(64, 96).to(dtype), cell, keep_high_precision=True))  # type: ignore[return-value]


def train(optimizer: AdamW, steps: int, seed: int = 0) -> list[float]:
    """Distances of the scale from the smallest that saturates nothing: amax * scale / 448, of each step."""
    weight: Any = optimizer.param_groups[0]["params"][0]
    used = []
    for step in range(seed, seed + steps):
        torch.manual_seed(step)
        weight.grad = torch.randn(weight.shape).to(weight.dtype) * (1000.0 if step % 20 == 7 else 1.0)
        optimizer.step()
        master = optimizer.state[weight].get("master")
        values = weight.detach().dequantize() if master is None else master.to(weight.dtype)
        used.append(float(values.float().abs().amax() / weight.scale_inv / 448))
    return used


def test_a_bounded_weight_is_trained_as_a_measured_one() -> None:
    """The same masters; its scale never saturates, and is that of the largest magnitude where a step measures."""
    for dtype, moments in ((torch.bfloat16, "fp32"), (torch.float32, "bf16")):
        options: dict[str, Any] = {"lr": 0.05, "master": "fp32", "moments": moments, "betas": (0.9, 0.95)}
        measured, bounded = (AdamW([weights(dtype=dtype)], **options, amax_every=every) for every in (1, 10))
        for optimizer in (measured, bounded):
            used = train(optimizer, 60)
            assert max(used) <= 1 + 2.0**-8, "a BF16 number may be half an ulp above the bound"
        ones = [optimizer.state[optimizer.param_groups[0]["params"][0]] for optimizer in (measured, bounded)]
        assert torch.equal(ones[0]["master"], ones[1]["master"])
        assert BOUND not in ones[0]
        assert used[9] > 1 - 2.0**-7, "step 10 measures"
        assert used[18] < 0.95, "step 19 has a bound, nine steps on"


def test_states_go_on_with_the_same_bits() -> None:
    """Of this optimizer, mid-way between two looks; and of torch's, whose first step here measures."""
    for master in ("fp32", "remainder"):
        options: dict[str, Any] = {"lr": 0.05, "master": master, "amax_every": 10}
        whole = AdamW([weights()], **options)
        train(whole, 30)
        halves = [AdamW([weights()], **options) for _ in range(2)]
        train(halves[0], 15)
        with torch.no_grad():
            halves[1].param_groups[0]["params"][0].copy_(halves[0].param_groups[0]["params"][0])
        halves[1].load_state_dict(halves[0].state_dict())
        train(halves[1], 15, seed=15)
        ours, theirs = (o.param_groups[0]["params"][0] for o in (whole, halves[1]))
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scale_inv, theirs.scale_inv)
        assert torch.equal(whole.state[ours][BOUND], halves[1].state[theirs][BOUND])
    plain = nn.Parameter(torch.randn(64, 96))
    other = torch.optim.AdamW([plain], lr=0.05)
    for _ in range(3):
        plain.grad = torch.randn(64, 96)
        other.step()
    taken = AdamW([weights()], **options)
    taken.load_state_dict(other.state_dict())
    assert max(train(taken, 25)) <= 1 + 2.0**-8
    model = nn.Sequential(nn.Linear(96, 64, bias=False, dtype=torch.bfloat16))
    ottava.convert(model, "tensorwise", weights="fp8")
    optimizer = AdamW(model.parameters(), **options)
    predicted = ottava.memory(model, optimizer).moments
    model[0].weight.grad = torch.zeros(64, 96, dtype=torch.bfloat16)
    optimizer.step()
    assert predicted == ottava.memory(model, optimizer).moments


def test_what_it_does_not_bound_is_refused() -> None:
    for wrong in ({"moments": "fp8"}, {"moments": "int8"}, {"capturable": True}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="is for moments in fp32 or bf16, capturable=False and eps of 1e-15"):
            AdamW([weights()], master="fp32", amax_every=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"above 1 is for weights with one scale; got one stored as E4M3\[128x128"):
        AdamW([weights("blockwise")], master="fp32", amax_every=2)
    for every in (0, -1):
        with pytest.raises(ValueError, match=f"amax_every is {every}; needs 1 or more steps"):
            AdamW([weights()], master="fp32", amax_every=every)
    with pytest.raises(TypeError, match=r"amax_every is 1\.5; needs a whole number"):
        AdamW([weights()], master="fp32", amax_every=1.5)  # type: ignore[arg-type]
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    optimizer = AdamW([plain], amax_every=2)  # has no codes: nothing to bound
    optimizer.step()
    assert BOUND not in optimizer.state[plain]


def test_an_amax_covers_the_rounding_to_the_outer_dtype() -> None:
    bound = torch.tensor([1 + 2.0**-8 + 2.0**-9, 1.0], dtype=torch.float64)
    amax = outer_amax(bound, torch.ones(1, dtype=torch.bfloat16))
    assert float(amax) == 1 + 2.0**-7
    assert float(amax) >= float(torch.tensor(float(bound[0])).bfloat16())
    assert measure(torch.empty(0, 2), torch.empty(0, 2), torch.empty(0, 2), 4, 1, {}).tolist() == [0.0, 0.0]

"""The one step: torch's bits, torch's state dicts, torch's tools around an optimizer."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

import ottava
from optim.samples import copies, made, same, steps
from ottava.optim import SGD, AdamW, Lion, Muon, accumulate_fp32, rewarm
from ottava.optim.storage import STORAGES, _value
from sweep import sweep

OPTIMIZERS = (AdamW, Lion, Muon, lambda p, **options: SGD(p, momentum=0.9, **options))


@sweep(make=OPTIMIZERS, moments=tuple(STORAGES), options=({}, {"master": "fp32"}, {"master": "remainder"}))
def test_a_state_dict_continues_bit_for_bit(make: Any, moments: str, options: dict[str, Any]) -> None:
    """Through torch.save, into a fresh optimizer; also as a deep copy."""
    parameters = made(matrices=True, dtype=torch.bfloat16 if options else torch.float32)
    first = make(parameters, moments=moments, **options)
    steps([(first, parameters)], 7)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    twins = copies(parameters)
    second = make(twins, moments=moments, **options)
    second.load_state_dict(torch.load(file))
    third = copy.deepcopy(second)
    thirds = [p for group in third.param_groups for p in group["params"]]
    steps([(first, parameters), (second, twins), (third, thirds)], 7)
    assert same(parameters, twins)
    assert same(parameters, thirds)
    for parameter, twin in zip(parameters, twins, strict=True):
        for name, value in first.state[parameter].items():
            other = second.state[twin][name]
            assert value.dtype == other.dtype
            assert torch.equal(value.float(), other.float()), name


@sweep(moments=tuple(STORAGES))
def test_states_go_to_torch_and_back(moments: str) -> None:
    """torch's AdamW continues ours with the moments that we decode; ours takes torch's, to within its storage."""
    parameters = made()
    ours = AdamW(parameters, 1e-3, moments=moments)  # type: ignore[arg-type]
    steps([(ours, parameters)], 6)
    twins = copies(parameters)
    theirs = torch.optim.AdamW(twins, 1e-3, foreach=True)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch's shares memory with what it loads
    assert all(theirs.state[p]["exp_avg"].dtype == torch.float32 for p in twins)
    steps([(ours, parameters), (theirs, twins)], 1)
    assert same(parameters, twins), "the first step reads the same moments"
    steps([(theirs, twins)], 6)
    again = copies(twins)
    back = AdamW(again, 1e-3, moments=moments)  # type: ignore[arg-type]
    back.load_state_dict(theirs.state_dict())
    assert back.param_groups[0]["moments"] == moments
    assert back.state[again[0]]["step"] == theirs.state[twins[0]]["step"]
    for mine, twin in zip(again, twins, strict=True):
        for name, positive in (("exp_avg", False), ("exp_avg_sq", True)):
            wanted = STORAGES[moments].empty(twin)
            STORAGES[moments].write([wanted], [theirs.state[twin][name].clone()], positive=positive)
            assert torch.equal(back.state[mine][name].float(), wanted[""].float())
    steps([(back, again)], 2)


def test_a_state_changes_its_storage_on_loading() -> None:
    """From FP8 moments and a remainder to FP32 and a master, and back: the same weight in FP32."""
    parameters = made(dtype=torch.bfloat16)
    first = AdamW(parameters, master="remainder", moments="fp8")
    steps([(first, parameters)], 5)
    chain = [(first, parameters)]
    for options in ({"master": "fp32", "moments": "int8"}, {"master": "remainder"}, {"master": "fp32"}):
        twins = copies(parameters)
        other = AdamW(twins, **options)  # type: ignore[arg-type]
        other.load_state_dict(chain[-1][0].state_dict())
        assert {name: other.param_groups[0][name] for name in options} == options
        chain.append((other, twins))
    for one, (last, twins) in itertools.product((chain[0],), chain[1:]):
        for group in (*one[0].param_groups, *last.param_groups):
            group.update(lr=0.0, weight_decay=0.0)
        steps([one, (last, twins)], 1, skip=99)
        assert same(one[1], twins)
        for a, b in zip(one[1], twins, strict=True):
            assert torch.equal(_value(a.data, one[0].state[a]), _value(b.data, last.state[b]))


@sweep(make=OPTIMIZERS, moments=tuple(STORAGES))
def test_a_step_reads_nothing_back_when_capturable(make: Any, moments: str) -> None:
    """On the meta device every reading raises. On a CPU the result is that of torch's formula for graphs."""
    for options in ({}, {"master": "fp32"}, {"master": "remainder"}, {"stochastic_rounding": True}):
        weight = nn.Parameter(torch.empty(64, 48, dtype=torch.bfloat16, device="meta"))
        weight.grad = torch.empty_like(weight)
        make([weight], lr=torch.tensor(1e-3, device="meta"), moments=moments, capturable=True, **options).step()
    plain = made(matrices=True)
    captured = copies(plain)
    one = make(plain, lr=1e-3, moments="fp32")
    two = make(captured, lr=torch.tensor(1e-3), moments="fp32", capturable=True)
    steps([(one, plain), (two, captured)], 20)
    assert two.state[captured[0]]["step"].dim() == 0
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(plain, captured, strict=True))


@sweep(make=OPTIMIZERS, moments=tuple(STORAGES), bad=(math.inf, math.nan))
def test_a_gradient_that_is_not_finite_hurts_its_element_only(make: Any, moments: str, bad: float) -> None:
    """As with torch's optimizers; Muon mixes all elements of a matrix, so there everything is NaN, with torch's too."""
    weight = nn.Parameter(torch.randn(16, 128))
    optimizer = make([weight], moments=moments)
    for number in range(3):
        weight.grad = torch.randn_like(weight)
        if number == 1:
            weight.grad[3, 5] = bad
        optimizer.step()
    if isinstance(optimizer, Muon):
        assert weight.isnan().all()
    else:
        hurt = ~weight.isfinite()
        expected = torch.zeros_like(hurt)
        expected[3, 5] = not isinstance(optimizer, Lion)  # the sign of NaN is 0: the weight stops
        assert torch.equal(hurt, expected)


def test_slices_and_neighbours_change_no_bit() -> None:
    """A large parameter is updated in slices, small ones together; each gets what it gets alone."""
    for moments in STORAGES:
        big, small = torch.randn(3, 100_003), torch.randn(77)
        together = [nn.Parameter(big.clone()), nn.Parameter(small.clone()), nn.Parameter(big.t().clone().t())]
        optimizer = AdamW(together, 1e-2, moments=moments)  # type: ignore[arg-type]
        alone = nn.Parameter(small.clone())
        other = AdamW([alone], 1e-2, moments=moments)  # type: ignore[arg-type]
        for _ in range(3):
            gradient = torch.randn_like(big)
            together[0].grad, together[2].grad = gradient, gradient.t().clone().t()
            together[1].grad = alone.grad = torch.randn(77)
            optimizer.step()
            other.step()
        assert torch.equal(together[1], alone)
        assert torch.allclose(together[0], together[2], rtol=2.0**-22), "other strides, other groups of 128"


def test_tools_of_torch_work() -> None:
    """Groups with options of their own, schedulers, closures, clipping, GradScaler, zero_grad, named parameters."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).bfloat16()
    report = ottava.convert(model, "delayed")
    assert report.converted
    optimizer = AdamW(list(model[0].named_parameters()), 1e-2, master="remainder", moments="fp8")
    optimizer.add_param_group({"params": list(model[1].named_parameters()), "moments": "fp32", "weight_decay": 0.0})
    with pytest.raises(ValueError, match="unknown moments"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(2)))], "moments": "fp9"})
    assert len(optimizer.param_groups) == 2
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 5)]
    schedule = SequentialLR(optimizer, parts, milestones=[3])  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    x = torch.randn(16, 32).bfloat16()

    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = model(x).float().square().mean()
        value.backward()
        return value

    losses = [float(optimizer.step(loss).detach()) for _ in range(4)]
    assert losses[-1] < losses[0]
    for _ in range(5):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float8_e4m3fn
    assert optimizer.state[model[1].weight]["exp_avg"].dtype == torch.float32
    assert model[0].scaling_state.boundaries == 9, "each step is a boundary of predicted scales"
    before = model[0].weight.detach().clone()
    scaler.scale(model(x).float().square().mean()).backward()
    model[0].weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert torch.equal(model[0].weight, before), "GradScaler skips a step with infinities"


def test_bad_input_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    for make, words in (
        (lambda: AdamW([weight], lr=-1.0), "lr is -1.0"),
        (lambda: AdamW([weight], betas=(1.0, 0.9)), "betas are"),
        (lambda: AdamW([weight], eps=-1.0), "eps is"),
        (lambda: SGD([weight], nesterov=True), "nesterov needs a momentum"),
        (lambda: SGD([weight], momentum=-1.0), "momentum is -1"),
        (lambda: Lion([weight], betas=(0.9, 2.0)), "betas are"),
        (lambda: Lion([weight], betas=(0.9,)), "betas are"),
        (lambda: Muon([{"params": [weight], "betas": (0.9, -1.0)}]), "betas are"),
        (lambda: Muon([weight], momentum=-1.0), "momentum is"),
        (lambda: Muon([weight], adjust_lr_fn="x"), "needs original or match_rms_adamw"),  # type: ignore[arg-type]
        (lambda: Muon([nn.Parameter(torch.ones(4))]), "updates whole matrices"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    for options in ({"lr": "1e-3"}, {"eps": None}, {"weight_decay": [1]}, {"stochastic_rounding": "yes"}):
        with pytest.raises(TypeError, match=r"needs (a number|true or false)"):
            AdamW([weight], **options)  # type: ignore[arg-type]
    for make in (lambda: AdamW(None), lambda: accumulate_fp32(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"needs parameters: model\.parameters\(\)"):
            make()
    for betas in (0.9, None, ("a", "b")):
        with pytest.raises(TypeError, match="needs two numbers such as"):
            AdamW([weight], betas=betas)  # type: ignore[arg-type]
    weight.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(TypeError, match="takes dense ones"):
        AdamW([weight]).step()
    other = torch.optim.AdamW([weight], amsgrad=True)
    with pytest.raises(ValueError, match="has no amsgrad"):
        AdamW([weight]).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"AdamW\.load_state_dict: has no param_groups; needs what"):
        AdamW([weight]).load_state_dict({})
    with pytest.raises(ValueError, match="has a damaged param_groups"):
        AdamW([weight]).load_state_dict({"state": {}, "param_groups": 3})
    with pytest.raises(TypeError, match=r"AdamW\.load_state_dict: got None; needs what"):
        AdamW([weight]).load_state_dict(None)  # type: ignore[arg-type]
    state = AdamW([weight]).state_dict()
    state["state"] = {0: {"step": torch.ones(()), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}}
    with pytest.raises(ValueError, match=r"has shape \(5,\); the parameter has \(4, 4\)"):
        AdamW([weight]).load_state_dict(state)


def test_the_state_of_another_rule_is_refused() -> None:
    """Before anything is changed; torch's optimizer of the same rule is no other one."""

    def stepped(kind: Any, **options: Any) -> Any:
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.ones(4, 4)
        optimizer = kind([weight], lr=0.1, **options)
        optimizer.step()
        return optimizer

    rules = {
        "AdamW": (AdamW, torch.optim.AdamW, {}),
        "Lion": (Lion, None, {}),
        "SGD": (SGD, torch.optim.SGD, {"momentum": 0.9}),
        "SGD without momentum": (SGD, torch.optim.SGD, {}),
        "Muon": (Muon, None, {}),
    }
    same = {frozenset(("SGD", "Muon"))}  # one momentum under one name
    for name, (kind, theirs, options) in rules.items():
        for other, (another, _, others) in rules.items():
            target, source = stepped(kind, **options), stepped(another, **others).state_dict()
            source["param_groups"] = target.state_dict()["param_groups"]
            before = {key: value.clone() for key, value in target.state[target.param_groups[0]["params"][0]].items()}
            if name == other or frozenset((name, other)) in same or other == "SGD without momentum":
                target.load_state_dict(source)
                continue
            with pytest.raises(ValueError, match=r"got the state of another rule, with \w+"):
                target.load_state_dict(source)
            after = target.state[target.param_groups[0]["params"][0]]
            assert all(torch.equal(after[key], value) for key, value in before.items()), (name, other)
        if theirs is not None:
            stepped(kind, **options).load_state_dict(stepped(theirs, **options).state_dict())


# --- gradients ---


def test_micro_batches_add_up_in_fp32() -> None:
    """The sum of 200 BF16 gradients: exact to FP32's errors; BF16 accumulation is off by more than a per cent."""
    weights = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(2)]
    accumulate_fp32(weights[:1])
    exact = torch.zeros(64, dtype=torch.float64)
    for _ in range(200):
        part = torch.rand(64).bfloat16()
        exact += part.double()
        for weight in weights:
            (weight * part).sum().backward()
    errors = [float(((w.grad.double() - exact).abs() / exact).max()) for w in weights]  # type: ignore[union-attr]
    assert errors[0] < 200 * 2.0**-24
    assert errors[1] > 0.01


def test_optimizer_clipping_and_scaler_take_them() -> None:
    model = nn.Linear(16, 16).bfloat16()
    accumulate_fp32(model.parameters())
    optimizer = AdamW(model.parameters(), 1e-2, master="remainder", moments="fp8")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for _ in range(2):
        scaler.scale(model(torch.randn(4, 16).bfloat16()).float().square().sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype == torch.float32
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(total) == pytest.approx(1e-3, rel=1e-3)
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_gradient_that_is_there_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="call zero_grad first"):
        accumulate_fp32([weight])
    with pytest.raises(TypeError, match=r"got a Linear; needs parameters: model\.parameters"):
        accumulate_fp32(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[arg-type]


# --- warmup ---


def test_steps_are_lowered_and_the_schedule_is_not() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    rewarm(optimizer, 3)
    moved = []
    for _ in range(6):
        before = float(weight.detach())
        weight.grad = -torch.ones(1, dtype=torch.float64)
        optimizer.step()
        schedule.step()
        moved.append(float(weight.detach()) - before)
    assert moved == pytest.approx([0.25, 0.5, 0.75 * 0.5, 0.5, 0.25, 0.25])
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_resumed_warm_up_goes_on_and_a_removed_one_ends() -> None:
    for done, remove, wanted in ((2, False, 0.75), (0, True, 1.0), (9, False, 1.0)):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = AdamW([weight], lr=1.0, weight_decay=0.0, eps=0.0)
        handle = rewarm(optimizer, 3, done=done)
        if remove:
            handle.remove()
        weight.grad = -torch.ones(1)
        optimizer.step()
        assert float(weight.detach()) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="steps is -1"):
        rewarm(optimizer, -1)
    with pytest.raises(TypeError, match="steps is '3'; needs a whole number"):
        rewarm(optimizer, "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a StepLR; needs a torch\.optim\.Optimizer"):
        rewarm(StepLR(optimizer, 1), 3)  # type: ignore[arg-type]

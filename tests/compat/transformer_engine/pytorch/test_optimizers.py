"""TransformerEngine's optimizers: the steps of torch's, the options of ours, refusals by name."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    pairs: list[tuple[Any, dict[str, Any], Any]] = [
        (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}, torch.optim.AdamW),
        (FusedAdam, {"lr": 1e-2, "weight_decay": 0.0}, torch.optim.AdamW),
        (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ]
    assert te.optimizers.FusedAdam is FusedAdam
    for ours, settings, theirs in pairs:
        models = [copy.deepcopy(layer) for _ in range(2)]
        optimizers = [ours(models[0].parameters(), **settings), theirs(models[1].parameters(), **settings)]
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        assert torch.equal(models[0].weight, models[1].weight)


def test_gradients_beside_the_parameter_are_read_and_a_state_of_theirs_goes_on() -> None:
    """BF16 weights with FP32 masters and FP32 gradients, against torch's AdamW on FP32 weights."""
    torch.manual_seed(0)
    start = torch.randn(64).bfloat16()
    theirs = torch.nn.Parameter(start.float())
    witness = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    for remainders in (False, True):
        ours = torch.nn.Parameter(start.clone())
        theirs.data.copy_(start)
        witness.state.clear()
        settings: Any = {"lr": 0.1, "master_weights": True, "use_decoupled_grad": True}
        optimizer = FusedAdam([ours], store_param_remainders=remainders, **settings)
        for step in range(4):
            theirs.grad = torch.randn(64)
            ours.decoupled_grad = theirs.grad.clone()  # type: ignore[attr-defined]
            optimizer.step()
            witness.step()
            assert optimizer.param_groups[0]["step"] == step + 1
            assert torch.equal(optimizer.get_unscaled_state(ours, "exp_avg"), witness.state[theirs]["exp_avg"])
            master = optimizer.get_unscaled_state(ours, "master_param")
            if remainders:  # bits of the weight and remainder, as transformer_engine/common/multi_tensor/adam.cu has it
                master = ((ours.detach().view(torch.int16).int() << 16) + master.int()).view(torch.float32)
            assert torch.equal(master, theirs)
            if step == 1:  # as TransformerEngine saves it: a group counts the steps, and a master has another name
                names = ("exp_avg", "exp_avg_sq", "master_param")
                state = {name: optimizer.get_unscaled_state(ours, name).clone() for name in names}
                groups = [{**optimizer.state_dict()["param_groups"][0], "step": 2}]
                optimizer = FusedAdam([ours], store_param_remainders=remainders, **settings)
                optimizer.load_state_dict({"param_groups": groups, "state": {0: state}})
        optimizer.zero_grad(set_to_none=False)
        assert not ours.decoupled_grad.any()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        assert ours.decoupled_grad is None  # type: ignore[attr-defined]
        optimizer.step()  # no gradient: the weight stays
        assert ours.grad is None


def test_options_have_our_names() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    for given, wanted in (
        ({}, (None, "fp32")),
        ({"master_weights": True}, ("fp32", "fp32")),
        ({"master_weights": True, "store_param_remainders": True}, ("remainder", "fp32")),
        ({"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}, (None, "bf16")),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, (None, "fp8")),
        ({"master_weights": True, "master_weight_dtype": torch.float16}, ("remainder", "fp32")),
    ):
        made = FusedAdam(parameters, **given).defaults  # type: ignore[arg-type]
        assert (made["master"], made["moments"]) == wanted


def test_each_mean_has_a_dtype_of_its_own() -> None:
    """Megatron's --exp-avg-dtype and --exp-avg-sq-dtype; steps stay beside those of FP32, also after a restart."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    stored = dict(zip(kinds, (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn), strict=True))
    for first, second in itertools.product(kinds, kinds):
        settings: Any = {"lr": 0.1, "master_weights": True, "master_weight_dtype": torch.float16}
        settings |= {"exp_avg_dtype": first, "exp_avg_sq_dtype": second}
        torch.manual_seed(0)
        ours = torch.nn.Parameter(torch.randn(3000).bfloat16())
        theirs = torch.nn.Parameter(ours.detach().float())
        optimizer, witness = FusedAdam([ours], **settings), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
        for step in range(6):
            theirs.grad = torch.randn(3000)
            ours.grad = theirs.grad.bfloat16()
            optimizer.step(), witness.step()
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                before = copy.deepcopy(optimizer.state[ours])
                optimizer = FusedAdam([ours], **settings)
                optimizer.load_state_dict(state)
                assert all(torch.equal(value, optimizer.state[ours][name]) for name, value in before.items())
        kept = optimizer.state[ours]
        assert (kept["exp_avg"].dtype, kept["exp_avg_sq"].dtype) == (stored[first], stored[second])
        master = optimizer.get_unscaled_state(ours, "master_param")
        off = (master - theirs).abs().max()
        # a step has 0.1, and E4M3 of an expanded range has 2**-4 at most; FP16 and BF16 have 2**-8 of BF16's gradients
        assert off < 6 * 0.1 * (2.0**-4 if torch.uint8 in (first, second) else 2.0**-6)


def test_what_is_not_here_is_refused_by_name() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4))]
    for given in ({"adam_w_mode": False}, {"bias_correction": False}, {"amsgrad": True}):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            FusedAdam(parameters, **given)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"exp_avg_sq_dtype=torch\.int8 is not in ottava; needs"):
        FusedAdam(parameters, exp_avg_sq_dtype=torch.int8)
    with pytest.raises(NotImplementedError, match="master_weight_dtype"):
        FusedAdam(parameters, master_weight_dtype=torch.bfloat16)
    halves = [torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float16))]
    for name, value in {"master_weight_dtype": torch.float16, "store_param_remainders": True}.items():
        with pytest.raises(ValueError, match=rf"^FusedAdam: {name}={value} extends bfloat16 weights; .*: leave it out"):
            FusedAdam(halves, master_weights=True, **{name: value})
    with pytest.raises(NotImplementedError, match="dampening"):
        FusedSGD(parameters, lr=0.1, dampening=0.5)
    with pytest.raises(TypeError, match="adam_mode"):
        FusedAdam(parameters, adam_mode=True)

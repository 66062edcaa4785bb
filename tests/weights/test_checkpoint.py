"""State dicts of FP8 weights: plain tensors under stable keys, into FP8 and BF16 models, and from both."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import ottava
from ottava.nn import dequantize_state_dict
from ottava.weights.checkpoint import infer_spec
from ottava.weights.parameter import is_quantized_weight, quantized_weight
from sweep import sweep

K, N = 160, 96


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16))


def pair() -> tuple[nn.Module, nn.Module]:
    """A model with FP8 weights, and one with the numbers that these stand for."""
    torch.manual_seed(0)
    stored, plain = linear(), linear()
    ottava.convert(stored, "blockwise", weights="fp8")
    ottava.convert(plain, "blockwise")
    plain.load_state_dict(stored.state_dict())
    return stored, plain


def test_state_dicts_hold_plain_tensors_under_stable_keys() -> None:
    """Codes and scales, for safetensors as they are; loaded by FP8 and BF16 models, by torch's own after decoding."""
    stored, plain = pair()
    state = stored.state_dict()
    assert list(state) == ["0.weight", "0.bias", "0.weight_scale_inv"]
    assert state["0.weight"].dtype == torch.float8_e4m3fn
    state = load(save(state))
    assert all(type(tensor) is Tensor for tensor in state.values())
    wanted = stored[0].weight.dequantize().detach()
    fresh, _ = pair()
    for source in (state, plain.state_dict()):  # from FP8, and from BF16
        nn.init.zeros_(fresh[0].weight)
        fresh.load_state_dict(source)
        assert torch.equal(fresh[0].weight.dequantize(), wanted)
    bf16 = linear()
    bf16.load_state_dict(dequantize_state_dict(state))
    assert torch.equal(bf16[0].weight, wanted)
    assert torch.equal(plain[0].weight, wanted)  # `same_numbers` has loaded it from codes
    with torch.device("meta"), ottava.model_init("blockwise"):
        empty = linear()
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty[0].weight.dequantize(), wanted)
    empty.load_state_dict(plain.state_dict(), assign=True)
    assert is_quantized_weight(empty[0].weight)
    ottava.convert(stored, "blockwise", weights="bf16")
    assert type(stored[0].weight) is nn.Parameter
    stored.load_state_dict(state)
    assert torch.equal(stored[0].weight, wanted)


def test_states_that_do_not_fit_are_refused_with_the_key() -> None:
    model, _ = pair()
    state = model.state_dict()
    codes, scales = "0.weight", "0.weight_scale_inv"
    bad = {
        "without their scales": {k: v for k, v in state.items() if k != scales},
        "has (1, 2)": {**state, scales: torch.ones(3, 3)},
        "no powers of two": {**state, scales: torch.full((1, 2), 0.3)},
        "float8_e5m2": {**state, codes: state[codes].view(torch.float8_e5m2)},
    }
    before = model[0].weight.dequantize()
    for message, wrong in bad.items():
        with pytest.raises(RuntimeError, match=re.escape(message)):
            model.load_state_dict(wrong)
        assert torch.equal(model[0].weight.dequantize(), before)


@sweep()
def test_codes_and_scales_say_what_they_are(recipe: ottava.Recipe) -> None:
    """What `infer_spec` finds decodes to the same numbers, under every recipe."""
    cell = recipe.cells("weight")[0]
    if cell is not None:
        weight = quantized_weight(torch.randn(256, 384), cell)
        found = infer_spec(weight.codes, weight.scale_inv)
        assert (found.format, found.granularity) == (cell.format, cell.granularity)
    with pytest.raises(ValueError, match="needs one for each of these: tensor, row, 128x128"):
        infer_spec(torch.zeros(64, 64, dtype=torch.float8_e4m3fn), torch.ones(5, 7))
    with pytest.raises(ValueError, match="needs float8_e4m3fn"):
        infer_spec(torch.zeros(64, 64), torch.ones(1, 1))

"""LoRA in both orders, and adapters that are merged into weights in FP8, with the error said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from hf_samples import batch, losses_of, made
from ottava.weights.parameter import is_quantized_weight

peft = pytest.importorskip("peft")
door = pytest.importorskip("ottava.doors.peft")


def adapted(order: str, weights: Any = None, steps: int = 4, **settings: Any) -> tuple[Any, list[float]]:
    """A model with trained adapters on every projection, and its losses."""
    model = made()
    config = door.with_fp8_weights(peft.LoraConfig(r=4, target_modules="all-linear", **settings))
    if order == "convert first":
        ottava.convert(model, "delayed", weights=weights)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    if order == "lora first":
        report = ottava.convert(model, "delayed", weights=weights)
        assert len(report.converted) == 14
        assert sum("LoRA adapter" in why for why in report.skipped.values()) == 28
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    losses = losses_of(model, optimizer, range(steps))
    return model.eval(), losses


def layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_both_orders_train_alike(weights: Any) -> None:
    model, losses = adapted("convert first", weights)
    _, others = adapted("lora first", weights)
    assert losses == others
    assert losses[-1] != losses[0]
    ottava.assert_fp8(model.base_model.model.model.layers[0].mlp.up_proj.base_layer)
    assert sum(is_quantized_weight(p) for p in model.parameters()) == (14 if weights else 0)


@pytest.mark.parametrize("order", ["convert first", "lora first"])
def test_a_merge_says_what_the_cast_lost(order: str, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = adapted(order, "fp8")
    caplog.set_level(logging.INFO)
    one = layers(model)[3]
    before = one.base_layer.weight.dequantize(torch.float32)
    delta = one.get_delta_weight("default").float()
    one.merge()
    after = one.base_layer.weight.dequantize(torch.float32)
    lost = float((after - before - delta).norm() / delta.norm())
    assert one.merge_error == pytest.approx(lost)
    assert 0 < lost < 0.5
    assert one.merged
    assert f"the cast lost {100 * lost:.1f} % of what the adapter adds" in caplog.messages[-1]
    half_a_step = before.abs().amax() * 2**-4
    assert (after - before - delta).abs().max() <= half_a_step
    one.unmerge()
    back = one.base_layer.weight.dequantize(torch.float32)
    assert not one.merged
    assert (back - before).abs().max() <= 2 * half_a_step


def test_a_merged_model_is_free_of_adapters_and_still_in_fp8() -> None:
    model, _ = adapted("convert first", "fp8")
    with torch.no_grad():
        wanted = model(**batch(9)).logits.float()
        whole = model.merge_and_unload()
        got = whole(**batch(9)).logits.float()
    assert type(whole).__name__ == "LlamaForCausalLM"
    assert sum(is_quantized_weight(p) for p in whole.parameters()) == 14
    assert (got - wanted).norm() / wanted.norm() < 0.1


def test_weights_in_high_precision_merge_as_peft_does_it() -> None:
    model, _ = adapted("convert first")
    one = layers(model)[0]
    wanted = (one.base_layer.weight.float() + one.get_delta_weight("default").float()).bfloat16()
    one.merge()
    assert torch.equal(one.base_layer.weight, wanted)
    one.unmerge()
    assert not one.merged


def test_adapters_survive_saving(tmp_path: Path) -> None:
    model, _ = adapted("convert first", "fp8")
    model.save_pretrained(tmp_path)
    base = made()
    ottava.convert(base, "delayed", weights="fp8")
    config = door.with_fp8_weights(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(base, tmp_path, config=config)
    assert all(type(layer).__name__ == "Fp8LoraLinear" for layer in layers(again))
    for one, other in zip(layers(model), layers(again), strict=True):
        assert torch.equal(one.lora_B["default"].weight, other.lora_B["default"].weight)


def test_what_is_no_sum_is_refused_and_changes_nothing() -> None:
    model, _ = adapted("lora first", "fp8", steps=1, lora_bias=False)
    one = layers(model)[0]
    codes = one.base_layer.weight.codes.clone()
    one.lora_bias["default"] = True
    with pytest.raises(ValueError, match="adapter 'default' is no plain sum"):
        one.merge()
    one.lora_bias["default"] = False
    with torch.no_grad():
        one.lora_B["default"].weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        one.merge()
    assert torch.equal(codes.view(torch.uint8), one.base_layer.weight.codes.view(torch.uint8))
    assert not one.merged

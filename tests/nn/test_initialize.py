"""`model_init`: FP8 weights from the moment a layer is made, on real memory and on meta."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.recipe import get_recipe
from ottava.weights.parameter import is_quantized_weight

K, N = 160, 96


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16))


RECIPE = "tensorwise"


def test_model_init_makes_fp8_weights_at_once() -> None:
    """At no time more than one weight is in BF16, and the numbers are those of `convert` after the fact."""
    torch.manual_seed(0)
    plain: list[int] = []

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(x)

    def made() -> nn.Module:
        layers = []
        for _ in range(4):
            layers.append(nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.ReLU()))
            plain.append(sum(not is_quantized_weight(m[0].weight) for m in layers))
        return nn.Sequential(*layers, Headed())

    with ottava.model_init(RECIPE, keep_high_precision=True):
        model = made()
    assert max(plain) == 0
    assert type(model[4].lm_head.weight) is nn.Parameter
    torch.manual_seed(0)
    later = made()
    ottava.convert(later, RECIPE, weights="fp8")
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    assert torch.equal(model(x), later(x))
    assert model[1][0].name == "1.0"
    assert model[0][0].weight.high_precision is not None
    with ottava.model_init("delayed"):
        alone = nn.Linear(64, 64, dtype=torch.bfloat16)
    assert is_quantized_weight(alone.weight)
    assert len(set(map(id, nn.modules.module._global_module_registration_hooks.values()))) >= 1
    assert not nn.modules.module._global_parameter_registration_hooks  # ours are gone
    with pytest.raises(ValueError, match="has overrides"), ottava.model_init(get_recipe(RECIPE).override("*", "bf16")):
        pass


def test_under_meta_memory_and_numbers_come_later() -> None:
    with torch.device("meta"), ottava.model_init(RECIPE):
        model = linear()
    assert (model[0].weight.device.type, model[0].weight.codes.is_meta) == ("meta", True)
    with pytest.raises(ValueError, match=r"got input on cpu for a weight on meta; .* model\.to_empty"):
        model(torch.ones(4, K, dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    assert is_quantized_weight(model[0].weight)
    torch.manual_seed(0)
    model[0].reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(model[0].weight.dequantize(), converted()[0].weight.dequantize())
    twin = copy.deepcopy(model)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert torch.equal(twin(x), model(x))
    assert twin.float()[0].weight.dtype == torch.float32


def test_of_nested_contexts_the_inner_one_decides() -> None:
    """About layers that are made in it, also when they become children of a module of the outer one."""
    with ottava.model_init("blockwise", keep_high_precision=True):
        first = linear()
        with ottava.model_init("tensorwise"):
            second = linear()
            alone = nn.Linear(K, N, dtype=torch.bfloat16)
            with ottava.model_init("bf16"):
                plain = linear()
        model = nn.Sequential(first, second, alone, nn.Sequential(plain), linear())
    recipes = [model.get_submodule(name).recipe.name for name in ("0.0", "1.0", "2", "3.0.0", "4.0")]
    assert recipes == ["blockwise", "tensorwise", "tensorwise", "bf16", "blockwise"]
    assert [is_quantized_weight(p) for p in model.parameters() if p.dim() == 2] == [True, True, True, False, True]
    assert (second[0].weight.high_precision, alone.weight.high_precision) == (None, None)
    assert model[4][0].weight.high_precision is not None
    assert not nn.modules.module._global_parameter_registration_hooks


def converted() -> nn.Module:
    model = linear()
    ottava.convert(model, RECIPE, weights="fp8")
    return model

"""Weights whose rows and columns have casts of their own, and casts that no cell of a recipe says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sweep import sweep

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import CustomRecipe, NVFP4BlockScaling
from ottava.compat.transformer_engine.pytorch.gemms import general_gemm
from ottava.compat.transformer_engine.pytorch.optimizers import FusedAdam
from ottava.compat.transformer_engine.pytorch.rope import apply_rotary_pos_emb

E4M3 = te.DType.kFloat8E4M3
KINDS: dict[str, Callable[[], Any]] = {
    "mx": lambda: te.MXFP8Quantizer(E4M3),
    "tensor": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "block": lambda: te.Float8BlockQuantizer(E4M3),
}


def recipe_of(row: str, column: str, source: str = "original") -> CustomRecipe:
    def factory(role: Any) -> Any:
        pair = {"rowwise_quantizer": KINDS[row](), "columnwise_quantizer": KINDS[column]()}
        flat = te.Float8BlockQuantizer(E4M3, block_scaling_dim=1) if "block" in (row, column) else KINDS[column]()
        return te.HybridQuantizer(**pair, columnwise_source=source) if role.tensor_type == "weight" else flat

    return CustomRecipe(qfactory=factory)


def passed(layer: Any, recipe: Any, x: Any) -> list[Any]:
    own = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(own)
    y.backward(x[:, :64].flip(0))
    return [y.detach(), own.grad, layer.weight.grad]


@sweep(pair=(("tensor", "tensor"), ("mx", "mx"), ("block", "block")))
def test_a_stored_hybrid_trains_with_the_bits_of_casts(pair: tuple[str, str]) -> None:
    """Also behind a gather of two shards; masters are those of a plain weight."""
    recipe, x = recipe_of(*pair), torch.randn(256, 128)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        stored = te.Linear(128, 64, bias=False, device="cpu")
    weight: Any = stored.weight
    plain = te.Linear(128, 64, bias=False, device="cpu", init_method=lambda w: w.copy_(weight.high_precision))
    for own, other in zip(passed(stored, recipe, x), passed(plain, recipe, x), strict=True):
        assert torch.equal(own, other)
    with pytest.raises(ValueError, match="a second rounding"):
        passed(stored, NVFP4BlockScaling(), x)
    if pair[0] != "block":
        halves = [half.fsdp_pre_all_gather(None, None, None, None, None) for half in weight.detach().split(32)]
        parts = tuple(torch.cat(two) for two in zip(*(half[0] for half in halves), strict=True))
        whole, _ = weight.fsdp_post_all_gather(parts, halves[0][1], weight.dtype)
        for name in ("rowwise_sub_storage", "columnwise_sub_storage"):
            assert torch.equal(getattr(whole, name).dequantize(), getattr(weight, name).dequantize())
    start = torch.nn.Parameter(weight.dequantize().detach())
    both = [FusedAdam([one], lr=0.1, master_weights=True) for one in (weight, start)]
    for _ in range(3):
        weight.grad = start.grad = torch.randn(64, 128)
        [one.step() for one in both]
    assert torch.equal(both[0].get_unscaled_state(weight, "master_param"), start)
    assert torch.equal(weight.rows.data, weight._quantizer(start.detach()).rows.data)


def test_rows_alone_and_columns_of_decoded_rows() -> None:
    x, cast = torch.randn(32, 128) * torch.logspace(-3, 3, 32)[:, None], te.NVFP4Quantizer()
    layer, rows = te.Linear(128, 64, bias=False, device="cpu"), te.NVFP4Quantizer(row_scaled_nvfp4=True)
    settings: dict[str, Any] = dict.fromkeys(("disable_rht", "disable_stochastic_rounding"), True)
    alone = NVFP4BlockScaling(row_scaled_activation=True, disable_2d_quantization=True, **settings)
    y, _, dw = passed(layer, alone, x)
    assert torch.equal(y, general_gemm(cast(layer.weight.detach()), rows(x))[0])
    assert torch.equal(dw, general_gemm(rows(x), cast(x[:, :64].flip(0)), layout="NT")[0])
    with te.quantized_model_init(recipe=alone, preserve_high_precision_init_val=True):  # W and W.T have scales apart
        stored: Any = te.Linear(128, 64, bias=False, device="cpu")
    layer.weight = torch.nn.Parameter(stored.weight.high_precision)
    assert all(map(torch.equal, passed(stored, alone, x), passed(layer, alone, x)))
    layer.zero_grad()
    _, dx, _ = passed(layer, recipe_of("mx", "mx", "rowwise_dequantized"), x)
    again = KINDS["mx"]()(KINDS["mx"]()(layer.weight.detach()).dequantize())
    assert torch.equal(dx, general_gemm(again, KINDS["mx"]()(x[:, :64].flip(0)), layout="NN")[0])


def test_small_ones() -> None:
    rows, both = te.Float8CurrentScalingQuantizer(E4M3, columnwise=False), KINDS["tensor"]()
    a, b = torch.randn(32, 48), torch.randn(16, 32)
    assert torch.equal(general_gemm(rows(a), rows(b), layout="NN")[0], general_gemm(both(a), both(b), layout="NN")[0])
    listed: Any = KINDS["mx"]()(a)
    torch._foreach_add_([listed], 1.0)
    assert torch.equal(listed.dequantize(), KINDS["mx"]()(KINDS["mx"]()(a).dequantize() + 1).dequantize())
    t = torch.randn(8, 1, 2, 16, dtype=torch.float16).requires_grad_()
    wide, angles = t.detach().float().requires_grad_(), torch.rand(8, 1, 1, 16)
    for one in (t, wide):
        apply_rotary_pos_emb(one, angles).sum().backward()
    assert torch.equal(t.grad, wide.grad.half())  # type: ignore[arg-type, union-attr]
    grouped = te.GroupedLinear(2, 16, 8, device="cpu")
    grouped.weight1 = torch.nn.Parameter(torch.ones(8, 16))
    assert torch.equal(grouped.groups[1].weight, torch.ones(8, 16))
    with te.quantized_model_init(recipe=recipe_of("mx", "tensor")):
        stored = te.GroupedLinear(2, 16, 8, device="cpu")
    assert [type(getattr(stored, f"weight{g}")).__name__ for g in range(2)] == ["HybridQuantizedTensor"] * 2

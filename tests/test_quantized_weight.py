"""A weight that is stored only as codes: what it takes, what it refuses, and that no bit is lost on the way."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ottava.casts import quantize
from ottava.formats import E4M3
from ottava.quantized_tensor import QuantizationSpec
from ottava.quantized_weight import (
    QuantizedWeight,
    is_quantized_weight,
    quantized_weight,
    stored_spec,
)
from ottava.recipe import RECIPES
from ottava.weight_operands import stored_as
from sweep import sweep

CELLS = {row: col for recipe in RECIPES.values() for row, col in [recipe.cells("weight")] if row is not None}
SHAPES = ((64, 96), (130, 257), (1, 1), (0, 32), (3, 64, 96))


def bits(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    return weight.codes.view(torch.uint8).clone(), weight.scale_inv.clone()


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


@sweep(spec=tuple(CELLS), shape=SHAPES)
def test_it_is_the_cast_of_its_numbers(spec: QuantizationSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Codes and scales are those of `quantize`, matrix by matrix, and what it gives back is what they stand for."""
    values = torch.randn(shape).to(dtype)
    weight = quantized_weight(values, spec)
    casts = [quantize(part, stored_spec(spec)) for part in (values if len(shape) == 3 else (values,))]
    decoded = torch.stack([cast.dequantize() for cast in casts]) if len(shape) == 3 else casts[0].dequantize()
    assert torch.equal(weight.dequantize(), decoded)
    assert weight.dequantize().dtype == weight.dtype == dtype
    assert torch.equal(
        weight.codes.view(torch.uint8).flatten(), torch.cat([c.data.view(torch.uint8).flatten() for c in casts])
    )
    assert weight.nbytes == weight.codes.numel() + 4 * weight.scale_inv.numel()
    weight.requantize_(values.float() * 3)
    assert same(weight, quantized_weight((values.float() * 3).to(dtype), spec))


def test_codes_are_cast_from_the_outer_dtype() -> None:
    """From a BF16 weight's numbers where its dtype is BF16: fp32 numbers between two of BF16 take their way."""
    spec = QuantizationSpec(E4M3, scale_format="pow2")
    master = torch.tensor([[448.0, 17.0 + 2**-6]])  # a tie of E4M3 in BF16, above it in fp32
    for dtype, wanted in ((torch.bfloat16, 16.0), (torch.float32, 18.0)):
        weight = quantized_weight(torch.zeros(1, 2, dtype=dtype), spec)
        weight.requantize_(master)
        assert weight.dequantize().tolist() == [[448.0, wanted]]


def test_a_known_amax_gives_the_same_bits() -> None:
    for spec in (s for s in CELLS if str(s.granularity) == "tensor"):
        values = torch.randn(40, 50, dtype=torch.bfloat16)
        one, other = (quantized_weight(torch.zeros_like(values), spec) for _ in range(2))
        one.requantize_(values)
        other.requantize_(values, amax=values.abs().amax())
        assert same(one, other)


def parameter(keep: bool = False) -> QuantizedWeight:
    values = torch.randn(64, 96, dtype=torch.bfloat16)
    weight = quantized_weight(values, QuantizationSpec(E4M3), keep_high_precision=keep)
    return nn.Parameter(weight)  # type: ignore[return-value]


def test_it_is_a_parameter_and_its_copies_too(tmp_path: Path) -> None:
    """deepcopy, pickle, torch.save, .to(), clone: the same bits in memory of their own; a Parameter stays one."""
    weight = parameter(keep=True)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    torch.save(weight, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=False)
    for made in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), loaded):
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
    for made in (copy.deepcopy(weight), loaded, weight.detach().clone(), weight.detach().to(torch.float32)):
        assert is_quantized_weight(made)
        assert same(made, weight)
        assert made.codes.data_ptr() != weight.codes.data_ptr() or made.dtype != weight.dtype
        assert made.high_precision is not None
    shared = copy.deepcopy(weight).share_memory_()
    assert same(shared, weight)
    assert shared.codes.is_shared()
    assert shared.scale_inv.is_shared()
    memo: dict[int, object] = {}
    assert copy.deepcopy([weight, weight], memo)[0] is memo[id(weight)]
    assert stored_as(weight) == QuantizationSpec(E4M3)


def test_gradients_pass_through_dequantize() -> None:
    weight = parameter()
    (weight.dequantize(torch.float32) * 3).sum().backward()
    assert type(weight.grad) is Tensor
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, torch.full((64, 96), 3.0, dtype=torch.bfloat16))


def test_tensors_made_like_it_are_plain_but_for_empty_ones() -> None:
    """Optimizers make states with zeros_like; Module.to_empty asks for memory of its own kind."""
    weight = parameter()
    for made in (
        torch.zeros_like(weight),
        torch.ones_like(weight),
        torch.full_like(weight, 2.0),
        torch.rand_like(weight),
    ):
        assert type(made) is Tensor
        assert (made.dtype, made.shape, made.is_contiguous()) == (torch.bfloat16, weight.shape, True)
    assert type(weight.new_empty(3)) is Tensor
    assert is_quantized_weight(torch.empty_like(weight))
    meta = nn.Parameter(quantized_weight(torch.empty(8, 8, device="meta"), QuantizationSpec(E4M3)))
    assert torch.empty_like(meta, device="cpu").codes.device.type == "cpu"


@torch.no_grad()
def test_numbers_come_in_by_copies_and_fills() -> None:
    """copy_ casts; of its own numbers it changes no bit; of its like it copies codes; fills are cast once."""
    weight, values = parameter(keep=True), torch.randn(64, 96)
    before, version = bits(weight), weight._version
    weight.copy_(weight.dequantize())
    assert all(torch.equal(a, b) for a, b in zip(bits(weight), before, strict=True))
    weight.copy_(values)
    assert weight._version > version
    assert same(weight, quantized_weight(values.bfloat16(), weight.spec))
    assert torch.equal(weight.high_precision, values.bfloat16())
    other = parameter()
    weight.copy_(other)
    assert same(weight, other)
    assert weight.high_precision is None  # nobody knows what these codes were made of
    plain = torch.zeros(64, 96)
    plain.copy_(weight)
    assert torch.equal(plain, weight.dequantize().float())
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(weight)
    torch.manual_seed(3)
    assert same(
        weight, quantized_weight(nn.init.kaiming_uniform_(torch.empty(64, 96, dtype=torch.bfloat16)), weight.spec)
    )
    nn.init.zeros_(weight)
    assert not weight.dequantize().any()
    with pytest.raises(ValueError, match="rounded twice"):
        weight.copy_(quantized_weight(values, RECIPES["blockwise"].cells("weight")[0]))


def test_what_it_does_not_take_is_refused_by_name() -> None:
    """Arithmetic, torch's own linear, a step of torch's optimizers: one sentence with what to do."""
    weight = parameter()
    weight.grad = torch.ones_like(weight)
    calls = {
        "aten.mul.Tensor": lambda: weight * 2,
        "aten.t.default": lambda: nn.functional.linear(torch.ones(2, 96, dtype=torch.bfloat16), weight),
        "aten.add_.Tensor": lambda: torch.optim.SGD([weight], 0.1, foreach=False).step(),
        "aten.transpose.int": lambda: weight.transpose(0, 1),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=re.escape(name)) as caught:
            call()
        assert "weight.dequantize()" in str(caught.value)
        assert "ottava.optim.AdamW" in str(caught.value)
    with pytest.raises(ValueError, match="needs \\(64, 96\\)"):
        weight.requantize_(torch.ones(2, 2))
    with pytest.raises(TypeError, match="outer dtype"):
        QuantizedWeight(weight.codes, weight.scale_inv, weight.spec, torch.float64)
    with pytest.raises(ValueError, match="has \\(1, 1\\)"):
        QuantizedWeight(weight.codes, torch.ones(2, 2), weight.spec, torch.bfloat16)


@torch.no_grad()
def test_pieces_are_whole_blocks_of_the_first_dimension() -> None:
    """As FSDP2 cuts it; a cut through a block is refused, since half of it would get other scales."""
    values = torch.randn(256, 130, dtype=torch.bfloat16)
    for cell in CELLS:
        whole = quantized_weight(values, cell)
        for number, piece in enumerate(whole.chunk(2)):
            assert torch.equal(piece.dequantize(), whole.dequantize().chunk(2)[number])
            assert piece.codes.data_ptr() == whole.codes.data_ptr() + number * 128 * 130  # no copy
    blocks = quantized_weight(values, RECIPES["blockwise"].cells("weight")[0])
    with pytest.raises(NotImplementedError, match="by whole blocks of 128 rows; got 0:86"):
        blocks.chunk(3)
    stack = quantized_weight(values.view(4, 64, 130), QuantizationSpec(E4M3))
    assert torch.equal(stack.unbind()[2].dequantize(), stack.dequantize()[2])
    assert torch.equal(stack[1:3].dequantize(), stack.dequantize()[1:3])
    with pytest.raises(NotImplementedError, match="fully_shard, which gathers codes"):
        torch.cat([blocks.view(-1), torch.ones(3)])
    blocks.sent = True  # as DistributedDataParallel's start leaves it
    flat = torch.cat([blocks.view(-1), torch.ones(3)])
    assert torch.equal(flat[:-3], blocks.dequantize().flatten().float())

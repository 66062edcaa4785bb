"""What torch's operations do to a weight that is stored only as codes: copies, fills, cuts; no bit is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES
from ottava.weights.parameter import is_quantized_weight, quantized_weight
from sweep import sweep
from weight_samples import bits, parameter, same

CELLS = {row for recipe in RECIPES.values() for row in [recipe.cells("weight")[0]] if row is not None}


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


def test_inference_mode_takes_what_no_grad_takes() -> None:
    """Views and what torch makes of them, of a matrix and of a stack: the same kind of result, or the same refusal."""
    made: dict[str, Callable[[Tensor], object]] = {
        "unbind": lambda w: w.unbind(),
        "split": lambda w: w.split(16),
        "chunk": lambda w: w.chunk(2),
        "select": lambda w: w[0],
        "slice": lambda w: w[:1],
        "detach": lambda w: w.detach(),
        "view": lambda w: w.view(w.shape),
        "float": lambda w: w.float(),
        "transpose": lambda w: w.mT,
    }

    def result(operation: Callable[[Tensor], object], weight: Tensor) -> str:
        try:
            return repr(operation(weight))
        except NotImplementedError as error:
            return str(error)

    stack = quantized_weight(torch.randn(2, 32, 32, dtype=torch.bfloat16), QuantizationSpec(E4M3))
    for weight in (parameter(), nn.Parameter(stack)):
        for name, operation in made.items():
            with torch.no_grad():
                expected = result(operation, weight)
            with torch.inference_mode():
                assert result(operation, weight) == expected, name


ASKED = {
    "norm": lambda w: w.norm(),
    "norm of rows": lambda w: torch.linalg.vector_norm(w, dim=1),
    "get_total_norm": lambda w: nn.utils.get_total_norm([w, w]),
    "abs": lambda w: w.abs(),
    "max": lambda w: w.max(),
    "amin": lambda w: w.amin(1),
    "mean": lambda w: w.mean(),
    "sum": lambda w: w.sum(0),
    "std": lambda w: w.std(),
    "isfinite": lambda w: w.isfinite().all(),
    "less": lambda w: w < 0.1,
    "count_nonzero": lambda w: w.count_nonzero(),
    "histc": lambda w: w.histc(8),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w, w]),
}
WRITTEN = {
    "mul_": lambda w: w.mul_(0.3),
    "div_": lambda w: w.div_(3),
    "add_": lambda w: w.add_(0.3),
    "sub_": lambda w: w.sub_(0.3),
    "clamp_": lambda w: w.clamp_(-0.5, 0.5),
    "neg_": lambda w: w.neg_(),
    "masked_fill_": lambda w: w.masked_fill_(torch.eye(64, 96, dtype=torch.bool), 0.0),
    "eye_": lambda w: nn.init.eye_(w),
    "constant_": lambda w: nn.init.constant_(w, 0.5),
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.ones(64 * 96).to(w.dtype), [w]),
}
REFUSED = {
    "a step of torch's": lambda w: torch.optim.SGD([w], 0.1).step(),
    "add_ of a tensor": lambda w: w.add_(torch.ones(64, 96)),
    "mul_ of a tensor": lambda w: w.mul_(torch.ones(64, 96)),
    "product": lambda w: torch.ones(3, 64).bfloat16() @ w,
    "sum with a tensor": lambda w: w + 1,
    "detached views joined": lambda w: torch.cat([w.detach().view(-1)]),
    "pow_": lambda w: w.pow_(2),
    "lerp_": lambda w: w.lerp_(torch.ones(64, 96).bfloat16(), 0.1),
    "an average in codes": lambda w: torch._foreach_lerp_([w], [parameter()], 0.1),
}


@torch.no_grad()
def test_questions_are_asked_of_the_numbers_and_numbers_are_cast() -> None:
    """What users and torch's own functions call on parameters; the rest is refused, and changes nothing."""
    for name, ask in ASKED.items():
        weight = parameter()
        found, wanted = ask(weight), ask(nn.Parameter(weight.dequantize()))
        assert not is_quantized_weight(found), name
        assert torch.equal(found, wanted), name
    for keep in (False, True):
        for name, write in WRITTEN.items():
            weight = parameter(keep)
            plain = nn.Parameter(weight.high_precision.clone() if keep else weight.dequantize())
            for one in (weight, plain):
                torch.manual_seed(0)
                write(one)
            assert same(weight, quantized_weight(plain, weight.spec)), name
            assert not keep or torch.equal(weight.high_precision, plain), name
    for name, refused in REFUSED.items():
        weight = parameter()
        weight.grad = torch.ones(64, 96, dtype=torch.bfloat16)
        before = bits(weight)
        with pytest.raises(NotImplementedError, match="stored as E4M3"):
            refused(weight)
        assert all(torch.equal(a, b) for a, b in zip(bits(weight), before, strict=True)), name


@torch.no_grad()
def test_trunc_normal_is_cast_of_its_distribution() -> None:
    """With bounds at 2 and at 100 standard deviations; bounds near the mean need arithmetic, or are as exact."""
    for std in (1.0, 0.02):
        weight = nn.Parameter(quantized_weight(torch.zeros(256, 256).bfloat16(), QuantizationSpec(E4M3)))
        nn.init.trunc_normal_(weight, std=std)
        plain = nn.init.trunc_normal_(torch.empty(256, 256), std=std)
        found = weight.dequantize(torch.float32)
        assert abs(float(found.std() / plain.std()) - 1) < 0.02
        assert float(found.abs().max()) <= min(2.0, 6 * std)


@sweep(recipe=tuple(RECIPES))
@torch.no_grad()
def test_a_write_to_a_part_leaves_the_rest(recipe: str) -> None:
    """Also where a matrix has one scale: the rest is cast anew by the common one, and stays within one rounding."""
    cell = RECIPES[recipe].cells("weight")[0]
    if cell is None:
        return
    for keep in (False, True):
        weight = quantized_weight(torch.randn(384, 128).bfloat16(), cell, keep_high_precision=keep)
        for part, std in zip(weight.chunk(3), (0.02, 0.5, 0.005), strict=True):
            nn.init.normal_(part, std=std)
        found = [float(part.float().std()) for part in weight.dequantize().chunk(3)]
        assert found == pytest.approx([0.02, 0.5, 0.005], rel=0.1)
        wanted = weight.high_precision.clone() if keep else weight.dequantize()
        before = weight.dequantize()
        wanted[128:256] = before[128:256] = 0.0
        weight[128:].view(-1).view(256, 128)[:128].zero_()
        if weight.scales_shard:  # not a bit of the others moves
            assert torch.equal(weight.dequantize(), before)
        else:
            assert same(weight, quantized_weight(wanted, cell))
        assert not keep or torch.equal(weight.high_precision, wanted)
        other = quantized_weight(torch.randn(128, 128).bfloat16(), cell)
        weight[:128].copy_(other)
        assert not keep or torch.equal(weight.high_precision[:128], other.dequantize())
        wanted[:128] = other.dequantize()
        assert torch.equal(weight.dequantize()[:128], other.dequantize())
        assert float((weight.dequantize() - wanted).abs().max()) <= (2.0**-3 if cell.format.bits > 4 else 0.5)


@torch.no_grad()
def test_no_write_reaches_another_weight() -> None:
    """Copies and clones have numbers of their own; a view shares them with its weight."""
    source, target = parameter(keep=True), parameter()
    target.copy_(source)
    clone = source.clone()
    wanted, kept = source.high_precision.clone(), target.high_precision
    assert torch.equal(kept, wanted)
    source.zero_()
    source.data.view(-1).fill_(2.0)
    for one in (target, clone):
        assert torch.equal(one.high_precision, wanted)
    assert bool((source.high_precision == 2).all())
    assert source.high_precision.shape == source.shape


def test_gradients_are_clipped_and_vectors_have_gradients() -> None:
    weight = parameter()
    nn.utils.parameters_to_vector([weight]).float().sum().backward()
    assert type(weight.grad) is Tensor
    assert float(nn.utils.clip_grad_norm_([weight], 1.0)) == pytest.approx((64 * 96) ** 0.5, rel=1e-2)
    assert float(weight.grad.norm()) == pytest.approx(1.0, rel=1e-2)

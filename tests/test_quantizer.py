"""The door: which casts it makes, and the state of delayed scaling that lives in its buffers and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ottava
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor
from ottava.quantizer import LinearQuantizers, Quantizer
from ottava.recipe import CELLS, Recipe
from ottava.scaling import PER_ROW

DELAYED = QuantizationSpec(ottava.E4M3, scaling="delayed", amax_history_len=4)
BUFFERS = {"amax_history", "amax_staged", "scale", "nonfinite"}
SPECS = {
    f"{recipe.name}.{cell}": getattr(getattr(recipe, cell[:5]), cell[6:])
    for recipe in ottava.RECIPES.values()
    for cell in CELLS
    if recipe.quantized and getattr(getattr(recipe, cell[:5]), cell[6:]) is not None
}


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amax_of(value: float) -> Tensor:
    """A matrix whose largest magnitude is `value`."""
    return torch.tensor([[value, -value / 2], [0.0, value / 8]])


def was_cast_with(operand: object, scale: float) -> bool:
    """Whether an operand stores 1 / scale, rounded to fp32."""
    assert isinstance(operand, QuantizedTensor)
    return operand.scale_inv.item() == torch.tensor(float(scale)).reciprocal().item()


def same(a: object, b: object) -> bool:
    """Bit for bit, codes and scales."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        codes = torch.equal(a.data.contiguous().view(torch.uint8), b.data.contiguous().view(torch.uint8))
        return codes and torch.equal(a.scale_inv, b.scale_inv) and (a.spec, a.dtype) == (b.spec, b.dtype)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


@pytest.mark.parametrize("shape", [(48, 64), (7, 33), (1, 1), (0, 64)], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_operands_are_the_casts_of_x_and_of_its_transpose(spec: QuantizationSpec, shape: tuple[int, int]) -> None:
    """Each direction is `quantize` of what the GEMM contracts, with the current scale where there is no history."""
    x = matrix(*shape)
    spec = replace(spec, rounding="nearest_even")
    row, col = Quantizer()(x, spec, spec)
    assert same(row, ottava.quantize(x, spec))
    assert same(col, ottava.quantize(x.t().contiguous(), spec))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_cast_serves_both_directions_where_scales_are_shared(spec: QuantizationSpec) -> None:
    """Per tensor and in square blocks x.T is a view of x's codes; rows and 1xN blocks need a cast of their own."""
    row, col = Quantizer()(matrix(48, 64), spec, spec)
    assert isinstance(row, QuantizedTensor)
    assert isinstance(col, QuantizedTensor)
    shared = row.data.data_ptr() == col.data.data_ptr()
    assert shared == (spec.granularity.rows == spec.granularity.cols)


def test_different_specs_are_two_casts() -> None:
    """rowwise_with_gw_hp's weight: a scale per row for fprop, one power of two for dgrad."""
    x, row_spec, col_spec = matrix(48, 64), QuantizationSpec(ottava.E4M3, PER_ROW), QuantizationSpec(ottava.E4M3)
    row, col = Quantizer()(x, row_spec, col_spec)
    assert same(row, ottava.quantize(x, row_spec))
    assert same(col, ottava.quantize(x.t(), col_spec))


def test_no_spec_is_a_pass() -> None:
    """A cell of None hands on the very tensor, and its transpose as a view."""
    x = matrix(4, 8)
    row, col = Quantizer()(x, None, None)
    assert row is x
    assert isinstance(col, Tensor)
    assert (col.shape, col.data_ptr()) == ((8, 4), x.data_ptr())
    assert Quantizer()(x, None, QuantizationSpec(ottava.E4M3))[0] is x


@pytest.mark.parametrize("spec", [None, QuantizationSpec(ottava.E4M3), DELAYED], ids=str)
def test_unwanted_directions_are_none(spec: QuantizationSpec | None) -> None:
    """A gradient that nobody needs costs no cast."""
    for rowwise in (True, False):
        for columnwise in (True, False):
            row, col = Quantizer()(matrix(4, 8), spec, spec, rowwise=rowwise, columnwise=columnwise)
            assert [row is not None, col is not None] == [rowwise, columnwise]


def test_column_alone_equals_column_of_both() -> None:
    """Whether x.T is a view of x's codes or a cast of its own, the bits are the same."""
    for spec in SPECS.values():
        spec = replace(spec, rounding="nearest_even")
        both = Quantizer()(matrix(48, 64), spec, spec)[1]
        assert same(Quantizer()(matrix(48, 64), spec, spec, rowwise=False)[1], both)


# --- delayed scaling: buffers ---------------------------------------------------------------------------------------


def test_stateless_doors_have_no_buffers() -> None:
    """Any number of casts with current scales leaves nothing behind."""
    door = Quantizer()
    for spec in SPECS.values():
        if spec.scaling == "current":
            door(matrix(48, 64), spec, spec)
    door.update()
    assert dict(door.named_buffers()) == {}


def test_first_step_takes_the_current_scale() -> None:
    """No history yet: amax 2 gives 448 / 2, not TransformerEngine's 1.0, which wastes 7 of 18 octaves."""
    door = Quantizer()
    row, _ = door(amax_of(2.0), DELAYED, DELAYED)
    assert was_cast_with(row, 224)
    assert door.scale.item() == 0
    assert door.amax_staged.item() == 2


def test_scale_is_constant_between_updates() -> None:
    """Micro-batches with amax 1, 8, 4 after a step with 2: all cast with 224, and the largest is staged."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    for value in (1.0, 8.0, 4.0):
        row, _ = door(amax_of(value), DELAYED, DELAYED)
        assert was_cast_with(row, 224)
    assert door.amax_staged.item() == 8
    door.update()
    assert door.amax_history.tolist() == [8, 2, 0, 0]
    assert door.scale.item() == 56
    assert door.amax_staged.item() == 0


def test_a_cast_keeps_the_scale_it_was_made_with() -> None:
    """An update between forward and backward does not reach what was saved: scale_inv is a value, not a view."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    saved, _ = door(amax_of(2.0), DELAYED, DELAYED)
    assert isinstance(saved, QuantizedTensor)
    before = saved.scale_inv.clone()
    door(amax_of(64.0), DELAYED, DELAYED)
    door.update()
    assert torch.equal(saved.scale_inv, before)


@pytest.mark.parametrize(
    "algorithm, scales", [("max", [224, 112, 112, 112, 112, 448]), ("most_recent", [224, 112] + [448] * 4)]
)
def test_window_forgets_after_its_length(algorithm: str, scales: list[float]) -> None:
    """amax 2, 4, 1, 1, 1, 1 with 4 entries: the 4 holds the scale at 112 for four steps."""
    spec = replace(DELAYED, amax_compute_algo=algorithm)
    door = Quantizer()
    got = []
    for value in (2.0, 4.0, 1.0, 1.0, 1.0, 1.0):
        door(amax_of(value), spec, spec)
        door.update()
        got.append(door.scale.item())
    assert got == scales


@pytest.mark.parametrize("margin, fmt, scale", [(0, ottava.E4M3, 224), (2, ottava.E4M3, 56), (0, ottava.E5M2, 28672)])
def test_scale_follows_format_and_margin(margin: int, fmt: ottava.formats.Format, scale: float) -> None:
    """amax 2: 448 / 2; two octaves of headroom: a quarter; E5M2: 57344 / 2."""
    spec = replace(DELAYED, margin=margin, format=fmt)
    door = Quantizer()
    door(amax_of(2.0), spec, spec)
    door.update()
    assert door.scale.item() == scale


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_amax_is_counted_and_never_enters(bad: float) -> None:
    """One overflowed micro-batch of two: the step's amax is that of the other, and the scale stays usable."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    door(torch.tensor([[bad, 1.0]]), DELAYED, DELAYED)
    assert (door.amax_staged.item(), door.nonfinite.item()) == (0, 1)
    door(amax_of(4.0), DELAYED, DELAYED)
    door.update()
    assert door.amax_history.tolist() == [4, 2, 0, 0]
    assert door.scale.item() == 112
    door(torch.tensor([[bad, 1.0]]), DELAYED, DELAYED)
    door.update()  # nothing finite was staged: as if the door had been idle
    assert door.amax_history.tolist() == [4, 2, 0, 0]
    assert (door.scale.item(), door.nonfinite.item()) == (112, 2)


def test_idle_and_all_zero_doors_do_not_roll() -> None:
    """An amax of 0 says nothing about the scale; TransformerEngine's unfused path rolls zeros in (#814)."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    before = {name: buffer.clone() for name, buffer in door.named_buffers()}
    door.update()
    door(torch.zeros(2, 2), DELAYED, DELAYED)
    door(torch.zeros(0, 2), DELAYED, DELAYED)
    door.update()
    assert all(torch.equal(buffer, before[name]) for name, buffer in door.named_buffers())


def test_evaluation_leaves_no_trace() -> None:
    """record=False casts with the training scale and stages nothing, whatever it sees."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    before = {name: buffer.clone() for name, buffer in door.named_buffers()}
    row, _ = door(torch.tensor([[1e4, float("nan")]]), DELAYED, DELAYED, record=False)
    assert was_cast_with(row, 224)
    door.update()
    assert all(torch.equal(buffer, before[name]) for name, buffer in door.named_buffers())


@pytest.mark.parametrize("other", [replace(DELAYED, amax_history_len=2), replace(DELAYED, format=ottava.E5M2)], ids=str)
def test_evaluation_under_another_delayed_spec_leaves_no_trace(other: QuantizationSpec) -> None:
    """It reads the history that is there (amax 2) and keeps it; a door without one takes the current scale."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    before = {name: buffer.clone() for name, buffer in door.named_buffers()}
    row, _ = door(amax_of(64.0), other, other, record=False)
    assert was_cast_with(row, other.format.max / 2)
    assert door.spec == DELAYED
    assert all(torch.equal(buffer, before[name]) for name, buffer in door.named_buffers())

    fresh = Quantizer()
    row, _ = fresh(amax_of(64.0), other, other, record=False)
    assert same(row, ottava.quantize(amax_of(64.0), other))
    assert dict(fresh.named_buffers()) == {}


def test_first_use_in_inference_mode_does_not_spoil_training() -> None:
    """Buffers born in inference mode could never be updated outside it."""
    door = Quantizer()
    with torch.inference_mode():
        door(amax_of(2.0), DELAYED, DELAYED, record=False)
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    assert door.scale.item() == 224


# --- delayed scaling: another spec ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt, scale", [(ottava.E5M2, 28672), (ottava.E4M3, 224)])
def test_a_new_format_keeps_the_history_and_rescales(fmt: ottava.formats.Format, scale: float) -> None:
    """The window holds amax, which knows no format. E5M2's scale on an E4M3 cast would clip all above amax / 128."""
    old = ottava.E4M3 if fmt is ottava.E5M2 else ottava.E5M2
    door = Quantizer()
    door(amax_of(2.0), replace(DELAYED, format=old), replace(DELAYED, format=old))
    door.update()
    spec = replace(DELAYED, format=fmt)
    row, _ = door(amax_of(2.0), spec, spec)
    assert was_cast_with(row, scale)
    assert door.amax_history.tolist() == [2, 0, 0, 0]


def test_a_new_length_starts_over_from_the_current_scale() -> None:
    """A window of another length is another state; the bootstrap makes the change harmless."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    spec = replace(DELAYED, amax_history_len=2)
    row, _ = door(amax_of(8.0), spec, spec)
    assert was_cast_with(row, 56)
    assert door.amax_history.tolist() == [0, 0]


def test_preparing_the_same_spec_changes_nothing() -> None:
    """`convert` with the same recipe again must not cost the history, nor a staged amax."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    door(amax_of(4.0), DELAYED, DELAYED)
    before = {name: (buffer, buffer.clone()) for name, buffer in door.named_buffers()}
    door.prepare(DELAYED)
    for name, buffer in door.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_forget_is_a_fresh_door() -> None:
    """No buffers, no spec; the next delayed cast bootstraps. Forgetting twice is the same."""
    door = Quantizer()
    door(amax_of(2.0), DELAYED, DELAYED)
    door.update()
    door.forget()
    door.forget()
    assert (dict(door.named_buffers()), door.spec, list(door.state_dict())) == ({}, None, [])
    row, _ = door(amax_of(8.0), DELAYED, DELAYED)
    assert same(row, ottava.quantize(amax_of(8.0), DELAYED))


# --- delayed scaling: what the model's owner does to buffers --------------------------------------------------------


def trained_door() -> Quantizer:
    """amax 3 in history: a scale of 448 / 3 = 149.33, which BF16 would round to 149."""
    door = Quantizer()
    door(amax_of(3.0), DELAYED, DELAYED)
    door.update()
    door(amax_of(1.7), DELAYED, DELAYED)
    return door


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.load(saved(m), weights_only=False),
    ],
    ids=["to_bf16", "bfloat16", "half", "double", "to", "to_empty", "share_memory", "deepcopy", "pickle", "save"],
)
def test_state_survives_what_is_done_to_models(change: Callable[[Quantizer], Quantizer]) -> None:
    """Scale and history stay fp32, the counter int64, all bit for bit: state follows the device, not the dtype."""
    before = trained_door()
    after = change(copy.deepcopy(before))
    assert set(dict(after.named_buffers())) == BUFFERS
    for name, buffer in before.named_buffers():
        assert getattr(after, name).dtype == buffer.dtype, name
        assert torch.equal(getattr(after, name), buffer), name
    assert after.spec == DELAYED


def saved(module: Quantizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def test_state_made_on_meta_starts_empty() -> None:
    """to_empty() hands out uninitialized memory, which is good for weights that are then loaded; a scale must be 0."""
    for _ in range(20):  # fresh memory is often 0 by chance
        door = Quantizer()
        door.prepare(DELAYED, torch.device("meta"))
        garbage = [torch.full((64,), 7.0) for _ in range(50)]
        del garbage
        door.to_empty(device="cpu")
        assert {name: buffer.count_nonzero().item() for name, buffer in door.named_buffers()} == dict.fromkeys(
            BUFFERS, 0
        )
        assert door.nonfinite.dtype == torch.int64


def test_state_dict_round_trip_continues_bit_for_bit() -> None:
    """History, scale, staged amax and count are all there is to a door."""
    one, two = trained_door(), Quantizer()
    two.prepare(DELAYED)
    two.load_state_dict(one.state_dict())
    for value in (5.0, 0.3):
        for door in (one, two):
            door(amax_of(value), DELAYED, DELAYED)
            door.update()
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


# --- the three doors of a Linear ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ottava.RECIPES.values(), ids=lambda r: r.name)
def test_state_dict_has_its_shape_before_the_first_forward(recipe: Recipe) -> None:
    """Delayed: four buffers in each of three doors. All else: nothing, so that BF16 checkpoints fit both ways."""
    doors = LinearQuantizers()
    doors.prepare(recipe)
    names = {f"{door}.{b}" for door in ("input", "weight", "grad_output") for b in BUFFERS}
    assert set(doors.state_dict()) == (names if recipe.name == "delayed" else set())


def test_only_delayed_cells_get_state() -> None:
    """Delayed weights with current-scaled gradients: one door of the three keeps a history."""
    tensorwise, delayed = ottava.get_recipe("tensorwise"), ottava.get_recipe("delayed")
    recipe = replace(
        tensorwise,
        fprop=replace(tensorwise.fprop, rhs=delayed.fprop.rhs),
        dgrad=replace(tensorwise.dgrad, rhs=delayed.dgrad.rhs),
    )
    doors = LinearQuantizers()
    doors.prepare(recipe)
    assert {name.split(".")[0] for name in doors.state_dict()} == {"weight"}


def test_another_recipe_forgets_what_it_does_not_need() -> None:
    """delayed -> tensorwise -> delayed: no dead buffers in checkpoints, no stale scale when delayed comes back."""
    doors = LinearQuantizers()
    doors.prepare(ottava.get_recipe("delayed"))
    spec = ottava.get_recipe("delayed").fprop.lhs
    assert spec is not None
    doors.input(amax_of(2.0), spec, spec)
    doors.input.update()
    doors.prepare(ottava.get_recipe("delayed"))
    assert doors.input.scale.item() == 224  # the same recipe again keeps it
    doors.prepare(ottava.get_recipe("tensorwise"))
    assert list(doors.state_dict()) == []
    doors.prepare(ottava.get_recipe("delayed"))
    assert doors.input.scale.item() == 0


def test_a_door_says_what_it_scales() -> None:
    """repr names the delayed spec; a stateless door has nothing to say."""
    assert repr(trained_door()) == "Quantizer(E4M3[tensor, delayed])"
    assert repr(Quantizer()) == "Quantizer()"

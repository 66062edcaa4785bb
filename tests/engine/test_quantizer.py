"""The door: which casts it makes, and the state of predicted scales that lives in its buffers and nowhere else."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.engine.quantizer import LinearQuantizers, Quantizer, WeightQuantizer
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.formats import Format
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import CELLS
from scaling_samples import (
    BUFFERS,
    DELAYED,
    GUARDED,
    amax_of,
    cast,
    door_after,
    everything,
    roll,
    same_operand,
    unchanged,
    was_cast_with,
)
from sweep import FIXED, sweep

SPECS = {
    f"{recipe.name}.{cell}": getattr(getattr(recipe, cell[:5]), cell[6:])
    for recipe in ottava.RECIPES.values()
    for cell in CELLS
    if recipe.name in FIXED and recipe.quantized and getattr(getattr(recipe, cell[:5]), cell[6:]) is not None
}


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@sweep(spec=SPECS.values(), shape=[(48, 64), (7, 33), (1, 1), (0, 64)])
def test_operands_are_the_casts_of_x_and_of_its_transpose(spec: QuantizationSpec, shape: tuple[int, int]) -> None:
    """Each direction is `quantize` of what the GEMM contracts, with the current scale where there is no history."""
    x = matrix(*shape)
    spec = replace(spec, rounding="nearest_even")
    row, col = Quantizer()(x, spec, spec)
    assert same_operand(row, ottava.quantize(x, spec))
    assert same_operand(col, ottava.quantize(x.t().contiguous(), spec))


@sweep(spec=SPECS.values())
def test_one_cast_serves_both_directions_where_scales_are_shared(spec: QuantizationSpec) -> None:
    """Per tensor and in square blocks x.T is a view of x's codes; rows and 1xN blocks need a cast of their own."""
    row, col = Quantizer()(matrix(48, 64), spec, spec)
    assert isinstance(row, QuantizedTensor)
    assert isinstance(col, QuantizedTensor)
    shared = row.data.data_ptr() == col.data.data_ptr()
    assert shared == (spec.granularity.rows == spec.granularity.cols)


def test_no_spec_is_a_pass() -> None:
    """A cell of None hands on the very tensor, and its transpose as a view."""
    x = matrix(4, 8)
    row, col = Quantizer()(x, None, None)
    assert row is x
    assert isinstance(col, Tensor)
    assert (col.shape, col.data_ptr()) == ((8, 4), x.data_ptr())
    assert Quantizer()(x, None, QuantizationSpec(ottava.E4M3))[0] is x


@sweep(spec=[None, QuantizationSpec(ottava.E4M3), DELAYED])
def test_unwanted_directions_are_none(spec: QuantizationSpec | None) -> None:
    """A gradient that nobody needs costs no cast."""
    for rowwise in (True, False):
        for columnwise in (True, False):
            row, col = Quantizer()(matrix(4, 8), spec, spec, rowwise=rowwise, columnwise=columnwise)
            assert [row is not None, col is not None] == [rowwise, columnwise]


# --- predicted scales: the rule -------------------------------------------------------------------------------------


@pytest.fixture(params=["a kernel", "the door"])
def noted_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who notes what a cast has seen: the kernel that makes it, or the door, in torch."""
    if request.param == "the door":
        monkeypatch.setattr(native_quantize, "supports_quantize", lambda x, spec, scale: "switched off")


@pytest.mark.usefixtures("noted_by")
@sweep(spec=[DELAYED, GUARDED])
def test_first_step_takes_the_current_scale(spec: QuantizationSpec) -> None:
    """No history yet: amax 2 gives 448 / 2, not TransformerEngine's 1.0, which wastes 7 of 18 octaves."""
    door = Quantizer()
    assert same_operand(cast(door, amax_of(2.0), spec), ottava.quantize(amax_of(2.0), spec))
    assert door.scale.item() == 0
    assert door.staged.tolist() == [2, 0, 0]


def test_without_bootstrap_the_first_step_is_unscaled() -> None:
    """bootstrap=False is TransformerEngine's first step: scale 1, and the history from then on."""
    spec, door = replace(DELAYED, bootstrap=False), Quantizer()
    assert was_cast_with(cast(door, amax_of(2.0), spec), 1)
    roll(door)
    assert was_cast_with(cast(door, amax_of(2.0), spec), 224)


def test_a_cast_keeps_the_scale_it_was_made_with() -> None:
    """A boundary between forward and backward does not reach what was saved: scale_inv is a value, not a view."""
    door = door_after(2.0)
    saved = cast(door, amax_of(2.0))
    before = saved.scale_inv.clone()
    cast(door, amax_of(64.0))
    roll(door)
    assert torch.equal(saved.scale_inv, before)


def test_a_users_algorithm_sees_the_window_newest_first() -> None:
    """The mean of the entries that are filled: amax 2, 4 -> 3, so 448 / 3; zeros are entries not yet filled."""
    windows: list[list[float]] = []

    def mean(window: Tensor) -> Tensor:
        windows.append(window.tolist())
        return window[window > 0].mean()

    door = door_after(2.0, 4.0, spec=replace(DELAYED, amax_compute_algo=mean))
    assert windows == [[2, 0, 0, 0], [4, 2, 0, 0]]
    assert door.scale.item() == torch.tensor(448 / 3, dtype=torch.float64).float().item()


@pytest.mark.parametrize("answer", [math.inf, math.nan, 0.0, -1.0])
def test_a_useless_answer_of_a_users_algorithm_keeps_the_scale(answer: float) -> None:
    """TransformerEngine's rule: a scale follows only from an amax that is finite and positive."""
    answers = iter([2.0, answer])
    spec = replace(DELAYED, amax_compute_algo=lambda window: torch.tensor(next(answers)))
    door = door_after(2.0, 4.0, spec=spec)
    assert (door.scale.item(), door.amax_history.tolist()) == (224, [4, 2, 0, 0])


@pytest.mark.parametrize("margin, fmt, scale", [(0, ottava.E4M3, 224), (2, ottava.E4M3, 56), (0, ottava.E5M2, 28672)])
def test_scale_follows_format_and_margin(margin: int, fmt: Format, scale: float) -> None:
    """amax 2: 448 / 2; two octaves of headroom: a quarter; E5M2: 57344 / 2."""
    assert door_after(2.0, spec=replace(DELAYED, margin=margin, format=fmt)).scale.item() == scale


@pytest.mark.usefixtures("noted_by")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_amax_is_counted_and_never_enters(bad: float) -> None:
    """Two overflowed micro-batches of three: the step's amax is that of the third, and one more step is counted."""
    door = door_after(2.0)
    for x in (torch.tensor([[bad, 1.0]]), torch.tensor([[bad, 9.0]]), amax_of(4.0)):
        cast(door, x)
    assert door.staged.tolist() == [4, 1, 0]
    roll(door)
    assert (door.amax_history.tolist(), door.scale.item(), door.nonfinite_count.item()) == ([4, 2, 0, 0], 112, 1)
    cast(door, torch.tensor([[bad, 1.0]]))
    roll(door)  # nothing finite was staged: as if the door had been idle, but counted
    assert (door.amax_history.tolist(), door.scale.item(), door.nonfinite_count.item()) == ([4, 2, 0, 0], 112, 2)


# --- predicted scales: evaluation and other specs -------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "row", "column"])
def test_without_a_kernel_for_both_a_scale_is_looked_up_once(
    wanted: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the cast is the same, and so is what the door has seen of it."""
    looked_up: list[object] = []
    real = Quantizer.scale_for

    def counted(door: Quantizer, *args: Any) -> Tensor:
        looked_up.append(door)
        return real(door, *args)

    monkeypatch.setattr(Quantizer, "scale_for", counted)
    doors, x = (door_after(2.0), door_after(2.0)), amax_of(3.0)
    operands = [doors[0](x, DELAYED, DELAYED, rowwise=wanted[0], columnwise=wanted[1])]
    monkeypatch.setattr(native_quantize, "supports_quantize", lambda x, spec, scale: "switched off")
    looked_up.clear()
    operands.append(doors[1](x, DELAYED, DELAYED, rowwise=wanted[0], columnwise=wanted[1]))
    assert len(looked_up) == 1
    for ours, theirs in zip(*operands, strict=True):
        assert (ours is None and theirs is None) or same_operand(ours, theirs)
    assert doors[0].staged.equal(doors[1].staged)


@pytest.mark.parametrize(
    "other",
    [
        replace(DELAYED, amax_history_len=2),
        replace(DELAYED, amax_history_len=9),
        replace(DELAYED, format=ottava.E5M2),
        replace(DELAYED, margin=1),
        replace(GUARDED, guard_bits=9),
    ],
    ids=["shorter", "longer", "E5M2", "margin", "guarded"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_under_another_spec_leaves_no_trace(mode: Callable[[], Any], other: QuantizationSpec) -> None:
    """It reads the history that is there (amax 2) and keeps it; a door without one takes the current scale."""
    door, fresh = door_after(2.0), Quantizer()
    before = everything(door)
    with mode():
        got = cast(door, amax_of(1.0), other, record=False)
        bootstrapped = cast(fresh, amax_of(64.0), other, record=False)
    assert was_cast_with(got, other.format.max / 2 / 2**other.margin)
    assert door.spec == DELAYED
    assert unchanged(door, before)
    assert same_operand(bootstrapped, ottava.quantize(amax_of(64.0), other))
    assert dict(fresh.named_buffers()) == {}
    cast(fresh, amax_of(2.0))  # buffers born in inference mode could never be updated outside it
    roll(fresh)
    assert fresh.scale.item() == 224


@pytest.mark.parametrize("change, scale", [({"format": ottava.E5M2}, 28672), ({"margin": 1}, 112)], ids=str)
def test_a_new_format_or_margin_keeps_the_history_and_rescales(change: dict[str, Any], scale: float) -> None:
    """The window holds amax, which knows no format. E5M2's scale on an E4M3 cast would clip all above amax / 128."""
    door = door_after(2.0)
    assert was_cast_with(cast(door, amax_of(2.0), replace(DELAYED, **change)), scale)
    assert door.amax_history.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("length, kept", [(2, [1, 4]), (6, [1, 4, 2, 0, 0, 0])])
def test_a_new_length_keeps_the_newest_and_says_so(length: int, kept: list[float]) -> None:
    """Window 1, 4, 2, newest first, of 4: two entries keep 1, 4; six hold all of it. The scale follows: 448 / 4."""
    door = door_after(2.0, 4.0, 1.0)
    with pytest.warns(UserWarning, match=rf"amax_history_len changed from 4 to {length}: the newest {min(length, 4)}"):
        door.prepare(replace(DELAYED, amax_history_len=length))
    assert (door.amax_history.tolist(), door.scale.item()) == (kept, 112)


def test_a_new_algorithm_keeps_the_history() -> None:
    """Window 1, 4: the largest gives 112, the most recent 448."""
    door = door_after(4.0, 1.0)
    door.prepare(replace(DELAYED, amax_compute_algo="most_recent"))
    assert (door.scale.item(), door.amax_history.tolist()) == (448, [1, 4, 0, 0])


@pytest.mark.parametrize("bootstrap, scale", [(True, 0), (False, 1)])
def test_drop_and_reset_empty_a_door(bootstrap: bool, scale: float) -> None:
    """reset keeps the buffers and the door goes on; drop takes them, and twice is the same."""
    spec = replace(DELAYED, bootstrap=bootstrap)
    door = door_after(2.0, spec=spec)
    cast(door, torch.tensor([[math.inf, 3.0]]), spec)
    buffers = dict(door.named_buffers())
    door.reset()
    assert {n: t.count_nonzero().item() for n, t in everything(door).items()} == {
        **dict.fromkeys((*BUFFERS, "staged"), 0),
        "scale": int(scale),
    }
    assert all(dict(door.named_buffers())[name] is buffer for name, buffer in buffers.items())
    cast(door, amax_of(4.0), spec)
    roll(door)
    assert (door.amax_history.tolist(), door.scale.item()) == ([4, 0, 0, 0], 112)
    for _ in range(2):
        door.drop()
        assert (dict(door.named_buffers()), door.spec, list(door.state_dict())) == ({}, None, [])


# --- predicted scales: what a model's owner does to buffers ---------------------------------------------------------


def saved(module: Quantizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


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
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.load(saved(m), weights_only=False),
    ],
    ids=["to_bf16", "bfloat16", "half", "double", "to", "to_empty", "share", "deepcopy", "copy", "pickle", "save"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_state_survives_what_is_done_to_models(change: Callable[[Quantizer], Quantizer], packed: bool) -> None:
    """amax 3: 448 / 3 = 149.33, which BF16 would round to 149. Scale and history stay fp32, counters int64."""
    before = door_after(3.0) if packed else Quantizer()  # a boundary makes the buffers views of a larger tensor
    cast(before, amax_of(1.7))
    after = change(copy.deepcopy(before) if not packed else before)
    for name in (*BUFFERS, "staged"):
        assert getattr(after, name).dtype == getattr(before, name).dtype, name
        assert torch.equal(getattr(after, name), getattr(before, name)), name
    assert set(dict(after.named_buffers())) == set(BUFFERS)
    assert after.spec == DELAYED
    roll(after)
    assert after.amax_history.tolist()[0] == torch.tensor(1.7).item()


def test_state_made_on_meta_starts_empty() -> None:
    """to_empty() hands out uninitialized memory, which is good for weights that are then loaded; a scale must be 0."""
    for bootstrap in (True, False) * 10:  # fresh memory is often 0 by chance
        door = Quantizer()
        door.prepare(replace(DELAYED, bootstrap=bootstrap), torch.device("meta"))
        garbage = [torch.full((64,), 7.0) for _ in range(50)]
        del garbage
        door.to_empty(device="cpu")
        counts = {name: tensor.count_nonzero().item() for name, tensor in everything(door).items()}
        assert counts == {**dict.fromkeys((*BUFFERS, "staged"), 0), "scale": int(not bootstrap)}
        assert (door.scale.item(), door.nonfinite_count.dtype) == (0.0 if bootstrap else 1.0, torch.int64)


# --- predicted scales: checkpoints of one door ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"scale": torch.tensor(math.nan)}, "scale holds negative or non-finite entries"),
        ({"amax_history": torch.tensor([1.0, math.inf, 0.0, 0.0])}, "amax_history holds negative or non-finite"),
        ({"amax_history": torch.tensor([1.0, -2.0, 0.0, 0.0])}, "amax_history holds negative or non-finite"),
        ({"nonfinite_count": torch.tensor(-1)}, "nonfinite_count holds negative"),
        ({"amax_history": torch.zeros(7)}, r"amax_history has shape \(7,\), needs \(4,\); convert with that"),
        ({"scale": torch.zeros(1)}, r"scale has shape \(1,\), needs \(\)"),
        ({"scale": 224.0}, r"scale has shape float, needs \(\)"),
        ({"scale": None}, "Missing key.*scale"),
        ({"amax_hist": torch.zeros(4)}, "Unexpected key.*amax_hist"),
    ],
    ids=["nan", "inf", "negative", "count", "length", "shape", "type", "partial", "foreign"],
)
def test_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any], message: str) -> None:
    """One bad tensor of four: the sentence says which and why, and the door is as it was."""
    door, state = door_after(2.0), {**door_after(9.0).state_dict(), **damage}
    cast(door, amax_of(5.0))
    before = everything(door)
    with pytest.raises(RuntimeError, match=message):
        door.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert unchanged(door, before) or "Unexpected" in message


# --- the three doors of a Linear ------------------------------------------------------------------------------------


def test_only_predicted_cells_get_state() -> None:
    """Delayed weights with current-scaled gradients: one door of the three keeps a history."""
    tensorwise, delayed = ottava.get_recipe("tensorwise"), ottava.get_recipe("delayed")
    recipe = replace(
        tensorwise,
        fprop=replace(tensorwise.fprop, rhs=delayed.fprop.rhs),
        dgrad=replace(tensorwise.dgrad, rhs=delayed.dgrad.rhs),
    )
    quantizers = LinearQuantizers()
    quantizers.prepare(recipe)
    assert {name.split(".")[0] for name in quantizers.state_dict()} == {"weight"}


def test_a_door_says_what_it_scales() -> None:
    """repr names the predicted spec; a stateless door has nothing to say."""
    assert repr(door_after(1.0)) == "Quantizer(E4M3[tensor, delayed])"
    assert repr(WeightQuantizer()) == "WeightQuantizer()"

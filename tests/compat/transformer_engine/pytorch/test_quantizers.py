"""Quantizers and their tensors: the codes of `ottava.quantize`, and what torch does with them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tests.sweep import sweep
from torch import Tensor

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common import recipe as recipes
from ottava.compat.transformer_engine.pytorch import quantizers
from ottava.compat.transformer_engine.pytorch.gemms import general_gemm, general_grouped_gemm
from ottava.compat.transformer_engine.pytorch.quantizers import Quantizer, RecipeState
from ottava.compat.transformer_engine.pytorch.tensors import DType, prepare_for_saving, restore_from_saved
from ottava.ops.gemm import gemm

QUANTIZERS: dict[str, Quantizer] = {
    "current": te.Float8CurrentScalingQuantizer(DType.kFloat8E5M2, force_pow_2_scales=True),
    "blocks": te.Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=1),
    "squares": te.Float8BlockQuantizer(DType.kFloat8E4M3, force_pow_2_scales=False),
    "mxfp8": te.MXFP8Quantizer(DType.kFloat8E4M3),
    "nvfp4": te.NVFP4Quantizer(),
    "hybrid": te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(DType.kFloat8E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    ),
    "identity": te.IdentityQuantizer(),
}


def matrix(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


@sweep(name=QUANTIZERS)
def test_a_tensor_holds_the_codes_of_its_specs(name: str) -> None:
    quantizer, x = QUANTIZERS[name], matrix(3, 4, 96)
    x_q: Any = quantizer(x)
    flat = x.reshape(12, 96)
    for spec, codes, own in zip(quantizer.specs(), (x_q.rows, x_q.columns), (flat, flat.t().contiguous()), strict=True):
        expected = own if spec is None else ottava.quantize(own, spec)
        if isinstance(expected, Tensor):
            assert torch.equal(codes, expected)
        else:
            assert torch.equal(codes.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(codes.scale_inv, expected.scale_inv)
    first = x_q.rows.dequantize() if quantizer.specs()[0] else flat
    assert torch.equal(x_q.dequantize(), first.view(3, 4, 96))
    assert (x_q.shape, x_q.dtype, x_q.is_leaf) == (x.shape, x.dtype, True)


@sweep(name=QUANTIZERS)
def test_operations_decode_and_those_in_place_cast_again(name: str) -> None:
    quantizer, x = QUANTIZERS[name], matrix(4, 32)
    x_q: Any = quantizer(x)
    numbers = x_q.dequantize()
    assert torch.equal(x_q + 1, numbers + 1)
    assert type(x_q + 1) is Tensor
    for kept in (x_q.detach(), x_q.clone(), x_q.view(2, 2, 32)):
        assert type(kept) is type(x_q)
        assert torch.equal(kept.dequantize().view(4, 32), numbers)
    x_q *= 2
    assert torch.equal(x_q.dequantize(), quantizer(numbers * 2).dequantize())  # type: ignore[attr-defined]
    x_q.copy_(x)
    assert torch.equal(x_q.dequantize(), numbers)
    stream = io.BytesIO()
    torch.save(x_q, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False).dequantize(), numbers)
    leaf = x.clone().requires_grad_()
    (quantizer(leaf).dequantize() * x).sum().backward()  # type: ignore[attr-defined]
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, x)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read(x_q: Any, way: str, shape: tuple[int, int], swizzled: bool) -> Tensor:
    """The numbers in TransformerEngine's buffers, from NVIDIA's description of their layout alone."""
    data, scales = getattr(x_q, f"_{way}_data"), getattr(x_q, f"_{way}_scale_inv")
    columns = way == "columnwise"
    rows, cols = reversed(shape) if columns else shape
    if isinstance(x_q, te.Float8BlockwiseQTensor):
        scales = scales.repeat_interleave(128, 0) if x_q._is_2D_scaled else scales.t()
        scales = scales[:rows].repeat_interleave(128, 1)[:, :cols]
        return data.view(torch.float8_e4m3fn).float() * scales
    size = 16 if isinstance(x_q, te.NVFP4Tensor) else 32
    transposed = columns and size == 32  # its columns stand as x does
    flat, grid = (scales.t() if transposed and not swizzled else scales).flatten(), (rows, -(-cols // size))
    row, block = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    across = -(-grid[1] // 4) * 4
    tile = (row // 128 * (across // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    bytes_ = flat[tile if swizzled else row * across + block].repeat_interleave(size, 1)[:, :cols]
    if size == 32:
        return (data.t() if transposed else data).view(torch.float8_e4m3fn).float() * 2.0 ** (bytes_.double() - 127)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    amax = x_q._amax_columnwise if columns else x_q._amax_rowwise
    numbers = E2M1[codes & 7] * torch.where(codes > 7, -1, 1) * bytes_.view(torch.float8_e4m3fn).float()
    return numbers * amax.view(-1, 1).double() / 2688


@sweep(
    make=(
        lambda: te.Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=1),
        lambda: te.Float8BlockQuantizer(DType.kFloat8E4M3),
        lambda: te.MXFP8Quantizer(DType.kFloat8E4M3),
        lambda: te.MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True),
        lambda: te.NVFP4Quantizer(),
        lambda: te.NVFP4Quantizer(with_2d_quantization=True),
        lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True),
    ),
    shape=((64, 96), (256, 128), (160, 320)),
    swizzled=(False, True),
)
def test_buffers_lie_as_theirs_do(make: Any, shape: tuple[int, int], swizzled: bool) -> None:
    """Also of blocks of zeros. Shapes are those of `get_scale_shape` of TransformerEngine."""
    quantizer, x = make(), matrix(*shape)
    x[:32, :32] = 0.0
    quantizer.optimize_for_gemm = swizzled
    x_q = quantizer(x)
    for way, held in (("rowwise", x_q.rows), ("columnwise", x_q.columns)):
        expected = held.dequantize().double()
        eps = torch.finfo(torch.float32).eps
        assert torch.allclose(read(x_q, way, shape, swizzled).double(), expected, rtol=4 * eps, atol=0.0), way
    if isinstance(x_q, te.MXFP8Tensor):
        assert x_q._columnwise_data.shape == shape
        assert x_q._columnwise_scale_inv.shape == (-(-shape[0] // 128) * 4, -(-shape[1] // 128) * 128)
        assert swizzled or int(x_q._rowwise_scale_inv[0, 0]) == 0


def test_rows_of_their_own_have_the_codes_of_tensors_of_one_row() -> None:
    x, quantizer = matrix(5, 32), te.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)
    alone = torch.cat([te.NVFP4Quantizer()(row).dequantize() for row in x.split(1)])
    assert torch.equal(quantizer(x).dequantize(), alone)
    x_q: Any = quantizer(x)
    assert torch.equal(x_q._amax_rowwise, x.abs().amax(1))
    assert (x_q._row_scaled_nvfp4, te.NVFP4Quantizer()(x)._row_scaled_nvfp4) == (True, False)  # type: ignore[attr-defined]


def test_an_empty_tensor_may_show_a_dtype_of_codes() -> None:
    x, quantizer = matrix(32, 128), te.Float8BlockQuantizer(DType.kFloat8E5M2)
    empty = quantizer.make_empty(x.shape, dtype=torch.float8_e5m2)
    assert (empty.dtype, empty.shape) == (torch.float8_e5m2, x.shape)
    filled: Any = quantizer.update_quantized(x, empty)
    assert torch.equal(filled.dequantize(dtype=torch.float32), quantizer(x).dequantize())  # type: ignore[attr-defined]


def test_a_tensor_in_high_precision_has_the_dtype_that_was_asked_for() -> None:
    quantizer, x = te.IdentityQuantizer(dtype=torch.bfloat16), matrix(4, 8)
    for made in (quantizer(x), quantizer.make_empty((4, 8), dtype=torch.float32)):
        assert made.dtype == made.dequantize().dtype == torch.bfloat16
    assert torch.equal(quantizer(x).dequantize(), x.bfloat16())


def test_each_direction_of_a_hybrid_is_a_tensor() -> None:
    x_q: Any = QUANTIZERS["hybrid"](matrix(32, 64))
    row, column = x_q.rowwise_sub_storage, x_q.columnwise_sub_storage
    assert (type(row), type(column)) == (te.MXFP8Tensor, te.NVFP4Tensor)
    assert torch.equal(row.dequantize(), x_q.dequantize())
    assert (row.columns, column.rows) == (None, None)
    assert column._columnwise_data.shape == (64, 16)


def test_a_scale_that_is_given_is_the_scale_and_amax_is_kept() -> None:
    quantizer = te.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), DType.kFloat8E4M3)
    x_q: Any = quantizer(torch.tensor([[1.0, -3.0, 200.0]]))
    assert (float(x_q._scale_inv), float(quantizer.amax)) == (0.25, 200.0)
    assert torch.equal(x_q.dequantize(), torch.tensor([[1.0, -3.0, 112.0]]))  # 448 / 4: it saturates
    noop = torch.ones(1)
    x_q.quantize_(torch.zeros(1, 3), noop_flag=noop)
    assert float(x_q.dequantize()[0, 0]) == 1.0
    x_q.quantize_(torch.zeros(1, 3), noop_flag=noop.zero_())
    assert not x_q.dequantize().any()


def test_a_tensor_below_epsilon_has_the_scale_of_epsilon() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, amax_epsilon=2.0)
    small, large = (quantizer(torch.tensor([[0.0, top]])) for top in (1.0, 4.0))
    assert torch.equal(small._scale_inv, torch.tensor([224.0]).reciprocal())  # type: ignore[attr-defined]
    assert torch.equal(large._scale_inv, torch.tensor([112.0]).reciprocal())  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match=r"amax_epsilon=2\.0 is not in ottava"):
        quantizer.specs("input")


def test_usages_say_which_codes_there_are() -> None:
    quantizer = te.MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)
    x_q: Any = quantizer(matrix(32, 64))
    assert x_q.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="make them at once"):
        x_q.update_usage(columnwise_usage=True)
    tensorwise: Any = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)(matrix(32, 64))
    tensorwise.update_usage(rowwise_usage=False, columnwise_usage=True)
    ours = ottava.quantize(matrix(32, 64), ottava.QuantizationSpec(ottava.E4M3))
    assert torch.equal(tensorwise.dequantize(), ours.dequantize())


def test_the_gemm_is_that_of_the_layouts() -> None:
    """Forward, dgrad and wgrad of codes equal `ops.gemm` bit by bit, and plain tensors torch's products."""
    x, w, dy = matrix(32, 64), matrix(96, 64), matrix(32, 96)
    quantizer = te.MXFP8Quantizer(DType.kFloat8E4M3)
    spec = quantizer.specs()[0]
    assert spec is not None
    ways = (w, x, "TN", (x, w)), (w, dy, "NN", (dy, w.t())), (x, dy, "NT", (dy.t(), x.t()))
    for a, b, layout, operands in ways:
        first, second = (ottava.quantize(t.contiguous(), spec) for t in operands)
        expected = gemm(first, second, out_dtype=torch.bfloat16)
        assert torch.equal(general_gemm(quantizer(a), quantizer(b), torch.bfloat16, layout=layout)[0], expected)
        exact = operands[0].double() @ operands[1].double().t()
        plain = general_gemm(a, b, torch.float32, layout=layout)[0]
        assert (plain - exact).abs().max() <= 96 * torch.finfo(torch.float32).eps * exact.abs().max()
    out = torch.ones(32, 96)
    summed = general_gemm(w, x, torch.float32, accumulate=True, out=out)[0]
    assert summed is out
    assert torch.allclose(out, 1 + x @ w.t())
    one, settings = torch.zeros(48, 96), {"m_splits": [32, 16], "use_bias": True, "bias": [torch.ones(96)] * 2}
    made = general_grouped_gemm([w, 2 * w], [x, x[:16]], [one], [None] * 2, single_output=True, **settings)
    assert made[0] is one
    assert torch.allclose(one, 1 + torch.cat([x @ w.t(), 2 * x[:16] @ w.t()]))
    with pytest.raises(NotImplementedError, match="gelu=True is not in ottava"):
        general_gemm(w, x, gelu=True)


@sweep(kind=("float8", "blocks1", "blocks2", "mxfp8", "nvfp4"))
def test_what_is_written_into_the_buffers_counts(kind: str) -> None:
    """Buffers of another tensor, written over those of this one; saved tensors come back as they were."""
    made = {
        "float8": te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
        "mxfp8": te.MXFP8Quantizer(DType.kFloat8E4M3),
    }
    made |= {f"blocks{dim}": te.Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=dim) for dim in (1, 2)}
    made |= {"nvfp4": te.NVFP4Quantizer(with_2d_quantization=True)}
    one, other = (made[kind](matrix(160, 288) * factor) for factor in (1.0, 30.0))
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv", "_amax_rowwise"):
        if kind == "nvfp4" or name != "_amax_rowwise":
            getattr(one, name).copy_(getattr(other, name))
    assert torch.equal(one.dequantize(), other.dequantize())
    one.update_usage(rowwise_usage=False)
    assert kind == "nvfp4" or torch.equal(one.dequantize(), other.columns.dequantize().t())
    parts, objects = prepare_for_saving(other, None)
    assert other.rows.data.numel() == 0
    before = one.columns.dequantize()
    found, left = restore_from_saved(objects, [*parts, torch.ones(1)], return_saved_tensors=True)
    assert (found[0] is other, found[1], len(left)) == (True, None, 1)
    assert kind == "nvfp4" or torch.equal(other.columns.dequantize(), before)


def test_ranks_join_nvfp4_tensors() -> None:
    """As FSDP2 calls it: two shards of one amax are the whole tensor, and both directions are there."""
    quantizer = te.NVFP4Quantizer(with_2d_quantization=True)
    shard: Any = quantizer(matrix(32, 64))
    parts, metadata = shard.fsdp_pre_all_gather(None, None, None, None, None)
    whole, _ = shard.fsdp_post_all_gather([torch.cat([part] * 2) for part in parts], metadata, torch.bfloat16)
    assert torch.equal(whole.dequantize(), torch.cat([shard.dequantize()] * 2).bfloat16())
    assert torch.equal(whole.columns.dequantize(), whole.rows.dequantize().t())
    assert torch.ops.aten.slice.Tensor(whole, 0, 0, 64).rows is not None
    again, _ = shard.fsdp_post_all_gather(parts, metadata, torch.bfloat16, out=whole)
    assert again is whole
    with pytest.raises(ValueError, match="got a shard of 24 rows"):
        quantizer(matrix(24, 64)).fsdp_pre_all_gather(None, None, None, None, None)
    quantizer.optimize_for_gemm = True
    with pytest.raises(NotImplementedError, match="GEMM-swizzled"):
        quantizer(matrix(32, 64)).fsdp_pre_all_gather(None, None, None, None, None)


_THEIRS = {"current_scaling": "Float8CurrentScaling", "delayed_scaling": "DelayedScaling"}
_THEIRS |= {"float8_block_scaling": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}
FACTORIES = {f"{name}_factory": getattr(recipes, recipe)() for name, recipe in _THEIRS.items()}


@sweep(name=FACTORIES)
def test_a_factory_has_the_cells_of_its_recipe(name: str) -> None:
    custom, own = recipes.CustomRecipe(qfactory=getattr(quantizers, name)).ottava, FACTORIES[name].ottava
    for tensor in ("input", "weight", "grad_output"):
        assert custom.cells(tensor) == own.cells(tensor)
    made = getattr(quantizers, name)(None)
    assert getattr(made, "recipe_class", type(FACTORIES[name])) is type(FACTORIES[name])
    assert not recipes.CustomRecipe(qfactory=quantizers.high_precision_factory).ottava.fprop.quantized


def test_a_layer_asks_the_factory_by_its_name() -> None:
    asked = []

    def factory(role: Any) -> Any:
        asked.append(role)
        return quantizers.mxfp8_factory(role) if role.name == "fc2" else quantizers.current_scaling_factory(role)

    layers = [te.Linear(64, 64, name=name, bias=False) for name in ("fc1", "fc2", "fc1")]
    x, recipe = matrix(32, 64), recipes.CustomRecipe(qfactory=factory)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            results = [layer(x) for layer in layers]
    counted = [str(role) for role in asked if role.name]
    assert counted == [
        f"module_type=linear|tensor_type={tensor}|name={name}"
        for name in ("fc1", "fc2")
        for tensor in ("input", "weight", "grad_output")
    ]
    for layer, y, own in zip(
        layers, results, (recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling(), None), strict=True
    ):
        with te.autocast(recipe=own or recipes.Float8CurrentScaling()):
            high = layer(x)
        assert (high - y).abs().max() <= (high.abs().max() if own is None else 0.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: te.NVFP4Quantizer(with_rht=True), "without with_post_rht_amax is not in ottava"),
        (lambda: te.Float8BlockQuantizer(DType.kFloat8E4M3, amax_epsilon=1e-4), "amax_epsilon=0.0001 is not in"),
        (lambda: te.Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=3), "needs 1 or 2"),
        (lambda: te.HybridQuantizer(rowwise_quantizer=Quantizer(), columnwise_quantizer=te.DelayedScalingRequest()),
         "QuantizerRequest"),  # type: ignore[arg-type]
        (lambda: te.MXFP8Quantizer(DType.kInt32)(matrix(2, 2)), "needs DType.kFloat8E4M3"),
        (lambda: Quantizer().specs(), "a class of your own"),
    ],
)  # fmt: skip
def test_what_a_quantizer_cannot_do_is_refused(make: Any, words: str) -> None:
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=words):
        make()


def test_a_recipe_state_makes_the_quantizers_of_its_recipe() -> None:
    """Their cells are those of the recipe's layers; requests share one history."""
    for own in FACTORIES.values():
        made = [
            RecipeState.create(own, mode=mode, num_quantizers=n).make_quantizers()
            for mode, n in (("forward", 3), ("backward", 2))
        ]
        if not isinstance(own, recipes.DelayedScaling):
            cells = [own.ottava.cells(tensor) for tensor in ("input", "weight", "grad_output")]
            assert [one.specs() for one in (*made[0][:2], made[1][0])] == cells
    state = RecipeState(recipes.DelayedScaling(amax_history_len=4), mode="backward", num_quantizers=2)
    first = state.make_quantizers()[0]
    first.amax.fill_(3.0)
    assert state.amax_history is not None
    assert state.amax_history.tolist() == [[3.0, 0.0], *[[0.0, 0.0]] * 3]
    assert state._has_delayed_scaling
    asked = recipes.CustomRecipe(qfactory=lambda role: te.DelayedScalingRequest(amax_history_len=8))
    own = RecipeState(asked, mode="forward")
    own.make_quantizers()
    assert own._inner_delayed_scaling_recipe == recipes.DelayedScaling(amax_history_len=8)
    with pytest.raises(ValueError, match="got 1 roles for 2"):
        RecipeState(recipes.MXFP8BlockScaling(), mode="forward", num_quantizers=2, roles=[None])


def test_quantizers_are_values_that_torch_compile_takes_as_constants() -> None:
    """Equal settings are equal quantizers, what stands in a graph's code casts as they do, and a group is refused."""
    constants = [one for name, one in QUANTIZERS.items() if name not in ("hybrid", "identity")]
    for place, one in enumerate(constants):
        code, names = one.__fx_repr__()
        again = eval(code, dict(names))
        assert [again == other for other in constants] == [place == k for k in range(len(constants))]
        assert hash(again) == hash(one)
        assert one.copy() == one
        assert torch.equal(again(matrix(32, 64)).dequantize(), one(matrix(32, 64)).dequantize())
    delayed = [te.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3) for _ in range(2)]
    assert delayed[0] != delayed[1]
    grouped = te.MXFP8Quantizer(DType.kFloat8E4M3)
    grouped.amax_reduction_group = torch.distributed.ProcessGroup(0, 1)
    with pytest.raises(TypeError, match="amax_reduction_group"):
        grouped.__fx_repr__()


def test_ranks_share_the_largest_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other of two ranks has an amax of 64, made by hand; a tensor without numbers asks nobody."""
    asked: list[Any] = []
    wanted = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(torch.full((4, 32), 64.0))._scale_inv
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: asked.append(group) or t.clamp_(min=64.0))
    x = torch.full((4, 32), 0.5)
    quantizer = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, with_amax_reduction=True)
    assert torch.equal(quantizer(x)._scale_inv, wanted)
    assert len(asked) == 2  # rows and columns
    empty = quantizer.make_empty((4, 32))
    assert len(asked) == 2
    empty.quantize_(x)
    assert torch.equal(empty._scale_inv, wanted)
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer: with_amax_reduction"):
        te.NVFP4Quantizer(with_amax_reduction=True)(x)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 takes only classes of its own metaclass")
def test_torch_compile_knows_the_quantizers_without_a_state() -> None:
    from torch._library.opaque_object import is_opaque_value_type

    constants = [type(one) for name, one in QUANTIZERS.items() if name not in ("hybrid", "identity")]
    assert [is_opaque_value_type(one) for one in constants] == [True] * len(constants)
    assert not is_opaque_value_type(te.Float8Quantizer)

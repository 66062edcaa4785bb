"""LayerNorm and RMSNorm against torch's and fp64; in front of a cast, the bits of two layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.engine.functional import quantized_layers
from ottava.nn import ActivatedLinear, LayerNorm, Linear, NormLinear, RMSNorm
from ottava.nn.norms import NormFormula, make_norm
from ottava.recipe import Recipe
from same_tensors import assert_same

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64,), (1, 64), (7, 33), (2, 3, 130), (0, 64), (2, 0, 64), (5, 1))
PAIRS = ((LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm))


def pairs(width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(ours, torch's with the same numbers in fp64), also with the weight centred at 0."""
    for ours, theirs in PAIRS:
        for zero_centered in (False, True):
            own = ours(width, 1e-5, dtype=weight_dtype, zero_centered_gamma=zero_centered)
            other = theirs(width, eps=1e-5, dtype=torch.float64)
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.normal_()
                other.load_state_dict({k: v.double() for k, v in own.state_dict().items()})
                other.weight += float(zero_centered)
            yield own, other


def test_forward_and_every_gradient_are_fp64s_within_fp32_roundings() -> None:
    """Every dtype, odd and empty shapes, a weight of another dtype."""
    for dtype in DTYPES:
        for shape in SHAPES:
            for weight_dtype in {dtype, torch.float32 if dtype != torch.float64 else dtype}:
                for ours, theirs in pairs(shape[-1], dtype, weight_dtype):
                    x = (torch.randn(shape) * 3 + 1).to(dtype).requires_grad_()
                    x64 = x.detach().double().requires_grad_()
                    y, exact = ours(x), theirs(x64)
                    dy = torch.randn(shape).to(dtype)
                    y.backward(dy)
                    exact.backward(dy.double())
                    assert y.dtype == x.grad.dtype == dtype
                    # eps of the inner dtype times the sums' lengths and the largest numbers in them, and one rounding
                    inner = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
                    features, rows = shape[-1], x.numel() // shape[-1]
                    gap = (x64.detach() ** 2).mean(-1, keepdim=True).sqrt() if x.numel() else torch.ones(1)
                    near = features * 16 * inner * (1 + float(gap.max() if gap.numel() else 1))
                    if features == 1:
                        continue  # all is cancelled: rounding noise times 1 / sqrt(eps)
                    close(y, exact, near)
                    close(x.grad, x64.grad, near * 4)
                    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                        assert own.grad.dtype == weight_dtype
                        close(own.grad, other.grad, near * 4 + rows * inner * 16)


def close(got: Tensor, exact: Tensor, near: float) -> None:
    assert got.shape == exact.shape
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    limit = near * (largest + 1) + torch.finfo(got.dtype).eps * exact.abs()
    assert torch.all((got.double() - exact).abs() <= limit), float((got.double() - exact).abs().max())


def test_the_same_bits_as_torchs_modules() -> None:
    """Forward in every dtype; gradients of LayerNorm in fp32 and fp64, where torch keeps no rounded statistics."""
    for dtype in DTYPES:
        for ours, theirs in PAIRS:
            own, other = ours(96, 1e-5, dtype=dtype), theirs(96, eps=1e-5, dtype=dtype)
            with torch.no_grad():
                own.weight.normal_()
            other.load_state_dict(own.state_dict())
            leaves = [torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)]
            results = [module(leaf.requires_grad_()) for module, leaf in zip((own, other), leaves, strict=True)]
            assert torch.equal(*results)
            for y in results:
                y.square().sum().backward()
            if dtype.itemsize >= 4 and ours is LayerNorm:
                assert torch.equal(leaves[0].grad, leaves[1].grad)
                assert torch.equal(own.weight.grad, other.weight.grad)
                assert torch.equal(own.bias.grad, other.bias.grad)


def test_formulas_pass_gradcheck_also_without_weights() -> None:
    """In fp64, every parameter there and not there."""
    x, g, b = torch.randn(5, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    leaf = [t.requires_grad_() for t in (x, g, b)]
    for centred in (False, True):
        norm, rms = (NormFormula(kernel, 1e-5, centred) for kernel in ("layernorm", "rmsnorm"))
        for parameters in ((g, b), (g, None), (None, b), (None, None)):
            assert torch.autograd.gradcheck(
                lambda x, *p, f=norm: ottava.engine.functional.produced(f, x, *p), (leaf[0], *parameters)
            )
        for weight in (g, None):
            assert torch.autograd.gradcheck(
                lambda x, w, f=rms: ottava.engine.functional.produced(f, x, w), (leaf[0], weight)
            )


def test_a_norm_keeps_its_input_and_a_number_or_two_a_row() -> None:
    """Nothing of the size of its input but the input itself."""
    for norm, numbers in ((LayerNorm(64), 2), (RMSNorm(64), 1)):
        kept: list[Tensor] = []
        x = torch.randn(10, 64).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            norm.bfloat16()(x)
        sizes = sorted(t.nbytes for t in kept if not any(t is p for p in norm.parameters()))
        assert sizes == [10 * 4] * numbers + [x.nbytes]


def test_bad_input_is_named_and_autocast_changes_no_dtype() -> None:
    for norm in (LayerNorm(64), RMSNorm(64, zero_centered_gamma=True)):
        with pytest.raises(ValueError, match=r"got input \(2, 3\).*needs floats \(..., 64\)"):
            norm(torch.zeros(2, 3))
        x = torch.randn(2, 64, requires_grad=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(norm(x).sum(), x, create_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(torch.randn(2, 64)).dtype == torch.float32
    with pytest.raises(ValueError, match="needs one size"):
        LayerNorm((4, 64))
    with pytest.raises(ValueError, match="rmsnorm"):
        make_norm("rmsnrom", 64)  # type: ignore[arg-type]
    assert "zero_centered_gamma" in repr(RMSNorm(8, zero_centered_gamma=True))
    norm = RMSNorm(8, zero_centered_gamma=True)
    norm.reset_parameters()
    assert not norm.weight.any()


NORMS = ("layernorm", "rmsnorm")


def layers(recipe: Recipe | str, norm: str, dtype: torch.dtype = torch.bfloat16) -> tuple[NormLinear, nn.Sequential]:
    """(fused, the norm and a Linear with the same numbers)."""
    torch.manual_seed(0)
    fused = NormLinear(66, 48, norm=norm, recipe=recipe, dtype=dtype, zero_centered_gamma=norm == "rmsnorm")  # type: ignore[arg-type]
    with torch.no_grad():
        fused.norm.weight.normal_()
    linear = Linear(66, 48, recipe=recipe, dtype=dtype)
    linear.load_state_dict(fused.state_dict(), strict=False)
    return fused, nn.Sequential(copy.deepcopy(fused.norm), linear)


def bits(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, *, input_too: bool = True) -> dict[str, Tensor]:
    """Output and every gradient, parameters by their last two names."""
    leaf = x.detach().clone().requires_grad_(input_too)
    model.zero_grad()
    torch.manual_seed(3)
    y = run(leaf)
    y.float().square().sum().backward()
    found = {"y": y.detach()} | ({"dx": leaf.grad} if input_too else {})
    for name, parameter in model.named_parameters():
        kind = "norm" if "norm" in name or name.startswith("0.") else "linear"
        found[f"{kind} {name.rpartition('.')[2]}"] = parameter.grad.clone()
    return found


def test_fused_and_unfused_are_the_same_bits(recipe: Recipe) -> None:
    """Both norms; 16 bits, fp32, torch.autocast over fp32; odd, flat, 3-D and empty inputs; input without gradient."""
    for norm in NORMS:
        for dtype, low in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            fused, plain = layers(recipe, norm, dtype)
            for shape in ((2, 24, 66), (5, 66), (66,), (0, 66)) if dtype == torch.bfloat16 else ((5, 66),):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                for input_too in (True, False):
                    with torch.autocast("cpu", torch.bfloat16, enabled=low):
                        got = bits(fused, fused, x, input_too=input_too)
                        want = bits(plain, plain, x, input_too=input_too)
                    assert_same(got, want)
                with torch.no_grad():
                    assert torch.equal(fused(x), plain(x))
    assert ottava.receipt(fused).fp8_fraction == ottava.receipt(plain[1]).fp8_fraction


def test_compiled_recomputed_copied_and_under_another_recipe() -> None:
    """One graph; checkpoints of both kinds; deepcopy and pickle; autocast; DDP: always the bits of the two layers."""
    # traced, a LayerNorm of 16 bits is one of fp32, where sums have another order: see test_norms
    compiled = (("bf16", "rmsnorm"), ("tensorwise", "rmsnorm"), ("delayed", "rmsnorm"))
    for name in ("bf16", "tensorwise", "rowwise_with_gw_hp", "delayed"):
        for norm in NORMS:
            fused, plain = layers(name, norm)
            x = torch.randn(6, 66, generator=torch.Generator().manual_seed(1)).bfloat16()
            want = bits(plain, plain, x)
            assert_same(bits(fused, fused, x), want)
            torch._dynamo.reset()
            ways: dict[str, tuple[nn.Module, Callable[[Tensor], Any]]] = {
                "checkpoint": (fused, lambda x, m=fused: checkpoint(m, x, use_reentrant=False)),
                "reentrant": (fused, lambda x, m=fused: checkpoint(m, x, use_reentrant=True)),
            }
            if (name, norm) in compiled:
                ways["compiled"] = fused, torch.compile(fused, fullgraph=True, backend="aot_eager")
            for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
                ways[f"copy {len(ways)}"] = other, other
            for model, run in ways.values():
                assert_same(bits(model, run, x), want)
            with ottava.autocast("mxfp8"):
                assert_same(bits(fused, fused, x), bits(plain, plain, x))
            with ottava.autocast(enabled=False):
                assert_same(bits(fused, fused, x), bits(plain, plain, x))


def test_calibration_conversion_state_and_plan_see_it_like_a_linear() -> None:
    """The input's history is that of normed rows; convert changes its recipe; state dicts load both ways."""
    from ottava.nn.convert import plan_model

    fused, plain = layers("delayed", "layernorm")
    batches = [torch.randn(8, 66).bfloat16() for _ in range(2)]
    fused_report, plain_report = (ottava.calibrate(model, batches) for model in (fused, plain))
    assert [row.amax for row in fused_report.rows] == [row.amax for row in plain_report.rows]
    other = nn.Sequential(NormLinear(66, 48, dtype=torch.bfloat16), ActivatedLinear(48, 64, dtype=torch.bfloat16))
    report = ottava.convert(other, "delayed")
    assert report.converted == ("0", "1")
    assert [layer.recipe.name for layer in quantized_layers(other)] == ["delayed"] * 2
    assert isinstance(other[0], NormLinear)
    other[0].load_state_dict(fused.state_dict())
    x = torch.randn(4, 66).bfloat16()
    assert torch.equal(other[0](x), fused(x))
    assert ottava.convert(other, "mxfp8", filter=lambda name, layer: name != "0").skipped["0"].endswith("'delayed'")
    assert [layer.shape for layer in plan_model(other, "tensorwise", tokens=8).layers] == [(8, 66, 48), (8, 48, 64)]
    assert not ottava.convert(other, "bf16").outside


def test_receipts_count_what_the_graph_keeps() -> None:
    """x, statistics and codes; no normed rows. What torch would keep: x and the rows."""
    for name in ("tensorwise", "mxfp8"):
        for norm, numbers in (("layernorm", 2), ("rmsnorm", 1)):
            layer = NormLinear(128, 64, norm=norm, bias=False, recipe=name, dtype=torch.bfloat16)  # type: ignore[arg-type]
            kept: dict[int, int] = {}
            x = torch.randn(32, 128).bfloat16().requires_grad_()

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = layer(x)
            for parameter in layer.parameters():
                kept.pop(parameter.untyped_storage().data_ptr(), None)
            y.sum().backward()
            row = ottava.receipt(layer).rows[0]
            assert row.saved_bytes == sum(kept.values())
            assert row.high_precision_bytes == 2 * x.nbytes
            codes = ottava.quantize(x.detach(), layer.resolved.fprop.lhs)
            assert row.saved_bytes >= x.nbytes + codes.data.nbytes + layer.weight.numel() + 4 * 32 * numbers
            assert row.saved_bytes < x.nbytes + 1.2 * (codes.data.nbytes + layer.weight.numel()) + 4 * 32 * numbers


def test_normed_rows_can_be_returned_too() -> None:
    """As the norm alone makes them; gradients of both arrive."""
    torch.manual_seed(0)
    both = NormLinear(64, 48, norm="rmsnorm", return_norm_output=True, dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y, rows = both(x)
    assert torch.equal(rows, both.norm(x))
    alone = NormLinear(64, 48, norm="rmsnorm", dtype=torch.bfloat16)
    alone.load_state_dict(both.state_dict())
    assert torch.equal(y, alone(x))
    (y.sum() + rows.sum()).backward()
    assert both.norm.weight.grad is not None


def test_what_is_wrong_is_named() -> None:
    """Widths, norms, second derivatives; a watch in high precision does not call the norm's input that of the GEMM."""
    layer = NormLinear(64, 48)
    with pytest.raises(ValueError, match=r"needs floats \(..., 64\)"):
        layer(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="made rows of 32 features"):
        ActivatedLinear(64, 48, activation="swiglu")(torch.zeros(2, 64))
    with pytest.raises(ValueError, match="rmsnorm"):
        NormLinear(64, 48, norm="rms")  # type: ignore[arg-type]
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert "recipe=tensorwise" in repr(layer)

"""LayerNorm and RMSNorm against torch's, bit for bit where sums are in one order, and against fp64 within a bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.nn import LayerNorm, RMSNorm
from ottava.nn.norms import LayerNormFormula, RMSNormFormula, make_norm

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
        norm, rms = LayerNormFormula(1e-5, centred), RMSNormFormula(1e-5, centred)
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


def test_modules_compile_checkpoint_and_say_what_is_wrong() -> None:
    """One graph with the bits of eager mode; bad input named."""
    for norm in (LayerNorm(64), RMSNorm(64, zero_centered_gamma=True)):
        grads = []
        for run in (
            norm,
            torch.compile(norm, fullgraph=True, backend="aot_eager"),
            lambda x, m=norm: checkpoint(m, x, use_reentrant=False),
        ):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
            norm.zero_grad()
            y = run(x)
            y.float().square().sum().backward()
            grads.append((y, x.grad, norm.weight.grad))
        for other in grads[1:]:
            for a, b in zip(grads[0], other, strict=True):
                # traced, a LayerNorm of 16 bits is one of fp32, where sums have another order
                exact = other is not grads[1] or isinstance(norm, RMSNorm)
                assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2.0**-7, atol=1e-4)
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

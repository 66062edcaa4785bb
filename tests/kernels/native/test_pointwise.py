"""SwiGLU and rotations in C++ against the same lines in torch: every bit, and which tensors they leave to torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.kernels.native import build as native_build
from ottava.kernels.native import pointwise

BF16 = torch.bfloat16
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


@pytest.fixture(autouse=True)
def _needs_library() -> None:
    if reason := native_build.load(pointwise.NAME).reason:
        pytest.skip(reason)


def equal(a: Tensor | None, b: Tensor) -> bool:
    """The same bits, and NaN in the same places."""
    assert a is not None
    same = a.view(torch.int16 if a.dtype == BF16 else torch.int32) == b.view(
        torch.int16 if b.dtype == BF16 else torch.int32
    )
    return a.shape == b.shape and bool((same | (a.isnan() & b.isnan())).all())


def lines(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU and its gradient by torch's autograd."""
    x = x.detach().requires_grad_()
    gate, up = x.chunk(2, -1)
    y = F.silu(gate) * up
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def test_swiglu_has_torchs_bits_at_every_bf16_number() -> None:
    """Gates: all 65,536 numbers; gradients: all 128 mantissas with both signs, and the ends of the exponents."""
    mantissas = torch.arange(0x3F80, 0x4000, dtype=torch.int32).to(torch.int16).view(BF16)
    ends = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-126), 1e38, torch.inf, -torch.inf, torch.nan]).to(BF16)
    assert torch.equal(mantissas.float(), 1 + torch.arange(128) / 128)
    for threads, dys in ((1, mantissas), (2, -mantissas[::8]), (1, ends)):
        torch.set_num_threads(threads)
        for dy in dys.split(16):
            gate = EVERY.repeat(len(dy), 1)
            up = torch.ones_like(gate)
            x, d = torch.cat((gate, up), -1), dy[:, None].expand_as(gate).contiguous()
            y, dx = lines(x, d)
            assert equal(pointwise.swiglu(x), y)
            assert equal(pointwise.swiglu_backward(d, x), dx)


def test_swiglu_has_torchs_bits_in_every_shape() -> None:
    for shape, threads in itertools.product(((3, 2), (5, 66), (2, 3, 14), (130, 770), (64,), (1, 2)), (1, 3)):
        torch.set_num_threads(threads)
        x = (torch.randn(shape) * 3).to(BF16)
        dy = torch.randn(*shape[:-1], shape[-1] // 2).to(BF16)
        y, dx = lines(x, dy)
        assert equal(pointwise.swiglu(x), y)
        assert equal(pointwise.swiglu_backward(dy, x), dx)


def test_other_tensors_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(4, 8).to(BF16), torch.randn(4, 4).to(BF16)
    others = (x.float(), x.half(), x.t(), x[:, :7].contiguous(), x[:0], x.clone().requires_grad_(), x.to("meta"))
    assert [pointwise.swiglu(other) for other in others] == [None] * len(others)
    for d, other in ((dy.float(), x), (dy[:, :1].expand(4, 4), x), (dy[:2], x), (dy, x.float())):
        assert pointwise.swiglu_backward(d, other) is None
    doubled = torch.func.vmap(lambda row: row if pointwise.swiglu(row) is None else 0 * row)(x)  # a row has no address
    assert torch.equal(doubled, x)
    with monkeypatch.context() as patch:  # a torch whose kernel rounds otherwise
        patch.setattr(
            torch.ops.aten, "silu_backward", lambda dy, x: (dy.float() * torch.sigmoid(x.float())).to(dy.dtype)
        )
        assert pointwise._silu_tables.__wrapped__() is None
    with monkeypatch.context() as patch:
        patch.setattr(pointwise, "_silu_tables", lambda: None)
        assert pointwise.swiglu(x) is None
    monkeypatch.setattr(native_build, "load", lambda name: native_build.Built(None, "no compiler"))
    assert pointwise.swiglu(x) is None
    heads = torch.randn(3, 2, 4)
    angles = torch.randn(3, 1, 4)
    assert pointwise.rotate(heads, angles, angles, torch.float32) is None


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Entry by entry, in fp32."""
    dim = cos.shape[-1]
    at = torch.arange(dim)
    other = at ^ 1 if interleaved else (at + dim // 2) % dim
    x = x.float()
    y = x[..., :dim] * cos + x[..., other] * (sin[..., other] if back else sin)
    return torch.cat((y, x[..., dim:]), -1)


def test_a_rotation_has_torchs_bits_in_every_layout() -> None:
    """Two products, a sum and one rounding; heads cut out of a fused projection, partial rotations, both pairings."""
    for sizes, angles, dim in (
        ((2, 3), (3,), 8),
        ((2, 3), (2, 3), 6),
        ((5,), (5,), 2),
        ((2, 2, 3), (2, 3), 8),
        ((1, 9), (9,), 8),
    ):
        qkv = torch.randn(*sizes, 7, 8)
        cos, sin = torch.randn(2, *angles, 1, dim).unbind(0)
        for dtype, out, interleaved, back in itertools.product(
            (torch.float32, BF16), (torch.float32, BF16), *[(False, True)] * 2
        ):
            torch.set_num_threads(1 + back)
            for x in (
                qkv.to(dtype),
                qkv.to(dtype)[..., 1:6, :],
                qkv.to(dtype).flatten(0, -3).transpose(0, 1).contiguous().transpose(0, 1).unflatten(0, sizes),
            ):
                y = pointwise.rotate(x, cos, sin, out, interleaved=interleaved, back=back)
                assert equal(y, turned(x, cos, sin, interleaved, back).to(out))
    large = torch.randn(3, 100, 6, 32)  # more than one thread
    cos, sin = torch.randn(2, 100, 1, 32).unbind(0)
    assert equal(pointwise.rotate(large, cos, sin, BF16), turned(large, cos, sin, False, False).to(BF16))


def test_other_rotations_stay_with_torch() -> None:
    x = torch.randn(2, 3, 4, 8)
    cos, sin = torch.randn(2, 3, 1, 8).unbind(0)
    shared = torch.randn(3, 1, 1, 8)
    others = (
        (x.double(), cos, sin),
        (x.half(), cos, sin),
        (x[:0], cos, sin),
        (x.transpose(0, 1), shared, shared),  # positions in front of sequences
        (x[:, :, :, ::2], cos[..., :4].contiguous(), sin[..., :4].contiguous()),
        (x[:, 1:], cos[1:].contiguous(), sin[1:].contiguous()),  # sequences with gaps
        (x, cos.to(BF16), sin),
        (x, cos[..., ::2], sin[..., ::2]),
        (x, cos[:1].contiguous(), sin[:1].contiguous()),
        (x, cos.clone().requires_grad_(), sin),
        (x.to("meta"), cos, sin),
    )
    assert [pointwise.rotate(*other, torch.float32) for other in others] == [None] * len(others)
    assert pointwise.rotate(x, cos, sin, torch.float16) is None

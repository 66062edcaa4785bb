"""Rows made inside the cast: the codes are those of rows that were made first, by the same formulas as in torch.

In the interpreter here, where exp, erf and tanh are torch's own; on a GPU with -m gpu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import make_rows, normed, supports_gradient, supports_rows
from ottava.nn.activations import ACTIVATIONS
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from sweep import sweep
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()
SPECS = {
    "tensor": QuantizationSpec(E4M3),
    "row": QuantizationSpec(E4M3, PER_ROW),
    "1x32": QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"),
    "1x128": QuantizationSpec(E4M3, BLOCK_1X128, "pow2"),
    "delayed": QuantizationSpec(E4M3, scaling="delayed"),
}


def samples(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)) * 2).to(dtype).to(DEVICE)


def of_a_norm(make: str, x: Tensor, dtype: torch.dtype, *, beta: bool, centred: bool) -> tuple[UnmadeRows, Tensor]:
    """Unmade rows, and the same by torch's operations one after the other, of the statistics that the kernel found."""
    k = x.shape[1]
    gamma = torch.linspace(0.5, 1.5, k, device=DEVICE).to(x.dtype)
    shift = torch.linspace(-1, 1, k, device=DEVICE).to(x.dtype) if beta else None
    unmade = normed(make, x, dtype, gamma, shift, eps=1e-5, zero_centered=centred)
    assert unmade.beside is not None
    mean, rstd = unmade.beside[:, :, None]
    y = (
        (x.float() - mean if make == "layernorm" else x.float())
        * rstd
        * (gamma.float() + 1 if centred else gamma.float())
    )
    y = y if shift is None else torch.addcmul(shift.float(), y, torch.ones_like(y))
    return unmade, y.to(x.dtype).to(dtype)


def same_casts(unmade: UnmadeRows, rows: Tensor, spec: QuantizationSpec) -> None:
    """Codes, scales and amax of x and x.T are those of the rows."""
    scale = torch.tensor(3.0, device=DEVICE) if spec.predicted else None
    staged = torch.zeros(3, device=DEVICE) if spec.predicted else None
    both = triton_quantize.quantize_both(unmade, spec, spec, scale, staged)
    for cast, one in zip(both, (rows, rows.t()), strict=True):
        assert cast is not None
        truth = reference.quantize(one.cpu(), spec, None if scale is None else scale.cpu())
        codes = [torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8)) for q in (cast.data.cpu(), truth.data)]
        assert torch.equal(*codes)
        assert torch.equal(truth.data.float().isfinite(), one.cpu().isfinite())
        assert torch.equal(cast.scale_inv.cpu(), truth.scale_inv)
        assert torch.equal(cast.amax.cpu().nan_to_num(-1), truth.amax.nan_to_num(-1))
    finite = bool(rows.isfinite().all())
    assert staged is None or staged.tolist()[:2] == ([rows.abs().max(), 0] if finite else [0, 1])


def spoil(x: Tensor) -> Tensor:
    """NaN, infinities, and numbers whose square and product leave fp32."""
    x[3, 5], x[9, 100], x[20, 7], x[30] = torch.nan, torch.inf, -torch.inf, torch.finfo(x.dtype).max / 2
    return x


# as CUDA's kernels have them; torch's on a CPU differ from them in the last bit of some BF16 numbers
FORMULAS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * 2**-0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x)))),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


@sweep(name=[*ACTIVATIONS])
def test_activated_rows_are_cast_as_torchs(name: str) -> None:
    """Ragged tiles; fp32 numbers that autocast rounds to BF16, too; one of them under every spec, also not finite."""
    activation = ACTIVATIONS[name]
    if not activation.kernel:
        assert "triton: makes" in str(supports_rows(name, samples(2, 2, torch.bfloat16), torch.bfloat16))
        return
    for x_dtype, dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        x = samples(67, 280 if activation.gated else 140, x_dtype)
        unmade = UnmadeRows(activation.kernel, x, dtype, activation.gated)
        gate, *up = x.chunk(2, 1) if activation.gated else (x,)
        rows = FORMULAS[activation.kernel](gate.float()).to(x_dtype)
        rows = (rows * up[0] if up else rows).to(dtype)
        torchs = activation.forward(x).to(dtype)
        assert torch.equal(rows, torchs) if ON_GPU else (rows - torchs).norm() <= 2**-10 * torchs.norm()
        assert torch.equal(make_rows(unmade), rows)
        for spec in SPECS.values() if name == "swiglu" else ():
            same_casts(unmade, rows, spec)
        spoil(x)
        rows = FORMULAS[activation.kernel](gate.float()).to(x_dtype)
        rows = (rows * up[0] if up else rows).to(dtype)
        assert rows.isnan().any()
        assert rows.isinf().any()
        assert torch.equal(make_rows(unmade).nan_to_num(7, 8, 9), rows.nan_to_num(7, 8, 9))
        for spec in SPECS.values() if name == "swiglu" and x_dtype == dtype else ():
            same_casts(unmade, rows, spec)


def d_gelu_tanh(dy: Tensor, x: Tensor) -> Tensor:
    """As torch's kernel has it."""
    beta, kappa = (2 / torch.pi) ** 0.5, 0.044715
    t = torch.tanh(beta * (x + kappa * (x * x * x)))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (beta * (1 + 3 * kappa * (x * x))))


# (dy, x) -> dx, as CUDA's kernels have them
GRADIENTS = {
    "silu": lambda dy, x: dy * (s := 1 / (1 + torch.exp(-x))) * (1 + x * (1 - s)),
    "gelu": lambda dy, x: (
        dy * (0.5 * (1 + torch.erf(x * 2**-0.5)) + x * (torch.exp(-0.5 * x * x) * 0.3989422804014327))
    ),
    "gelu_tanh": d_gelu_tanh,
    "relu": lambda dy, x: torch.where(x <= 0, 0.0, dy),
}


@sweep(name=[name for name, one in ACTIVATIONS.items() if one.kernel])
def test_gradients_of_activations_are_cast_as_torchs(name: str) -> None:
    """Halves that end inside a tile; strides; dy of another dtype; NaN and infinity; one of them under every spec."""
    activation = ACTIVATIONS[name]
    for dtype, dy_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ):
        wide = 144
        x = samples(67, 2 * wide + 16, dtype)[:, : 2 * wide if activation.gated else wide]
        dy = samples(67, wide, dy_dtype) * 8
        if dtype == torch.float16:
            dy[0, :2], x[1, :2] = torch.tensor([torch.inf, torch.nan]), torch.tensor([torch.nan, -torch.inf])
        unmade = UnmadeRows(activation.kernel, x, dtype, activation.gated, dy)
        assert supports_gradient(activation.kernel, dy, x, gated=activation.gated) == (
            None if ON_GPU else "triton: runs on cuda; got cpu"
        )
        assert unmade.shape == x.shape
        gate, *up = x.chunk(2, 1) if activation.gated else (x,)
        d, forward = dy.to(dtype), FORMULAS[activation.kernel](gate.float()).to(dtype)
        d_act = d * up[0] if up else d
        if activation.kernel == "relu2":
            d_gate = d_act * 2 * gate.relu()
        else:
            d_gate = GRADIENTS[activation.kernel](d_act.float(), gate.float()).to(dtype)
        rows = torch.cat((d_gate, d * forward), 1) if up else d_gate
        torchs, got = activation.backward(d, x), make_rows(unmade)
        finite = torchs.isfinite() & rows.isfinite()
        assert (rows - torchs)[finite].norm() <= (0 if ON_GPU else 2**-9) * torchs[finite].norm()
        assert torch.equal(got.nan_to_num(7, 8, 9), rows.nan_to_num(7, 8, 9))
        for spec in SPECS.values() if (name, dtype) == ("swiglu", torch.bfloat16) else ():
            same_casts(unmade, rows, spec)


@sweep(make=["rmsnorm", "layernorm"])
def test_normed_rows_are_cast_as_torchs(make: str) -> None:
    """To the bit with the kernel's statistics, and those within 4 roundings of fp32 of their fp64 values."""
    for dtype, centred in ((torch.bfloat16, False), (torch.float16, True)):
        x = samples(70, 140, dtype) + (3 if make == "layernorm" else 0)
        unmade, rows = of_a_norm(make, x, dtype, beta=make == "layernorm", centred=centred)
        assert torch.equal(make_rows(unmade), rows)
        lost = of_a_norm(make, spoil(x.clone()), dtype, beta=make == "layernorm", centred=centred)
        assert not lost[1].isfinite().all()
        for spec in SPECS.values() if centred == (make == "rmsnorm") else ():
            same_casts(unmade, rows, spec)
            same_casts(*lost, spec)
        wide = x.double()
        mean = wide.mean(1) if make == "layernorm" else torch.zeros(70, device=DEVICE, dtype=torch.float64)
        rstd = ((wide - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
        assert unmade.beside is not None
        if make == "layernorm":
            torch.testing.assert_close(unmade.beside[0].double(), mean, rtol=2**-20, atol=0)
        torch.testing.assert_close(unmade.beside[1].double(), rstd, rtol=2**-22, atol=0)

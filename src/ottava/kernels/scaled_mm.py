"""torch's scaled GEMM: FP8 tensor cores on Hopper and later through cuBLASLt; newer torches run the call on a CPU too.

    y = (a * scale_inv_a) @ (b * scale_inv_b).T + bias           per tensor, per row of a and of b, or by blocks of 128

cuBLASLt needs K and N in multiples of 16, and with blocks K in multiples of 128 and M of 4. This kernel zero-pads them,
which changes no sum, and the receipt says so. torch's CPU version takes calls that CUDA's refuses, but no blocks. This
kernel has CUDA's rules on every device, so a laptop refuses the calls that a cluster refuses.

Only Hopper takes blocks of 128 (1x128 with 1x128 or 128x128), from CUDA 12.9 on, always with slow, accurate
accumulation. With blocks this kernel adds the bias to an fp32 result, because it is unknown whether cuBLASLt does.
There is one rounding. Blackwell (sm_100) takes MXFP8's 1x32, with scales as bytes in tiles of 128 rows. AMD's MI300
(gfx942) takes the FNUZ formats, per tensor and per row. Neither has ever run.

Source: torch aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes and strides of scales); vllm #49932 (M in fours).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, SwizzleType

from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, exponent_bytes
from ottava.numerics.tensor import QuantizedTensor, RunGemm

NAME = "scaled_mm"
NATIVE = True

_ALIGNMENT = 16
_BLOCK = 128
_MX_BLOCK = 32
_HOPPER, _ADA = (9, 0), (8, 9)
_BLACKWELL = 10
_MI300, _MI350 = "gfx942", "gfx950"
_CUDA_WITH_BLOCKS = (12, 9)


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why torch's scaled GEMM does not take this call; None if it does."""
    formats = {a.spec.format, b.spec.format}
    if not (formats <= {E4M3, E5M2} or formats <= {E4M3FNUZ, E5M2FNUZ}):
        return f"{NAME}: takes E4M3 and E5M2, or both in FNUZ; got {a.spec.format} and {b.spec.format}"
    if formats in ({E5M2}, {E5M2FNUZ}):
        return f"{NAME}: no tensor core multiplies E5M2 by E5M2"
    sides = {a.spec.granularity, b.spec.granularity}
    blocks = BLOCK_1X128 in sides and sides <= {BLOCK_1X128, BLOCK_128X128}
    mx = _is_mx(a) and _is_mx(b)
    if not blocks and not mx and not sides <= {PER_TENSOR, PER_ROW}:
        return (
            f"{NAME}: takes scales per tensor and per row, 1x128 with 1x128 or 128x128, and MXFP8's 1x32; "
            f"got {a.spec.granularity} and {b.spec.granularity}"
        )
    # torch wants one kind on both sides: a scale of a tensor is expanded to one a row
    per_row = PER_ROW in sides
    if blocks and out_dtype == torch.float16:
        return f"{NAME}: blocks give bfloat16 and float32; got {out_dtype}"
    if (per_row or mx) and out_dtype != torch.bfloat16:
        return f"{NAME}: {'1x32' if mx else 'per-row'} scales give bfloat16 only; got {out_dtype}"
    if bias is not None and not blocks and (out_dtype == torch.float32 or bias.dtype != out_dtype):
        return f"{NAME}: bias must be of the output's 16-bit dtype; got {bias.dtype} for {out_dtype}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if (fnuz := formats <= {E4M3FNUZ, E5M2FNUZ}) or torch.version.hip is not None:
        return _refuse_amd(a, fnuz, blocks or mx)
    if a.device.type == "cuda":
        capability = torch.cuda.get_device_capability(a.device)
        if capability < _ADA or (per_row and capability < _HOPPER):
            return f"{NAME}: needs FP8 tensor cores; this device is sm_{capability[0]}{capability[1]}"
        if mx and capability[0] != _BLACKWELL:
            return f"{NAME}: blocks of 1x32 are Blackwell's (sm_100); this device is sm_{capability[0]}{capability[1]}"
        if blocks and capability[0] != _HOPPER[0]:
            return f"{NAME}: blocks of 128 are Hopper's (sm_90); this device is sm_{capability[0]}{capability[1]}"
        if blocks and tuple(map(int, (torch.version.cuda or "0.0").split("."))) < _CUDA_WITH_BLOCKS:
            return f"{NAME}: blocks of 128 need a torch built for CUDA 12.9 or later; got {torch.version.cuda}"
    elif blocks or mx:
        return f"{NAME}: torch multiplies blocks of {'1x32' if mx else 128} on cuda only; got {a.device.type}"
    elif a.device.type != "cpu":
        return f"{NAME}: runs on cuda and cpu; got {a.device.type}"
    elif not runs_on_cpu():
        return f"{NAME}: torch {torch.__version__} multiplies FP8 on cuda only; got cpu"
    return None


def _refuse_amd(a: QuantizedTensor, fnuz: bool, blocks: bool) -> str | None:
    """As `supports_gemm`, for AMD's devices and formats. Never run: no MI300 was at hand."""
    if torch.version.hip is None or a.device.type != "cuda":
        return f"{NAME}: FNUZ formats are those of AMD's MI300; got {a.device.type}"
    name = torch.cuda.get_device_properties(a.device).gcnArchName.partition(":")[0]
    if (name == _MI300) != fnuz:
        return f"{NAME}: on AMD {_MI300} multiplies FNUZ formats, and only that card; got {a.spec.format} on {name}"
    if name not in (_MI300, _MI350):
        return f"{NAME}: AMD's {_MI300} and {_MI350} multiply FP8; this device is {name}"
    return f"{NAME}: takes scales per tensor and per row on AMD; got {a.spec.granularity}" if blocks else None


def runs_on_cpu() -> bool:
    """Whether this torch has a kernel of its scaled GEMM for CPUs: 2.13 has one, 2.11 has none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


def padding(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """The zero-padded sizes, such as "K 100->112"."""
    m, n, k = _sizes(a, b)
    padded = (("M", a.shape[0], m), ("K", a.shape[1], k), ("N", b.shape[0], n))
    return ", ".join(f"{name} {size}->{aligned}" for name, size, aligned in padded if size != aligned)


class Arguments(NamedTuple):
    """The arguments of torch's scaled GEMM."""

    a: Tensor
    """Codes (M, K), row-major."""
    b: Tensor
    """Codes (K, N), column-major: with the above, the only layouts of sm_90."""
    scale_a: Tensor
    """fp32: one | (M, 1) | 1x128: (M, K / 128), strides (1, M) | 128x128: (K / 128 in fours, M / 128), first one 1."""
    kind_a: ScalingType
    """Which of them."""
    scale_b: Tensor
    """fp32: one | (1, N) | 1x128: (N, K / 128), strides (1, N) | 128x128: (K / 128 in fours, N / 128), first one 1."""
    kind_b: ScalingType
    """Which of them."""


def arguments(a: QuantizedTensor, b: QuantizedTensor) -> Arguments:
    """Pads and lays out the operands as CUDA's kernels need them; copies only where it must."""
    m, n, k = _sizes(a, b)
    # TN: both contracted over their last dimension, the only layouts that FP8 tensor cores of sm_90 read
    codes_a, codes_b = _pad(a.data, m, k), _pad(b.data, n, k).t()
    if _is_mx(a):
        kind = ScalingType.BlockWise1x32
        return Arguments(codes_a, codes_b, swizzled(a.scale_inv), kind, swizzled(b.scale_inv), kind)
    if not _has_blocks(a):
        if a.scale_inv.numel() == b.scale_inv.numel() == 1:
            one = ScalingType.TensorWise
            return Arguments(codes_a, codes_b, a.scale_inv, one, b.scale_inv, one)
        row = ScalingType.RowWise
        # a row of the padding gets scale 1: its codes are zeros, and 0 * NaN would not be
        scale_a, scale_b = _rows(a.scale_inv, a.shape[0], m), _rows(b.scale_inv, b.shape[0], n)
        return Arguments(codes_a, codes_b, scale_a.contiguous(), row, scale_b.t().contiguous(), row)
    (scale_a, kind_a), (scale_b, kind_b) = _block_scales(a, m), _block_scales(b, n)
    return Arguments(codes_a, codes_b, scale_a, kind_a, scale_b, kind_b)


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension."""
    blocks = _has_blocks(a)
    ready = arguments(a, b)
    # with blocks nobody says whether cuBLASLt adds a bias before or after it rounds
    own_bias = bias if blocks else None
    if bias is not None and not blocks and ready.b.shape[1] != bias.shape[0]:
        bias = nn.functional.pad(bias, (0, ready.b.shape[1] - bias.shape[0]))
    # how the scales lie, where torch does not guess it from their shape
    swizzle: dict[str, Any] = {f"swizzle_{side}": SwizzleType.SWIZZLE_32_4_4 for side in "ab"} if _is_mx(a) else {}
    y = nn.functional.scaled_mm(
        *ready,
        bias=None if blocks else bias,
        output_dtype=torch.float32 if own_bias is not None else out_dtype,
        use_fast_accum=fast_accum and not blocks and not _is_mx(a),
        **swizzle,
    )
    # the rows and columns of the padding are zeros, or the bias
    y = y[: a.shape[0], : b.shape[0]]
    if own_bias is not None:
        y = (y + own_bias.to(torch.float32)).to(out_dtype)
    return y.contiguous()  # the strides that ops promises to torch.compile


def plan_gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> RunGemm:
    """`gemm` for all operands like these. Without padding and copies the plan is torch's call alone."""
    device = a.device.type
    kind = ScalingType.TensorWise if a.scale_inv.numel() == b.scale_inv.numel() == 1 else ScalingType.RowWise
    # an entry for each row, so that torch's call takes the scales as they lie
    whole = kind == ScalingType.TensorWise or (len(a.scale_inv), len(b.scale_inv)) == (a.shape[0], b.shape[0])
    contiguous = a.data.is_contiguous() and b.data.is_contiguous()
    direct = whole and contiguous and not _has_blocks(a) and not _is_mx(a) and not padding(a, b)
    kinds = [kind.value]

    def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(device):  # torch's emulation on a CPU would multiply in BF16
            with torch.autocast(device, enabled=False):
                return run(a, b, bias)
        if not direct:
            return gemm(a, b, out_dtype, bias, fast_accum)
        # what nn.functional.scaled_mm calls behind 17 calls of Python
        scale_a, scale_b = [a.scale_inv], [b.scale_inv.t()]
        return torch._scaled_mm_v2(
            a.data, b.data.t(), scale_a, kinds, [], scale_b, kinds, [], bias, out_dtype, (), fast_accum
        )

    return run


def _has_blocks(x_q: QuantizedTensor) -> bool:
    return x_q.spec.granularity in (BLOCK_1X128, BLOCK_128X128)


def _is_mx(x_q: QuantizedTensor) -> bool:
    return x_q.spec.granularity == BLOCK_1X32 and x_q.spec.scale_format in ("e8m0", "e8m0_floor")


def swizzled(scale_inv: Tensor) -> Tensor:
    """E8M0's bytes of (rows, K / 32) scales in the order of Blackwell's tensor cores, float8_e8m0fnu, one dimension.

    Rows are padded to 128s and blocks to fours, by bytes 0. In a tile of 128 x 4, row r and block j lie at
    16 (r mod 32) + 4 (r div 32) + j; tiles go along K. Source: cuBLAS, "1D block scaling factors layout".
    """
    scales = scale_inv if scale_inv.dtype == torch.uint8 else exponent_bytes(scale_inv)
    rows, blocks = scales.shape
    scales = nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    # bytes 0 stand for 2**-127; the codes beside them are padding and 0, too
    tiles = scales.view(-1, 4, 32, scales.shape[1] // 4, 4)  # (rows / 128, 4, 32, blocks / 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def _sizes(a: QuantizedTensor, b: QuantizedTensor) -> tuple[int, int, int]:
    """(M, N, K), padded."""
    if _is_mx(a):
        return a.shape[0], _aligned(b.shape[0], _ALIGNMENT), _aligned(b.shape[1], _MX_BLOCK)
    if not _has_blocks(a):
        return a.shape[0], _aligned(b.shape[0], _ALIGNMENT), _aligned(b.shape[1], _ALIGNMENT)
    return _aligned(a.shape[0], 4), _aligned(b.shape[0], _ALIGNMENT), _aligned(b.shape[1], _BLOCK)


def _rows(scale_inv: Tensor, rows: int, padded: int) -> Tensor:
    """(rows, 1) or (1, 1) -> (padded, 1)."""
    if rows == padded:  # torch's pad copies even so
        return scale_inv.expand(rows, 1)
    return nn.functional.pad(scale_inv.expand(rows, 1), (0, 0, 0, padded - rows), value=1.0)


def _block_scales(x_q: QuantizedTensor, rows: int) -> tuple[Tensor, ScalingType]:
    """Outer dimension first in memory: entries of one block of K lie side by side (1x128), or the entries of K
    (128x128)."""
    scale_inv = x_q.scale_inv
    if x_q.spec.granularity == BLOCK_1X128:  # (rows, K / 128) -> the same with strides (1, rows), as casts write it
        if more := rows - scale_inv.shape[0]:  # torch's pad copies even where nothing is missing
            scale_inv = nn.functional.pad(scale_inv, (0, 0, 0, more), value=1.0)
        return scale_inv.t().contiguous().t(), ScalingType.BlockWise1x128
    # cuBLASLt reads scales of 128 x 128 blocks in fours along K
    if more := -scale_inv.shape[1] % 4:  # (rows / 128, K / 128) -> (K / 128 in fours, rows / 128), strides (1, .)
        scale_inv = nn.functional.pad(scale_inv, (0, more), value=1.0)
    return scale_inv.contiguous().t(), ScalingType.BlockWise128x128


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _pad(codes: Tensor, rows: int, cols: int) -> Tensor:
    more_rows, more_cols = rows - codes.shape[0], cols - codes.shape[1]
    if more_rows or more_cols:  # as bytes: torch pads no FP8 tensor; code 0 is the number 0
        return nn.functional.pad(codes.view(torch.uint8), (0, more_cols, 0, more_rows)).view(codes.dtype)
    return codes.contiguous()

"""FP8 GEMM on Hopper by a persistent Triton kernel, which promotes sums to fp32 at a configured interval.

    y = (a * scale_inv_a) @ (b * scale_inv_b).T + bias        scales per tensor, per row, 1x128 and 128x128

Hopper's tensor cores keep about 14 bits of a sum of FP8 products. cuBLASLt promotes the sum to fp32 every 128 products
(slow accumulation) or never (fast). Here the interval is one number of a configuration, with values in between. The
rest is as in the reference: fp32 totals, scales after the sum (after each block of K), then the bias, and ONE rounding.

`gemm_choice` measures on the device which configuration runs, and whether this kernel or torch's does; without a
measurement torch's runs. `gemm_device_code` holds the device code; the first plan imports Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.kernels import gemm_choice
from ottava.kernels.gate import aligned, launched
from ottava.kernels.triton.quantize import FUSED, has_triton
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizedTensor, RunGemm

NAME = "triton_gemm"
NATIVE = True
SOURCES = ("gemm.py", "gemm_device_code.py")

_HOPPER = 9
_BLOCK = 128  # along K: one row of a tile is one line of swizzled shared memory, and one block of the block scales
_DESCRIPTOR_BYTES = 16  # what addresses and row pitches of a tensor descriptor are multiples of
_GROUP = 8  # rows of tiles in one group of the walk
_INTERPRETED_PROGRAMS = 4


class Config(NamedTuple):
    """One way to run the kernel.

    Example:
        >>> str(CONFIGS[0])
        '128x256 stages 3 warps 8 promote 0'
    """

    rows: int
    """Of a tile of y."""
    cols: int
    """Of a tile of y."""
    stages: int
    """Tiles of a and b on their way from memory."""
    warps: int
    """Warps of a program."""
    promote: int
    """Products in a sum before its promotion to fp32, a multiple of 128; 0: all of K."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols} stages {self.stages} warps {self.warps} promote {self.promote}"


CONFIGS = (
    Config(128, 256, 3, 8, 0),
    Config(128, 128, 4, 8, 0),
    Config(64, 128, 5, 4, 0),
    Config(128, 128, 4, 8, 512),
    Config(128, 128, 4, 8, 256),
    Config(128, 128, 4, 8, 128),
    Config(64, 256, 4, 8, 128),
    Config(64, 128, 5, 4, 128),
    Config(128, 64, 5, 8, 128),
)
"""The measured configurations. A tile of sums takes registers (two tiles with promotion), and its stages take shared
memory. A test compiles each for sm_90 and finds no spilled register."""


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why this kernel does not take this call; None if it does."""
    if not {a.spec.format, b.spec.format} <= {E4M3, E5M2}:
        return f"{NAME}: takes E4M3 and E5M2; got {a.spec.format} and {b.spec.format}"
    for granularity in (a.spec.granularity, b.spec.granularity):
        rows, cols = granularity.rows, granularity.cols
        if (rows, cols) not in ((None, None), (1, None), (1, _BLOCK), (_BLOCK, _BLOCK)):
            return f"{NAME}: takes scales per tensor, per row, 1x128 and 128x128; got {granularity}"
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{NAME}: gives bfloat16, float16 and float32; got {out_dtype}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if a.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {a.device.type}"
    if not has_triton():
        return f"{NAME}: Triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(a.device)
    if capability[0] != _HOPPER or torch.version.hip is not None:  # MI300 counts as 9, too
        return f"{NAME}: written for Hopper (sm_90); this device is sm_{capability[0]}{capability[1]}"
    return None


def configs(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False
) -> tuple[Config, ...]:
    """The configurations that may run a call; without a measurement the first one runs.

    With fast_accum all; without it those that promote every 128 products, like cuBLASLt's slow accumulation.

    Example:
        >>> import ottava
        >>> x_q = ottava.quantize(torch.ones(2, 2), ottava.QuantizationSpec(E4M3))
        >>> sorted({config.promote for config in configs(x_q, x_q, torch.bfloat16, fast_accum=True)})
        [0, 128, 256, 512]
    """
    blocks = _in_blocks(a, b)
    usable = []
    for config in CONFIGS:
        if config.promote != _BLOCK and (blocks or not fast_accum):
            continue
        if config.cols > _BLOCK and (blocks or out_dtype == torch.float32):
            continue  # one scale of 128x128 a tile; an fp32 tile of y does not fit beside the stages
        if blocks and config.rows == config.cols and b.spec.granularity.rows == 1:
            continue  # registers would spill: a scale for each column besides two tiles
        usable.append(config)
    return tuple(usable)


def padding(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """The zero-padded size: K, to rows of 16 bytes."""
    k, missing = a.shape[1], -a.shape[1] % _DESCRIPTOR_BYTES
    return f"K {k}->{k + missing}" if missing else ""


def plan_gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> RunGemm:
    """A GEMM of all operands of the specs, shapes and strides of these: (a, b, bias) -> y.

    The configuration is the one measured fastest; a later measurement does not change it.
    """
    usable = configs(a, b, out_dtype, fast_accum)
    choice = gemm_choice.known(a, b, out_dtype, bias, fast_accum)
    measured = choice.milliseconds if choice is not None else ()
    named = {way(config): config for config in usable}
    # a measurement lists the fastest first, other kernels among them
    best = next((named[name] for name in measured if name in named), usable[0])
    return plan_under(a, b, out_dtype, bias, best)


def way(config: Config) -> str:
    """The name of this kernel under a configuration in measurements."""
    return f"{NAME} {config}"


def ways(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> dict[str, Callable[[], Tensor]]:
    """Each configuration that fits the call -> the call."""
    return {way(config): partial(run, a, b, out_dtype, bias, config) for config in configs(a, b, out_dtype, fast_accum)}


def run(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, config: Config) -> Tensor:
    """A GEMM under the given configuration: one of CONFIGS, or another to be measured."""
    return plan_under(a, b, out_dtype, bias, config)(a, b, bias)


def plan_under(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, config: Config
) -> RunGemm:
    """As `plan_gemm`, under the given configuration."""
    device = importlib.import_module("ottava.kernels.triton.gemm_device_code")
    (m, k), n = a.shape, b.shape[0]
    # y itself is written by TMA only where its rows begin at multiples of 16 bytes
    described = n * out_dtype.itemsize % _DESCRIPTOR_BYTES == 0
    launch = gemm_launch(a, b, bias is not None, described, config)
    # programs stay on their multiprocessors and walk over tiles: a launch of more would wait in line
    tiles = -(-m // config.rows) * -(-n // config.cols)
    kernel = device.gemm_kernel[(min(tiles, _programs(a.device)),)]
    # TMA: the hardware computes addresses, swizzles shared memory and reads zeros beyond an edge
    descriptor = device.TensorDescriptor.from_tensor
    boxes = [config.rows, _BLOCK], [config.cols, _BLOCK], [config.rows, config.cols]

    def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> Tensor:
        launched(a.data, b.data, a.scale_inv, b.scale_inv, bias)
        y = a.data.new_empty((m, n), dtype=out_dtype)
        with torch.cuda.device_of(y):  # Triton launches on the current device
            kernel(
                *(descriptor(_codes(a.data), boxes[0]), descriptor(_codes(b.data), boxes[1])),
                descriptor(y, boxes[2]) if described else y,
                *(a.scale_inv, b.scale_inv, y if bias is None else bias.contiguous()),
                *(m, n, k),
                *(*_strides(a), *_strides(b)),
                **launch,
            )
        return y

    return run


def gemm_launch(
    a: QuantizedTensor, b: QuantizedTensor, bias: bool, described: bool, config: Config
) -> Mapping[str, Any]:
    """The compile-time parameters of `gemm_kernel`; described: y is written through a descriptor."""
    return MappingProxyType(
        {
            "A_EACH": a.spec.granularity.rows == 1,
            "B_EACH": b.spec.granularity.rows == 1,
            "BLOCKS": _in_blocks(a, b),
            "PROMOTE": 0 if _in_blocks(a, b) else config.promote // _BLOCK,
            "BIAS": bias,
            "DESCRIBED": described,
            "BM": config.rows,
            "BN": config.cols,
            "BK": _BLOCK,
            "GROUP": _GROUP,
            "num_warps": config.warps,
            "num_stages": config.stages,
            **FUSED,
        }
    )


def _in_blocks(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return a.spec.granularity.cols is not None or b.spec.granularity.cols is not None


def _strides(x_q: QuantizedTensor) -> tuple[int, int]:
    """Strides of scale_inv from row to row of scales and from block to block of K; 0 for a single scale."""
    granularity = x_q.spec.granularity
    row, block = x_q.scale_inv.stride()
    return row if granularity.rows else 0, block if granularity.cols else 0


def _codes(codes: Tensor) -> Tensor:
    """Codes in rows of a multiple of 16 bytes, as descriptors need them; copied only if necessary."""
    if missing := -codes.shape[1] % _DESCRIPTOR_BYTES:  # as bytes: torch pads no FP8 tensor; code 0 is the number 0
        return nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
    codes = codes.contiguous()
    return codes if aligned(codes, _DESCRIPTOR_BYTES) else codes.clone()


@functools.cache
def _programs(device: torch.device) -> int:
    """The number of programs: one per multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count

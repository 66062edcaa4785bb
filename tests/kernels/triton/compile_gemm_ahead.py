"""Compiles the Triton GEMM for sm_90 under every configuration that is measured; no GPU is needed.

It prints a JSON object: name of a launch -> what the machine code holds. In a process of its own, because Triton
decides at import whether it interprets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import triton
from compile_ahead import facts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ottava.kernels.triton.gemm import CONFIGS, Config, configs, gemm_launch
from ottava.kernels.triton.gemm_device_code import gemm_kernel
from ottava.numerics.formats import E4M3, E5M2, Format
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

FORMATS = {E4M3: "fp8e4nv", E5M2: "fp8e5"}
OUTPUTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ALIGNED = ("m", "n", "k")  # the sizes of a model's tensors are multiples of 16
Launch = tuple[Config, QuantizedTensor, QuantizedTensor, torch.dtype, bool]


def operand(granularity: Granularity, fmt: Format = E4M3) -> QuantizedTensor:
    codes = torch.zeros(256, 256, dtype=fmt.storage_dtype)
    scales = torch.ones(granularity.grid_shape((256, 256)))
    return QuantizedTensor(codes, scales, QuantizationSpec(fmt, granularity), torch.bfloat16)


def launches() -> Iterator[tuple[str, Launch]]:
    """Each configuration per row, with a bias; blocks and an fp32 result under those they may run; the rest once."""
    row, blocks, square = operand(PER_ROW), operand(BLOCK_1X128), operand(BLOCK_128X128)
    for config in CONFIGS:
        yield f"row, {config}", (config, row, row, torch.bfloat16, True)
    for name, b in (("1x128", blocks), ("128x128", square)):
        for config in configs(blocks, b, torch.bfloat16):
            yield f"1x128 x {name}, {config}", (config, blocks, b, torch.bfloat16, True)
    tensor, gradient, last = operand(PER_TENSOR), operand(PER_TENSOR, E5M2), CONFIGS[-1]
    yield "E5M2 x E4M3", (last, gradient, tensor, torch.bfloat16, True)
    yield "E4M3 x E5M2", (last, tensor, gradient, torch.bfloat16, True)
    yield "fp32", (configs(row, row, torch.float32, True)[0], row, row, torch.float32, True)
    yield "odd N", (CONFIGS[0], row, row, torch.bfloat16, False)


def compiled(config: Config, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, described: bool) -> Any:
    """As it is launched for sizes that are multiples of 16, with a bias; described: y is written by TMA."""
    launch = dict(gemm_launch(a, b, True, described, config))
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    kinds = {"bias_ptr": "*bf16", "scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32"}
    for name, x, rows in (("a_desc", a, config.rows), ("b_desc", b, config.cols)):
        kinds[name] = f"tensordesc<{FORMATS[x.spec.format]}[{rows},{launch['BK']}]>"
    out = OUTPUTS[dtype]
    kinds["y"] = f"tensordesc<{out}[{config.rows},{config.cols}]>" if described else f"*{out}"
    names = gemm_kernel.arg_names
    signature = {name: "constexpr" if name in launch else kinds.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name in ALIGNED or signature[name].startswith("*")]
    source = ASTSource(gemm_kernel, signature, launch, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    """Prints the facts of all launches."""
    found = {}
    for name, launch in launches():
        binary = compiled(*launch)
        ptx = binary.asm["ptx"]
        found[name] = facts(binary) | {
            "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\.\S*\.f32\.(e\dm\d\.e\dm\d)", ptx))),
            "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared\S*\.global", ptx)),
            "tma_stores": len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", ptx)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

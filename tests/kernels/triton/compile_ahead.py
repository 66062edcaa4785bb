"""Compiles the Triton kernels, as they are launched, for GPU architectures; no GPU is needed.

`python tests/kernels/triton/compile_ahead.py 90` prints a JSON object: name of a launch -> what the machine code holds;
942 stands for AMD's gfx942 and casts to FNUZ.
`--table` compiles the casts for every architecture and prints their figures; `--write` keeps them in
benchmarks/results/machine_code.json, and refuses to keep a worse one. In a process of its own, because Triton decides
at import whether it interprets.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError as error:
    raise SystemExit(
        f"compile_ahead.py compiles Triton's kernels, and {error}: pip install triton (no GPU is needed)"
    ) from None

from ottava.kernels.triton import device_code, rows_device_code
from ottava.kernels.triton.quantize import ACTIVATION_LAUNCH, amax_launch, cast_launch, predicted_launch
from ottava.kernels.triton.rows import STATISTICS, TILE, norm_launch
from ottava.kernels.triton.step import adamw_launch, roll_launch
from ottava.numerics.formats import E4M3, E4M3FNUZ, E5M2
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES

TYPES = {"given_ptr": "*fp32", "scale_inv_ptr": "*fp32", "scale_inv_t_ptr": "*fp32", "q_ptr": "*u8", "qt_ptr": "*u8"}
TYPES |= dict.fromkeys(("lanes_ptr", "history_ptr", "scale_ptr", "staged_ptr"), "*fp32")
TYPES |= {"statistics_ptr": "*fp32"}
TYPES |= dict.fromkeys(("index_ptr", "nonfinite_ptr", "guard_ptr", "table_ptr", "gradient_table_ptr"), "*i64")
TYPES |= {"lr_ptr": "*fp32"} | dict.fromkeys(("lr", "weight_decay", "beta1", "beta2"), "fp64")
FLOATS = ("eps", "top", "lowest_top", "correction", "size")
ALIGNED = (
    "count",
    "rows",
    "cols",
    "wide",
    "stride_r",
    "q_stride_r",
)  # the sizes of a model's tensors are multiples of 16
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
AMD = 942
KEPT = Path(__file__).parents[3] / "benchmarks" / "results" / "machine_code.json"
FIGURES = ("instructions", "registers", "blocks", "spilled", "shared")


class Multiprocessor(NamedTuple):
    """What one holds at once (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    warps: int
    blocks: int
    shared: int
    """Bytes, of which each block takes 1,024 beside its own."""


MULTIPROCESSORS = MappingProxyType(
    {
        80: Multiprocessor(64, 32, 164 << 10),
        89: Multiprocessor(48, 24, 100 << 10),
        90: Multiprocessor(64, 32, 228 << 10),
        100: Multiprocessor(64, 32, 228 << 10),
        120: Multiprocessor(48, 24, 100 << 10),
    }
)
"""The architectures that are meant."""


def launches(capability: int) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Name -> (kernel, its compile-time parameters): x and x.T of the tensors of the recipes, and single casts."""
    converts, roomy = capability >= 90, capability < 120
    tensor, row, block, mx = (RECIPES[name].fprop.lhs for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"))
    square = RECIPES["blockwise"].fprop.rhs
    gradient = QuantizationSpec(E5M2)
    pairs = {
        "tensor": (tensor, tensor),
        "tensor E5M2": (gradient, gradient),
        "row": (row, row),
        "row, tensor": (row, RECIPES["rowwise_with_gw_hp"].dgrad.rhs),
        "1x128": (block, block),
        "128x128": (square, square),
        "1x32": (mx, mx),
        "x only": (tensor, None),
        "x.T only": (None, block),
    }
    found = {name: (device_code.cast_kernel, cast_launch(*pair, converts, roomy)) for name, pair in pairs.items()}
    guarded = QuantizationSpec(E4M3, scaling="guarded", margin=1)
    for name, redo in (("predicted", False), ("guard", True)):
        found[name] = (device_code.predicted_kernel, predicted_launch(guarded, True, True, redo, converts, redo))
    found["amax"] = (device_code.amax_kernel, amax_launch(("tensor", "rows", "cols")))
    made = (
        {"MAKE": "silu", "FLAG": True, **ACTIVATION_LAUNCH},
        {"MAKE": "rmsnorm", "DTYPE": "bf16", "gamma_ptr": "*bf16"},
    )
    made[1]["beside_ptr"] = "*fp32"
    found["swiglu, 1x128"] = (device_code.cast_kernel, {**cast_launch(block, block, converts), **made[0]})
    found["rmsnorm, tensor"] = (device_code.cast_kernel, {**cast_launch(tensor, tensor, converts), **made[1]})
    guess = dict(predicted_launch(guarded, True, True, False, converts))
    found["gelu, predicted"] = (device_code.predicted_kernel, {**guess, "MAKE": "gelu_tanh", **ACTIVATION_LAUNCH})
    found["amax of layernorm"] = (device_code.amax_kernel, {**amax_launch(("tensor",)), **made[1], "MAKE": "layernorm"})
    back = {"MAKE": "silu", "FLAG": True, "beside_ptr": "*bf16", **ACTIVATION_LAUNCH}
    found["dgelu"] = (
        device_code.cast_kernel,
        {**cast_launch(gradient, gradient, converts), **back, "MAKE": "gelu", "FLAG": False},
    )
    guess |= {**back, "MAKE": "gelu_tanh", "FLAG": False}
    found["dgelu, predicted"] = (device_code.predicted_kernel, guess)
    found["rows"] = (rows_device_code.rows_kernel, {**made[1], "FLAG": False, **TILE, "beta_ptr": None})
    gate = {"MAKE": "silu", **TILE, "dy_ptr": "*bf16", "dx_ptr": "*bf16"}
    found["dswiglu pair"] = (rows_device_code.gate_gradient_kernel, gate)
    found["row statistics"] = (rows_device_code.row_statistics_kernel, {"MAKE": "layernorm", **STATISTICS})
    whole = {**norm_launch("rmsnorm", 4096), "CENTERED": False, "gamma_ptr": "*bf16", "beta_ptr": None}
    found["rmsnorm alone"] = (rows_device_code.norm_kernel, whole)
    back = {**whole, "dy_ptr": "*bf16", "dx_ptr": "*bf16", "d_gamma_ptr": "*fp32", "d_beta_ptr": None}
    del back["beta_ptr"]
    found["drmsnorm"] = (rows_device_code.norm_gradient_kernel, back)
    wide, narrow, given = torch.float32, torch.bfloat16, {"lr_ptr": None}
    kinds = {"adamw": (wide, None, wide, wide, wide), "adamw, remainder": (narrow, torch.int16, *[narrow] * 3)}
    for name, types in kinds.items():
        found[name] = (device_code.adamw_kernel, {**adamw_launch(types, 64, True), **given})
        read = {"correction": None, "size": None}
        found[f"{name}, read"] = (device_code.adamw_kernel, {**adamw_launch(types, 64, True), **read})
    found["roll"] = (device_code.roll_kernel, roll_launch(replace(guarded, amax_history_len=1024)))
    return found


def for_amd() -> dict[str, dict[str, int]]:
    """What the casts to AMD's formats take on MI300: registers a thread, and those that it spills."""
    found = {}
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        cells = [replace(cell, format=E4M3FNUZ) for cell in RECIPES[name].cells("input")]
        binary = compiled(device_code.cast_kernel, cast_launch(*cells, False), AMD)
        numbers = re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", binary.asm["amdgcn"])
        found[name] = {what: int(number) for what, number in numbers}
    return found


def compiled(kernel: Any, launch: Mapping[str, Any], capability: int, x_type: str = "*bf16") -> Any:
    """The kernel for x in bf16 whose rows lie one after the other, sizes and addresses multiples of 16."""
    options = {name: value for name, value in launch.items() if name not in kernel.arg_names}
    constants = {one.name: one.default for one in kernel.params if one.has_default}
    constants |= {name: value for name, value in launch.items() if name in kernel.arg_names}
    pointers = {name: value for name, value in constants.items() if str(value).startswith("*")}
    constants = {name: value for name, value in constants.items() if name not in pointers}
    constants |= {name: 1 for name in ("stride_c", "q_stride_c") if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        kind = "*i32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        kind = x_type if name in ("x_ptr", "y_ptr") else (TYPES | pointers).get(name, kind)
        signature[name] = "constexpr" if name in constants else kind
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or name in ALIGNED]
    aligned = [i for i in aligned if signature[kernel.arg_names[i]] != "constexpr"]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("hip", f"gfx{AMD}", 64) if capability == AMD else GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def facts(binary: Any) -> dict[str, Any]:
    """Registers, bytes spilled, and the instructions of interest."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    ptx = binary.asm["ptx"]
    counted = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    return counted | {
        "loads16": len(re.findall(r"ld\.global[\w.]*\.v4\.b32", ptx)),
        "loads": len(re.findall(r"ld\.global[\w.]*\.b(?:8|16)\b", ptx)),
        "stores16": len(re.findall(r"st\.global[\w.]*\.v4\.b32", ptx)),
        "byte_stores": len(re.findall(r"st\.global[\w.]*\.b8", ptx)),
        "conversions": len(re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", ptx)),
        "zero_products": len(re.findall(r"fma\.rn\.f32\s[^;]*, 0f00000000, ", ptx)),
        "flushes": ".ftz" in ptx,
        "approximate": len(re.findall(r"div\.(?:full|approx)|rcp\.approx", ptx)),
        "barriers": len(re.findall(r"bar\.sync|barrier\.sync", ptx)),
        "fused": len(re.findall(r"fma\.rn\.f32", ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.[\w.]*max", ptx)),
        "shared": binary.metadata.shared,
    }


def figures(binary: Any, launch: Mapping[str, Any], capability: int) -> dict[str, float]:
    """FIGURES of a launch: SASS instructions an element, each counted once, as no kernel here repeats a tile's code;
    registers a thread; blocks that fit on a multiprocessor; bytes spilled a thread and shared a block."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.asm["cubin"])
        text = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", text, re.MULTILINE)
    code = sum(line != "NOP" for line in lines)
    counted = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    warps, shared = launch.get("num_warps", 4), binary.metadata.shared
    room = MULTIPROCESSORS[capability]
    # a quarter of a multiprocessor has 16,384 registers, and hands them to a warp by 256
    by_registers = 4 * (16_384 // (-(-counted["REG"] * 32 // 256) * 256)) // warps
    blocks = min(by_registers, room.warps // warps, room.blocks, room.shared // (shared + 1024))
    each = round(code * 32 * warps / (launch["TR"] * launch["TC"]), 1)
    return dict(zip(FIGURES, (each, counted["REG"], blocks, counted["STACK"] + counted["LOCAL"], shared), strict=True))


def chosen(capability: int) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The casts on every architecture; the rest on one, and a few of it on all."""
    every = launches(capability)
    some = ("roll", "adamw", "adamw, read", "adamw, remainder, read")
    return {name: one for name, one in every.items() if capability == 90 or name in some or is_cast(one)}


def is_cast(launch: tuple[Any, Mapping[str, Any]]) -> bool:
    """Whether a launch writes codes, finds their scales or makes what is cast."""
    casts = (device_code.cast_kernel, device_code.predicted_kernel, device_code.amax_kernel)
    return launch[0] in (*casts, rows_device_code.gate_gradient_kernel)


def table() -> dict[str, Any]:
    """Every cast on every architecture."""
    found: dict[str, Any] = {"command": "python tests/kernels/triton/compile_ahead.py --write"}
    found |= {"triton": triton.__version__, "counts": "SASS, by the nvdisasm of Triton's wheel; no GPU ran"}
    for capability in MULTIPROCESSORS:
        casts = {name: one for name, one in chosen(capability).items() if is_cast(one)}
        found[f"sm_{capability}"] = {
            name: figures(compiled(*launch, capability), launch[1], capability) for name, launch in casts.items()
        }
    return found


def worse(found: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Casts that need more instructions than those that were kept (0.2 is a compiler's mood), spill more, or leave room
    for one block only."""
    pairs = [
        (f"{name} on {where}", one, kept[where][name])
        for where, casts in found.items()
        if where.startswith("sm_")
        for name, one in casts.items()
        if name in kept.get(where, {})
    ]
    return [
        f"{name}: {new} after {old}"
        for name, new, old in pairs
        if new["instructions"] > old["instructions"] + 0.2
        or new["blocks"] < min(old["blocks"], 2)
        or new["spilled"] > old["spilled"]
    ]


def main() -> None:
    """Prints the facts of all launches, or the table of the casts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", nargs="?", type=int, choices=(*MULTIPROCESSORS, AMD))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--despite", action="append", default=["-"], help="a cast that gets worse by a decision")
    settings = parser.parse_args()
    if settings.capability == AMD:
        print(json.dumps(for_amd()))
        return
    if capability := settings.capability:
        facts_of = {}
        for name, launch in chosen(capability).items():
            binary = compiled(*launch, capability)
            facts_of[name] = facts(binary) | (figures(binary, launch[1], capability) if is_cast(launch) else {})
        print(json.dumps(facts_of))
        return
    found = table()
    if settings.write:
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else found
        back = [step for step in worse(found, kept) if not step.startswith(tuple(settings.despite))]
        if back and kept["triton"] == found["triton"]:
            raise SystemExit("limits only improve:\n" + "\n".join(back))
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if not settings.table else lines_of(found))


def lines_of(found: Mapping[str, Any]) -> str:
    """The table as text: instructions an element, registers, blocks a multiprocessor; then what spills."""
    places = [where for where in found if where.startswith("sm_")]
    rows = ["| cast | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    for name in found[places[0]]:
        cells = [found[where][name] for where in places]
        texts = [
            f"{one['instructions']}, {one['registers']}, {one['blocks']}" + " spills" * (one["spilled"] > 0)
            for one in cells
        ]
        rows.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

"""`ottava doctor`: names the kernels of this machine, tests them, and lists what is missing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ottava.base.text import columns, to_json

SCHEMA_VERSION = 1
WRONG, MISSING = 1, 3
SIZE = 128
"""Rows and columns of the test matrices; every kernel supports this size."""
TOLERANCE = 2.0**-8
"""Twice the largest error of one rounding to BF16; each kernel rounds once. One wrong operand code in a hundred causes
a larger error."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show this machine and the kernels of each recipe on it, and check the results of these kernels.

    Doctor runs every GEMM of every recipe on random numbers. The codes of the operands must equal those of the
    reference, bit by bit, and the result must be the product of the codes.

    The first call builds the native kernels, which takes seconds, and measures which GEMM kernel is the fastest on this
    CPU. OTTAVA_NATIVE=0 switches native kernels off, OTTAVA_CACHE names the folder for kernels and measurements, CXX
    names the compiler.

    Exit code 1 if a recipe computes wrong results, 3 if this machine lacks something that makes ottava faster, such as
    a C++ compiler.
    """
    result = examine()
    typer.echo(to_json({"schema_version": SCHEMA_VERSION, **result}) if as_json else report(result))
    wrong = any(row["check"] != "ok" for row in result["recipes"])
    return WRONG if wrong else MISSING if result["lost"] else 0


def examine() -> dict[str, Any]:
    """Device, versions, libraries, the checked kernels of every recipe, traps and missing parts, as plain values."""
    import torch

    import ottava
    from ottava.kernels.native import build as native_build
    from ottava.kernels.native import gemm as native_gemm
    from ottava.ops import dispatch

    settings = native_build.from_environment()
    compiler = native_build.find_compiler(settings)
    on_gpu = torch.cuda.is_available()
    libraries = []
    for name in native_build.sources():
        native_build.begin(name)
    for name in native_build.sources():
        built = native_build.load(name)
        libraries.append({"name": name, "reason": built.reason, "note": built.note, "threads": built.threads})
    lost = [f"{library['name']}: {library['reason']}" for library in libraries if library["reason"]]
    lost += sorted({str(library["note"]) for library in libraries if library["note"]})
    if any(not library["reason"] and not library["threads"] for library in libraries):
        lost.append("native kernels run on one thread: the compiler has no OpenMP; install g++, which has it")
    return {
        "ottava": ottava.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "compiler": "" if isinstance(compiler, str) else " ".join(compiler),
        "cache": str(settings.cache or ""),
        "libraries": libraries,
        "measured": {
            "levels of native_gemm": str(native_gemm.ranking()),
            "gemm": str(dispatch.cpu_ranking()),
            "gemm of BF16 operands": str(dispatch.dense_ranking()),
        },
        "recipes": [row for recipe in ottava.RECIPES.values() for row in _kernels(recipe, "cuda" if on_gpu else "cpu")],
        "traps": traps(facts()),
        "lost": lost,
    }


@dataclass(frozen=True)
class Facts:
    """The facts of a machine that traps depend on."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU; None without a GPU."""
    cuda: tuple[int, ...]
    """CUDA version that torch was built for."""
    cudnn: int
    """Version of cuDNN: 91500 is 9.15."""
    cudnn_attention: bool
    """Whether torch may use cuDNN's attention."""
    matmul_precision: str
    """The result of torch.get_float32_matmul_precision()."""


def facts() -> Facts:
    """The facts of this machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    return Facts(
        torch.cuda.get_device_capability() if on_gpu else None,
        tuple(int(part) for part in (torch.version.cuda or "0").split(".")),
        (torch.backends.cudnn.version() or 0) if on_gpu else 0,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_float32_matmul_precision(),
    )


def traps(here: Facts) -> list[str]:
    """Settings that slow FP8 down and that no receipt shows.

    Example:
        >>> [trap.split(":")[0] for trap in traps(Facts((9, 0), (12, 8), 91000, True, "high"))]
        ['float32 inputs', 'attention', 'blocks of 128']
    """
    warnings = [
        "float32 inputs: casts read twice the bytes, and every other operation stays in float32, which can be slower "
        "than BF16 (TransformerEngine #1119). Use model.bfloat16(), or torch.autocast(device_type, torch.bfloat16)"
    ]
    if here.capability is None:
        return warnings
    sm = f"sm_{here.capability[0]}{here.capability[1]}"
    if here.capability < (8, 9):
        warnings.append(
            f"tensor cores: {sm} has none for FP8; BF16 emulates every recipe, and no recipe is faster than BF16"
        )
    if here.capability >= (9, 0) and not (here.cudnn_attention and here.cudnn > 91500):
        why = f"cuDNN {here.cudnn // 10000}.{here.cudnn // 100 % 100}" if here.cudnn_attention else "switched off"
        warnings.append(
            f"attention: torch does not choose cuDNN's ({why}; it does after 9.15), and FlashAttention-2 takes 1.7 to "
            "2.3 times as long on Hopper. Put torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, "
            "SDPBackend.FLASH_ATTENTION], set_priority=True) around the forward"
        )
    if here.capability[0] == 9 and here.cuda < (12, 9):
        version = ".".join(map(str, here.cuda))
        warnings.append(
            f"blocks of 128: this torch is built for CUDA {version}; GEMMs of such blocks need 12.9 and run in BF16"
        )
    if here.matmul_precision == "highest":
        warnings.append(
            "float32 GEMMs: precision is 'highest', so float32 layers use no tensor cores; "
            "torch.set_float32_matmul_precision('high') turns tensor cores on"
        )
    return warnings


def _kernels(recipe: Any, device: str) -> list[dict[str, str]]:
    """One row per quantized GEMM: its kernels for a matrix that fits all kernels, and the check of their result."""
    import torch

    from ottava.ops.gemm import explain
    from ottava.ops.quantize import explain_quantize, quantize

    numbers = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=numbers).to(device, torch.bfloat16) for _ in range(2))
    rows = []
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        if not gemm.quantized:
            continue
        a = quantize(x, gemm.lhs)
        b = quantize(w, gemm.rhs, beside=a)
        casts = [_runs(explain_quantize(x, spec)) for spec in (gemm.lhs, gemm.rhs)]
        row = {"recipe": recipe.name, "gemm": name, "operands": f"{gemm.lhs} x {gemm.rhs}"}
        row |= {"quantize": ", ".join(dict.fromkeys(casts)), "kernel": _runs(explain(a, b, out_dtype=x.dtype))}
        rows.append(row | {"check": _check(gemm, (x, w), (a, b))})
    return rows


def _check(cells: Any, tensors: Any, operands: Any) -> str:
    """ "ok", or the error in the casts of these tensors or in the product of their codes."""
    import torch

    from ottava.kernels import reference
    from ottava.ops.gemm import gemm, rests

    for side, x, got in zip(("left", "right"), tensors, operands, strict=True):
        if got.spec.rounding == "stochastic" or got.spec.block_scale == "ms_eden":  # draws other codes each time
            continue
        truth = reference.quantize(got.transformed(x).cpu(), got.spec)
        codes = (got.data.cpu().contiguous().view(torch.uint8), truth.data.contiguous().view(torch.uint8))
        if wrong := int((codes[0] != codes[1]).sum()):
            return f"{wrong} of {codes[0].numel()} codes of the {side} operand differ from the reference"
        if not torch.equal(got.scale_inv.cpu(), truth.scale_inv):
            return f"scales of the {side} operand differ from the reference"
    pair: Any = rests(*operands) or operands
    a, b = pair
    y = gemm(a, b, out_dtype=torch.bfloat16, fast_accum=cells.fast_accum).double()
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    error = float((y - exact).norm() / exact.norm())
    return (
        "ok"
        if error < TOLERANCE
        else f"the product is off by {error:.2g}, relative; one rounding allows {TOLERANCE:.2g}"
    )


def _runs(explanation: str) -> str:
    """The kernel at the end of an explanation."""
    return next(line.removesuffix(": runs") for line in explanation.splitlines() if line.endswith(": runs"))


def report(result: dict[str, Any]) -> str:
    """The result of `examine` as text."""
    lines = [
        f"ottava {result['ottava']}, torch {result['torch']}, Python {result['python']}",
        f"device    {result['device']}, {result['threads']} threads",
        f"compiler  {result['compiler'] or 'none'}",
        f"cache     {result['cache'] or 'none'}",
    ]
    lines += [f"native    {library['name']}: {library['reason'] or 'built'}" for library in result["libraries"]]
    lines += [f"measured  {what}: {ranking}" for what, ranking in result["measured"].items()]
    header = ("recipe", "gemm", "operands", "quantize", "kernel", "check")
    lines += ["", *columns(header, *([row[key] for key in header] for row in result["recipes"])), ""]
    wrong = [f"  {row['recipe']}.{row['gemm']}: {row['check']}" for row in result["recipes"] if row["check"] != "ok"]
    if wrong:
        lines += ["Wrong results:", *wrong]
        lines.append("Do not train with these recipes on this machine. Please report the output of this command.")
    lines += ["Traps:", *(f"  {line}" for line in result["traps"]), ""]
    if result["lost"]:
        lines += ["Missing:", *(f"  {line}" for line in result["lost"])]
        lines.append("ottava works without it, but casts, GEMMs and statistics on the CPU take several times as long.")
    else:
        lines.append("Nothing is missing.")
    return "\n".join(lines)

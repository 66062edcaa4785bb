"""`ottava doctor`: what runs on this machine, whether it computes what it should, and what is lost."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ottava.text import columns, to_json

SCHEMA_VERSION = 1
WRONG, MISSING = 1, 3
SIZE = 128
"""Of the matrices that are tried: every kernel takes them."""
TOLERANCE = 2.0**-8
"""Twice what one rounding to BF16 can do, which each kernel makes; operands that are wrong in one code of a hundred are
off by more."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Say what this machine has, which kernels each recipe would run on it, and whether they compute what they should.

    Every GEMM of every recipe is tried on random numbers: the codes of its operands must be those of the reference, bit
    by bit, and the product that of the codes.

    Builds the native kernels if that has not happened yet, which takes seconds once, and measures which way to multiply
    is the fastest on this CPU. OTTAVA_NATIVE=0 switches them off, OTTAVA_CACHE says where they and what was measured
    are kept, CXX which compiler makes them.

    Exit code 1 if a recipe computes something else, 3 if something is missing that makes ottava slower than it could be
    here, such as a C++ compiler.
    """
    found = examine()
    typer.echo(to_json({"schema_version": SCHEMA_VERSION, **found}) if as_json else report(found))
    wrong = any(row["check"] != "ok" for row in found["recipes"])
    return WRONG if wrong else MISSING if found["lost"] else 0


def examine() -> dict[str, Any]:
    """Device, versions, libraries, every recipe's kernels and their test, traps, and what is lost; plain values."""
    import torch

    import ottava
    from ottava import dispatch
    from ottava.kernels.native import build as native_build
    from ottava.kernels.native import gemm as native_gemm

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
        lost.append("native kernels run on one thread: the compiler has no OpenMP; g++ has")
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
    """What traps depend on."""

    capability: tuple[int, int] | None
    """Of the GPU; None without one."""
    cuda: tuple[int, ...]
    """Version torch was built for."""
    cudnn: int
    """91500 is 9.15."""
    cudnn_attention: bool
    """Whether torch may use it."""
    matmul_precision: str
    """torch.get_float32_matmul_precision()."""


def facts() -> Facts:
    """Those of this machine."""
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
    """What makes FP8 slower than it should be, and is not seen in a receipt.

    Example:
        >>> [trap.split(":")[0] for trap in traps(Facts((9, 0), (12, 8), 91000, True, "high"))]
        ['float32 inputs', 'attention', 'blocks of 128']
    """
    found = [
        "float32 inputs: casts read twice the bytes and all that is no GEMM stays in float32, which can be slower than "
        "BF16 (TransformerEngine #1119). Use model.bfloat16(), or torch.autocast(device_type, torch.bfloat16)"
    ]
    if here.capability is None:
        return found
    sm = f"sm_{here.capability[0]}{here.capability[1]}"
    if here.capability < (8, 9):
        found.append(f"tensor cores: {sm} has none for FP8; every recipe is emulated in BF16, and none is faster")
    if here.capability >= (9, 0) and not (here.cudnn_attention and here.cudnn > 91500):
        why = f"cuDNN {here.cudnn // 10000}.{here.cudnn // 100 % 100}" if here.cudnn_attention else "switched off"
        found.append(
            f"attention: torch does not choose cuDNN's ({why}; it does after 9.15), and FlashAttention-2 takes 1.7 to "
            "2.3 times as long on Hopper. Put torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, "
            "SDPBackend.FLASH_ATTENTION], set_priority=True) around the forward"
        )
    if here.capability[0] == 9 and here.cuda < (12, 9):
        version = ".".join(map(str, here.cuda))
        found.append(f"blocks of 128: this torch is built for CUDA {version}; their GEMMs need 12.9 and run in BF16")
    if here.matmul_precision == "highest":
        found.append(
            "float32 GEMMs: precision is 'highest', so that layers left in float32 use no tensor cores; "
            "torch.set_float32_matmul_precision('high') lets them"
        )
    return found


def _kernels(recipe: Any, device: str) -> list[dict[str, str]]:
    """One row a quantized GEMM: the kernels of a matrix that fits all of them, and whether they compute it."""
    import torch

    from ottava.casts import explain_quantize, quantize
    from ottava.ops import explain

    numbers = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=numbers).to(device, torch.bfloat16) for _ in range(2))
    rows = []
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        if not gemm.quantized:
            continue
        a, b = quantize(x, gemm.lhs), quantize(w, gemm.rhs)
        casts = [_runs(explain_quantize(x, spec)) for spec in (gemm.lhs, gemm.rhs)]
        row = {"recipe": recipe.name, "gemm": name, "operands": f"{gemm.lhs} x {gemm.rhs}"}
        row |= {"quantize": ", ".join(dict.fromkeys(casts)), "kernel": _runs(explain(a, b, out_dtype=x.dtype))}
        rows.append(row | {"check": _check(gemm, (x, w), (a, b))})
    return rows


def _check(cells: Any, tensors: Any, operands: Any) -> str:
    """ "ok", or what is wrong with the casts of these tensors or with the product of their codes."""
    import torch

    from ottava.kernels import reference
    from ottava.ops import gemm

    for side, x, got in zip(("left", "right"), tensors, operands, strict=True):
        if got.spec.rounding == "stochastic":  # other codes each time
            continue
        truth = reference.quantize(x.cpu(), got.spec)
        codes = (got.data.cpu().contiguous().view(torch.uint8), truth.data.contiguous().view(torch.uint8))
        if wrong := int((codes[0] != codes[1]).sum()):
            return f"{wrong} of {codes[0].numel()} codes of the {side} operand are not the reference's"
        if not torch.equal(got.scale_inv.cpu(), truth.scale_inv):
            return f"scales of the {side} operand are not the reference's"
    a, b = operands
    y = gemm(a, b, out_dtype=torch.bfloat16, fast_accum=cells.fast_accum).double()
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    error = float((y - exact).norm() / exact.norm())
    return (
        "ok"
        if error < TOLERANCE
        else f"the product is off by {error:.2g}, relative; one rounding allows {TOLERANCE:.2g}"
    )


def _runs(explanation: str) -> str:
    """The name of the kernel that an explanation ends on."""
    return next(line.removesuffix(": runs") for line in explanation.splitlines() if line.endswith(": runs"))


def report(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"ottava {found['ottava']}, torch {found['torch']}, Python {found['python']}",
        f"device    {found['device']}, {found['threads']} threads",
        f"compiler  {found['compiler'] or 'none'}",
        f"cache     {found['cache'] or 'none'}",
    ]
    lines += [f"native    {one['name']}: {one['reason'] or 'built'}" for one in found["libraries"]]
    lines += [f"measured  {what}: {ranking}" for what, ranking in found["measured"].items()]
    header = ("recipe", "gemm", "operands", "quantize", "kernel", "check")
    lines += ["", *columns(header, *([row[key] for key in header] for row in found["recipes"])), ""]
    wrong = [f"  {row['recipe']}.{row['gemm']}: {row['check']}" for row in found["recipes"] if row["check"] != "ok"]
    if wrong:
        lines += ["What is wrong:", *wrong]
        lines.append("Do not train with these recipes here; please report it with the output of this command.")
    lines += ["Traps:", *(f"  {line}" for line in found["traps"]), ""]
    if found["lost"]:
        lines += ["What is lost:", *(f"  {line}" for line in found["lost"])]
        lines.append("Everything works without; casts, GEMMs and statistics on the CPU take several times as long.")
    else:
        lines.append("Nothing is missing.")
    return "\n".join(lines)

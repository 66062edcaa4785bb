"""`ottava doctor`: what runs on this machine, and what is lost."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import typer

SCHEMA_VERSION = 1
MISSING = 3


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Say what this machine has and which kernels each recipe would run on it.

    Builds the native kernels if that has not happened yet, which takes seconds once. OTTAVA_NATIVE=0 switches them off,
    OTTAVA_CACHE says where they are kept, CXX which compiler makes them.

    Exit code 3 if something is missing that makes ottava slower than it could be here, such as a C++ compiler.
    """
    found = examine()
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, **found}, allow_nan=False))
    else:
        typer.echo(report(found))
    return MISSING if found["lost"] else 0


def examine() -> dict[str, Any]:
    """Device, versions, compiler, native libraries, the kernels of every recipe, and what is lost; plain values."""
    import torch

    import ottava
    from ottava.kernels import native_build

    settings = native_build.from_environment()
    compiler = native_build.find_compiler(settings)
    on_gpu = torch.cuda.is_available()
    libraries = []
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
        "recipes": [row for recipe in ottava.RECIPES.values() for row in _kernels(recipe, "cuda" if on_gpu else "cpu")],
        "lost": lost,
    }


def _kernels(recipe: Any, device: str) -> list[dict[str, str]]:
    """One row a quantized GEMM: the kernels of a matrix that fits all of them, 128 x 128 in BF16."""
    import torch

    from ottava.ops import explain, explain_quantize, quantize

    x = torch.ones(128, 128, dtype=torch.bfloat16, device=device)
    rows = []
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        if not gemm.quantized:
            continue
        casts = [_runs(explain_quantize(x, spec)) for spec in (gemm.lhs, gemm.rhs)]
        lines = explain(quantize(x, gemm.lhs), quantize(x, gemm.rhs), out_dtype=x.dtype)
        row = {"recipe": recipe.name, "gemm": name, "operands": f"{gemm.lhs} x {gemm.rhs}"}
        rows.append(row | {"quantize": ", ".join(dict.fromkeys(casts)), "kernel": _runs(lines)})
    return rows


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
    header = {"recipe": "recipe", "gemm": "gemm", "operands": "operands", "quantize": "quantize", "kernel": "kernel"}
    rows = [header, *found["recipes"]]
    widths = {key: max(len(row[key]) for row in rows) for key in header}
    lines += ["", *("  ".join(row[key].ljust(widths[key]) for key in header).rstrip() for row in rows), ""]
    if found["lost"]:
        lines += ["What is lost:", *(f"  {line}" for line in found["lost"])]
        lines.append("Everything works without; casts, GEMMs and statistics on the CPU take several times as long.")
    else:
        lines.append("Nothing is missing.")
    return "\n".join(lines)

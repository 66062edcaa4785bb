"""`ottava audit` recomputes elements of GEMMs in a running script; `ottava order` learns how a kernel adds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ottava.base.errors import unknown_name
from ottava.cli.console import answer
from ottava.cli.watch import run_inside

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ottava.prove.order import Probed

_FOUND = 1


def audit(
    command: Annotated[
        list[str], Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The words after `python`: a file, or -m MODULE.")
    ],
    every: Annotated[int, Option(metavar="N", help="Steps from one audited step to the next.")] = 50,
    elements: Annotated[int, Option(metavar="N", help="Elements of each GEMM.")] = 64,
    accumulator: Annotated[
        str | None, Option(metavar="NAME", help="The profile that this device claims, such as hopper.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="Watch the run, too; findings are its events.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Run a training script, unchanged, and recompute random elements of its GEMMs on the host.

    Example: ottava audit --every 100 -- train.py --lr 1e-3

    The script trains with layers of ottava. Under a named accumulator a differing bit is a wrong kernel, a wrong mode
    or a failing card. Where the accumulator is not known, elements are held against a proved bound instead, and the
    result says so. The first step is audited, then every N-th.

    The exit code is the script's; 1 if an element is wrong.
    """
    from ottava.prove.audit import Audit
    from ottava.watching.launch import check_script

    check_script(command, "audit")
    found = Audit(every=every, elements=elements, accumulator=accumulator)
    with ExitStack() as stack:
        if out is not None:
            from ottava.watching.session import watch

            found.event = stack.enter_context(watch(None, out)).writer.event
        code = run_inside(found, command)
    if as_json:
        answer(True, {**found.to_dict(), "script_exit_code": code}, "")
    else:
        typer.echo(f"ottava audit: {found}", err=True)
    return code or (_FOUND if found.findings else 0)


def order(
    kernel: Annotated[
        str,
        Argument(
            metavar="KERNEL",
            help="torch.sum, torch.mm, linear, scaled_mm, gemm (ottava's), the name of an accumulator, or "
            "MODULE:FUNCTION, a function (a (M, K), b (N, K)) -> (M, N).",
        ),
    ],
    k: Annotated[int, Option("--terms", "-k", metavar="K", help="Terms of the sum.")] = 64,
    dtype: Annotated[str, Option(help="Of the operands: FP32, BF16, FP16, E4M3 or E5M2.")] = "",
    shape: Annotated[str, Option(metavar="MxN", help="Of the result.")] = "16x16",
    at: Annotated[str, Option(metavar="ROW,COLUMN", help="Which element of the result.")] = "0,0",
    tree: Annotated[bool, Option("--tree", help="Print the whole tree, too.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Learn from a kernel's outputs in which order, how wide and with which rounding it adds.

    Example: ottava order torch.mm -k 256 --dtype BF16

    A sum of random terms along the tree that was found is compared with the kernel's, bit for bit. The exit code is 1
    if the outputs fit no order, or if bits differ.
    """
    import json

    from ottava.prove.order import OrderError, confirm, reveal

    probed, out_dtype = _probed(kernel, k, dtype, _pair("shape", shape, "x"), _pair("at", at, ","))
    found = reveal(probed)
    try:
        equal: float | None = confirm(probed, found, out_dtype=out_dtype)
    except OrderError:
        equal = None  # how an addition rounds is not known
    said = "not every rounding is known" if equal is None else f"{equal:.0%} of random sums have these bits"
    text = f"{found.name}\n{found.probes:,} probes; {said}" + (f"\n{found}" if tree else "")
    answer(as_json, {**json.loads(found.to_json()), "confirmed": equal}, text)
    return 0 if equal in (None, 1.0) else _FOUND


def _pair(name: str, text: str, mark: str) -> tuple[int, int]:
    parts = text.split(mark)
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"order: --{name} is {text!r}; needs two numbers such as {mark.join(('4', '2'))!r}")
    return int(parts[0]), int(parts[1])


def _probed(kernel: str, k: int, dtype: str, shape: tuple[int, int], at: tuple[int, int]) -> tuple[Probed, torch.dtype]:
    """The sum to probe, and the dtype of its result."""
    import torch

    from ottava.numerics.accumulator import ACCUMULATORS
    from ottava.prove.order import of_gemm, of_sum

    dtypes = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
    dtypes |= {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
    profiles: dict[str, str | None] = {n: n for n, p in ACCUMULATORS.items() if p.emulated and p.dot == 1}
    on_codes = {name: partial(_gemm, accumulator=profile) for name, profile in (profiles | {"gemm": None}).items()}
    plain: dict[str, Callable[..., Tensor]] = {"torch.mm": lambda a, b: a @ b.T, "linear": torch.nn.functional.linear}
    function = on_codes.get(kernel) or plain.get(kernel)
    if kernel not in ("torch.sum", "scaled_mm") and function is None and ":" not in kernel:
        names = ("torch.sum", *plain, "scaled_mm", *on_codes)
        raise ValueError(f"order: {unknown_name('kernel', kernel, names)}; or give MODULE:FUNCTION")
    fp8 = kernel == "scaled_mm" or kernel in on_codes
    dtype = dtype or ("E4M3" if fp8 else "FP32")
    if dtype not in dtypes or (fp8 and dtype[0] != "E"):
        raise ValueError(f"order: {unknown_name(f'dtype for {kernel}', dtype, [*dtypes][3 if fp8 else 0 :])}")
    given = dtypes[dtype]
    if kernel == "torch.sum":
        return of_sum(torch.sum, k, given), given
    run = function or (_scaled_mm if fp8 else _function(kernel))
    try:
        result = run(torch.ones(shape[0], max(k, 0)).to(given), torch.ones(shape[1], max(k, 0)).to(given))
    except Exception as error:
        raise ValueError(f"order: {kernel} does not multiply {shape[0]} x {k} by {shape[1]} x {k}: {error}") from error
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"order: {kernel} returned {got}; needs a tensor {shape}")
    return of_gemm(run, k, given, shape=shape, at=at), result.dtype


def _function(path: str) -> Callable[..., Tensor]:
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    found: Any = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"order: module {module!r} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    import torch

    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)


def _gemm(a: Tensor, b: Tensor, accumulator: str | None) -> Tensor:
    import torch

    from ottava.numerics.formats import E4M3, E5M2
    from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
    from ottava.ops.gemm import gemm

    spec = QuantizationSpec(E5M2 if a.dtype == torch.float8_e5m2 else E4M3)
    lhs, rhs = (QuantizedTensor(x, torch.ones(1, 1), spec, torch.float32) for x in (a, b))
    return gemm(lhs, rhs, out_dtype=torch.float32, accumulator=accumulator)

"""Measures the GEMMs of a model on this device: from then on each runs its fastest kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ottava.base.errors import need
from ottava.engine.layer import quantized_layers
from ottava.kernels.gemm_choice import Choice, Store, Timer, call_name
from ottava.ops.gemm import tune_gemm
from ottava.ops.quantize import quantize


def tune(model: nn.Module, *, timer: Timer | None = None, store: Store | None = None) -> dict[str, Choice]:
    """Times every way to run each quantized GEMM of the model's last forward and backward; results are kept on disk.

    Args:
        model: converted, and run once, forward and backward, at the sizes it will train with.
        timer, store: as for `ops.gemm.tune_gemm`.
    Returns:
        call -> its measurement; each distinct call once. str() of a measurement is one line.
    Raises:
        ValueError: no layer has run a quantized GEMM; or the model is not on a CUDA device, and there is no timer.
    Edge cases: it does not see calls inside torch.compile; run the model once without it. Operands are random numbers
    of
        the same formats and sizes. It takes the time of some hundred GEMMs a call and waits for the device.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> ottava.nn.tune(model)                                                    # on a GPU it would measure
        Traceback (most recent call last):
        ValueError: tune_gemm: got operands on cpu; times are taken on cuda: move them there
    """
    need("tune", model, nn.Module)
    found: dict[str, Choice] = {}
    for layer in quantized_layers(model):
        if layer.last_call is None:
            continue
        call = layer.last_call.last_training or layer.last_call
        for gemm, record in call.records.items():
            cells = getattr(call.recipe, gemm)
            if not cells.quantized or cells.compute != "native" or cells.accumulator is not None:
                continue
            dtype, numbers = getattr(torch, record.out_dtype), _numbers(layer.weight.device)
            a, b = (
                quantize(numbers(rows, record.k, dtype=torch.bfloat16), spec)
                for rows, spec in ((record.m, cells.lhs), (record.n, cells.rhs))
            )
            bias = numbers(record.n, dtype=dtype) if gemm == "fprop" and layer.bias is not None else None
            name = call_name(a, b, dtype, bias, cells.fast_accum)
            if name not in found:
                found[name] = tune_gemm(
                    a, b, out_dtype=dtype, bias=bias, fast_accum=cells.fast_accum, timer=timer, store=store
                )
    if not found:
        raise ValueError(
            "tune: no layer has run a quantized GEMM; convert the model and run a forward and a backward first, "
            "without torch.compile"
        )
    return found


def _numbers(device: torch.device) -> Callable[..., Tensor]:
    """Normal numbers from a separate generator: tuning does not change a run's random numbers."""
    return partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))

"""Ways of being wrong, of sums, layers, attention and optimizers; see `hypotheses`."""

# ruff: noqa: E501  (an entry is a line)
# mypy: disable-error-code="misc"
# (a lambda with a default has no type that mypy infers)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.accumulator import ACCUMULATORS
from ottava.numerics.formats import Format
from ottava.numerics.scaling import PER_TENSOR
from ottava.prove.hypotheses import (
    EIGHT,
    SUMS,
    Asked,
    Fault,
    Knobs,
    always,
    by_memory,
    bytes_of,
    changed,
    inverse,
    of_casts,
    of_codes,
    rows,
    scale_faults,
)
from ottava.prove.judge import block_amax, numbers_of
from ottava.recipe import CELLS, GEMMS, RECIPES, get_recipe

# --- sums ------------------------------------------------------------------------------------------------------------


# fmt: off


def _of_operands() -> Iterator[Fault]:
    def as_format(fmt: Format) -> Callable[[Tensor], Tensor | None]:
        return lambda x: None if x.dtype == fmt.dtype else x.view(torch.uint8).view(fmt.storage_dtype)

    turned = partial(bytes_of, change=lambda y: y.mT.reshape(y.shape))
    flat = partial(bytes_of, change=by_memory)
    for fmt in EIGHT:
        if fmt.dtype is not None:
            yield from rows(
                SUMS,
                (f"a read as {fmt}", f"The codes of a are read as {fmt}", changed(a=as_format(fmt))),
                (f"b read as {fmt}", f"The codes of b are read as {fmt}", changed(b=as_format(fmt))),
                (f"both read as {fmt}", f"All codes are read as {fmt}", changed(**dict.fromkeys("ab", lambda x, to=fmt.dtype: x.view(torch.uint8).view(to)))),
            )
    yield from rows(
        SUMS,
        ("b read in the format of a", "The codes of b are read in the format of a", lambda c: changed(b=lambda x: x.view(torch.uint8).view(c.inputs["a"].dtype))(c)),
        ("a read in the format of b", "The codes of a are read in the format of b", lambda c: changed(a=lambda x: x.view(torch.uint8).view(c.inputs["b"].dtype))(c)),
        *((f"scale of {side} inverted", f"scale_inv_{side} divides instead of multiplying", changed(**{f"scale_inv_{side}": inverse})) for side in "ab"),
        *((f"{name} ({side})", f"{sentence}: scale_inv_{side}", changed(**{f"scale_inv_{side}": change})) for side in "ab" for name, sentence, change in scale_faults()),
        *((f"{name} (both)", f"{sentence}: both scales", changed(scale_inv_a=change, scale_inv_b=change)) for name, sentence, change in scale_faults()),
        ("scales inverted", "Both scales divide instead of multiplying", changed(scale_inv_a=inverse, scale_inv_b=inverse)),
        ("scales exchanged", "a gets the scale of b, and b that of a", _exchanged),
        ("b transposed", "b is read as (K, N), not (N, K)", changed(b=turned)),
        ("a transposed", "a is read as (K, M), not (M, K)", changed(a=turned)),
        ("strides of a ignored", "a is read row by row, whatever its strides are", changed(a=flat)),
        ("strides of b ignored", "b is read row by row, whatever its strides are", changed(b=flat)),
        ("strides ignored", "Operands are read row by row, whatever their strides are", changed(a=flat, b=flat)),
        *(("tail of K dropped", f"Columns beyond the last whole {n} of K are not summed", changed(a=partial(_tail, size=n))) for n in (2, 4, 8, 16, 32, 64, 128, 256)),
        *(("tail of K doubled", f"Columns beyond the last whole {n} of K are summed twice", always(operands=partial(_weighted, size=n))) for n in (2, 4, 8, 16, 32, 64, 128, 256)),
        ("last column of K dropped", "The last column of K is not summed", always(operands=lambda v: torch.cat([v[:, :-1], 0 * v[:, -1:]], 1))),
        ("first column of K dropped", "The first column of K is not summed", always(operands=lambda v: torch.cat([0 * v[:, :1], v[:, 1:]], 1))),
        ("all zeros", "The result is zero", always(operands=torch.zeros_like)),
        *((f"{text} of an earlier call", f"It uses {text} of an earlier call of these shapes", partial(_earlier, keys=keys)) for text, keys in (("a", ("a", "scale_inv_a")), ("b", ("b", "scale_inv_b")), ("scale_inv_a", ("scale_inv_a",)), ("scale_inv_b", ("scale_inv_b",)), ("ends", ("ends",)))),
        ("exponent bytes shifted", "The scale bytes 0 and 255 are read as 0 and infinity, not as 2^-127 and NaN", changed(scale_inv_a=_shifted, scale_inv_b=_shifted)),
        ("sign lost", "Operands lose their signs", always(operands=torch.abs)),
        ("NaN lost", "NaN is read as zero", always(operands=lambda v: v.nan_to_num(0.0))),
        ("operands rounded to BF16", "Codes times scales are rounded to BF16 before they are multiplied", always(operands=lambda v: v.to(torch.bfloat16).double())),
        ("operands rounded to FP16", "Codes times scales are rounded to FP16 before they are multiplied", always(operands=lambda v: v.to(torch.float16).double())),
        ("subnormals flushed", "Codes of subnormal numbers are read as zero", changed(a=_flushed, b=_flushed)),
    )


def _of_results() -> Iterator[Fault]:
    yield from rows(("attention",), *((f"{out} times {by:g}", f"{out} is {by:g} times what it should be", always(only={out: by})) for out in ("o", "dq", "dk", "dv") for by in (0.0, -1.0, 2.0, 0.5, 0.72)))
    yield from rows(
        (*SUMS, "linear", "attention"),
        *((f"result times {by:g}", f"The result is {by:g} times what it should be", always(times=by)) for by in (-1.0, 2.0, 0.5, 0.72)),
        ("result rounded to FP16", "The result is rounded to FP16 on its way", always(through=torch.float16)),
        ("result rounded to BF16", "The result is rounded to BF16 on its way", always(through=torch.bfloat16)),
    )
    yield from rows(
        SUMS,
        ("result truncated", "The sum is cut off to the output's type, not rounded", always(cut=True)),
        ("result clamped at 448", "The result is clamped to E4M3's range", always(clamp=448.0)),
        ("result clamped at 65504", "The result is clamped to FP16's range", always(clamp=65504.0)),
    )
    yield from rows(
        ("grouped",),
        ("groups one row late", "Each group ends one row late", lambda c: {"ends": (c.inputs["ends"] + 1).clamp(max=c.inputs["ends"][-1])}),
        ("groups one row early", "Each group but the last ends one row early", lambda c: {"ends": torch.cat([(c.inputs["ends"][:-1] - 1).clamp(min=0), c.inputs["ends"][-1:]])}),
        ("empty group shifts the others", "An empty group is skipped without its weight: groups behind it take the weight of the one before", always(experts=lambda g, sizes: sum(size > 0 for size in sizes[:g]))),
        ("weight of the next group", "Each group takes the weight of the next", always(experts=lambda g, sizes: min(g + 1, len(sizes) - 1))),
        ("weight of the group before", "Each group takes the weight of the group before", always(experts=lambda g, sizes: max(g - 1, 0))),
        ("weight of the first group", "All groups take the weight of the first", always(experts=lambda g, sizes: 0)),
        *((f"{part} of the first group", f"All groups take {part} of the first", changed(**{part: partial(bytes_of, change=lambda y: y[:1].expand(y.shape))})) for part in ("b", "scale_inv_b")),
    )
    yield from rows(
        SUMS,
        *((f"accumulates like {name}", f"The sums are those of the accumulator {rule}", always(accumulator=name)) for name, rule in ACCUMULATORS.items()),
        *((f"accumulates in {text}", f"Sums are kept in {text}, {n} products at a time", always(steps=(dtype, n))) for text, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)) for n in (1, 4, 8, 16, 32, 64, 128)),
    )
    for text, unit in (("TF32 or FP16", 2.0**-11), ("BF16", 2.0**-8)):
        yield Fault(f"accumulates in {text}", f"The errors are those of sums in {text}: beyond FP32's bound, within that of {text}", SUMS, always(unit=unit), True)


# fmt: on


def _tail(x: Tensor, size: int) -> Tensor | None:
    whole = x.shape[-1] // size * size
    if whole == x.shape[-1]:
        return None
    y = x.view(torch.uint8).clone()
    y[..., whole:] = 0
    return y.view(x.dtype)


def _weighted(values: Tensor, size: int) -> Tensor:
    y = values.clone()
    y[:, values.shape[1] // size * size :] *= 2**0.5  # on both sides
    return y


def _flushed(codes: Tensor) -> Tensor | None:
    fmt = next((fmt for fmt in EIGHT if fmt.dtype == codes.dtype), None)
    if fmt is None:
        return None
    held = codes.view(torch.uint8)
    return torch.where(numbers_of(codes, fmt).abs() < fmt.min_normal, held & 0x80, held).view(codes.dtype)


def _shifted(scale: Tensor) -> Tensor | None:
    return (scale.to(torch.int32) << 23).view(torch.float32) if scale.dtype == torch.uint8 else None


def _earlier(call: Asked, keys: tuple[str, ...]) -> dict[str, Any] | None:
    if call.before is None or not all(
        key in call.inputs and call.before[key].shape == call.inputs[key].shape for key in keys
    ):
        return None
    return {"inputs": {**call.inputs, **{key: call.before[key] for key in keys}}}


def _exchanged(call: Asked) -> dict[str, Any] | None:
    a, b = call.inputs["scale_inv_a"], call.inputs["scale_inv_b"]
    return {"inputs": {**call.inputs, "scale_inv_a": b, "scale_inv_b": a}} if a.shape == b.shape else None


# --- layers, attention, optimizers -----------------------------------------------------------------------------------


# fmt: off


def _of_layers() -> Iterator[Fault]:
    cells = {"x": ("fprop.lhs", "wgrad.rhs"), "the weight": ("fprop.rhs", "dgrad.rhs"), "the gradient": ("dgrad.lhs", "wgrad.lhs")}
    operands = cells | {f"{gemm}'s operands": (f"{gemm}.lhs", f"{gemm}.rhs") for gemm in GEMMS} | {"anything": CELLS}
    yield from rows(
        ("linear",),
        *((f"recipe {name}", f"The numbers are those of recipe {name}", lambda c, name=name: {"what": {**c.what, "recipe": name}}) for name, recipe in RECIPES.items() if not recipe.predicted),
        *((f"{side} of the step before", f"It uses the {side} of the call before", lambda c, side=side: None if c.before is None else {"inputs": {**c.inputs, side: c.before[side]}}) for side in ("x", "weight", "grad")),
    )
    for text, places in operands.items():
        yield from rows(
            ("linear",),
            (f"no cast of {text}", f"It does not quantize {text}", always(cells=dict.fromkeys(places, "skip"))),
            *((f"{text}: {name}", f"{text[0].upper()}{text[1:]} {sentence}", always(cells=dict.fromkeys(places, knobs))) for name, sentence, knobs in _casts()),
        )
    yield from rows(
        ("linear",),
        *((f"scale of {side} of the step before", f"The scale of {side} is that of the call before", partial(_stale_cells, side=side, places=where)) for side, where in zip(("x", "weight", "grad"), cells.values(), strict=True)),
        ("no gradient of the weight", "dw is zero", always(only={"dw": 0.0})),
        ("no gradient of the input", "dx is zero", always(only={"dx": 0.0})),
        ("weight transposed", "The weight is read as (K, N)", changed(weight=lambda w: w.t().reshape(w.shape))),
        ("strides ignored", "x is read row by row, whatever its strides are", changed(x=by_memory)),
        ("strides ignored", "The gradient is read row by row, whatever its strides are", changed(grad=by_memory)),
        *(("tail of rows dropped", f"Rows beyond the last whole {n} are left out", partial(_rows_cut, size=n)) for n in (16, 32, 64, 128)),
        ("mean over rows", "dw is the mean over rows, not the sum", lambda c: {"only": {"dw": 1 / max(1, c.inputs["x"][..., 0].numel())}}),
    )


def _casts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield from (
        *((f"in {fmt}", f"is cast to {fmt}, not to the recipe's format", {"format": fmt}) for fmt in EIGHT),
        ("truncates", "is rounded toward zero", {"rounding": "truncate"}),
        ("ties away", "is rounded with ties away from zero", {"rounding": "ties_away"}),
        ("rounded at random", "is rounded stochastically", {"rounding": "stochastic"}),
        ("subnormals flushed", "loses numbers below the smallest normal one", {"flush": True}),
        ("scaled to 240", "is scaled to 240", {"scale_top": 240.0}),
        ("scale of the whole tensor", "has the scale of the whole tensor", {"blocks": PER_TENSOR}),
        ("OCP's floor for the scale", "has the exponent floor(log2(amax)) - emax, so its largest numbers saturate", {"exponent": "floor"}),
        ("scale no power of two", "has max / amax as scale, no power of two", {"exponent": "none"}),
        ("scale rounded up", "has its scale rounded up to a power of two", {"exponent": "up"}),
        ("scale rounded down", "has its scale rounded down to a power of two", {"exponent": "down"}),
    )


def _of_attention() -> Iterator[Fault]:
    def scaled(scale: Callable[[int, int], float]) -> Knobs:
        return lambda c: {"scale": scale(c.inputs["q"].shape[-1], c.inputs["v"].shape[-1])}

    yield from rows(
        ("attention",),
        ("causal mask one late", "A query sees one key too many", always(offset=1)),
        ("causal mask one early", "A query does not see its own key", always(offset=-1)),
        ("no causal mask", "The causal mask is missing", always(causal=False)),
        ("causal mask where none is", "A causal mask hides later keys", always(causal=True)),
        ("no softmax scale", "Scores are not divided by sqrt(D)", always(scale=1.0)),
        ("softmax not normalized", "Probabilities are not divided by their sum", always(fault="not normalized")),
        ("gradients without the softmax scale", "dq and dk lack the factor 1 / sqrt(D)", always(fault="gradients without scale")),
        ("no correction of dS", "dS lacks the row sum of dO * O", always(fault="no delta")),
        ("softmax scale 1 / D", "Scores are divided by D, not by its root", scaled(lambda d, dv: 1 / d)),
        ("softmax scale of v", "Scores are divided by the root of v's D", scaled(lambda d, dv: dv**-0.5)),
        ("softmax scale upside down", "Scores are multiplied by sqrt(D)", scaled(lambda d, dv: d**0.5)),
        ("softmax in base 2", "exp2 is taken of scores in base e", scaled(lambda d, dv: d**-0.5 * math.log(2))),
        ("softmax in base 2 twice", "log2(e) is applied, and then exp", scaled(lambda d, dv: d**-0.5 / math.log(2))),
        ("softmax scale of a padded D", "Scores are divided by the root of D padded to a power of two", scaled(lambda d, dv: (1 << (d - 1).bit_length()) ** -0.5)),
        *((f"{side} of the first head", f"All heads read {side} of the first", changed(**{side: lambda x: x[:, :1].expand(x.shape)})) for side in ("q", "k", "v", "grad")),
        *((f"{side} of the first batch", f"All batches read {side} of the first", changed(**{side: lambda x: x[:1].expand(x.shape)})) for side in ("q", "k", "v", "grad")),
        *(("tail of keys dropped", f"Keys beyond the last whole {n} are not seen", lambda c, n=n: {"keys": c.inputs["k"].shape[2] // n * n}) for n in (8, 16, 32, 64, 128)),
    )


def _of_optimizers() -> Iterator[Fault]:
    settings = {"eps": (1e-6, 1e-5, 1e-10, 0.0, 1e-3), "lr": (0.0,), "weight_decay": (0.1, 0.01), "betas": ((0.9, 0.99), (0.9, 0.95), (0.9, 0.999), (0.95, 0.999), (0.0, 0.999))}
    yield from rows(
        ("optimizer",),
        *((fault, sentence, always(fault=fault)) for fault, sentence in _OPTIMIZERS),
        *((f"{name} {value}", f"It uses {name} = {value}, whatever it is told", lambda c, n=name, v=value: {"what": {**c.what, n: v}}) for name, values in settings.items() for value in values),
        *((f"lr times {by:g}", f"The learning rate is {by:g} times what it should be", lambda c, by=by: {"what": {**c.what, "lr": by * float(c.what.get("lr", 1e-3))}}) for by in (2.0, 0.5, 10.0, 0.1)),
        *((f"gradient times {by:g}", f"The gradient is {by:g} times what it should be", changed(grad=lambda g, by=by: g * by)) for by in (2.0, 0.5, 10.0, 0.1)),
        *((f"moments in {text}", f"Moments are kept in {text}", always(moments=text)) for text in ("bf16", "int8")),
        ("parameter in BF16", "The parameter is rounded to BF16 in every step", changed(parameter=lambda p: p.to(torch.bfloat16))),
    )


_OPTIMIZERS = (
    ("no bias correction", "Moments are not divided by 1 - beta ** step"),
    ("first moment uncorrected", "The first moment is not divided by 1 - beta1 ** step"),
    ("second moment uncorrected", "The second moment is not divided by 1 - beta2 ** step"),
    ("decay coupled", "Weight decay goes into the gradient (L2), not into the parameter"),
    ("decay without lr", "Weight decay is not multiplied by the learning rate"),
    ("no decay", "Weight decay is missing"),
    ("decay after the step", "Weight decay multiplies the parameter after the step"),
    ("betas swapped", "beta1 and beta2 are exchanged"),
    ("step one late", "The bias correction uses step - 1"),
    ("step one early", "The bias correction uses step + 1"),
    ("momentum undamped", "The first moment adds the gradient without 1 - beta1"),
    ("gradient not squared", "The second moment is a mean of magnitudes, not of squares"),
    ("eps under the root", "eps is added under the root"),
    ("eps corrected too", "eps is divided by the root of the second moment's correction"),
    ("no root", "The step divides by the second moment, not by its root"),
    ("sign", "The step has the wrong sign"),
    ("nesterov", "The step looks ahead, as Nesterov's does"),
    ("gradient of the step before", "It uses the gradient of the step before"),
    ("moments forgotten", "Moments start from zero in each step"),
)


# fmt: on


def _stale_cells(call: Asked, side: str, places: tuple[str, ...]) -> dict[str, Any] | None:
    if call.before is None:
        return None
    recipe, cells = get_recipe(call.what.get("recipe", "tensorwise")), {}
    for place in places:
        gemm, where = place.split(".")
        spec, x = getattr(getattr(recipe, gemm), where), call.before[side].reshape(-1, call.before[side].shape[-1])
        turned = (side != "weight" and gemm == "wgrad") or (side == "weight" and gemm == "dgrad")
        if spec is not None:
            cells[place] = {"amax": block_amax(x.t() if turned else x, spec.granularity)}
    return {"cells": cells}


def _rows_cut(call: Asked, size: int) -> dict[str, Any] | None:
    x, grad = call.inputs["x"], call.inputs["grad"]
    rows, dy = x.reshape(-1, x.shape[-1]).clone(), grad.reshape(-1, grad.shape[-1]).clone()
    whole = rows.shape[0] // size * size
    if whole == rows.shape[0]:
        return None
    rows[whole:], dy[whole:] = 0, 0
    return {"inputs": {**call.inputs, "x": rows.view(x.shape), "grad": dy.view(grad.shape)}}


def all_hypotheses() -> Iterator[Fault]:
    """Every way of being wrong, in the order in which they are preferred."""
    yield from of_codes()
    yield from of_casts()
    yield from _of_operands()
    yield from _of_results()
    yield from _of_layers()
    yield from _of_attention()
    yield from _of_optimizers()

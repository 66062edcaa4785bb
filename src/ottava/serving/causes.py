"""Why an engine multiplies other numbers than training did: each cause is tried until one gives the checkpoint's bits.

The order matters: a cause that explains every bit of codes and scales comes before one that explains some of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.serving.engines import Decision, units
from ottava.serving.sides import Model, Side
from ottava.serving.source import same_numbers
from ottava.weights.layouts import REGEX, InputCast

CAUSES = MappingProxyType(
    {
        "unread": "the engine does not read this layout, or reads it wrong",
        "parts": "the config leaves some of the linears in BF16 that the engine joins: it does not load them",
        "missing": "one side lacks the tensor, or has another shape",
        "regex-dot": "a dot in a regular expression matches any character, and so a linear that was not meant",
        "substring": "a pattern matches in the middle of a longer name",
        "ignored": "training cast it, and the engine runs it in BF16",
        "unscaled": "the engine expects codes, and the checkpoint has none: no scale beside the weight",
        "router": "training left the router in BF16, and the engine casts it",
        "head": "training left the output head in BF16, and the engine casts it",
        "extra": "training left it in BF16, and the engine casts it",
        "format": "the codes are of another number format",
        "granularity": "a scale is for other blocks than in training",
        "reciprocal": "the stored scale quantizes, and the engine expects the one that dequantizes",
        "scale-layout": "the scales are those of training in another order",
        "scale-format": "the scales are rounded to another format: powers of two, or BF16",
        "master": "one side casts the FP32 master, the other its rounding to BF16",
        "joined-scale": "the engine joins linears that had a scale each, and rounds their codes a second time",
        "scales": "the codes are those of training, and their scales are other numbers",
        "swapped": "the codes are those of another linear",
        "rows": "the rows are those of training in another order",
        "stale": "the codes are of other numbers than the trained weight: of another step, or changed after training",
        "activation-granularity": "activations have scales for other elements than in training",
        "activation-scale": "the static scale of activations is another one than in training, or missing",
        "activation-format": "scales of activations are powers of two on one side only",
        "activation-rounding": "the engine casts a fused activation without its rounding to BF16",
        "tied": "head and embedding are one tensor on one side only",
        "plain": "a tensor in high precision differs after rounding to BF16",
        "kv-cache": "the engine caches keys and values in FP8, and training attended to them in high precision",
        "not-fp8": "the recipe casts it, and by its receipt training ran it in high precision",
    }
)
"""Cause -> what it means. In the order in which causes of one layer are named."""

_SAME = 1e-6  # of two fp32 roundings of one quotient
_ROUTER = re.compile(r"(^|\.)(router|gate|gating|shared_expert_gate)$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|head|embed_out|score|classifier)$")


def layer_set(name: str, side: Side, there: Side, decision: Decision, names: Sequence[str]) -> tuple[str, str] | None:
    """(cause, what was found) if the two sides do not cast the same linears.

    Args:
        there: the engine's side.
        names: of all linears, for patterns that were meant for another.
    """
    if decision.refused:
        return "parts", decision.refused
    cast = decision.quantized and there.cast is not None
    if side.cast is not None and not decision.quantized:
        how = f"pattern {decision.pattern!r} matches by {decision.rule}" if decision.pattern else decision.rule
        return _pattern_cause(
            name, decision, names
        ), f"trained as {side}, served in BF16: {how or 'no scale beside it'}"
    if side.cast is not None and not cast:
        return "unscaled", f"trained as {side}; the engine expects codes, and the checkpoint has {there.weight.dtype}"
    if side.cast is None and (cast or there.codes or (decision.quantized and there.activations is not None)):
        kind = "router" if _ROUTER.search(name) else "head" if _HEAD.search(name) else "extra"
        return kind, f"trained in BF16, served as {there}"
    return None


def _pattern_cause(name: str, decision: Decision, names: Sequence[str]) -> str:
    pattern = decision.pattern
    if not pattern or pattern == name:
        return "ignored"
    body = pattern.removeprefix(REGEX)
    if pattern.startswith(REGEX) or "bounded" in decision.rule:
        literal = re.sub(r"(?<!\\)\.(?![*+?{])", r"\\.", body)
        if literal != body and re.match(literal, name) is None and re.match(body, name) is not None:
            return "regex-dot"
        return "ignored"
    against = decision.rule.rpartition(" ")[2]
    return "substring" if f".{body.strip('.')}." not in f".{against}." and body in against else "ignored"


def weight_cause(name: str, side: Side, there: Side, model: Model, stored: Model) -> tuple[str, str] | None:
    """(cause, what was found) if codes and scales stand for other numbers; both sides cast the linear."""
    ours, theirs = side.cast, there.cast
    assert ours is not None
    assert theirs is not None
    if ours.data.shape != theirs.data.shape:
        return "missing", f"trained as {tuple(ours.data.shape)}, the checkpoint has {tuple(theirs.data.shape)}"
    if ours.spec.format != theirs.spec.format:
        return "format", f"trained in {ours.spec.format.name}, served in {theirs.spec.format.name}"
    if same_numbers(ours, theirs):
        return None
    same_codes = _equal(ours.data, theirs.data)
    if ours.scale_inv.shape != theirs.scale_inv.shape:
        if ours.scale_inv.numel() == theirs.scale_inv.numel() and same_codes:
            return "scale-layout", f"a grid {tuple(theirs.scale_inv.shape)} instead of {tuple(ours.scale_inv.shape)}"
        return "granularity", f"trained as {side}, served as {there}"
    if same_codes and (found := _of_scales(ours.scale_inv, theirs.scale_inv)):
        return found
    return _of_codes(name, side, theirs, model, stored)


def _of_scales(ours: Tensor, theirs: Tensor) -> tuple[str, str] | None:
    """Why scales differ under equal codes."""
    if torch.allclose(theirs, ours.reciprocal(), rtol=_SAME, atol=0):
        return (
            "reciprocal",
            f"{float(theirs.reshape(-1)[0]):.6g} is stored, {float(ours.reshape(-1)[0]):.6g} dequantizes",
        )
    if torch.equal(theirs.reshape(-1).sort().values, ours.reshape(-1).sort().values):
        turned = torch.equal(theirs.reshape(-1), ours.t().reshape(-1))
        return "scale-layout", "the grid is stored transposed" if turned else "the same scales in another order"
    if torch.equal(theirs, ours.bfloat16().float()):
        return "scale-format", "the fp32 scales are rounded to BF16"
    return None


def _of_codes(name: str, side: Side, theirs: QuantizedTensor, model: Model, stored: Model) -> tuple[str, str]:
    """Why codes differ, for a checkpoint that casts the same blocks."""
    ours = side.cast
    assert ours is not None
    spec = replace(ours.spec, scaling="current")
    powers = _powers(theirs.scale_inv) and not _powers(ours.scale_inv)
    fp32 = _powers(ours.scale_inv) and not _powers(theirs.scale_inv)
    other = replace(spec, scale_format="pow2" if powers else "fp32")
    formats = "fp32 scales in training, powers of two in the checkpoint" if powers else ""
    formats = "powers of two in training, fp32 scales in the checkpoint" if fp32 else formats
    group = next((parts for parts in units(model.linears).values() if name in parts), [name])
    if spec.granularity == PER_TENSOR and _joined(group, model, stored) and _near(theirs, side.weight):
        return "joined-scale", f"the engine joins {', '.join(part.rpartition('.')[2] for part in group)}"
    for tensor, what in ((side.weight.bfloat16(), "bf16(master)"), (side.weight.float(), "the FP32 master")):
        if _is(theirs, quantize(tensor, spec)) and not _is(theirs, ours):
            return "master", f"the checkpoint has codes of {what}, training multiplied codes of the other"
        if formats and _is(theirs, quantize(tensor, other)):
            return "scale-format", formats
    if formats and _near(theirs, side.weight):
        return "scale-format", formats
    for found, one in model.linears.items():
        if found != name and one.cast is not None and _is(theirs, one.cast):
            return "swapped", f"the codes and scales of {found}"
    if _equal(ours.data, theirs.data):
        ratio = (theirs.scale_inv / ours.scale_inv).reshape(-1)
        return "scales", f"{float(ratio.min()):.4g} to {float(ratio.max()):.4g} times those of training"
    if _row_set(ours.data) == _row_set(theirs.data):
        return "rows", "the same rows of codes in another order"
    away, own = _distance(theirs, side.weight), _distance(ours, side.weight)
    return "stale", f"decoded, they are {away:.2%} away from the trained weight; its own cast is {own:.2%}"


def _joined(group: Sequence[str], model: Model, stored: Model) -> bool:
    """Whether linears that the engine joins have one scale there, where training had one for each."""

    def scales(side: Model) -> set[float]:
        casts = [side.linears[part].cast if part in side.linears else None for part in group]
        return {float("nan") if cast is None else float(cast.scale_inv.max()) for cast in casts}

    return len(scales(stored)) == 1 and len(scales(model)) > 1


def _near(cast: QuantizedTensor, weight: Tensor) -> bool:
    """Whether a cast is that of the weight but for the rounding: half a unit of E4M3's three bits, twice."""
    return _distance(cast, weight) < 2 * 2.0**-4


def _distance(cast: QuantizedTensor, weight: Tensor) -> float:
    exact = weight.float()
    return float((cast.dequantize(torch.float32) - exact).norm() / exact.norm().clamp_min(1e-30))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def _is(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    return (
        one.data.shape == other.data.shape
        and one.scale_inv.shape == other.scale_inv.shape
        and torch.equal(one.scale_inv.cpu(), other.scale_inv.cpu())
        and _equal(one.data, other.data)
    )


def _powers(scale_inv: Tensor) -> bool:
    return bool((torch.frexp(scale_inv.float()).mantissa == 0.5).all())


def _row_set(codes: Tensor) -> list[bytes]:
    return sorted(bytes(row) for row in codes.cpu().contiguous().view(torch.uint8).numpy())


def activation_cause(ours: InputCast | None, theirs: InputCast | None) -> tuple[str, str] | None:
    """(cause, what was found) if the input of a linear is cast in another way; the weights agree on being cast."""
    if ours is None or theirs is None:
        if ours is theirs:
            return None
        return "activation-granularity", f"trained with {ours or 'BF16'}, served with {theirs or 'BF16'}"
    if ours.granularity != theirs.granularity:
        return "activation-granularity", f"trained with {ours}, served with {theirs}"
    if ours.static != theirs.static or (ours.static and ours.scale_inv != theirs.scale_inv):
        return "activation-scale", f"trained with {ours}, served with {theirs}"
    if ours.powers != theirs.powers:
        return "activation-format", f"trained with {ours}, served with {theirs}"
    if ours.rounded != theirs.rounded:
        return "activation-rounding", "training rounds the activation to BF16 before its cast, the engine does not"
    return None


def plain_causes(ours: Model, theirs: Model) -> Mapping[str, tuple[str, str]]:
    """Module or tensor -> (cause, what was found), for tensors in high precision."""
    found: dict[str, tuple[str, str]] = {}
    embedding = next((name for name in ours.plain if name.endswith(("embed_tokens.weight", "wte.weight"))), "")
    for name, tensor in ours.plain.items():
        if (other := theirs.plain.get(name)) is None:
            found[name] = "missing", "the checkpoint lacks it"
        elif other.shape != tensor.shape:
            found[name] = "missing", f"trained as {tuple(tensor.shape)}, the checkpoint has {tuple(other.shape)}"
        elif not torch.equal(_bf16(tensor), _bf16(other)):
            found[name] = "plain", f"{float((_bf16(tensor) != _bf16(other)).float().mean()):.1%} of it differs"
    if ours.tied != theirs.tied and embedding in theirs.plain:
        head = theirs.plain[embedding] if theirs.tied else _head(theirs)
        trained = ours.plain[embedding] if ours.tied else _head(ours)
        if head is None or trained is None or not torch.equal(_bf16(head), _bf16(trained)):
            found["lm_head"] = (
                "tied",
                f"{'tied' if ours.tied else 'apart'} in training, {'tied' if theirs.tied else 'apart'} in the engine, "
                "and the numbers of the head differ",
            )
    return found


def _head(model: Model) -> Tensor | None:
    side = model.linears.get("lm_head")
    return side.weight if side is not None else model.plain.get("lm_head.weight")


def _bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def spec_of(cast: InputCast, weight: QuantizationSpec) -> QuantizationSpec:
    """The spec by which activations are cast in front of a weight of this spec."""
    powers = "e8m0" if weight.scale_format in ("e8m0", "e8m0_floor") else "pow2"
    numbers = "e4m3" if weight.scale_format == "e4m3" else "fp32"
    return QuantizationSpec(weight.format, cast.granularity, powers if cast.powers else numbers)  # type: ignore[arg-type]

"""`parity`: a certificate that an engine multiplies what training multiplied, or the first layer where it does not.

It compares, linear by linear in the order of execution: whether both sides cast it, codes, scales and their blocks,
the cast of its input; then tensors in high precision, ties and the cache. Nothing of an engine runs here: its rules
are data (`engines`), and what it would multiply is computed (`sides`).

Each cause of a difference is tried until one gives the checkpoint's bits. The order matters: a cause that explains
every bit of codes and scales comes before one that explains some of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.text import columns
from ottava.base.untrusted import UntrustedError, misfit
from ottava.nn.receipt import Receipt, receipt
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import Recipe, get_recipe
from ottava.serving.engines import Decision, units
from ottava.serving.sides import Model, Side, Text, digest, kl_alone, served, trained, under
from ottava.serving.source import Source, of_folder, of_model, same_numbers
from ottava.weights.layouts import REGEX, InputCast
from ottava.weights.parameter import powers_only

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Mismatch:
    """One difference at one layer."""

    layer: str
    """Module or tensor of the checkpoint."""
    cause: str
    """A name of `CAUSES`."""
    found: str
    """What each side has."""


@dataclass(frozen=True)
class LinearRow:
    """One linear of the certificate."""

    layer: str
    trained: str
    served: str
    input_trained: str
    input_served: str
    sha256_trained: str
    """Of the numbers that are multiplied."""
    sha256_served: str
    kl: float | None
    """Nats per token if this linear alone is the engine's; None: not measured."""


@dataclass(frozen=True)
class Certificate:
    """The result of `parity`. It holds no time and no path, so equal inputs give equal bytes."""

    engine: str
    rows: tuple[LinearRow, ...]
    """Linears in the order of execution."""
    findings: tuple[Mismatch, ...]
    """In the order of execution; at one layer in the order of `CAUSES`."""
    sha256_trained: str
    """Of all that training multiplies."""
    sha256_served: str
    """Of all that the engine multiplies."""
    files: Mapping[str, str]
    """SHA-256 of the files of the checkpoint."""
    text: str
    """What the KL was measured on, or why it was not."""
    notes: tuple[str, ...]
    """What the certificate does not say."""

    @property
    def equal(self) -> bool:
        """Whether both sides multiply the same."""
        return not self.findings

    @property
    def first(self) -> Mismatch | None:
        """The first difference in the order of execution."""
        return self.findings[0] if self.findings else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        body = asdict(self)
        verdict = "equal" if self.equal else "different"
        first = None if self.first is None else asdict(self.first)
        return {"schema_version": SCHEMA_VERSION, "verdict": verdict, "first": first, **body}

    def to_json(self) -> str:
        """The certificate, its own hash at the end: equal sides give equal bytes."""
        body = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        seal = hashlib.sha256(body.encode()).hexdigest()
        return json.dumps({**self.to_dict(), "sha256": seal}, indent=2, sort_keys=True) + "\n"

    def __str__(self) -> str:
        cast = sum(row.served != "BF16" for row in self.rows)
        if self.first is None:
            lines = [
                f"equal: {self.engine} multiplies what training multiplied, {cast} of {len(self.rows)} linears in FP8"
            ]
        else:
            lines = [f"different, first at {self.first.layer}: {CAUSES[self.first.cause]}", f"  {self.first.found}", ""]
            lines += columns(("cause", "layers", "first", "KL alone", "found there"), *self._causes())
        lines += ["", f"KL: {self.text}", f"trained {self.sha256_trained[:16]}, served {self.sha256_served[:16]}"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def _causes(self) -> list[tuple[str, str, str, str, str]]:
        kls = {row.layer: row.kl for row in self.rows if row.kl is not None}
        groups: dict[str, list[Mismatch]] = {}
        for finding in self.findings:
            groups.setdefault(finding.cause, []).append(finding)
        shown = []
        for cause, group in groups.items():
            own = [kls[one.layer] for one in group if one.layer in kls]
            kl = f"{max(own):.3g}" if own else "-"
            shown.append((cause, str(len({one.layer for one in group})), group[0].layer, kl, group[0].found))
        return shown


def parity(
    train: nn.Module | Source | Path | str,
    checkpoint: Path | str,
    engine: str = "vllm",
    *,
    recipe: Recipe | str | None = None,
    settings: Mapping[str, Any] | None = None,
    ran: Receipt | Mapping[str, Any] | None = None,
    text: Text | None = None,
) -> Certificate:
    """Compares what training multiplied with what an engine multiplies after it has read a checkpoint.

    Args:
        train: a trained model (converted by ottava), a `Source`, or the folder of a checkpoint in high precision.
        checkpoint: a folder with config.json and safetensors.
        engine: "vllm", "sglang", "transformers" or "trtllm": whose rules read the config.
        recipe: for a train side without casts: the recipe of the training.
        settings: of the engine, in its words: {"compilation_config": {"pass_config": {"fuse_act_quant": True}}},
            {"kv_cache_dtype": "fp8"}, {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "1"}}.
        ran: the receipt of the training, as an object or as the content of receipt.json. None: the model's own.
        text: tokens to measure the KL of each layer alone on; None: not measured.
    Returns:
        Certificate.
    Raises:
        UntrustedError: a folder is damaged.  ValueError: an unknown engine or recipe, or a model without a config.

    Example:
        >>> import tempfile, ottava
        >>> from ottava.serving.source import Weight
        >>> plain = Source((Weight("up.weight", torch.randn(128, 128).bfloat16(), True),), {})
        >>> source = under(plain, ottava.RECIPES["blockwise_fp32"])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = ottava.export(source, f"{place}/out", layout="fp8-block")
        ...     certificate = parity(source, f"{place}/out", "vllm")
        >>> certificate.equal, certificate.rows[0].served
        (True, 'E4M3[128x128]')
    """
    if isinstance(train, nn.Module):
        ran = receipt(train) if ran is None else ran
        train = of_model(train)
    source = of_folder(Path(train)) if isinstance(train, (str, Path)) else train
    if recipe is not None:
        source = under(source, get_recipe(recipe))
    ours, theirs = trained(source), served(Path(checkpoint), engine, settings)
    ranks = {cause: i for i, cause in enumerate(CAUSES)}
    if theirs.unread:  # of what an engine does not read, nothing else can be said
        findings = [Mismatch("config.json", "unread", theirs.unread)]
    else:
        findings = _findings(ours, theirs, engine) + _not_fp8(ours, ran)
    findings.sort(key=lambda one: (place(one.layer), ranks[one.cause]))
    changed = sorted(
        {one.layer for one in findings if one.layer in ours.linears and one.layer in theirs.linears}, key=place
    )
    kls, said = kl_alone(ours, theirs, changed, text)
    said = "not measured: the engine does not read the checkpoint" if theirs.unread else said
    rows = tuple(
        _row(name, ours, theirs, kls.get(name)) for name in sorted({*ours.linears, *theirs.linears}, key=place)
    )
    return Certificate(
        engine, rows, tuple(findings), _whole(ours), _whole(theirs), dict(theirs.files), said, _notes(ours, theirs)
    )


def place(name: str) -> tuple[Any, ...]:
    """A key that sorts modules and tensors of a decoder by their execution.

    Example:
        >>> sorted(["lm_head", "layers.1.mlp.up_proj", "layers.1.self_attn.o_proj", "layers.0.mlp.gate"], key=place)
        ['layers.0.mlp.gate', 'layers.1.self_attn.o_proj', 'layers.1.mlp.up_proj', 'lm_head']
    """
    name = name.removesuffix(".weight")
    block = re.search(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.*)", name)
    if block is None:
        late = re.search(r"(^|\.)(norm|final_layernorm|ln_f|lm_head|head|output|score)$", name)
        return (2 if late else 0, 0, 0, 1 if "head" in name else 0, 0, name)
    inside = block[2]
    rank = next((i for i, word in enumerate(_ORDER) if re.search(word, inside)), len(_ORDER))
    expert = re.search(r"experts\.(\d+)", inside)
    return (1, int(block[1]), rank, 0, int(expert[1]) if expert else 0, name)


_ORDER = (
    *(r"^(input_layernorm|ln_1|norm1)", r"(qkv_proj|\bq_proj)", r"\bk_proj", r"\bv_proj", r"q_norm", r"k_norm"),
    *(r"self_attn|attn|attention", r"post_attention_layernorm|pre_feedforward_layernorm|ln_2|norm2"),
    *(r"(router|gating|shared_expert_gate|\bgate)$", r"(gate_up_proj|gate_proj|\bw1|fc1)", r"(up_proj|\bw3)"),
    *(r"(down_proj|\bw2|fc2)", r"post_feedforward_layernorm"),
)


def _findings(ours: Model, theirs: Model, engine: str) -> list[Mismatch]:
    findings: list[Mismatch] = []
    names = list(ours.linears)
    for name, side in ours.linears.items():
        there = theirs.linears.get(name)
        if name == "lm_head" and ours.tied != theirs.tied:
            continue  # `plain_causes` compares the heads
        if there is None:
            findings.append(Mismatch(name, "missing", "the checkpoint lacks it"))
            continue
        if there.weight.shape != side.weight.shape:
            shapes = f"trained as {tuple(side.weight.shape)}, the checkpoint has {tuple(there.weight.shape)}"
            findings.append(Mismatch(name, "missing", shapes))
            continue
        if cause := layer_set(name, side, there, theirs.decisions[name], names):
            findings.append(Mismatch(name, *cause))
            continue
        if side.cast is None:
            if not torch.equal(side.weight.bfloat16(), there.weight.bfloat16()):
                findings.append(Mismatch(name, "plain", "in BF16 on both sides, with other numbers"))
            continue
        causes = weight_cause(name, side, there, ours, theirs), activation_cause(side.activations, there.activations)
        findings += [Mismatch(name, *cause) for cause in causes if cause]
    extra = [name for name in theirs.linears if name not in ours.linears and name != "lm_head"]
    findings += [Mismatch(name, "missing", "training has no such linear") for name in extra]
    findings += [Mismatch(name, *cause) for name, cause in plain_causes(ours, theirs).items()]
    if theirs.kv_cache:
        where = min(names, key=place, default="model")
        findings.append(Mismatch(where, "kv-cache", f"{engine} stores them in FP8, and reads them rounded"))
    return findings


def _not_fp8(ours: Model, ran: Receipt | Mapping[str, Any] | None) -> list[Mismatch]:
    """Layers that the recipe casts, and that the receipt says ran in high precision."""
    rows = (ran.to_dict() if isinstance(ran, Receipt) else ran or {}).get("rows") or []
    if wrong := misfit(rows, [{"layer": str, "gemm": str, "kernel": str, "note": str}], "rows"):
        raise UntrustedError(f"the receipt of the training: {wrong}")
    plain = {
        row["layer"]: row.get("note", "")
        for row in filter(None, rows)
        if row.get("gemm") == "fprop" and not row.get("fp8") and row.get("kernel", "-") != "-"
    }
    return [
        Mismatch(name, "not-fp8", plain[side.layer] or "the receipt gives no reason")
        for name, side in ours.linears.items()
        if side.cast is not None and side.layer in plain
    ]


def _row(name: str, ours: Model, theirs: Model, kl: float | None) -> LinearRow:
    def shown(side: Side | None) -> tuple[str, str, str]:
        return ("absent", "-", "") if side is None else (str(side), str(side.activations or "BF16"), side.digest)

    here = shown(ours.linears.get(name))
    there = ("not read", "-", "") if theirs.unread else shown(theirs.linears.get(name))
    return LinearRow(name, here[0], there[0], here[1], there[1], here[2], there[2], kl)


def _whole(model: Model) -> str:
    lines = [f"{name} {side.digest} {side.activations}" for name, side in model.linears.items()]
    lines += [f"{n} {digest(t.bfloat16() if t.is_floating_point() else t)}" for n, t in model.plain.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _notes(ours: Model, theirs: Model) -> tuple[str, ...]:
    notes = ["kernels of the engine did not run: sums inside its GEMMs and its attention may round differently"]
    dynamic = [s for s in ours.linears.values() if s.activations and s.activations.granularity.rows is None]
    if any(side.activations and not side.activations.static for side in dynamic):
        notes.append("one dynamic scale for all tokens depends on the batch: no engine repeats the batches of training")
    if not any(side.cast is not None for side in ours.linears.values()):
        notes.append("the train side casts nothing: give the recipe of the training")
    return tuple(notes)


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
    before, after = powers_only(ours.scale_inv), powers_only(theirs.scale_inv)
    powers, fp32 = after and not before, before and not after
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

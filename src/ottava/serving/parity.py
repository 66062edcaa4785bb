"""`parity`: a certificate that an engine multiplies what training multiplied, or the first layer where it does not.

It compares the formula (`formula`), then linear by linear in the order of execution: whether both sides cast it, codes,
scales and their blocks, the cast of its input; then tensors in high precision, ties and the cache. The rules of an
engine are data (`engines`), and what it multiplies by them is computed (`sides`). transformers runs, where it is
installed, and its rules must be what ran (`executed`). Causes are named by `causes`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ottava.base.text import columns, grouped, progress
from ottava.base.untrusted import UntrustedError, misfit
from ottava.nn.receipt import Receipt, receipt
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES, Recipe, get_recipe
from ottava.serving.causes import CAUSES, activation_cause, gap, layer_set, number_cause, plain_causes, weight_cause
from ottava.serving.engines import ENGINES
from ottava.serving.formula import formula_causes, quantization_causes, sampling_causes, settings_causes
from ottava.serving.sides import Model, Side, Text, default_device, digest, made_up, served, trained, under
from ottava.serving.source import Source, of_folder
from ottava.serving.trained import of_model
from ottava.serving.twin import kl_alone

_TOKENS = 32  # that an engine runs
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_OPEN = ("unknown", "executed")  # causes of what is not certified
SCHEMA_VERSION = 2


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
    device: str
    """On which the engine multiplies: "cpu" or "cuda"."""
    ran: str
    """What was executed of the engine, or why nothing was."""
    text: str
    """What the KL was measured on, or why it was not."""
    notes: tuple[str, ...]
    """What the certificate does not say."""

    @property
    def equal(self) -> bool:
        """Whether both sides multiply the same."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """ "equal", "different", or "not certified": what was understood is equal, and something was not understood."""
        first = self.first
        return "equal" if first is None else "not certified" if first.cause in _OPEN else "different"

    @property
    def first(self) -> Mismatch | None:
        """The first difference in the order of execution. What an engine's arithmetic does to every checkpoint comes
        after what this one has, and what was not understood comes last."""
        return min(
            self.findings, key=lambda one: (one.cause in _OPEN, one.cause == "activation-arithmetic"), default=None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        first = None if self.first is None else asdict(self.first)
        told = {"schema_version": SCHEMA_VERSION, "written_by": "ottava parity", "sentence": self.headline}
        return {**told, "verdict": self.verdict, "first": first, **asdict(self)}

    def to_json(self) -> str:
        """The certificate, its own hash at the end: equal sides give equal bytes."""
        body = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        seal = hashlib.sha256(body.encode()).hexdigest()
        return json.dumps({**self.to_dict(), "sha256": seal}, indent=2, sort_keys=True) + "\n"

    good = equal
    """The same, for a page of several results."""

    @property
    def headline(self) -> str:
        """The answer in one line."""
        if self.first is not None:
            return f"{self.verdict}, first at {self.first.layer}: {CAUSES[self.first.cause]}"
        cast = sum(row.served != "BF16" for row in self.rows)
        counted = f"{cast} of {len(self.rows)} linears in FP8"
        return f"equal: {self.engine} on {self.device} multiplies what training multiplied, {counted}"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.first is not None:
            lines += [f"  {self.first.found}", ""]
            lines += columns(("cause", "layers", "first", "KL alone", "found there"), *self.causes())
        hashes = f"trained {self.sha256_trained[:16]}, served {self.sha256_served[:16]}"
        lines += ["", f"ran: {self.ran}", f"KL: {self.text}", hashes]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def causes(self) -> list[tuple[str, str, str, str, str]]:
        """Cause, number of layers, its first layer, the largest KL of one of them alone, what was found there."""
        kls = {row.layer: row.kl for row in self.rows if row.kl is not None}
        shown = []
        for cause, group in grouped((one.cause, one) for one in self.findings).items():
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
    device: str | None = None,
    run: bool | None = None,
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
        device: "cpu" or "cuda", on which the engine multiplies. None: "cuda"; for transformers what this machine has.
        run: execute the engine on a few tokens, and hold its rules against what it multiplied. Only transformers on a
            CPU is executed. None: where it is installed; True: an error where it is not.
    Returns:
        Certificate.
    Raises:
        UntrustedError: a folder is damaged.  ValueError: an unknown engine, device or recipe, a model without a config,
        or an engine that cannot be executed.  ImportError: `run`, and the library is not installed.

    Example:
        >>> import tempfile, ottava
        >>> from ottava.serving.source import Weight
        >>> plain = Source((Weight("up.weight", torch.randn(128, 128).bfloat16(), True),), {})
        >>> source = under(plain, ottava.RECIPES["blockwise"])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = ottava.export(source, f"{place}/out", layout="fp8-block-ue8m0")
        ...     certificate = parity(source, f"{place}/out", "vllm")
        >>> certificate.equal, certificate.rows[0].served
        (True, 'E4M3[128x128]')
    """
    if isinstance(train, nn.Module):
        own = receipt(train)  # of a model that is not converted it says nothing about the recipe that is given
        ran = own if ran is None and any(row.gemm == "fprop" for row in own.rows) else ran
        train = of_model(train)
    source = of_folder(Path(train)) if isinstance(train, (str, Path)) else train
    if recipe is not None:
        source = under(source, get_recipe(recipe))
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"parity: device {device!r}; needs 'cpu' or 'cuda'")
    where, path = device or default_device(engine), Path(checkpoint)
    source, left, unsaid = _by_receipt(source, ran)
    ours, theirs = trained(source), served(path, engine, settings, device=where)
    shown, why, wrong = _executed(path, engine, where, theirs, text, run)
    if theirs.unread or why:  # of what an engine does not read, nothing else can be said
        findings = [Mismatch("config.json", "unread", theirs.unread or why)]
    else:
        quantization = theirs.config.get("quantization_config") or {}
        sampler = next((path for path in source.files if path.name == "generation_config.json"), None)
        causes = [*formula_causes(source.config, theirs.config), *quantization_causes(quantization)]
        causes += [*settings_causes(settings or {}, ENGINES[engine].settings), *sampling_causes(sampler, path)]
        if where == "cpu" and quantization and engine != "transformers":
            causes.append(("unknown", f"no rule says how {engine} multiplies codes on a CPU"))
        findings = [Mismatch("config.json", *cause) for cause in causes] + _findings(ours, theirs, engine, left)
        findings += unsaid + [Mismatch(name, "executed", said) for name, said in wrong.items()]
    ranks = {cause: i for i, cause in enumerate(CAUSES)}
    findings.sort(key=lambda one: (place(one.layer), ranks[one.cause]))
    both = ours.linears.keys() & theirs.linears.keys()
    kls, said = kl_alone(ours, theirs, sorted({one.layer for one in findings} & both, key=place), text)
    said = "not measured: the engine does not read the checkpoint" if theirs.unread or why else said
    names = sorted({*ours.linears, *theirs.linears}, key=place)
    rows = tuple(_row(name, ours, theirs, kls.get(name)) for name in names)
    hashes, files, notes = (_whole(ours), _whole(theirs)), dict(theirs.files), _notes(ours)
    if where == "cuda" and any(one.cause in ("scale-format", "activation-format") for one in findings):
        notes += tuple(filter(None, [ENGINES[engine].note]))
    return Certificate(engine, rows, tuple(findings), *hashes, files, where, shown, said, notes)


def _executed(
    folder: Path, engine: str, device: str, theirs: Model, text: Text | None, run: bool | None
) -> tuple[str, str, dict[str, str]]:
    """(what ran or why nothing did, why the engine does not run it, linear -> what its rules did not say)."""
    if run is False or theirs.unread or (engine, device) != ("transformers", "cpu"):
        if run:
            raise ValueError(f"parity: run=True, and {engine} on {device} is not executed here; transformers on cpu is")
        return f"nothing of {engine} on {device}; its rules are {ENGINES[engine].known}", "", {}
    from ottava.serving.executed import disagreements, execute, in_model

    try:
        ids = (text or made_up(int(theirs.config.get("vocab_size") or 1))).ids[:_TOKENS]
        one = execute(folder, ids)
    except ImportError as error:
        if run:
            raise
        return f"nothing: {error}".splitlines()[0], "", {}
    except ValueError as error:
        return str(error), str(error), {}
    left = [name for name in theirs.linears if in_model(name) not in one.operands]
    counted = f"{len(theirs.linears) - len(left)} of {len(theirs.linears)} linears"
    return f"{one.said}, {len(ids)} tokens: the operands of {counted} were compared", "", disagreements(theirs, one)


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


def _findings(ours: Model, theirs: Model, engine: str, left: Mapping[str, str]) -> list[Mismatch]:
    findings: list[Mismatch] = []
    names = list(ours.linears)
    for name, side in progress(ours.linears.items(), "comparing linears"):
        there = theirs.linears.get(name)
        if name == "lm_head" and ours.tied != theirs.tied:
            continue  # `plain_causes` compares the heads
        if there is None or there.weight.shape != side.weight.shape:
            findings.append(Mismatch(name, *gap(side.weight, None if there is None else there.weight)))
            continue
        if cause := layer_set(name, side, there, theirs.decisions[name]):
            ran = name in left and cause[0] != "parts"
            findings.append(Mismatch(name, "not-fp8", left[name]) if ran else Mismatch(name, *cause))
            continue
        if side.cast is None:
            others = ((n, one.weight) for n, one in ours.linears.items() if one.cast is None)
            if cause := number_cause(name, side.weight, there.weight, others):
                findings.append(Mismatch(name, *cause))
            continue
        file = there.stored  # what is wrong there is no deed of the engine's
        filed = there if file is None else replace(there, cast=file, weight=file.dequantize(torch.float32))
        weights = weight_cause(name, side, filed, ours, theirs) or weight_cause(name, side, there, ours, theirs)
        causes = weights, activation_cause(side, there)
        findings += [Mismatch(name, *cause) for cause in causes if cause]
        if there.misfit and not causes[0]:
            findings.append(Mismatch(name, "formula", there.misfit))
    extra = [name for name in theirs.linears if name not in ours.linears and name != "lm_head"]
    findings += [Mismatch(name, "missing", "training has no such linear") for name in extra]
    findings += [Mismatch(name, *cause) for name, cause in plain_causes(ours, theirs).items()]
    if theirs.kv_cache:
        where = min(names, key=place, default="model")
        findings.append(Mismatch(where, "kv-cache", f"{engine} stores them in FP8, and reads them rounded"))
    return findings


def _by_receipt(
    source: Source, ran: Receipt | Mapping[str, Any] | None
) -> tuple[Source, dict[str, str], list[Mismatch]]:
    """The source with the casts that ran; linear -> why it ran in high precision; what the receipt leaves open."""
    rows = (ran.to_dict() if isinstance(ran, Receipt) else ran or {}).get("rows") or []
    shape = {"layer!": str, "gemm": str, "operands": str, "kernel": str, "note": str, "fp8": bool}
    if wrong := misfit(rows, [shape], "rows"):
        raise UntrustedError(f"the receipt of the training: {wrong}")
    if not rows:
        return source, {}, []
    told = {_WRAPPERS.sub("", row["layer"]): row for row in rows if row.get("gemm") in ("fprop", "all")}
    known = {str(one): one for recipe in RECIPES.values() for one in (recipe.fprop.lhs, recipe.fprop.rhs) if one}
    unsaid = {row["layer"]: f"training's attention ran in FP8, {row.get('operands')}"
              for row in rows if row.get("gemm") == "attention" and row.get("fp8")}  # fmt: skip
    left, weights = {}, []
    for weight in source.weights:
        row = told.get(weight.layer or weight.module, {"kernel": "unknown", "note": "no row has its name"})
        cast, codes, inputs = weight.cast, weight.codes, weight.input_spec
        said = row.get("operands", "")
        lhs, _, rhs = re.sub(" under .*", "", said).partition(" x ")
        rhs, own = re.sub(", (delayed|guarded)", "", rhs), cast and str(replace(cast.spec, scaling="current"))
        if row.get("fp8") and {lhs, rhs} <= known.keys() | {str(inputs), own}:
            codes = codes if rhs == own else quantize(weight.tensor, known[rhs])
            inputs = inputs if lhs == str(inputs) else known[lhs]
        elif (row.get("fp8") and said) or (own and row.get("kernel") == "unknown"):
            unsaid[weight.module] = said if row.get("fp8") else row.get("note") or said
        elif own and not row.get("fp8") and row.get("kernel", "-") != "-":
            left[weight.module] = row.get("note") or "the receipt gives no reason"
            codes = inputs = None
        weights.append(replace(weight, codes=codes, input_spec=inputs))
    unsure = [Mismatch(name, "unknown", f"by the receipt: {said}") for name, said in unsaid.items()]
    return replace(source, weights=tuple(weights)), left, unsure


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


def _notes(ours: Model) -> tuple[str, ...]:
    notes = ["kernels of the engine did not run: sums inside its GEMMs and its attention may round differently"]
    dynamic = [s for s in ours.linears.values() if s.activations and s.activations.granularity.rows is None]
    if any(side.activations and not side.activations.static for side in dynamic):
        notes.append("one dynamic scale for all tokens depends on the batch: no engine repeats the batches of training")
    if any(tensor.dtype == torch.float32 for tensor in ours.plain.values()):
        notes.append("training has FP32 tensors: what it computes in FP32 between linears, the engine computes in BF16")
    if not any(side.cast is not None for side in ours.linears.values()):
        notes.append("the train side casts nothing: give the recipe of the training")
    return tuple(notes)

"""Log-probabilities of a rollout and of training, from the dumps of RL trainers; and whether they are one, bit for bit.

A format is data: `FORMATS` says which fields of a dump hold what. Files are rows of JSON, safetensors, or what
torch.save wrote of a dict of tensors; a pickle that could run code is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import listed
from ottava.base.untrusted import UntrustedError, parse_json, read_lines, read_text, regular_size

CERTIFICATE = "ottava.serving.rollout/1"
_LINE = 1 << 26
_LAYER = ("rollout/", "recomputed/")


@dataclass(frozen=True)
class DumpFormat:
    """Which fields of a dump hold what; a field that ends in "?" may lack."""

    name: str
    source: str
    """Where it was read."""
    tokens: tuple[str, ...]
    """Pieces of a sequence, one after the other."""
    present: tuple[str, ...]
    """For each piece, or for all together, which tokens are no padding; a field of lengths, too."""
    counted: tuple[str, ...]
    """Which tokens were generated, and are compared: all of these masks."""
    rollout: str
    """log p of each token, by the engine that generated it."""
    recomputed: str
    """The same by training, before the first step."""
    trained: str = "first_train_forward_raw_logprob?"
    """The same in the forward in which the token first counts for the loss."""
    last: bool = False
    """Masks and log-probabilities are of the last piece only."""

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether a dump has what this format needs."""
        return {self.rollout, self.recomputed, *self.tokens} <= fields.keys()


_ENTRIES = (
    DumpFormat(
        "plain",
        "docs/serving.md; the names of NeMo-RL's certificate",
        ("token_ids",),
        ("lengths?",),
        ("mask",),
        "rollout_raw_logprob",
        "prev_recompute_raw_logprob",
    ),
    DumpFormat(
        "nemo-rl",
        "NeMo-RL 7ea279a, nemo_rl/algorithms/grpo.py: train_data_step*.jsonl",
        ("token_ids",),
        ("input_lengths",),
        ("token_loss_mask", "sample_loss_mask?"),
        "generation_logprobs",
        "prev_logprobs",
    ),
    DumpFormat(
        "verl",
        "verl b178a3c, verl/utils/debug/metrics.py and agent_loop.py: tensors of DataProto.batch",
        ("prompts", "responses"),
        ("attention_mask",),
        ("response_mask",),
        "rollout_log_probs",
        "old_log_probs",
        last=True,
    ),
    DumpFormat(
        "trl",
        "TRL 1.16.0, trl/trainer/grpo_trainer.py: output of _generate_and_score_completions",
        ("prompt_ids", "completion_ids"),
        ("prompt_mask", "completion_mask"),
        ("completion_mask", "tool_mask?"),
        "sampling_per_token_logps",
        "old_per_token_logps",
        last=True,
    ),
)
FORMATS: Mapping[str, DumpFormat] = MappingProxyType({one.name: one for one in _ENTRIES})


@dataclass(frozen=True, eq=False)
class Rollout:
    """One batch of generated sequences. N counts their compared tokens, sequence by sequence."""

    format: str
    ids: tuple[Tensor, ...]
    """int64 (T,) of each sequence, without padding."""
    at: tuple[Tensor, ...]
    """int64: places of the compared tokens in each sequence."""
    rollout: Tensor
    """fp32 (N,): log p by the engine, in nats."""
    recomputed: Tensor
    """fp32 (N,): by training."""
    trained: Tensor | None = None
    """fp32 (N,): in the first training forward."""
    routes: tuple[Tensor, ...] | None = None
    """int64 (T, L, k) of each sequence: the experts that the engine chose."""
    versions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the weights, for each sequence: rollout_start_version, rollout_end_version, trainer_version."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """Layer -> ||rollout - recomputed|| / ||recomputed|| of what came out of it."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """Compared tokens of each sequence."""
        return tuple(len(one) for one in self.at)


def read_rollout(path: Path | str, form: str | None = None) -> Rollout:
    """Reads a dump.

    Args:
        path: .jsonl (a sequence a line), .json, .safetensors, or .pt of torch.save with a dict of tensors.
        form: a name of `FORMATS`; None: the first whose fields the dump has.
    Raises:
        UntrustedError: fields that lack or do not fit, numbers that are no log-probabilities, a pickle.

    Example:
        >>> import tempfile
        >>> row = {"token_ids": [5, 6], "mask": [0, 1], "rollout_raw_logprob": [0.0, -1.0]}
        >>> with tempfile.TemporaryDirectory() as place:
        ...     file = Path(place) / "dump.jsonl"
        ...     _ = file.write_text(json.dumps(row | {"prev_recompute_raw_logprob": [0.0, -1.5]}))
        ...     read_rollout(file).recomputed
        tensor([-1.5000])
    """
    path = Path(path)
    try:
        fields = _fields(path)
        if form is not None and form not in FORMATS:
            raise UntrustedError(f"format {form!r} is none of {', '.join(FORMATS)}")
        found = FORMATS[form] if form else next((one for one in _ENTRIES if one.fits(fields)), None)
        if found is None or not found.fits(fields):
            needed = "; ".join(f"{f.name}: {', '.join((*f.tokens, f.rollout, f.recomputed))}" for f in _ENTRIES)
            raise UntrustedError(f"has the fields {listed(sorted(fields), 12)}; a dump needs those of one of {needed}")
        return _rollout(fields, found)
    except (UntrustedError, OSError) as error:
        raise UntrustedError(f"{path}: {error}") from error


def _fields(path: Path) -> dict[str, list[Any]]:
    """Field -> its value for each sequence."""
    regular_size(path)
    if path.suffix in (".jsonl", ".json"):
        rows: Any = (
            [parse_json(line) for line in read_lines(path, longest=_LINE) if line] if path.suffix == ".jsonl" else None
        )
        rows = parse_json(read_text(path)) if rows is None else rows
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise UntrustedError("needs a row of JSON for each sequence")
        if uneven := {key for row in rows for key in row.keys() ^ rows[0].keys()}:
            raise UntrustedError(f"some rows lack {listed(sorted(uneven), 6)}")
        return {key: [_unwrapped(row[key]) for row in rows] for key in rows[0]}
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors: Any = load_file(path)
        except SafetensorError as error:
            raise UntrustedError(f"is no safetensors file: {error}") from error
    elif path.suffix in (".pt", ".pth"):
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged archives raise errors of any kind
            raise UntrustedError(
                "is no dict of tensors, and nothing else is unpickled, for it could run code. Write it with "
                "torch.save({name: tensor, ...}), of verl {**data.batch}"
            ) from error
    else:
        raise UntrustedError(
            f"{path.suffix or 'no suffix'!r} is not read; needs .jsonl, .safetensors or .pt. A pickle could run code: "
            "of verl's DataProto save the tensors, torch.save({**data.batch}, 'dump.pt')"
        )
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise UntrustedError("needs a dict of tensors")
    return {str(name): list(one) for name, one in tensors.items() if one.ndim}


def _unwrapped(value: Any) -> Any:
    """NeMo-RL writes a row as a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _rollout(fields: Mapping[str, list[Any]], form: DumpFormat) -> Rollout:
    def get(name: str, number: int, dtype: torch.dtype) -> Tensor | None:
        optional, name = name.endswith("?"), name.removesuffix("?")
        if name not in fields:
            if optional:
                return None
            raise UntrustedError(f"lacks {name}, which {form.name} has ({form.source})")
        if number >= len(fields[name]):
            raise UntrustedError(f"{name} has {len(fields[name])} sequences, and {form.tokens[0]} has more")
        return _tensor(fields[name][number], name, dtype)

    count = len(fields[form.tokens[0]])
    ids, at, routes, kept = [], [], [], []
    values: dict[str, list[Tensor]] = {name: [] for name in (form.rollout, form.recomputed, form.trained)}
    for i in range(count):
        pieces = [piece.reshape(-1) for name in form.tokens if (piece := get(name, i, torch.int64)) is not None]
        whole, offset = torch.cat(pieces), sum(len(one) for one in pieces[:-1]) if form.last else 0
        masks = [mask for name in form.present if (mask := get(name, i, torch.int64)) is not None]
        present = _present(masks, len(whole), pieces)
        counted = torch.ones(len(whole) - offset, dtype=torch.bool)
        for name in form.counted:
            if (mask := get(name, i, torch.int64)) is not None:
                counted = counted & _same(mask.bool(), len(counted), name, form, i)
        if not bool(present.any()):
            continue  # a row that fills up a batch
        kept.append(i)
        chosen = torch.zeros(len(whole), dtype=torch.bool)
        chosen[offset:] = counted
        chosen &= present
        if bool(chosen[present.nonzero()[:1]].any()):
            chosen[present.nonzero()[0]] = False  # nothing precedes the first token, so nothing predicts it
        ids.append(whole[present])
        at.append(chosen[present].nonzero()[:, 0])
        for name, column in values.items():
            if (one := get(name, i, torch.float32)) is not None:
                column.append(_same(one, len(counted), name.removesuffix("?"), form, i)[chosen[offset:]])
        if "routed_experts" in fields and (one := get("routed_experts", i, torch.int64)) is not None:
            routes.append(_same(one, len(whole), "routed_experts", form, i)[present])
    if not ids:
        raise UntrustedError("all of its tokens are padding")
    joined = {name: torch.cat(column) for name, column in values.items() if column}
    found = Rollout(
        form.name,
        tuple(ids),
        tuple(at),
        joined[form.rollout],
        joined[form.recomputed],
        joined.get(form.trained),
        tuple(routes) if routes else None,
        {name: tuple(_number(get(name, i, torch.int64), name) for i in kept) for name in _VERSIONS if name in fields},
        _layers(fields),
    )
    _check(found)
    return found


_VERSIONS = ("rollout_start_version", "rollout_end_version", "trainer_version")


def _tensor(value: Any, name: str, dtype: torch.dtype) -> Tensor:
    try:
        if isinstance(value, list):
            value = [float("nan") if one is None else one for one in value]
        made = value if isinstance(value, Tensor) else torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UntrustedError(f"{name} is no list of numbers: {error}") from error
    if made.is_complex() or (dtype == torch.int64 and made.is_floating_point() and not torch.equal(made, made.round())):
        raise UntrustedError(f"{name} has numbers that are no whole ones")
    return made.to(dtype)


def _number(value: Any, name: str) -> int:
    made = _tensor(value, name, torch.int64)
    if made.numel() != 1:
        raise UntrustedError(f"{name} has {made.numel()} numbers for a sequence; needs one")
    return int(made)


def _present(masks: Sequence[Tensor], length: int, pieces: Sequence[Tensor]) -> Tensor:
    """bool (T,): tokens that are no padding."""
    if not masks:
        return torch.ones(length, dtype=torch.bool)
    if masks[0].ndim == 0 or (masks[0].numel() == 1 and length > 1 and len(pieces) == 1):
        if not 0 < int(masks[0]) <= length:
            raise UntrustedError(f"a sequence of {length} tokens has the length {int(masks[0])}")
        return torch.arange(length) < int(masks[0])
    if any(mask.ndim != 1 for mask in masks):
        raise UntrustedError(f"masks have {', '.join(str(mask.ndim) for mask in masks)} dimensions; each needs one")
    whole = torch.cat(list(masks)).bool()
    if len(whole) != length:
        raise UntrustedError(f"{length} tokens, and masks for {len(whole)}")
    return whole


def _same(one: Tensor, length: int, name: str, form: DumpFormat, number: int) -> Tensor:
    """One value a token; a single one stands for all."""
    if one.ndim == 0:
        return one.expand(length)
    if one.ndim > 1 and name != "routed_experts":
        raise UntrustedError(f"{name} has {one.ndim} dimensions in sequence {number}; needs one number a token")
    if len(one) != length:
        raise UntrustedError(
            f"{name} has {len(one)} entries in sequence {number}, and {form.tokens[-1]} has {length} tokens: one of "
            "them is cut or shifted"
        )
    return one


def _layers(fields: Mapping[str, list[Any]]) -> dict[str, float]:
    found = {}
    for name in (key.removeprefix(_LAYER[0]) for key in fields if key.startswith(_LAYER[0])):
        if (other := _LAYER[1] + name) not in fields:
            raise UntrustedError(f"has {_LAYER[0]}{name}, and no {other}")
        sides = [[_tensor(x, name, torch.float32) for x in fields[key]] for key in (_LAYER[0] + name, other)]
        shapes = [[str(tuple(x.shape)) for x in side] for side in sides]
        if shapes[0] != shapes[1]:
            raise UntrustedError(
                f"{name} is {listed(shapes[0], 3)} in the rollout, and {listed(shapes[1], 3)} in training"
            )
        a, b = (torch.cat([x.reshape(-1) for x in side]) for side in sides)
        found[name] = float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return found


def _check(found: Rollout) -> None:
    sizes = found.sequences
    if not sum(sizes):
        raise UntrustedError("no token is compared: its mask is empty")
    if (least := min(int(ids.min()) for ids in found.ids)) < 0:
        raise UntrustedError(f"has the token {least}; needs numbers from 0 on, and a mask that leaves padding out")
    for name in ("rollout", "recomputed", "trained"):
        values: Tensor | None = getattr(found, name)
        if values is None:
            continue
        for wrong, what in (
            (~values.isfinite(), "not finite"),
            (values > 1e-3, "above 0, and so no log-probabilities"),
        ):
            if count := int(wrong.sum()):
                first = int(wrong.nonzero()[0])
                sequence = next(i for i in range(len(sizes)) if first < sum(sizes[: i + 1]))
                raise UntrustedError(
                    f"{count} of {len(values)} log-probabilities of the {name} side are {what}, the first in sequence "
                    f"{sequence}, compared token {first - sum(sizes[:sequence])}: repair that before you compare"
                )


@dataclass(frozen=True)
class Equality:
    """Whether rollout, recomputation and first training forward are one, as bit patterns of FP32."""

    equal: bool
    tokens: int
    mismatch_count: int
    """Tokens at which any two of the three differ."""
    mismatches: Mapping[str, int]
    """Of each pair."""
    largest: float
    """Largest |difference|, nats."""
    why: str
    """Why nothing is certified; "" if the three are equal."""
    sha256: Mapping[str, str]
    """Of the bytes of each side."""

    def to_json(self) -> str:
        """The certificate, the same bytes for the same dump."""
        return json.dumps({"schema": CERTIFICATE, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def certify(found: Rollout) -> Equality:
    """NeMo-RL's certificate of zero mismatch: three sides equal as bits, all finite, one version of the weights.

    A recomputation that was skipped certifies nothing: it is all zeros, or a dump lacks the first training forward.

    Example:
        >>> one = torch.tensor([-1.0, -2.0])
        >>> certify(Rollout("plain", (torch.arange(3),), (torch.tensor([1, 2]),), one, one.clone(), one.clone())).equal
        True
    """
    sides = {"rollout": found.rollout, "recomputed": found.recomputed}
    sides |= {} if found.trained is None else {"trained": found.trained}
    bits = {name: one.contiguous().view(torch.int32) for name, one in sides.items()}
    pairs = list(combinations(bits, 2))
    apart = {f"{a}, {b}": bits[a] != bits[b] for a, b in pairs}
    count = int(torch.stack(list(apart.values())).any(0).sum())
    largest = max(float((sides[a] - sides[b]).abs().max()) for a, b in pairs)
    versions = {tuple(one) for one in zip(*found.versions.values(), strict=False)}
    why = ""
    if not bool(found.recomputed.any()) and bool(found.rollout.any()):
        why = "the recomputation is all zeros: it was skipped"
    elif found.trained is None:
        why = "the dump lacks the first training forward, first_train_forward_raw_logprob"
    elif any(len(set(one)) > 1 for one in versions):
        why = "a sequence was generated and scored under different versions of the weights"
    elif count:
        why = f"{count} of {len(found.rollout)} tokens differ"
    hashes = {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in bits.items()}
    pairwise = {name: int(one.sum()) for name, one in apart.items()}
    return Equality(not why, len(found.rollout), count, pairwise, largest, why, hashes)


@dataclass(frozen=True)
class Sampler:
    """What an engine does with logits before it takes log-probabilities."""

    temperature: float = 1.0
    top_k: int = 0
    """Tokens that stay; 0: all."""
    top_p: float = 1.0
    """Probability of those that stay."""
    penalty: float = 1.0
    """By which positive logits of tokens that stand before are divided, and negative ones multiplied."""
    cap: float = 0.0
    """Logits z are cap tanh(z / cap); 0: as they are."""

    def log_probabilities(self, logits: Tensor, ids: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """logits (n, V), of the places before `at` in ids (B, T) -> fp32 (n,): log p of the tokens at `at`.

        A token that does not stay has that of the whole vocabulary.

        Example:
            >>> z, ids = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[2, 0]])
            >>> at = (torch.tensor([0]), torch.tensor([1]))
            >>> [round(float(one.log_probabilities(z, ids, at)), 3) for one in (Sampler(), Sampler(top_k=2))]
            [-0.408, -0.313]
        """
        logits = self.cap * torch.tanh(logits / self.cap) if self.cap else logits
        if self.penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for i, (row, place) in enumerate(zip(*(one.tolist() for one in at), strict=True)):
                seen[i, ids[row, :place]] = True
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        logits, target = logits / self.temperature, ids[at][:, None]
        whole = logits.log_softmax(-1)
        if self.top_k or self.top_p < 1:
            ordered, places = logits.sort(-1, descending=True)
            mass = ordered.softmax(-1).cumsum(-1)
            gone = mass - ordered.softmax(-1) >= self.top_p
            if self.top_k:
                gone[:, self.top_k :] = True
            cut = logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf).log_softmax(-1)
            whole = torch.where(cut.isfinite(), cut, whole)
        return whole.gather(-1, target)[:, 0]


_BATCH = 8


def batches(
    found: Rollout, config: Mapping[str, Any], size: int = _BATCH
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]]:
    """(ids padded at the right, which a causal model does not see; (sequence, place) of compared tokens; routes)."""
    vocabulary = int(config.get("vocab_size") or 0)
    top = max(int(one.max()) for one in found.ids)
    if vocabulary and top >= vocabulary:
        raise ValueError(
            f"parity: the dump has token {top}, and the checkpoint {vocabulary} tokens: they are of another tokenizer"
        )
    for start in range(0, len(found.ids), size):
        some, places = found.ids[start : start + size], found.at[start : start + size]
        ids = torch.nn.utils.rnn.pad_sequence(list(some), batch_first=True)
        row = torch.cat([torch.full_like(at, i) for i, at in enumerate(places)])
        routes = None
        if found.routes is not None:
            routes = torch.nn.utils.rnn.pad_sequence(list(found.routes[start : start + size]), batch_first=True)
        yield ids, (row, torch.cat(list(places))), routes

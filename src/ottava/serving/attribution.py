"""Why rollout and training give other log-probabilities: the measured KL, split into causes that sum to it.

Attribution is by experiment. A twin computes what training's log-probabilities would be with one cause switched on; the
cause that brings them nearest to the rollout's is kept, and the next one is tried on top of it. A part is the KL that
its cause takes away, so parts and rest sum to the whole. Without a model only what the dump shows is tried.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import columns
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.causes import HEAD, ROUTER
from ottava.serving.engines import EXACT
from ottava.serving.formula import formula_causes
from ottava.serving.rollout import Equality, Rollout, Sampler, batches, certify
from ottava.serving.sides import Model, Side
from ottava.serving.twin import ModelState, Twin
from ottava.weights.layouts import InputCast

SCHEMA_VERSION = 1
CAUSES = MappingProxyType(
    {
        "shift": "one side's log-probabilities are of the token before or after",
        "padded": "the engine gave no log-probability, and a constant stands there",
        "temperature": "one side divides logits by a temperature, and the other by another one",
        "scaled": "log-probabilities, not logits, were divided by a temperature",
        "processed": "one side's log-probabilities are those after top-k, top-p or a penalty",
        "stale": "the engine has weights of an earlier step: a refit that did not arrive, in whole or in part",
        "formula": "config.json of the engine has other fields that change what is computed",
        "layers": "one side casts linears that the other leaves in high precision",
        "weights": "both sides cast the weights, to other numbers",
        "activations": "both sides cast a linear, and its input by another rule",
        "head": "the output head is cast on one side only",
        "router": "routers are cast on one side only",
        "routes": "routers chose other experts for some tokens",
        "kv-cache": "the engine caches keys and values in FP8",
        "plain": "a tensor in high precision differs",
        "trainer": "training's own recomputation is not what its checkpoint gives: dropout, masks, packing, its code",
        "batch variance": "as large as the rounding of BF16 sums in another order: other kernels, other batches",
        "not-fp8": "neither side casts anything, and no cause that was tried explains it",
        "untold": "no cause that was tried explains it",
    }
)
"""Cause -> what it means. The last three are names of a rest."""
_LISTS = ("shift", "padded")
_REST = ("batch variance", "not-fp8", "untold")
FP8 = frozenset(("layers", "weights", "activations", "head", "router", "kv-cache"))
"""Causes that are casts."""
_CAP = 5.0
"""Nats of a token's difference that count: exp of more would let one token be the whole sum."""
_SHARE = 0.05  # of the KL that a cause must explain
_SIGMA = 4.0  # of its standard error over tokens
_NOISE = 4.0
"""Times the KL that BF16 sums over two ranks make: attention, norms and the engine's own kernels are the rest."""
_TOKENS = 4096
_ROUNDS = 8
_FAR = 0.5
_EXPLAINED = 0.1  # of the distance that another temperature leaves: a broken recomputation has no temperature


@dataclass(frozen=True)
class Share:
    """A cause, and the KL that it takes away."""

    cause: str
    """A name of `CAUSES`."""
    kl: float
    """Nats a token."""
    said: str
    """Which experiment explained it."""


@dataclass(frozen=True)
class Attribution:
    """The KL of a rollout, in parts that sum to it."""

    kl: float
    """KL(rollout || training), nats a token: the mean of exp(d) - 1 - d, d = log p of training - log p of rollout, |d|
    held at 5."""
    tokens: int
    mean_difference: float
    """Mean of |d|."""
    parts: tuple[Share, ...]
    """In the order in which causes were found, the rest last; their sum is `kl`."""
    equality: Equality
    layers: Mapping[str, float]
    """Of the dump: layer -> relative difference behind it."""
    tried: tuple[str, ...]
    """Causes of the experiments."""
    notes: tuple[str, ...]

    @property
    def first(self) -> Share | None:
        """The largest part that is no rest; None: no cause was found."""
        return max((one for one in self.parts if one.cause not in _REST), key=lambda one: one.kl, default=None)

    @property
    def good(self) -> bool:
        """Whether nothing but rounding is between the two sides."""
        return not self.kl or (self.first is None and self.rest.cause == "batch variance")

    @property
    def rest(self) -> Share:
        """What no cause explains."""
        return self.parts[-1]

    @property
    def fp8(self) -> float:
        """Share of the KL that is of casts."""
        return sum(one.kl for one in self.parts if one.cause in FP8) / self.kl if self.kl else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        first = None if self.first is None else asdict(self.first)
        return {"schema_version": SCHEMA_VERSION, "first": first, "fp8_share": self.fp8, **asdict(self)}

    def to_json(self) -> str:
        """The same bytes for the same dump and sides."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @property
    def headline(self) -> str:
        """The answer in one line."""
        if self.first is None:
            return f"No cause of the KL between rollout and training was found; the rest is {self.rest.cause}"
        return f"{self.first.cause}: {CAUSES[self.first.cause]}"

    def __str__(self) -> str:
        lines = [f"KL(rollout || training) {self.kl:.4g} nats a token, mean |difference| {self.mean_difference:.4g}, "
                 f"{self.tokens:,} tokens"]  # fmt: skip
        if self.kl:
            rows = [(f"  {one.cause}", f"{one.kl:.4g}", f"{one.kl / self.kl:.0%}", one.said) for one in self.parts]
            lines += ["", *columns(("cause", "KL", "share", "found by"), *rows)]
            if self.first is not None:
                lines += ["", self.headline, f"casts are {self.fp8:.0%} of the KL"]
        layers = [f"{name} {value:.3g}" for name, value in self.layers.items()]
        lines += [f"relative difference behind layers: {', '.join(layers)}"] if layers else []
        bits = "equal bit for bit" if self.equality.equal else f"not certified: {self.equality.why}"
        lines += ["", f"rollout, recomputation and first training forward: {bits}"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def attribute(
    found: Rollout,
    ours: Model | None = None,
    theirs: Model | None = None,
    *,
    before: Sequence[tuple[str, Model]] = (),
    temperature: float = 1.0,
) -> Attribution:
    """Splits the KL between the log-probabilities of a rollout and of training into causes.

    Args:
        found: of `read_rollout`.
        ours: what training multiplies, of `sides.trained`. None: only what the dump shows is tried.
        theirs: what the engine multiplies, of `sides.served`. None: hypotheses about common engines only.
        before: (name, what training multiplied) at earlier steps, for weights that did not arrive.
        temperature: by which training divides its logits, as far as is known: what it recomputed may say another one.
    Returns:
        Attribution, whose parts sum to the KL.
    Raises:
        ValueError: tokens beyond the vocabulary, a temperature that is not positive, or a model that cannot run.
        ImportError: `ours` is given, and transformers is not installed.

    Example:
        >>> from ottava.serving.rollout import Rollout
        >>> p = -torch.rand(400, generator=torch.Generator().manual_seed(0))
        >>> one = Rollout("plain", (torch.arange(401),), (torch.arange(1, 401),), p, p.roll(1))
        >>> attribute(one).first.cause
        'shift'
    """
    if not temperature > 0:
        raise ValueError(f"parity: temperature {temperature:g}; needs a number above 0")
    found = _first(found)
    lab = _Lab(found, ours, temperature)
    state = lab.start
    ours = lab.ours
    tried = list(hypotheses(found, ours, theirs, before))
    loss, parts, part = lab.loss(state), list[Share](), False
    done = torch.zeros_like(loss, dtype=torch.bool)  # sequences of which a cause was found that holds in them alone
    while float(loss.mean()) > 0 and len(parts) < _ROUNDS:
        settings = ((one.cause, *each) for one in tried for each in lab.tries(state, one, loss, done, part))
        best = min(settings, key=lambda x: float(x[3].mean()), default=None)
        if best is not None and best[0] == "trainer":  # a list that is wrong in some sequences needs no such cause
            some = [one for one in tried if one.cause in _LISTS]
            lists = [(one.cause, *x) for one in some for x in lab.tries(state, one, loss, done, True)]
            best = min(
                (x for x in lists if float(x[3].mean()) <= lab.noise), key=lambda x: float(x[3].mean()), default=best
            )
        if best is None or not _real(loss, best[3], lab.whole, part=part):
            if part or float(loss.mean()) <= lab.rounding(state)[0]:
                break
            tried, part = [*tried, *_in_part(ours, before)], True
            continue
        cause, changed, said, after, where = best
        if bool((where | done).all()):
            state = changed
        else:
            done, count = done | where, sum(bool(one.any()) for one in where.split(found.sequences))
            said = f"{said}, in {count} of {len(found.sequences)} sequences"
        gain = float(loss.mean() - after.mean())
        parts.append(Share(cause, gain, said))
        loss = after
    rest = float(loss.mean())
    noise, said = lab.rounding(state)
    parts.append(Share(lab.rest(rest, noise, theirs, parts), rest, said))
    difference = found.recomputed - found.rollout
    return Attribution(
        lab.whole,
        len(difference),
        float(difference.abs().mean()),
        _joined(parts),
        certify(found),
        found.layers,
        tuple(dict.fromkeys(one.cause for one in tried)),
        lab.notes,
    )


def _joined(parts: Sequence[Share]) -> tuple[Share, ...]:
    """One part for each cause, in the order in which they were found."""
    groups: dict[str, list[Share]] = {}
    for one in parts:
        groups.setdefault(one.cause, []).append(one)
    return tuple(
        Share(cause, sum(one.kl for one in some), "; ".join(dict.fromkeys(one.said for one in some)))
        for cause, some in groups.items()
    )


def _first(found: Rollout) -> Rollout:
    """The first sequences, as many as experiments can afford."""
    count, total = 0, 0
    for size in found.sequences:
        if count and total + size > _TOKENS:
            break
        count, total = count + 1, total + size
    if count == len(found.ids):
        return found
    cut = {name: getattr(found, name)[:total] for name in ("rollout", "recomputed")}
    trained = None if found.trained is None else found.trained[:total]
    routes = None if found.routes is None else found.routes[:count]
    versions = {name: one[:count] for name, one in found.versions.items()}
    return replace(found, **cut, ids=found.ids[:count], at=found.at[:count], trained=trained, routes=routes,
                   versions=versions)  # fmt: skip


def _real(before: Tensor, after: Tensor, whole: float, *, part: bool = False) -> bool:
    """Whether a cause takes away enough, and more than chance does: of the roots, for one token may be half of a KL.

    Tokens of which a cause says nothing do not count, unless it was chosen for those where it holds (`part`).
    """
    gain = (before.sqrt() - after.sqrt())[(before != after) | part]
    error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return float(gain.mean()) > _SIGMA * error and float((before - after).mean()) > _SHARE * whole


def kl_of(rollout: Tensor, other: Tensor) -> Tensor:
    """Each token's exp(d) - 1 - d, d = other - rollout, held at 5 nats; its mean estimates KL(rollout || other).

    Example:
        >>> kl_of(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.], dtype=torch.float64)
    """
    d = (other.double() - rollout.double()).clamp(-_CAP, _CAP)
    return torch.expm1(d) - d


class _Lab:
    """Runs experiments on one dump."""

    def __init__(self, found: Rollout, ours: Model | None, temperature: float) -> None:
        self.found = found
        self.whole = float(kl_of(found.rollout, found.recomputed).mean())
        self.notes: tuple[str, ...] = ()
        self.noise, self.said = 0.0, "no model was given: nothing but the dump was looked at"
        self._kept: tuple[ModelState, list[Tensor]] | None = None
        self._base: tuple[Guess, Tensor] | None = None
        self._true = False  # whether the twin is as near to training's numbers as another order of sums is
        state = None if ours is None else ModelState.of(ours)
        self.start, self.ours = Guess(state, Sampler(temperature)), ours
        if state is None:
            return
        self._batches = list(batches(found, state.config))
        self._twins: dict[int, Twin] = {id(state.config): Twin(state, torch.bfloat16)}
        self._own = self._logp(self.start)
        self.noise, self.said = self.rounding(self.start)
        self._fit()
        self._fit_layers()
        self._true = float(kl_of(found.recomputed, self._own).mean()) <= self.noise
        self._compare(self.start.sampler.temperature)

    def rounding(self, setting: Guess) -> tuple[float, str]:
        """How far other kernels may be, nats a token, and what was measured for it."""
        if setting.state is None:
            return self.noise, self.said
        halves = replace(setting, state=replace(setting.state, split=True))
        away = float(kl_of(self._logp(setting), self._logp(halves)).mean())
        return _NOISE * away, f"BF16 sums over two ranks are {away:.3g} nats away"

    def _fit(self) -> None:
        """Takes training's temperature from what it recomputed, if another one than 1 explains it."""

        def away(setting: Guess) -> float:
            return float(kl_of(self.found.recomputed, self._logp(setting)).mean())

        warm, said = next(temperatures(self.start, away))
        if (here := away(self.start)) > self.noise and away(warm) < _EXPLAINED * here:
            self.start, self._own = warm, self._logp(warm)
            self.notes = (f"training's own log-probabilities are those of {said}",)

    def _fit_layers(self) -> None:
        """Takes linears that training leaves in BF16, whatever its recipe says, from what it recomputed."""
        assert self.ours is not None
        casts = {name: Side(side.weight) for name, side in self.ours.linears.items() if side.cast is not None}
        here = kl_of(self.found.recomputed, self._own)
        tried = []
        for kind, names in _groups(list(casts)).items():
            other = replace(self.ours, linears={**self.ours.linears, **{n: casts[n] for n in names}})
            setting = replace(self.start, state=ModelState.of(other))
            tried.append((kind, other, setting, own := self._logp(setting), kl_of(self.found.recomputed, own)))
        best = min(tried, key=lambda x: float(x[4].mean()), default=None)
        if best is None or not best[4].mean() < 0.5 * here.mean() or not _real(here, best[4], float(here.mean())):
            return
        kind, self.ours, self.start, self._own, _ = best
        self.noise, self.said = self.rounding(self.start)
        self.notes += (f"training's own log-probabilities are those with {kind} in BF16",)

    def _compare(self, temperature: float) -> None:
        """Whether the twin computes what training recomputed."""
        away = float(kl_of(self.found.recomputed, self._own).mean())
        both = torch.stack((self.found.recomputed, self._own)).double()
        alike = float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 2 and bool((both.std(1) > 0).all()) else 1.0
        against = float(kl_of(self.found.rollout, self._own).mean())
        if alike < _FAR and away > self.noise and against > self.noise:
            raise ValueError(
                "parity: this checkpoint gives other log-probabilities than training recomputed (correlation "
                f"{alike:.2f}, KL {away:.3g}) and the rollout has: it is another checkpoint, or the tokens are of "
                "another tokenizer"
            )
        if away > max(self.noise, self.whole):
            self.notes += (
                f"at temperature {temperature:g} the checkpoint is {away:.3g} nats from what training recomputed, "
                "farther than the rollout is from it: causes are less certain",
            )

    def rest(self, left: float, noise: float, theirs: Model | None, parts: Sequence[Share]) -> str:
        """The name of what no cause explains."""
        if self.start.state is None:
            return "untold"
        if left <= noise:
            return "batch variance"
        sides = [*self.start.state.linears.values(), *(theirs.linears.values() if theirs else ())]
        return "untold" if any(side.cast is not None for side in sides) or parts else "not-fp8"

    def tries(
        self, setting: Guess, one: Hypothesis, loss: Tensor, done: Tensor, part: bool
    ) -> Iterator[tuple[Guess, str, Tensor, Tensor]]:
        """The settings of a hypothesis, in words, each token's KL under them, and the tokens where they hold.

        They hold everywhere but in sequences that are `done`; with `part`, where they halve the KL of a sequence.
        """

        def under(other: Guess) -> tuple[Tensor, Tensor]:
            after, where = self.loss(other), ~done
            if part:
                both = zip(after.split(self.found.sequences), loss.split(self.found.sequences), strict=True)
                where = where & torch.cat([(a.mean() < 0.5 * b.mean()).expand(len(a)) for a, b in both])
            return torch.where(where, after, loss), where

        for changed, said in one.settings(setting, lambda other: float(under(other)[0].mean())):
            if changed.trainer and not setting.trainer and float(loss.mean()) <= self.noise:
                continue  # one rounding less is no cause
            yield changed, said, *under(changed)
            if self._true and changed.state is not setting.state and not setting.trainer:
                # Sums in another order move codes, in training's own numbers, too: the twin's have one such way less.
                after, where = under(alone := replace(changed, trainer=True))
                if _real(torch.where(done, loss, self._plain(setting)), after, self.whole):
                    yield alone, said, after, where

    def loss(self, setting: Guess) -> Tensor:
        """Each token's KL between the rollout and training's log-probabilities under a setting."""
        return kl_of(self.found.rollout, self._predicted(setting))

    def _plain(self, setting: Guess) -> Tensor:
        """The loss of what the twin alone says, kept, since each hypothesis asks for it."""
        if self._base is None or self._base[0] is not setting:
            self._base = setting, self.loss(replace(setting, trainer=True))
        return self._base[1]

    def _predicted(self, setting: Guess) -> Tensor:
        """fp32 (N,): the rollout's log-probabilities, if the setting is true."""
        values = self.found.recomputed
        if setting.state is not None:
            moved = setting.state is not self.start.state or setting.sampler != self.start.sampler
            own = self._logp(setting) if moved else self._own
            values = own if setting.trainer else values + (own - self._own)
        values = values / setting.scale + setting.offset
        if setting.shift:
            parts = zip(*(one.split(self.found.sequences) for one in (values, self.found.rollout)), strict=True)
            values = torch.cat([_shifted(part, setting.shift, told, setting.behind) for part, told in parts])
        if setting.padded is not None:
            values = torch.where(self.found.rollout == setting.padded, setting.padded, values)
        return values

    def _logp(self, setting: Guess) -> Tensor:
        """fp32 (N,): log p of the compared tokens by the twin."""
        assert setting.state is not None
        state, found, made = setting.state, [], []
        kept = self._kept[1] if self._kept is not None and self._kept[0] is state else None
        for i, (ids, at, routes) in enumerate(self._batches):
            if kept is None:
                given = routes if state.replay else None
                made.append(self._twin(state).logits(state, ids, given)[at[0], at[1] - 1])
            logits = made[-1] if kept is None else kept[i]
            found.append(setting.sampler.log_probabilities(logits, ids, at))
        if kept is None:
            self._kept = state, made
        return torch.cat(found)

    def _twin(self, state: ModelState) -> Twin:
        key = id(state.config)
        if key not in self._twins:
            self._twins[key] = Twin(state, torch.bfloat16)
        return self._twins[key]


def _shifted(values: Tensor, by: int, told: Tensor, behind: bool) -> Tensor:
    """Moves a list by some places, and keeps what was told at its ends. `behind`: from the place on that fits best."""
    made = torch.cat((told[:by], values[:-by]) if by > 0 else (values[-by:], told[by:]))
    if not behind:
        return made
    before, after = (kl_of(told, one).flip(0).cumsum(0).flip(0) for one in (values, made))  # of all from a place on
    place = int((before - after).argmax())
    found = bool(after[place] < _EXPLAINED * before[place])
    return torch.cat((values[:place], made[place:])) if found else values


# --- what may be true of the engine: each hypothesis is a switch of one setting ---------------------------------------


_TEMPERATURES = (0.1, 10.0)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_TOP_K = (5, 10, 20, 40, 50, 100, 200, 500)
_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
_CLIPS = (0.7, 0.5, 0.35, 0.25, 0.12, 0.06)
_TOPS = tuple(2.0 ** (k / 2) for k in range(8, -1, -1))
_EXACTLY = 1e-4
_EXPERTS = 16  # that are tried one by one
_MOSTLY = 0.98
_CASTS = MappingProxyType(
    {
        "one scale a weight and a token": (QuantizationSpec(E4M3, PER_TENSOR), InputCast(PER_ROW, False, False)),
        "one scale a weight and all tokens": (QuantizationSpec(E4M3, PER_TENSOR), InputCast(PER_TENSOR, False, False)),
        "a scale a row and a token": (QuantizationSpec(E4M3, PER_ROW), InputCast(PER_ROW, False, False)),
        "blocks of 128": (QuantizationSpec(E4M3, BLOCK_128X128), InputCast(BLOCK_1X128, False, False)),
        "blocks of 128, powers of two": (
            QuantizationSpec(E4M3, BLOCK_128X128, "pow2"),
            InputCast(BLOCK_1X128, True, False),
        ),
        "MXFP8": (QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"), InputCast(BLOCK_1X32, True, False)),
    }
)
"""What engines cast to without a checkpoint that says so: weight, input."""
_KINDS = MappingProxyType(
    {
        "attention": r"attn|attention",
        "q, k, v": r"(q|k|v|qkv)_proj$|c_attn$",
        "MLP": r"mlp|feed_forward|experts",
        "gate, up": r"(gate|up|gate_up)_proj$|c_fc$",
        "experts": r"\.experts\.",
    }
)
"""Linears that are left out, or lost, together."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Guess:
    """What an experiment supposes of the engine: the state of its forward, its sampler, and what became of its list."""

    state: ModelState | None
    sampler: Sampler = field(default_factory=Sampler)
    shift: int = 0
    """Places by which the rollout's list is late."""
    behind: bool = False
    """Only from some place of a sequence on, which is found for each."""
    scale: float = 1.0
    """By which log-probabilities were divided."""
    offset: float = 0.0
    """Added to log-probabilities."""
    padded: float | None = None
    """A constant for tokens without a log-probability."""
    trainer: bool = False
    """Take what the checkpoint gives for training's log-probabilities."""


Settings = Callable[[Guess, Callable[[Guess], float]], Iterator[tuple[Guess, str]]]


@dataclass(frozen=True)
class Hypothesis:
    """A cause, and the settings under which it may be true."""

    cause: str
    settings: Settings
    """(setting so far, its loss) -> changed settings, in words."""


def hypotheses(
    found: Rollout, ours: Model | None, theirs: Model | None, before: Sequence[tuple[str, Model]]
) -> Iterator[Hypothesis]:
    """All that can be tried with what is given, cheap ones first."""
    for by in (1, -1, 2, -2):
        yield _one("shift", f"the list moved by {by:+d}", shift=by)
    values, counts = found.rollout.unique(return_counts=True)
    if int(counts.max()) > 1:
        constant = float(values[counts.argmax()])
        yield _one("padded", f"{int(counts.max())} tokens have {constant:g}", padded=constant)
    slope, offset = _line(found.recomputed, found.rollout)
    yield _one(
        "scaled", f"log p divided by {1 / slope:.4g}" if slope > 0 else "", scale=1 / slope if slope > 0 else 1.0
    )
    if ours is None:
        yield from _of_lists(found, slope, offset)
        return
    yield Hypothesis("temperature", temperatures)
    yield Hypothesis("processed", partial(_processed, int(ours.config.get("vocab_size") or 0)))
    yield _one("trainer", "the checkpoint's own log-probabilities", trainer=True)
    if found.routes is not None:
        yield _of_state("routes", "the experts of the dump", partial(replace, replay=True))
    for fmt in (E4M3, E5M2):
        for i in (None, *range(int(ours.config.get("num_hidden_layers") or 0))):
            where = f"keys and values {'' if i is None else f'of layer {i} '}in {fmt.name}"
            yield _of_state("kv-cache", where, partial(replace, cache=fmt, cached=i))
    if theirs is not None:
        yield from _of_checkpoint(ours, theirs)
    for name, model in before:
        yield from _stale(ours, name, model)
    yield from _of_engines(ours)


def _one(cause: str, said: str, **changed: object) -> Hypothesis:
    return Hypothesis(cause, lambda setting, _: iter([(replace(setting, **changed), said)]))  # type: ignore[arg-type]


def _of_state(cause: str, said: str, change: Callable[[ModelState], ModelState]) -> Hypothesis:
    def settings(setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
        if setting.state is not None:
            yield replace(setting, state=change(setting.state)), said

    return Hypothesis(cause, settings)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Least squares: y = slope x; and of y - slope x the mean, with a free slope."""
    x, y = x.double(), y.double()
    return float((x * y).sum() / (x * x).sum().clamp_min(1e-30)), float((y - x).mean())


def _of_lists(found: Rollout, slope: float, offset: float) -> Iterator[Hypothesis]:
    """What two lists show without a model: averages."""
    gain = found.rollout - found.recomputed
    if float((gain > -_EXACTLY).double().mean()) > _MOSTLY and offset > 0:
        yield _one("processed", f"the rollout is never less likely, on average {offset:.3g} nats more", offset=offset)
    x, y = found.recomputed.double(), found.rollout.double()
    spread = float(((x - x.mean()) ** 2).sum())
    if spread:
        steep = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
        if steep > 0:
            said = f"log p is steeper by {steep:.3g}, as of logits divided by about {1 / steep:.3g}"
            yield _one("temperature", said, scale=1 / steep, offset=float(y.mean() - steep * x.mean()))


def temperatures(setting: Guess, loss: Callable[[Guess], float]) -> Iterator[tuple[Guess, str]]:
    """The temperature that fits best, by thirds of an interval of its logarithm."""

    def at(power: float) -> Guess:
        return replace(setting, sampler=replace(setting.sampler, temperature=float(torch.tensor(power).exp())))

    low, high = (float(torch.tensor(t).log()) for t in _TEMPERATURES)
    grid = [low + (high - low) * i / 16 for i in range(17)]
    best = min(grid, key=lambda power: loss(at(power)))
    step = (high - low) / 16
    for _ in range(10):
        best = min((best - step, best - step / 2, best, best + step / 2, best + step), key=lambda p: loss(at(p)))
        step /= 2
    found = at(best)
    yield found, f"logits divided by {found.sampler.temperature:.4g} instead of {setting.sampler.temperature:.4g}"


def _processed(vocabulary: int, setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
    for p in _TOP_P:
        yield replace(setting, sampler=replace(setting.sampler, top_p=p)), f"top-p {p:g}"
    for k in (k for k in _TOP_K if k < vocabulary):
        yield replace(setting, sampler=replace(setting.sampler, top_k=k)), f"top-k {k}"
    for penalty in _PENALTIES:
        yield replace(setting, sampler=replace(setting.sampler, penalty=penalty)), f"a penalty of {penalty:g}"


def _of_checkpoint(ours: Model, theirs: Model) -> Iterator[Hypothesis]:
    """Each way in which the engine's checkpoint differs, by its rules."""
    if causes := formula_causes(ours.config, theirs.config):
        said = min(causes, key=lambda cause: cause[0] != "formula")[1]
        config = theirs.config if theirs.config.get("model_type") else ours.config
        yield _of_state("formula", said, lambda s: replace(s, config=config))
    pairs = {n: (a, theirs.linears[n]) for n, a in ours.linears.items() if n in theirs.linears}
    pairs = {n: (a, b) for n, (a, b) in pairs.items() if a.weight.shape == b.weight.shape}
    sets: dict[str, dict[str, Side]] = {}
    for name, (a, b) in pairs.items():
        if (a.cast is None) != (b.cast is None) or (b.codes and b.cast is None):
            sets.setdefault(_kind(name, "layers"), {})[name] = b
        elif a.cast is None and not torch.equal(a.operand(), b.operand()):
            sets.setdefault("plain", {})[name] = b
        elif a.cast is not None:
            if not torch.equal(a.operand(), b.operand()):
                how = replace(b.arithmetic, inputs=a.arithmetic.inputs)
                sets.setdefault("weights", {})[name] = replace(b, activations=a.activations, arithmetic=how)
            if (a.activations, a.arithmetic.inputs) != (b.activations, b.arithmetic.inputs):
                how = replace(a.arithmetic, inputs=b.arithmetic.inputs)
                sets.setdefault("activations", {})[name] = replace(a, activations=b.activations, arithmetic=how)
    for cause, sides in sets.items():
        yield _of_state(cause, f"{len(sides)} linears as in the checkpoint", partial(_given, sides))
    if "weights" in sets and "activations" in sets:
        both = {name: theirs.linears[name] for name in {*sets["weights"], *sets["activations"]}}
        yield _of_state("weights", "weights and inputs as in the checkpoint", partial(_given, both))
    other = {n: t for n, t in theirs.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape
             and not torch.equal(t.float(), ours.plain[n].float())}  # fmt: skip
    if other:
        said = f"{len(other)} tensors in high precision as in the checkpoint"
        yield _of_state("plain", said, lambda s: replace(s, plain={**s.plain, **other}))


def _kind(name: str, other: str) -> str:
    return "router" if ROUTER.search(name) else "head" if HEAD.search(name) else other


def _given(sides: Mapping[str, Side], state: ModelState) -> ModelState:
    return replace(state, linears={**state.linears, **sides})


def _clipped(sides: Mapping[str, Side], share: float, state: ModelState) -> ModelState:
    return replace(_given(sides, state), clip=share)


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Linears left out together: kinds, those of one name, one expert everywhere, blocks, the first and last block."""
    found = {kind: [n for n in names if re.search(pattern, n)] for kind, pattern in _KINDS.items()}
    blocks: dict[int, list[str]] = {}
    for name in names:
        if match := _BLOCK.search(name):
            blocks.setdefault(int(match[1]), []).append(name)
            alike = ".".join([word for word in name[match.end() :].split(".") if not word.isdigit()][-2:])
            found.setdefault(alike, []).append(name)
            if (expert := re.search(r"\.experts\.(\d+)\.", name)) and int(expert[1]) < _EXPERTS:
                found.setdefault(f"expert {expert[1]}", []).append(name)
    found |= {f"block {i}": some for i, some in blocks.items()}
    if len(blocks) > 2:
        found["the first and last block"] = blocks[min(blocks)] + blocks[max(blocks)]
    return {kind: some for kind, some in found.items() if some and len(some) < len(names)}


def _subtrees(names: Iterable[str]) -> dict[str, list[str]]:
    """Linears below each module inside of a block; an expert is one, its linears are none."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _BLOCK.search(name):
            words = name[match.end() :].split(".")
            for k in range(1, len(words) + ("experts" not in words)):
                found.setdefault(name[: match.end()] + ".".join(words[:k]), []).append(name)
    return found


def _old(ours: Model, model: Model) -> dict[str, Side]:
    """Weights of an earlier step, cast as today's are."""
    sides = {}
    for key, side in ours.linears.items():
        if (old := model.linears.get(key)) is not None and old.weight.shape == side.weight.shape:
            cast = None if side.cast is None else quantize(old.weight, replace(side.cast.spec, scaling="current"))
            sides[key] = replace(side, weight=old.weight, cast=cast)
    return sides


def _stale(ours: Model, name: str, model: Model) -> Iterator[Hypothesis]:
    """Weights of an earlier step: all of them, or some."""
    sides = _old(ours, model)
    plain = {n: t for n, t in model.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape}

    def change(some: Mapping[str, Side], others: Mapping[str, Tensor], state: ModelState) -> ModelState:
        return replace(state, linears={**state.linears, **some}, plain={**state.plain, **others})

    yield _of_state("stale", f"all weights of {name}", partial(change, sides, plain))
    for kind, names in _groups(list(sides)).items():
        inside = {n: t for n, t in plain.items() if kind.startswith("block") and f".{kind[6:]}." in n}
        yield _of_state("stale", f"{kind} of {name}", partial(change, {n: sides[n] for n in names}, inside))
    embeddings = {n: t for n, t in plain.items() if re.search("embed|wte|wpe", n)}
    norms = {n: t for n, t in plain.items() if n not in embeddings}
    heads = {n: side for n, side in sides.items() if HEAD.search(n)}
    for what, some, others in (
        ("embedding", {}, embeddings),
        ("head", heads, {}),
        ("embedding and head", heads, embeddings),
        ("norms and biases", {}, norms),
        ("tensors in high precision", {}, plain),
    ):
        yield _of_state("stale", f"{what} of {name}", partial(change, some, others))
    yield _of_state("stale", f"all linears of {name}", partial(change, sides, {}))


def _of_engines(ours: Model) -> Iterator[Hypothesis]:
    """What engines do, whatever a checkpoint says."""
    casts = {name: side for name, side in ours.linears.items() if side.cast is not None}
    body = {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for what, (spec, inputs) in _CASTS.items():
        if casts:
            weights = {n: _cast(side, spec, side.activations) for n, side in casts.items()}
            yield _of_state("weights", f"weights cast with {what}", partial(_given, weights))
            rows = {n: replace(side, activations=inputs) for n, side in casts.items() if side.activations != inputs}
            yield _of_state("activations", f"inputs cast with {what}", partial(_given, rows))
        else:
            full = {n: _cast(side, spec, inputs) for n, side in body.items()}
            yield _of_state("layers", f"all linears cast with {what}", partial(_given, full))
            alone = {n: _cast(side, spec, None) for n, side in body.items()}
            yield _of_state("layers", f"all weights cast with {what}, and no inputs", partial(_given, alone))
        for (cause, pattern), fmt in product((("head", HEAD), ("router", ROUTER)), (E4M3, E5M2)):
            chosen = {n: s for n, s in ours.linears.items() if pattern.search(n) and s.cast is None}
            some = {n: _cast(s, replace(spec, format=fmt), inputs) for n, s in chosen.items()}
            if some:
                yield _of_state(cause, f"cast with {what}, weights in {fmt.name}", partial(_given, some))
    if not casts:
        return
    bare = {n: Side(side.weight) for n, side in casts.items()}
    yield _of_state("layers", "the engine casts nothing", partial(_given, bare))
    for kind, names in _groups(list(casts)).items():
        yield _of_state("layers", f"{kind} in BF16", partial(_given, {n: bare[n] for n in names}))
    exact = {n: replace(side, activations=None) for n, side in casts.items() if side.activations is not None}
    yield _of_state("activations", "the engine casts no inputs", partial(_given, exact))
    first = next(iter(casts.values()))
    assert first.cast is not None
    left = {n: _cast(s, first.cast.spec, first.activations) for n, s in body.items() if s.cast is None}
    if left:
        yield _of_state("layers", "the linears that training leaves in BF16", partial(_given, left))
    tensor = {n: replace(s, activations=InputCast(PER_TENSOR, False, False)) for n, s in casts.items()}
    for share in _CLIPS:
        said = f"inputs clipped at {share:g} of their largest, as by a scale of other data"
        yield _of_state("activations", said, partial(_clipped, tensor, share))
    for top in _TOPS:
        said = f"inputs clipped at {top:.3g}, as by one scale for all linears"
        yield _of_state("activations", said, lambda s, top=top: replace(_given(tensor, s), top=top))  # type: ignore[misc]
    for coarse, said in ((True, f"weights in {E5M2.name}"), (False, "codes of bf16(master)")):
        specs = {n: s.cast.spec for n, s in casts.items() if s.cast is not None}
        specs = {n: replace(spec, format=E5M2) if coarse else spec for n, spec in specs.items()}
        other = {n: _cast(casts[n], spec, casts[n].activations) for n, spec in specs.items()}
        yield _of_state("weights", said, partial(_given, other))


def _in_part(ours: Model | None, before: Sequence[tuple[str, Model]]) -> Iterator[Hypothesis]:
    """What holds from a place on, in some linears, or beyond a limit: what holds everywhere does not explain."""
    for by in (1, -1, 2, -2):
        yield _one("shift", f"the list moved by {by:+d} from a place on", shift=by, behind=True)
    if ours is None:
        return
    for top in _TOPS:
        said = f"keys and values in {E4M3.name}, clipped at {top:.3g}"
        yield _of_state("kv-cache", said, partial(replace, cache=E4M3, cache_top=top))
    casts = {name: side for name, side in ours.linears.items() if side.cast is not None}
    ways = [("stale", f"of {name}", _old(ours, model)) for name, model in before]
    ways += [("layers", "in BF16", {n: Side(side.weight) for n, side in casts.items()})]
    for cause, said, sides in ways:
        for part, names in _subtrees(sides).items():
            yield _of_state(cause, f"{part} {said}", partial(_given, {n: sides[n] for n in names}))
    body = casts or {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for kind, names in _groups(list(body)).items():
        for what, (spec, inputs) in () if "block" in kind else _CASTS.items():
            full = {n: _cast(body[n], spec, body[n].activations if casts else inputs) for n in names}
            yield _of_state("weights" if casts else "layers", f"{kind} cast with {what}", partial(_given, full))
            if casts:
                rows = {n: replace(body[n], activations=inputs) for n in names}
                yield _of_state("activations", f"inputs of {kind} cast with {what}", partial(_given, rows))


def _cast(side: Side, spec: QuantizationSpec, inputs: InputCast | None) -> Side:
    cast = quantize(side.weight.bfloat16(), replace(spec, scaling="current"))
    return Side(side.weight, cast, inputs, side.layer, arithmetic=EXACT)

"""Why rollout and training give other log-probabilities: the measured KL, split into causes that sum to it.

Attribution is by experiment. A twin computes what training's log-probabilities would be with one cause switched on; the
cause that brings them nearest to the rollout's is kept, and the next one is tried on top of it. A part is the KL that
its cause takes away, so parts and rest sum to the whole. Without a model only what the dump shows is tried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.base.text import columns, grouped
from ottava.numerics.scaling import PER_TENSOR
from ottava.serving.rollout import Equality, Rollout, Sampler, batches, certify
from ottava.serving.sides import Model, Side
from ottava.serving.suspects import Guess, Hypothesis, groups, hypotheses, in_part, nats, temperature
from ottava.serving.twin import ModelState, Twin

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
_OF_LISTS = (*_LISTS, "scaled", "trainer")
"""What they do and what is measured share a list, so one looks like the other by chance."""
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
_ALIKE, _CHANCE = 0.5, 8.0
"""Least cosine of what a cause does and what is measured, and least number of its standard errors under chance."""
_INEXACT = 0.2
"""Share of a KL that a cause with a fitted number may leave."""
_ROUGH, _FEW = 0.5, 0.25
"""The same of a cast, whose codes move with its scale's last digits; and the least share of tokens where it holds."""
_OVERLAP = 8
"""Least tokens of a list that must agree with a list elsewhere."""
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
        told = {"schema_version": SCHEMA_VERSION, "written_by": "ottava parity", "sentence": self.headline}
        return {**told, "first": first, "fp8_share": self.fp8, **asdict(self)}

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
    gap, parts, part, unwritten = lab.gap(state), list[Share](), False, ""
    done = torch.zeros_like(gap, dtype=torch.bool)  # sequences that have a cause of their own
    while _kl(gap) > (max(lab.rounding(state)[0], _SHARE * lab.whole) if parts else 0.0) and len(parts) < _ROUNDS:
        best = min((x for one in tried for x in lab.tries(state, one, gap, done, part)), key=_left, default=None)
        if not part and (best is None or _left(best) > max(lab.noise, _EXPLAINED * _kl(gap))):
            tried, part = [*tried, *in_part(found, ours, before)], True
            continue
        if best is not None and best.cause == "trainer":  # a list that is wrong in some sequences needs no such cause
            some = [one for one in tried if one.cause in _LISTS]
            lists = [x for one in some for x in lab.tries(state, one, gap, done, True)]
            best = min((x for x in lists if _left(x) <= lab.noise), key=_left, default=best)
        alike = best is not None and best.cause not in _OF_LISTS and _real(gap, best.gap, lab.whole, alike=True)
        if best is None or not (alike or _real(gap, best.gap, lab.whole, part=part)):
            break
        if lab.shared and _kl(gap) <= lab.noise and _left(best) > 0.5 * _kl(gap):
            break  # without casts nothing depends on what runs together, so leaving them out is nearer to any engine
        if best.cause in _REST:
            unwritten = best.said
            break
        said = best.said
        if bool((best.where | done).all()):
            state = best.setting
        else:
            done, count = done | best.where, sum(bool(one.any()) for one in best.where.split(found.sequences))
            said = f"{said}, in {count} of {len(found.sequences)} sequences"
        parts.append(Share(best.cause, _kl(gap) - _left(best), said))
        gap = best.gap
    rest = _kl(gap)
    noise, said = lab.rounding(state)
    parts.append(Share(lab.rest(rest, 0.0 if unwritten else noise, theirs, parts), rest, unwritten or said))
    difference = found.recomputed - found.rollout
    return Attribution(
        lab.whole,
        len(difference),
        float(difference.abs().mean()),
        tuple(
            Share(cause, sum(one.kl for one in some), "; ".join(dict.fromkeys(one.said for one in some)))
            for cause, some in grouped((one.cause, one) for one in parts).items()
        ),
        certify(found),
        found.layers,
        tuple(dict.fromkeys(one.cause for one in tried)),
        lab.notes,
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


def _real(before: Tensor, after: Tensor, whole: float, *, part: bool = False, alike: bool = False) -> bool:
    """Whether a cause takes away enough, and more than chance does.

    It compares square roots, because one token may be half of a KL. Tokens that the cause leaves as they are do not
    count, unless it was chosen for those where it holds (`part`). A few tokens that take other experts have most of a
    KL and spoil its standard error; `alike` also takes a cause whose differences point where the measured ones do.
    Among shuffled tokens their cosine has a standard error of 1 / sqrt(tokens), whatever the tails.
    """
    one, two, counts = nats(before), nats(after), (before != after) | part
    if not float((one - two).mean()) > _SHARE * whole:
        return False
    gain, did, here = (one.sqrt() - two.sqrt())[counts], before - after, before != after
    error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    if float(gain.mean()) > _SIGMA * error:
        return True
    cosine = float(torch.cosine_similarity(before[here], did[here], 0))
    return alike and cosine > max(_ALIKE, _CHANCE / math.sqrt(int(here.sum())))


def _kl(gap: Tensor) -> float:
    return float(nats(gap).mean())


def _gap(rollout: Tensor, other: Tensor) -> Tensor:
    return (other.double() - rollout.double()).clamp(-_CAP, _CAP)


def kl_of(rollout: Tensor, other: Tensor) -> Tensor:
    """Each token's exp(d) - 1 - d, d = other - rollout, held at 5 nats; its mean estimates KL(rollout || other).

    Example:
        >>> kl_of(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.], dtype=torch.float64)
    """
    return nats(_gap(rollout, other))


class _Trial(NamedTuple):
    """What an experiment found."""

    cause: str
    setting: Guess
    said: str
    gap: Tensor
    """Each token's difference under the setting, where it holds."""
    where: Tensor
    """bool: tokens where it holds."""


def _left(one: _Trial) -> float:
    return _kl(one.gap)


class _Lab:
    """Runs experiments on one dump."""

    def __init__(self, found: Rollout, ours: Model | None, temperature: float) -> None:
        self.found = found
        self.whole = float(kl_of(found.rollout, found.recomputed).mean())
        self.notes: tuple[str, ...] = ()
        self.shared = False
        """Whether the scale of inputs is that of all that runs together."""
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
        if not bool(self._own.isfinite().all()):
            raise ValueError("parity: the checkpoint gives log-probabilities that are not finite; look for a NaN in it")
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
        own = self._logp(setting)
        away = float(kl_of(own, self._logp(halves)).mean())
        said = f"BF16 sums over two ranks are {away:.3g} nats away"
        inputs = (side.activations for side in setting.state.linears.values() if side.activations is not None)
        if any(cast.granularity == PER_TENSOR and not cast.static for cast in inputs):
            apart = float(kl_of(own, self._logp(setting, alone=True)).mean())
            if apart > away:  # the scale of all inputs is that of the sequences that run together
                self.shared = True
                away, said = apart, f"sequences that run alone are {apart:.3g} nats away"
        return _NOISE * away, said

    def _fit(self) -> None:
        """Takes training's temperature from what it recomputed, if another one than 1 explains it."""

        def away(setting: Guess) -> float:
            return float(kl_of(self.found.recomputed, self._logp(setting)).mean())

        warm, said = next(temperature().settings(self.start, away), (self.start, ""))
        if (here := away(self.start)) > self.noise and away(warm) < _EXPLAINED * here:
            self.start, self._own = warm, self._logp(warm)
            self.notes = (f"training's own log-probabilities are those of {said}",)

    def _fit_layers(self) -> None:
        """Takes linears that training leaves in BF16, whatever its recipe says, from what it recomputed."""
        assert self.ours is not None
        casts = {name: Side(side.weight) for name, side in self.ours.casts.items()}
        here = _gap(self.found.recomputed, self._own)
        tried = []
        for kind, names in groups(list(casts)).items():
            other = replace(self.ours, linears={**self.ours.linears, **{n: casts[n] for n in names}})
            setting = replace(self.start, state=ModelState.of(other))
            tried.append((kind, other, setting, own := self._logp(setting), _gap(self.found.recomputed, own)))
        best = min(tried, key=lambda x: _kl(x[4]), default=None)
        if best is None or not _kl(best[4]) < 0.5 * _kl(here) or not _real(here, best[4], _kl(here)):
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

    def tries(self, setting: Guess, one: Hypothesis, gap: Tensor, done: Tensor, part: bool) -> Iterator[_Trial]:
        """The settings of a hypothesis, and each token's difference under them.

        They hold everywhere but in sequences that are `done`; with `part`, where they halve the KL of a sequence.
        """

        def under(other: Guess, *, part: bool = part) -> tuple[Tensor, Tensor]:
            after, where = self.gap(other), ~done
            if part:
                both = zip(nats(after).split(self.found.sequences), nats(gap).split(self.found.sequences), strict=True)
                where = where & torch.cat([(a.mean() < 0.5 * b.mean()).expand(len(a)) for a, b in both])
            return torch.where(where, after, gap), where

        def found(trial: _Trial) -> bool:
            """Whether a fitted number explains most of the KL where it holds, and holds in enough tokens."""
            here = trial.where & (trial.gap != gap)
            if not one.fitted or float((here | done).double().mean()) < _FEW:
                return not one.fitted
            left, before = (float(nats(x)[here].mean()) for x in (trial.gap, gap))
            return left <= max(self.noise, (_ROUGH if one.cause in FP8 else _INEXACT) * before)

        for changed, said in one.settings(setting, lambda other: _kl(under(other)[0])):
            if changed.trainer and not setting.trainer and _kl(gap) <= self.noise:
                continue  # one rounding less is no cause
            for some in (False, True) if part else (False,):
                if found(trial := _Trial(one.cause, changed, said, *under(changed, part=some))):
                    yield trial
            if self._true and changed.state is not setting.state and not setting.trainer:
                # Sums in another order move codes, in training's own numbers, too: the twin's have one such way less.
                after, where = under(alone := replace(changed, trainer=True))
                trial = _Trial(one.cause, alone, said, after, where)
                if _real(torch.where(done, gap, self._plain(setting)), after, self.whole, alike=True) and found(trial):
                    yield trial

    def gap(self, setting: Guess) -> Tensor:
        """Each token's difference between training's log-probabilities under a setting and the rollout's."""
        return _gap(self.found.rollout, self._predicted(setting))

    def _plain(self, setting: Guess) -> Tensor:
        """The gap to what the twin alone says, kept, since each hypothesis asks for it."""
        if self._base is None or self._base[0] is not setting:
            self._base = setting, self.gap(replace(setting, trainer=True))
        return self._base[1]

    def _predicted(self, setting: Guess) -> Tensor:
        """fp32 (N,): the rollout's log-probabilities, if the setting is true."""
        values = self.found.recomputed
        if setting.state is not None:
            moved = setting.state is not self.start.state or setting.sampler != self.start.sampler
            own = self._logp(setting) if moved else self._own
            values = own if setting.trainer else values + (own - self._own)
        values = values / setting.scale + setting.offset
        if setting.matched:
            values = _matched(values, self.found.rollout, self.found.sequences, setting.matched == "lists")
        if setting.raised:
            values = torch.maximum(values, self.found.rollout)
        if setting.shift:
            parts = zip(*(one.split(self.found.sequences) for one in (values, self.found.rollout)), strict=True)
            values = torch.cat([_shifted(part, setting.shift, told, setting.behind) for part, told in parts])
        if setting.padded is not None:
            values = torch.where(self.found.rollout == setting.padded, setting.padded, values)
        return values

    def _logp(self, setting: Guess, alone: bool = False) -> Tensor:
        """fp32 (N,): log p of the compared tokens by the twin. alone: each sequence runs as a batch of its own."""
        assert setting.state is not None
        state, found, made = setting.state, [], []
        kept = self._kept[1] if self._kept is not None and self._kept[0] is state and not alone else None
        if kept is None and (key := id(state.config)) not in self._twins:
            self._twins[key] = Twin(state, torch.bfloat16)
        for i, (ids, at, routes) in enumerate(batches(self.found, state.config, 1) if alone else self._batches):
            if kept is None:
                given = routes if state.replay else None
                prompts = torch.full((len(ids),), ids.shape[1]).scatter_reduce(0, *at, "amin")
                made.append(self._twins[key].logits(state, ids, given, prompts)[at[0], at[1] - 1])
            logits = made[-1] if kept is None else kept[i]
            found.append(setting.sampler.log_probabilities(logits, ids, at))
        if kept is None and not alone:
            self._kept = state, made
        return torch.cat(found)


def _shifted(values: Tensor, by: int, told: Tensor, behind: bool) -> Tensor:
    """Moves a list by some places, and keeps what was told at its ends. `behind`: from the place on that fits best."""
    if len(values) < abs(by) + _OVERLAP:  # by chance the rest fits somewhere
        return values
    made = torch.cat((told[:by], values[:-by]) if by > 0 else (values[-by:], told[by:]))
    if not behind:
        return made
    known = slice(max(by, 0), len(values) + min(by, 0))  # the other places keep the rollout's own numbers
    # of all tokens from a place on
    before, after = (kl_of(told, one)[known].flip(0).cumsum(0).flip(0) for one in (values, made))
    if not len(gain := (before - after)[: 1 - _OVERLAP]):
        return values
    place = int(gain.argmax())
    found = bool(after[place] < _EXPLAINED * before[place])
    place += known.start
    return torch.cat((values[:place], made[place:])) if found else values


def _matched(values: Tensor, told: Tensor, sizes: Sequence[int], lists: bool) -> Tensor:
    """Each sequence's list moved by the number of places that fits it best, or another sequence's list in its place."""
    own, theirs = values.split(sizes), told.split(sizes)
    made = []
    for one, other in zip(own, theirs, strict=True):
        size = len(one)
        if lists:
            tries = [x for x in own if len(x) == size >= _OVERLAP]  # a short list is near to some other by chance
        else:
            tries = [_shifted(one, by, other, False) for by in range(_OVERLAP - size, size - _OVERLAP + 1) if by]
        here = nats(_gap(other, one)).mean()
        near = min(tries, key=lambda x: float(nats(_gap(other, x)).mean()), default=one)
        made.append(near if nats(_gap(other, near)).sum() <= _EXPLAINED * here * int((near != other).sum()) else one)
    return torch.cat(made)

"""The shadow step: the gradient of a captured step with casts and without: same weights, batch and random state.

error = |g_casts - g| / |g|                 how far the casts move the gradient
noise = |g_casts - g| / |sigma|             sigma: the gradient of one half of the samples less that of the other,
                                            over all samples' count: how far the batch itself leaves g uncertain
bias  = <g_casts - g, g> / |g|^2            the part that does not average out
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ottava.experiments.casts import Casts, with_sites
from ottava.experiments.handmade import Exact, derivatives
from ottava.experiments.program import AS_IT_RAN, Gradients, Pass, Player, Program, Way
from ottava.experiments.replay import untouched
from ottava.experiments.snapshot import random_now
from ottava.weights.parameter import local

_SHOWN = 5
_COPIED = 1 << 26
"""Elements of weights that are copied on their device; more of them go to the CPU."""
_FLOOR = 1e-3
"""Parameters whose gradient is a smaller part of the whole are not ranked by their noise."""


@contextmanager
def nothing_changes(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restores all that a run of these models changes: see `replay.untouched`; and random generators."""
    with ExitStack() as stack:
        stack.callback(random_now())
        for model in models:
            stack.enter_context(untouched(model))
        yield


def parameters_of(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that get gradients, each once."""
    return [p for p in {id(p): p for m in models for p in m.parameters()}.values() if p.requires_grad]


class Shadow:
    """A shadow step of a program, made between the last backward and the optimizer's step.

    Args:
        program: what the step has computed.
        casts: what to turn off, or on; None: of layers, there are none.
        parameters: of the models.
        script: whether the script may convert by itself: then its conversions are looked for, and turned off.
    Raises:
        NotReplayableError: the program cannot run again.
    """

    def __init__(
        self, program: Program, casts: Casts | None, parameters: Sequence[nn.Parameter], *, script: bool = False
    ) -> None:
        self.program, self.casts, self.parameters, self.script = program, casts, list(parameters), script
        self.player = Player(program, parameters)
        self.ran = [p.grad for p in parameters]
        few = sum(p.numel() for p in parameters) <= _COPIED
        self.before = [local(p.detach()).to(p.device if few else "cpu", copy=True) for p in parameters]
        self.ratio = scaler_factor(program)
        self.tail = self.player.tail
        """Whether losses can be repeated: a shadow step knows better."""
        self.began = time.perf_counter(), time.process_time()

    def facts(self, name_of: Callable[[Tensor], str]) -> dict[str, Any] | None:
        """Runs it; the facts of its line in experiments.jsonl. None: nothing casts, nor can be simulated."""
        real = self.casts is not None and self.casts.mode == "real"
        seen = Exact((), libraries=False)
        way = AS_IT_RAN if self.casts is None else self.casts.with_casts if real else self.casts.without
        ours = self._seen(way, seen, halves=not real)
        tail = self.player.tail and self._same_losses(ours)
        if self.player.tail and not tail:
            ours = self.player.run(way, tail=False, halves=not real)
        self.tail, self.sites = tail, seen.sites
        if seen.sites:
            self.casts, real = with_sites(self.casts, seen.sites), True
        if self.casts is None:
            return None
        theirs = self.player.run(self.casts.without if real else self.casts.with_casts, tail=tail, halves=real)
        cast, exact = (ours, theirs) if real else (theirs, ours)
        self.exact = exact.gradients
        noise = exact.noise if exact.noise is not None else self._noise_of_rows(exact)
        replay_error = self._replay_error(ours.gradients)
        summary = compared(cast.gradients, exact.gradients, noise, self.parameters, name_of)
        summary["norm"] = summary["norm"] / self.ratio
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        # the rounding of a product with a factor, as clipping multiplies
        rounding = max((torch.finfo(g.dtype).eps for g in self.ran if g is not None), default=0.0)
        reproduces = replay_error is not None and replay_error <= rounding
        return {
            "mode": self.casts.mode,
            "recipe": self.casts.recipe,
            "reproduces": reproduces,
            "replay_error": replay_error,
            **({"sites": seen.sites, **self._derived(seen)} if seen.sites else {}),
            # their average over the ranks is that of the gradients
            **({"sketch": sketch(ours.gradients), "arrived": sketch(self.ran)} if ranks else {}),
            "vanished": self._vanished(ours.gradients),
            "muted": [
                name_of(p)
                for p, a, b in zip(self.parameters, cast.gradients, exact.gradients, strict=True)
                if _none(a) and not _none(b)
            ][:_SILENT],
            "silent": [name_of(p) for p, g in zip(self.parameters, exact.gradients, strict=True) if _none(g)][:_SILENT],
            "tail": "replayed" if tail else "recorded",
            **({} if tail else {"why_recorded": self.program.broken or "the repeated loss has other bits"}),
            "loss": self.loss_of(cast) if cast.losses and tail else self.loss,
            "loss_without": self.loss_of(exact) if tail else None,
            **summary,
            "seconds": time.perf_counter() - self.began[0],
            "cpu_seconds": time.process_time() - self.began[1],
        }

    def passed(self) -> dict[str, Any]:
        """What the optimizer gets of the backward, in a step in which no layer casts."""
        ours = self.player.run(AS_IT_RAN, tail=self.player.tail)
        tail = self.player.tail and self._same_losses(ours)
        if self.player.tail and not tail:
            ours = self.player.run(AS_IT_RAN, tail=False)
        error, vanished = self._replay_error(ours.gradients), self._vanished(ours.gradients)
        return {"replay_error": error, "vanished": vanished, "tail": "replayed" if tail else "recorded"}

    def _seen(self, way: Way, seen: Exact, *, halves: bool) -> Pass:
        """The step as it ran, with the sites at which the script converts."""
        if self.script:
            try:
                return self.player.run(replace(way, mode=seen), tail=self.player.tail, halves=halves)
            except Exception:  # a kind of tensor that no mode may see
                seen.sites.clear()
        return self.player.run(way, tail=self.player.tail, halves=halves)

    @property
    def loss(self) -> float:
        """The loss of the step as it ran."""
        return _mean([float(x) / self.ratio for x in self._values()]) or 0.0

    def loss_of(self, found: Pass) -> float | None:
        """The loss of a pass."""
        return _mean([float(x) / self.ratio for x in found.losses])

    def loss_now(self) -> float | None:
        """The loss of the same batch, as it ran, under the weights of now."""
        return _mean([float(x) / self.ratio for x in self.player.losses(AS_IT_RAN)])

    @contextmanager
    def scaled(self, part: float) -> Iterator[None]:
        """The weights after a part, or a multiple, of the step that was made since."""
        with ExitStack() as stack:
            for p, before in zip(self.parameters, self.before, strict=True):
                now = local(p.data)
                stack.callback(now.copy_, now.clone())
                now.lerp_(before.to(now.device), 1 - part)
            yield

    def _values(self) -> list[Tensor]:
        return [entry.value.value() for entry in self.program.backwards]

    def _same_losses(self, ours: Pass) -> bool:
        """Whether the repeated losses have the bits of the run's."""
        values = self._values()
        return len(ours.losses) == len(values) and all(
            torch.equal(a, b) or bool(a.isnan().all() and b.isnan().all())
            for a, b in zip(ours.losses, values, strict=True)
        )

    def _replay_error(self, found: Gradients) -> float | None:
        """|f g - p.grad| / |p.grad| for the factor f of clipping, scaling and averaging that fits; None: no gradient.

        Gradients of several processes are averages, which one process cannot repeat."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        pairs = [(g, local(r)) for g, r in zip(found, self.ran, strict=True) if g is not None and r is not None]
        if not pairs:
            return None
        if all(torch.equal(local(g), r) for g, r in pairs):
            return 0.0
        dots = [(_dot(local(g), r), _dot(local(g), local(g)), _dot(r, r)) for g, r in pairs]
        across, own, ran = (math.fsum(column) for column in zip(*dots, strict=True))
        if not (own > 0 and ran > 0 and math.isfinite(across + own + ran)):
            return None
        factor = across / own
        left = math.fsum(_square(local(g).float() * factor - r.float()) for g, r in pairs)
        return math.sqrt(left / ran)

    def _derived(self, seen: Exact) -> dict[str, Any]:
        """How far handwritten backwards around the conversions are from the derivative of their forwards."""
        assert self.casts is not None
        functions: dict[str, str] = {}
        with derivatives(seen.codes, functions):
            own = self.player.run(self.casts.without, tail=self.tail).gradients
        named = [name for name, why in functions.items() if not why]
        error = compared(self.exact, own, None, self.parameters, lambda _: "")["error"] if named else None
        return {} if error is None else {"derivative": error, "functions": named}

    def _vanished(self, found: Gradients) -> float | None:
        """The share of elements whose gradient is zero at the optimizer and was not so behind the backward: no average
        over ranks does that, a cast on the way may."""
        pairs = [(local(g), local(r)) for g, r in zip(found, self.ran, strict=True) if g is not None and r is not None]
        pairs = [(g, r) for g, r in pairs if g.shape == r.shape]
        was = sum(int((g != 0).sum()) for g, _ in pairs)
        return sum(int(((g != 0) & (r == 0)).sum()) for g, r in pairs) / was if was else None

    def _noise_of_rows(self, exact: Pass) -> Gradients | None:
        """The noise from the first half of every forward's samples, where outputs have no rows: a model that returns
        its loss."""
        samples = min((f.samples for f in self.program.forwards), default=0)
        if samples < 2 or not self.tail:
            return None
        assert self.casts is not None
        way = self.casts.without
        half = self.player.run(way, tail=True, rows=slice(0, samples // 2))
        one, all_of_it = _mean([float(x) for x in half.losses]), _mean([float(x) for x in exact.losses])
        if one is None or all_of_it is None:
            return None
        factor = 2.0 if abs(one - all_of_it / 2) < abs(one - all_of_it) else 1.0  # the loss is a sum, or a mean
        pairs = zip(half.gradients, exact.gradients, strict=True)
        return [None if a is None or g is None else factor * a - g for a, g in pairs]


def compared(
    cast: Gradients,
    exact: Gradients,
    noise: Gradients | None,
    parameters: Sequence[Tensor],
    name_of: Callable[[Tensor], str],
) -> dict[str, Any]:
    """error, noise, bias, norm and the worst parameters of two gradients.

    lost: of the elements whose exact gradient is not zero, the share whose gradient is zero with casts."""
    rows: list[tuple[Tensor, list[float]]] = []
    counts = torch.zeros(2, dtype=torch.float64)
    for i, (a, b) in enumerate(zip(cast, exact, strict=True)):
        if a is None or b is None:
            continue
        g, difference = local(b).float(), local(a).float() - local(b).float()
        counts += torch.stack([((g != 0) & (local(a) == 0)).sum(), (g != 0).sum()]).cpu()
        spread = None if noise is None or noise[i] is None else noise[i]
        of_noise = math.nan if spread is None else _square(local(spread))
        rows.append((parameters[i], [_square(difference), _square(g), _dot(difference, g), of_noise]))
    error2, norm2, dot = (math.fsum(numbers[k] for _, numbers in rows) for k in range(3))
    known = [numbers[3] for _, numbers in rows if not math.isnan(numbers[3])]
    whole = math.fsum(known) if known else math.nan

    def entry(parameter: Tensor, numbers: list[float]) -> dict[str, Any]:
        e, g, _, n = numbers
        return {"parameter": name_of(parameter), "error": _root(e, g), "noise": _root(e, n), "share": _over(e, error2)}

    def badness(row: tuple[Tensor, list[float]]) -> float:
        e, g, _, n = row[1]
        if not math.isfinite(e):
            return math.inf
        ranked = row[0].numel() > 1 and g > _FLOOR**2 * norm2 and n > 0
        return e / n if ranked else (0.0 if known else _over(e, error2) or 0.0)

    worst = sorted(rows, key=badness, reverse=True)[:_SHOWN]
    return {
        "error": _root(error2, norm2),
        "noise": _root(error2, whole),
        "bias": _over(dot, norm2),
        "lost": _over(*counts.tolist()),
        "norm": math.sqrt(norm2) if norm2 >= 0 else math.nan,
        "worst": [entry(*row) for row in worst],
    }


def sketch(gradients: Gradients) -> list[float]:
    """256 sums whose distances are about those of the gradients: each element with a fixed random sign.

    Example:
        >>> g = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        >>> 0.8 < math.hypot(*sketch([g])) / float(g.norm()) < 1.2
        True
    """
    total = torch.zeros(_SKETCH, dtype=torch.float64)
    for i, g in enumerate(gradients):
        if g is None or not local(g).numel():
            continue
        flat = local(g).detach().reshape(-1)
        flat = flat[:: -(-flat.numel() // _SKETCHED)].cpu().double()
        signs = torch.randint(0, 2, (len(flat),), generator=torch.Generator().manual_seed(i)) * 2 - 1
        total += nn.functional.pad(flat * signs, (0, -len(flat) % _SKETCH)).reshape(-1, _SKETCH).sum(0)
    return [float(f"{x:.5g}") for x in total.tolist()]


_SKETCH, _SKETCHED, _SILENT = 256, 1 << 16, 512


def _none(g: Tensor | None) -> bool:
    return g is None or not bool(local(g).any())


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x.double() * y.double()).sum())


def _over(a: float, b: float) -> float | None:
    return a / b if b > 0 and math.isfinite(a / b) else None


def _root(a: float, b: float) -> float | None:
    ratio = _over(a, b)
    return None if ratio is None else math.sqrt(ratio)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def scaler_factor(program: Program) -> float:
    """The factor of a GradScaler."""
    for entry in program.backwards:
        root, loss = float(entry.value.value()), float(entry.loss.value())
        if math.isfinite(root / loss if loss else math.nan):
            return root / loss
    return 1.0

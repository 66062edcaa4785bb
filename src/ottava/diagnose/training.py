"""Facts about the training around the casts: parameters and their updates, layers and experts, scales, call sites.

Rules over steps, parameters and layers name them; see `facts`. What a watch did not record is unknown, never zero.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing, Values
from ottava.diagnose.rows import AnyRows, CastRows, Context
from ottava.measure.layer_names import layer_kind, starred
from ottava.record.reader import number_of

_ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "leaky_relu", "mish", "elu", "hardswish")
_EXPERT = re.compile(r"(.*expert[^.]*)\.(\d+)(\..*)?|(.*expert.*)\.(\d+)()")
MEASURED = ("ratio", "still", "gradient", "weight", "spread", "written")
"""What a watch measures of each parameter at a look."""
_MOVED = 0.25  # octaves of the amax that a live scale must follow


class ParameterRows(AnyRows):
    """One row per parameter and measured update; one without numbers for a parameter that never had an update."""

    kind = "parameters"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.about = {
            str(p.get("name")): p for p in context.run.manifest.get("parameters") or () if isinstance(p, dict)
        }
        rows: list[tuple[Any, ...]] = []
        for event in context.run.training:
            if event.get("kind") == "updates":
                names = event.get("parameters") or []
                columns = [event.get(name) or [math.nan] * len(names) for name in MEASURED]
                rows += [
                    (float(event["step"]), str(n), *map(number_of, v)) for n, *v in zip(names, *columns, strict=False)
                ]
        seen = {row[1] for row in rows}
        rows += [(math.nan, name, *[math.nan] * len(MEASURED)) for name in self.about if name not in seen]
        self.rows = rows

    @property
    def count(self) -> int:
        return len(self.rows)

    def steps(self) -> Values:
        """The step of each row; NaN for a parameter that never had an update."""
        return np.array([row[0] for row in self.rows], dtype=np.float64)

    def number(self, name: str) -> Values:
        """A column of the updates."""
        at = 2 + MEASURED.index(name)
        return np.array([row[at] for row in self.rows], dtype=np.float64)

    def beta(self, index: int) -> Values:
        """A beta of each parameter's optimizer; NaN if it has none."""
        betas = [str(word).split() for word in self.word("betas")]
        return np.array([number_of(pair[index]) if len(pair) == 2 else math.nan for pair in betas])

    def beside_namesakes(self) -> Values:
        """Each weight's root mean square over the median of those with its name in other blocks, at the same step."""
        groups: dict[tuple[float, str], list[float]] = {}
        keys = [(row[0], starred(row[1])) for row in self.rows]
        weights = self.number("weight")
        for (step, (name, number)), weight in zip(keys, weights, strict=True):
            if number is not None:
                groups.setdefault((step, name), []).append(weight)
        usual = {key: float(np.median(found)) for key, found in groups.items() if len(found) > 2}
        at = [usual.get((step, name), math.nan) for step, (name, _) in keys]
        with np.errstate(all="ignore"):
            return np.where(np.array(at) > 0, weights / np.array(at), np.nan)

    def word(self, name: str) -> Values:
        """A fact of the parameter: of the manifest, or of the optimizer's settings."""
        if not self.about:
            raise Missing("the parameters in watch.json")
        values = []
        for row in self.rows:
            about = self.about.get(row[1]) or {}
            held = about.get("held") or {}
            value = (
                held.get(name.removesuffix("_dtype"), "")
                if name.endswith("_dtype")
                else about.get(name, held.get(name, ""))
            )
            values.append(" ".join(map(str, value)) if isinstance(value, list) else value)
        return np.array([str(v) if isinstance(v, bool) else v for v in values], dtype=object)

    def held(self) -> Values:
        """ "yes", "no", or "frozen"."""
        words = []
        for row in self.rows:
            about = self.about.get(row[1]) or {}
            words.append("frozen" if not about.get("trains") else "yes" if about.get("held") else "no")
        return np.array(words, dtype=object)

    def dims(self) -> Values:
        """The dimensions of each parameter; NaN if unknown."""
        shapes = [(self.about.get(row[1]) or {}).get("shape") for row in self.rows]
        return np.array([math.nan if shape is None else float(len(shape)) for shape in shapes])

    def beside(self) -> Values:
        """Each update over its weight, divided by the median of the matrices in the same step."""
        matrices: dict[float, list[float]] = {}
        for row, dims in zip(self.rows, self.dims(), strict=True):
            if math.isfinite(row[2]) and row[5] > 0 and not dims < 2:
                matrices.setdefault(row[0], []).append(row[2])
        usual = {step: max(float(np.median(ratios)), 1e-12) for step, ratios in matrices.items()}
        return np.array([row[2] / usual.get(row[0], math.nan) for row in self.rows])

    def moved(self) -> Values:
        """ "no" for a parameter without a gradient at every look, where others have one."""
        seen = {row[1] for row in self.rows if math.isfinite(row[0])}
        graded = {name for name, about in self.about.items() if (about.get("held") or {}).get("gradient", "?")}
        return np.array(["no" if seen and row[1] not in seen | graded else "yes" for row in self.rows], dtype=object)

    def ended(self) -> Values:
        """ "yes" for a parameter with updates at every look up to one, and at none of the last third."""
        looks = sorted({row[0] for row in self.rows if math.isfinite(row[0])})
        seen: dict[str, set[float]] = {}
        for row in self.rows:
            seen.setdefault(row[1], set()).add(row[0])
        late = min(2 * len(looks) // 3, len(looks) - 3)
        ended = {
            name
            for name, steps in seen.items()
            if len(looks) > 4 and max(steps) < looks[late] and steps == {step for step in looks if step <= max(steps)}
        }
        return np.array(["yes" if row[1] in ended else "no" for row in self.rows], dtype=object)

    def trains_before(self) -> Values:
        """ "yes" if a frozen parameter's namesake in an earlier block trains: people freeze first blocks, or all."""
        first: dict[str, int] = {}
        for name, about in self.about.items():
            plain, number = starred(name)
            if about.get("trains") and number is not None:
                first[plain] = min(number, first.get(plain, number))
        words = []
        for row in self.rows:
            plain, number = starred(row[1])
            frozen = number is not None and not (self.about.get(row[1]) or {}).get("trains")
            words.append("yes" if frozen and first.get(plain, math.inf) < (number or 0) else "no")
        return np.array(words, dtype=object)

    def frozen_late(self) -> Values:
        """ "yes" for a matrix of no block that is frozen, where most parameters and one before it train."""
        sizes = {name: math.prod(about.get("shape") or [0]) for name, about in self.about.items()}
        trains = [name for name, about in self.about.items() if about.get("trains")]
        most = sum(sizes[name] for name in trains) > 0.5 * sum(sizes.values())
        late, before = set[str](), False
        for name, about in self.about.items():
            matrix = name.endswith("weight") and len(about.get("shape") or ()) == 2 and starred(name)[1] is None
            before |= name in trains and starred(name)[1] is not None
            if most and before and matrix and not about.get("trains"):
                late.add(name)
        return np.array(["yes" if row[1] in late else "no" for row in self.rows], dtype=object)

    def layers(self) -> list[str]:
        """The layer of every row."""
        return [re.sub(r"\.(weight|bias)$", "", row[1]) for row in self.rows]

    def series(self) -> Any:
        """One series per parameter."""
        places: dict[str, list[int]] = {}
        for i, row in enumerate(self.rows):
            places.setdefault(row[1], []).append(i)
        yield from (np.array(sorted(rows, key=lambda i: self.rows[i][0])) for rows in places.values())


class LayerRows(AnyRows):
    """One row per layer that the watch knows."""

    kind = "layers"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        layers = context.run.manifest.get("layers") or ()
        self.rows = [layer for layer in layers if isinstance(layer, dict) and layer.get("name")]

    @property
    def count(self) -> int:
        return len(self.rows)

    def word(self, name: str) -> Values:
        """A field of the manifest's layer, as a word."""
        return np.array([str(layer.get(name, "")) for layer in self.rows], dtype=object)

    def kinds(self) -> Values:
        """The part of a transformer that each is."""
        return np.array([layer_kind(str(layer["name"])) for layer in self.rows], dtype=object)

    def casts(self) -> Values:
        """Whether ottava casts the operands of each layer: "yes" or "no"."""
        real = {slot.layer for slot in self.context.run.table().slots() if slot.source != "hook"}
        return np.array(["yes" if str(layer["name"]) in real else "no" for layer in self.rows], dtype=object)

    def siblings_cast_pct(self) -> Values:
        """Share of the layers with the same name in other blocks that are cast [%]."""
        names = [starred(str(layer["name"]))[0] for layer in self.rows]
        cast = self.value("casts") == "yes"
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            if not name.endswith("*"):  # the layers of a Sequential are no namesakes
                groups.setdefault(name, []).append(i)
        values = np.full(self.count, np.nan)
        for members in groups.values():
            for i in members:
                others = [j for j in members if j != i]
                values[i] = 100 * float(np.mean(cast[others])) if others else np.nan
        return values

    def expert_share_pct(self) -> Values:
        """Rows of the expert's input over those of the mean expert beside it, in the later half of the looks [%]."""
        table = self.context.run.table().where(tensor="input", direction="row")
        steps = sorted(set(table["step"]))
        late = set(steps[len(steps) // 2 :])
        rows: dict[str, float] = {}
        for layer, step, n, shape in zip(
            table["layer"], table["step"], table.tallies.n_total, table.tallies.n_casts, strict=True
        ):
            if step in late and shape:
                rows[layer] = rows.get(layer, 0.0) + float(n)
        groups: dict[tuple[str, str], list[int]] = {}
        for i, layer in enumerate(self.rows):
            if match := _EXPERT.fullmatch(str(layer["name"])):
                head, _, tail = (match[1], match[2], match[3]) if match[1] else (match[4], match[5], match[6])
                groups.setdefault((head, tail or ""), []).append(i)
        values = np.full(self.count, np.nan)
        for members in groups.values():
            counts = [rows.get(str(self.rows[i]["name"]), 0.0) for i in members]
            if len(members) > 1 and any(counts):
                values[members] = [100 * count * len(members) / sum(counts) for count in counts]
        return values


class AmaxRows(CastRows):
    """One row per cast and step with a known amax. Steps between full looks and layers in BF16 have rows, too."""

    kind = "amaxes"

    def __init__(self, context: Context) -> None:
        super().__init__(context, context.run.table(phase=None))

    def order_nonfinite(self) -> Values:
        """Rank among rows with infinities or NaNs, by step and then by execution; NaN for others."""
        bad = np.flatnonzero(np.asarray(self.table.metric("nonfinite")) > 0)
        steps, full = self.table["step"], self.table["phase"] == "full"
        looked = set(steps[full].tolist())
        # a step with a full look has its casts there, in the order in which they ran
        bad = np.array([i for i in bad if full[i] or steps[i] not in looked], dtype=int)
        ranks = np.full(self.count, np.nan)
        ranks[bad[np.lexsort((bad, steps[bad]))]] = np.arange(len(bad))
        return ranks

    def before(self, row: int) -> int | None:
        """The last cast of an activation or gradient before this one in its step that is finite; None without one."""
        same = (self.table["step"][:row] == self.table["step"][row]) & (
            self.table["phase"][:row] == self.table["phase"][row]
        )
        fine = (np.asarray(self.table.metric("nonfinite"))[:row] == 0) & (self.table["tensor"][:row] != "weight")
        return int(np.flatnonzero(same & fine)[-1]) if (same & fine).any() else None


class WouldRows(CastRows):
    """Simulated casts of layers that stay in BF16 beside layers that are cast."""

    kind = "would"

    def __init__(self, context: Context) -> None:
        super().__init__(context, context.simulated)


def made_by(rows: CastRows) -> Values:
    """The operation that made each input: its activation, or the graph's name of it; "" if unknown."""
    before = {str(x.get("name")): str(x.get("before") or "") for x in rows.context.run.manifest.get("layers") or ()}
    casts, keys = rows.table.casts
    return np.asarray(np.array([before.get(key.layer, "") for key in keys], dtype=object)[casts])


def activated(rows: CastRows) -> Values:
    """ "yes" if an activation function made the input."""
    made = made_by(rows)
    known = {word: "yes" if word.split(" *")[0] in _ACTIVATIONS else "no" for word in set(made)}
    return np.array([known[word] for word in made], dtype=object)


def headroom(rows: CastRows) -> Values:
    """log2(largest number of the format / scaled amax): below 0 the cast clips, far above 0 it wastes octaves."""
    top = rows.by_format(lambda fmt: fmt.max)
    scale = np.asarray(rows.value("scale_max"), dtype=np.float64)
    amax = np.asarray(rows.table.tallies.amax, dtype=np.float64)
    with np.errstate(all="ignore"):
        octaves = np.log2(top / (amax * scale))
    one = (rows.value("granularity") == "tensor") & np.isfinite(octaves) & (amax > 0)
    return np.where(one, octaves, np.nan)


def hidden(rows: CastRows) -> Values:
    """ "yes" if the tensor's amax, which is always exact, lies in a row that the look did not measure.

    If it was measured, n * kurtosis >= (amax / rms)**4, because the sum of fourth powers has that of the amax.
    """
    with np.errstate(all="ignore"):
        share = np.asarray(rows.value("outlier_ratio")) ** 4 / (
            rows.value("kurtosis") * np.asarray(rows.table.tallies.n)
        )
    return np.where(share > 2, "yes", "no").astype(object)


def late_clip(rows: CastRows) -> Values:
    """ "yes" where the history asks for a scale that is too large for the amax of the step."""
    error, clipped = np.asarray(rows.value("scale_error_max")), np.asarray(rows.table.tallies.n_overflow)
    return np.where((error > 0.5) & (clipped >= 8), "yes", "no").astype(object)


def stuck(rows: CastRows) -> Values:
    """Later looks at which a predicted scale still is what it was at a look where the amax asked for another one."""
    scale, error = rows.value("scale_max"), rows.value("scale_error_max")
    steps, amax = rows.table["step"], np.asarray(rows.table.tallies.amax, dtype=np.float64)
    predicted, counts = rows.value("scaling") != "current", np.full(rows.count, np.nan)
    for index in rows.series():
        if not predicted[index[0]]:
            continue
        window, start, wrong = rows.window(int(index[0])), 0, 0
        for k, j in enumerate(index):
            if scale[j] != scale[index[start]]:
                start, wrong = k, 0
            old = [amax[i] for i in index[start:k] if steps[j] - steps[i] > window]
            recent = [amax[i] for i in index[start:k] if steps[j] - steps[i] <= window]
            # amaxes that left the window no longer hold a scale down
            late = bool(old) and bool(recent) and max(recent) < max(old) * 2**-_MOVED
            counts[j] = wrong + late
            wrong += int(late or error[j] > 0.5)
    return counts

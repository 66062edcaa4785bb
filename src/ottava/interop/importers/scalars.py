"""Reads numbers that others logged: text of TransformerEngine's debug features, and TensorBoard's event files.

The text has one number per line, and one file per rank:

    2025-11-03 10:15:01,123 - INFO - layers.0.mlp.fc1_activation_underflows%     iteration=000100     value=0.0312

The name is LAYER_TENSOR_STATISTIC; a statistic may begin with a recipe that was tried beside the real one, and end with
_columnwise. Numbers have four digits after the point: a mean squared error of 3e-6 becomes 0.0000, so the importer
leaves out such zeros. TransformerEngine divides underflows by all elements, zeros too; as `underflow_pct` that is a
lower bound. Its std over ranks or micro-batches may be nan (TE PR 3044).
Source: nvdlfw_inspect/logging.py (log_scalar), TransformerEngine debug/features/utils/stats_computation.py.

TensorBoard's event files hold losses under their usual names, and statistics under TransformerEngine's names, those of
our own sink (tensor/LAYER/X/underflow_pct), and LAYER/TENSOR/STATISTIC or LAYER.TENSOR.STATISTIC, which hooks around
torchao's layers often write. `tags` names any other scalar.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ottava.base.text import progress
from ottava.base.untrusted import read_lines
from ottava.interop.event_file import Scalar, read_scalars
from ottava.interop.importers.collected import NO_SQNR, Cast, Collected, Place, whole
from ottava.interop.te_config import OF_CAST, OF_TENSOR, RECIPES_OF_TE, RECIPROCAL, TENSORS
from ottava.measure.layer_names import SYMBOLS
from ottava.measure.statistics import STATISTICS

_OF_TENSOR = MappingProxyType({**OF_TENSOR, **{name: name for name in ("max", "min", "l2_norm", "numel")}})
"""Statistics of the tensor before any cast -> our names; `finish` computes some of ours from the last four."""
_ROUNDED_AWAY = frozenset({"mse", "std", "scale_inv_min", "scale_inv_max", "cur_amax", "l2_norm"})
"""A zero of these may be any small number, because the log has four digits."""
_RESOLUTION = 5e-5
_COARSE = 20 * _RESOLUTION
"""Below this, four digits leave an error above 5 %, too much for a ratio."""

_NAME = re.compile(rf"(?P<layer>.+)_(?P<tensor>{'|'.join(TENSORS)})_(?P<statistic>.+)")
_LONGEST_LINE = 4096
"""Bytes; a longer line is no statistic."""
FILE = re.compile(r".*globalrank-(\d+).*")
_LAYER = re.compile(r"Assigned layer name: (\S+)\s*$")


class Named(NamedTuple):
    """The parts of a name of TransformerEngine."""

    layer: str
    tensor: str
    cast: Cast
    statistic: str


def read(paths: list[Path], collected: Collected) -> None:
    """Reads every line with a statistic and ignores the rest of a log."""
    collected.source = "import:te_log"
    collected.note(
        "underflow_pct comes from TransformerEngine, which divides by all elements, zeros too: it is a lower bound"
    )
    for path in progress(paths, "reading files"):
        rank = whole(match[1]) if (match := FILE.fullmatch(path.name)) else 0
        for raw in read_lines(path, longest=_LONGEST_LINE):
            words = (line := raw.decode(errors="replace")).split()[-3:]
            step, value = (words[1].removeprefix("iteration="), words[2]) if len(words) == 3 else ("", "")
            if step.isdecimal() and words[1] != step and value.startswith("value="):
                _take(words[0], whole(step), rank, value.removeprefix("value="), collected)
            elif match := _LAYER.search(line):
                collected.spellings[match[1]] = None
    finish(collected, coarse=_COARSE)


@functools.lru_cache(maxsize=1 << 16)
def parse_name(name: str) -> Named | None:
    """The parts of a name; None if it is no name of TransformerEngine.

    Example:
        >>> parse_name("l.0.fc1_gradient_mxfp8_mse_columnwise")
        Named(layer='l.0.fc1', tensor='grad_output', cast=Cast(recipe='mxfp8', direction='col'), statistic='mse')
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    statistic = match["statistic"]
    direction = "col" if statistic.endswith("_columnwise") else "row"
    statistic = statistic.removesuffix("_columnwise")
    recipe = None
    for theirs, ours in RECIPES_OF_TE.items():
        if statistic.startswith(f"{theirs}_"):
            recipe, statistic = ours, statistic.removeprefix(f"{theirs}_")
    return Named(match["layer"], TENSORS[match["tensor"]], Cast(recipe, direction), statistic)


def take(name: str, step: int, rank: int, value: float, collected: Collected) -> bool:
    """Adds one number under a name of TransformerEngine; False if the name is none."""
    named = parse_name(name)
    if named is None or named.statistic not in {*_OF_TENSOR, *OF_CAST, *RECIPROCAL}:
        return False
    place = Place(step, rank, named.layer, named.tensor)
    if named.statistic in _OF_TENSOR:
        collected.of_tensor(place, {_OF_TENSOR[named.statistic]: value})
        if named.statistic in ("max", "min", "cur_amax") and not math.isfinite(value):
            collected.of_tensor(place, {"nonfinite": 1.0})
    elif (reciprocal := RECIPROCAL.get(named.statistic)) is not None:
        collected.of_cast(place, named.cast, {reciprocal: 1 / value} if value else {})
    else:
        collected.of_cast(place, named.cast, {OF_CAST[named.statistic]: value})
    return True


def _take(name: str, step: int, rank: int, text: str, collected: Collected) -> None:
    named = parse_name(name)
    try:
        value = float(text)
    except ValueError:
        collected.unmapped[f"value {text}"] += 1
        return
    if named is not None and value == 0 and named.statistic in _ROUNDED_AWAY:
        collected.note(f"{named.statistic}: left out values of 0.0000, whose digits are lost")
        return
    if not take(name, step, rank, value, collected):
        collected.unmapped[named.statistic if named else name] += 1


def finish(collected: Collected, *, coarse: float = 0.0) -> None:
    """Computes the amax from min and max, and the power from norm and count. coarse: a number below it has too few
    digits for a ratio."""
    for place, values in collected.tensors():
        extremes = [abs(values.pop(name)) for name in ("max", "min") if name in values]
        if len(extremes) == 2 and "amax" not in values:
            values["amax"] = max(extremes)
        norm, count = values.pop("l2_norm", math.nan), values.pop("numel", math.nan)
        if count > 0 and norm > coarse:
            values["power"] = norm * norm / count
        elif values.get("std", 1.0) < coarse:
            values["power"] = 0.0  # known, but with too few digits
        for cast in collected.casts(place):
            if cast.get("mse", 1.0) < coarse:
                cast[NO_SQNR] = 1.0


# --- TensorBoard ----------------------------------------------------------------------------------------


NUMBERS = MappingProxyType(
    {
        "loss": (
            *("loss", "train/loss", "train_loss", "training_loss", "loss/train", "lm loss", "train/lm loss"),
            *("lm-loss-training/lm loss", "loss_metrics/global_avg_loss", "reduced_train_loss"),
        ),
        "grad_norm": ("grad_norm", "grad-norm", "train/grad_norm", "optimizer/grad_norm", "gradient_norm"),
        "lr": ("lr", "learning_rate", "learning-rate", "train/lr", "train/learning_rate", "optimizer/lr", "lr-AdamW"),
        "tokens": ("tokens", "consumed_tokens", "consumed-tokens", "train/tokens", "n_tokens_seen"),
    }
)
"""Numbers of a step, and the tags of Megatron, NeMo, torchtitan, Hugging Face and Lightning for them."""
STATISTIC_WORDS = MappingProxyType(
    {"amax": "amax", "scale": "scale_max"}
    | dict.fromkeys(("sqnr", "snr"), "sqnr_db")
    | dict.fromkeys(("underflow", "underflows"), "underflow_pct")
    | dict.fromkeys(("saturation", "overflow"), "overflow_pct")
)
"""Other names of statistics -> ours; shares must be percentages."""
_OF_CAST = frozenset({"underflow_pct", "underflow_pct_numel", "overflow_pct", "sqnr_db", "mse", "scale_max", "cosine"})
_TENSOR_WORDS = MappingProxyType(
    {**TENSORS, **{name: name for name in SYMBOLS}, **{symbol: name for name, symbol in SYMBOLS.items()}}
)
_TAG = re.compile(
    rf"(?:tensor/)?(?P<layer>\S+?)[/.](?P<tensor>{'|'.join(_TENSOR_WORDS)})(?P<col>\.T)?[/._](?P<statistic>[\w%]+)"
)


EVENTS = re.compile(".*tfevents.*")
_OVER_LAYERS = ("worst/", "median/")
"""Beginnings of our own sink's tags for all layers together; they name no layer."""


def read_events(paths: list[Path], collected: Collected) -> None:
    """Reads every scalar with a known tag."""
    collected.source = "import:tensorboard"
    by_tag = {tag: name for name, tags in NUMBERS.items() for tag in tags}
    by_tag |= collected.tags
    for path in progress(paths, "reading files"):
        try:
            for scalar in read_scalars(path):
                if scalar.tag in by_tag:
                    collected.number(scalar.step, by_tag[scalar.tag], scalar.value)
                elif not take(scalar.tag, scalar.step, 0, scalar.value, collected) and not _take_scalar(
                    scalar, collected
                ):
                    collected.unmapped[scalar.tag] += 1
        except ValueError as error:
            collected.note(str(error))
    finish(collected)


def _take_scalar(scalar: Scalar, collected: Collected) -> bool:
    match = _TAG.fullmatch(scalar.tag)
    if match is None or scalar.tag.startswith(_OVER_LAYERS):
        return False
    statistic = STATISTIC_WORDS.get(match["statistic"].lower(), match["statistic"])
    if statistic not in STATISTICS:
        return False
    place = Place(scalar.step, 0, match["layer"], _TENSOR_WORDS[match["tensor"]])
    if statistic in _OF_CAST or match["col"]:
        collected.of_cast(place, Cast(None, "col" if match["col"] else "row"), {statistic: scalar.value})
    else:
        collected.of_tensor(place, {statistic: scalar.value})
    return True

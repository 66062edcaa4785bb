"""Reads scalars of TensorBoard event files: losses under their usual names, and statistics of tensors.

It knows TransformerEngine's names (LAYER_TENSOR_STATISTIC), the names of our own sink (tensor/LAYER/X/underflow_pct),
and LAYER/TENSOR/STATISTIC or LAYER.TENSOR.STATISTIC, which hooks around torchao's layers often write. `tags` names any
other scalar.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

from ottava.interop.event_file import Scalar, read_scalars
from ottava.interop.importers import te_log
from ottava.interop.importers.collected import Cast, Collected, Place
from ottava.interop.te_config import TENSORS
from ottava.measure.layer_names import SYMBOLS
from ottava.measure.statistics import STATISTICS

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


FILE = re.compile(".*tfevents.*")
_OVER_LAYERS = ("worst/", "median/")
"""Beginnings of our own sink's tags for all layers together; they name no layer."""


def read(paths: list[Path], collected: Collected) -> None:
    """Reads every scalar with a known tag."""
    collected.source = "import:tensorboard"
    by_tag = {tag: name for name, tags in NUMBERS.items() for tag in tags}
    by_tag |= collected.tags
    for path in paths:
        try:
            for scalar in read_scalars(path):
                if scalar.tag in by_tag:
                    collected.number(scalar.step, by_tag[scalar.tag], scalar.value)
                elif not te_log.take(scalar.tag, scalar.step, 0, scalar.value, collected) and not _take(
                    scalar, collected
                ):
                    collected.unmapped[scalar.tag] += 1
        except ValueError as error:
            collected.note(str(error))
    te_log.finish(collected)


def _take(scalar: Scalar, collected: Collected) -> bool:
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

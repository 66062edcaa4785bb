"""The cause of a finding from facts of its run: where it is, what stands before it, when it began, how it grew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ottava.diagnose.rows import AnyRows, CastRows, Context
from ottava.diagnose.training import AmaxRows, headroom, made_by
from ottava.measure.layer_names import SYMBOLS, layer_index
from ottava.record.schema import SlotKey

_GREW = 2.0
_GOOD_RUN = (
    ("its BF16 twin", "the good run"),
    ("the BF16 twin", "the good run"),
    ("The BF16 twin", "The good run"),
    ("a BF16 twin", "a good run"),
    ("The gap to BF16", "The gap to the good run"),
    ("that BF16 does not have", "that the good run does not have"),
    ("than in BF16", "than in the good run"),
)
"""Words for a BF16 twin, and for a good run that casts, too."""


def of_twin(text: str, context: Context) -> str:
    """A text of the rule book that calls the baseline what it is: it speaks of a BF16 twin, which may be an FP8 run."""
    for words, others in _GOOD_RUN if context.twin_casts else ():
        text = text.replace(words, others)
    return text


def told(cause: str, context: Context, rows: AnyRows, index: Any) -> str:
    """The cause of a rule, and what the record says about the cast where it began."""
    if not isinstance(rows, CastRows) or not len(index):
        return cause
    first = min(index, key=lambda i: (rows.table["step"][i], i))
    slot = rows.slots[first]
    series = rows.index[slot]
    steps = rows.table["step"]
    block = layer_index(slot.layer)
    where = _named(slot) + (f" (block {block})" if block is not None else "")
    made = str(made_by(rows)[first]).replace("_", " ")
    origin = f", the output of {made}" if slot.tensor == "input" and made else ""
    earlier = [int(steps[i]) for i in series if steps[i] < steps[first]]
    since = f"at step {steps[first]}" + (f"; step {max(earlier)} was fine" if earlier else ", its first look")
    story = f"It began in {where}{origin}, {since}"
    if isinstance(rows, AmaxRows) and (last := rows.before(first)) is not None:
        size = float(np.asarray(rows.table.tallies.amax)[last])
        story += f". {_named(rows.slots[last])} before it is finite (amax {size:.3g}): it happens between the two"
    amax = np.asarray(rows.table.tallies.amax, dtype=np.float64)[series]
    amax = amax[np.isfinite(amax) & (amax > 0)]
    more = []
    if len(amax) > 1 and max(amax[-1] / amax[0], amax[0] / amax[-1]) > _GREW:
        more.append(f"its amax went from {amax[0]:.3g} to {amax[-1]:.3g}")
    channel = float(rows.value("top_channel_pct")[first])
    if math.isfinite(channel) and channel > 50:
        more.append(f"one channel has {channel:.4g} % of its energy")
    room = float(headroom(rows)[first])
    if math.isfinite(room) and not -0.1 <= room <= 2.5:
        more.append(
            f"its scale puts the amax {abs(room):.1f} octaves {'above' if room < 0 else 'below'} the format's end"
        )
    facts = "; ".join(more)
    return f"{cause.rstrip('.')}. {story}" + (f". {facts[0].upper()}{facts[1:]}" if facts else "")


def _named(slot: SlotKey) -> str:
    return f"{slot.layer}.{SYMBOLS.get(slot.tensor, slot.tensor)}"

"""The triage tree: the questions that an engineer asks of a bad FP8 run, answered from facts and experiments.

A branch that the record cannot answer says what would.
"""

from __future__ import annotations

import math
from typing import Any

from ottava.diagnose.facts import Facts
from ottava.diagnose.loss import Event
from ottava.diagnose.trials import Trial, named


def walk(facts: Facts, good: Facts | None, event: Event | None, trial: Trial) -> list[dict[str, Any]]:
    """The path through the tree: {id, question, answer, say, needs}; answer is yes, no or unknown."""
    path: list[dict[str, Any]] = []

    def ask(name: str, question: str, answer: bool | None, yes: str, no: str, needs: str = "") -> bool | None:
        word = "unknown" if answer is None else "yes" if answer else "no"
        say = "" if answer is None else yes if answer else no
        needed = [needs] if answer is None and needs else []
        path.append({"id": name, "question": question, "answer": word, "say": say, "needs": needed})
        return answer

    loss, known = facts.loss, len(facts.steps) > 0
    first = float(loss.loss[0]) if known else math.nan
    high = first > 1.5 * facts.guess if math.isfinite(facts.guess) and math.isfinite(first) else None
    ask("T0", "Does the run start far above a guess?", high, "Look at initial weights and scales of logits first.",
        "The start is fine.", "a cross-entropy whose classes the watch saw")  # fmt: skip
    spikes = bool(loss.spikes) if known else None
    if ask("T1", "Does the loss spike?", spikes, f"{len(loss.spikes)} spikes.", "No spikes.", "losses"):
        more = None if good is None else loss.spike_rate > 2 * good.loss.spike_rate
        ask("T1b", "Are spikes more frequent than in the good run?", more, "The good run has fewer.",
            "The good run has them, too: look at data and learning rate.", "--baseline RUN")  # fmt: skip
    stays = None if not known else event is not None and event.stays is not None
    if ask("T2", "Does the loss leave its band for good?", stays, "" if event is None else event.sentence,
           "It does not.", "losses"):  # fmt: skip
        assert event is not None
        ask("T2a", "Within the first 1000 steps?", event.step < 1000, "Look for bugs first, then at the recipe.",
            "Look at the recipe first: what grew slowly?")  # fmt: skip
    casts = {"guilty": True, "innocent": False, "none": False}.get(trial.part)
    said = trial.tried[0] if trial.tried else ""
    if ask("T2b", "Do the casts do it?", casts, said, said, "a shadow step, or `ottava watch --replay`"):
        place = bool(trial.place)
        ask("T3", "Do you know which GEMM?", place, f"{named(trial.place)}.", "Run `ottava bisect RUN`.")
        ask("T2c", "Is it the accumulator?", None, "", "", "ottava bisect RUN --accumulator hopper")
    ask("T4", "Is the loss fine, but downstream tasks are not?", None, "", "", "ottava eval")
    return path

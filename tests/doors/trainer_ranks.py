"""Two ranks of a Trainer on a CPU: one of them wants to stop. Each rank writes at which step it ended, and why."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_samples import hf, made, rows
from ottava.doors.trainer import OttavaCallback
from ottava.doors.transformers import OttavaConfig


class OnOneRank(hf.TrainerCallback):  # type: ignore[misc]
    """Stops by hand at step 4, on rank 1 alone."""

    def __init__(self, callback: OttavaCallback) -> None:
        self.callback = callback

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "1" and state.global_step == 4:
            self.callback.stop("by hand")


def main(folder: str, who: str) -> None:
    """who: "line" stops by the line of the log, which the first rank reads; "hand" by hand on the second."""
    model = made()
    OttavaConfig("delayed").convert(model)
    settings = {"max_steps": 20, "logging_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    args = hf.TrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to=[], ddp_backend="gloo", **settings)
    asked: list[Any] = []
    wants = (lambda line: len(asked.append(line) or asked) == 3 and "enough") if who == "line" else None
    callback = OttavaCallback(stop_when=wants)
    run = hf.Trainer(model, args, train_dataset=rows(), callbacks=[OnOneRank(callback)] * (who == "hand") + [callback])
    run.train()
    told = {"step": run.state.global_step, "stopped": callback.stopped, "asked": len(asked)}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

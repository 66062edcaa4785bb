"""FP8 weights and optimizers in two processes: DDP and FSDP2. Gloo, CPU only."""

from __future__ import annotations

import json
import time
import traceback
from datetime import timedelta
from pathlib import Path

import optimizer_scenarios
import torch
import torch.distributed as dist
import weight_scenarios
from weight_scenarios import SIZE

import warm

SCENARIOS = (*weight_scenarios.SCENARIOS, *optimizer_scenarios.SCENARIOS)
_LIMIT = 200


def run_all(rank: int, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    results: dict[str, str] = {}
    for scenario in SCENARIOS:
        try:
            scenario()
            results[scenario.__name__] = ""
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def test_every_scenario_holds_on_every_rank(tmp_path: Path) -> None:
    """See the scenarios' own docstrings; one start of the processes runs all of them."""
    context = warm.start_ranks(run_all, (str(tmp_path),), SIZE)
    deadline = time.monotonic() + _LIMIT
    try:
        while not context.join(timeout=1) and time.monotonic() < deadline:
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE)]
    failures = [
        f"{scenario.__name__}, rank {rank}: {said}"
        for scenario in SCENARIOS
        for rank, answers in enumerate(results)
        if (said := answers.get(scenario.__name__, "did not answer"))
    ]
    assert not failures, "\n".join(failures)

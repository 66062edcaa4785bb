"""A newcomer's path with each host: `python benchmarks/doors.py [HOST ...]` writes benchmarks/results/doors.json.

For each host: a fresh venv with torch, `pip install '.[EXTRA]'`, and the host's example in there. Seconds are counted
from the start of the example's Python, imports included, to the first FP8 step, the first receipt, and the end: a model
or state saved and loaded.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ottava.doors.host import HOSTS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "doors.json"
EXAMPLES = {
    "transformers": "trainer.py",
    "accelerate": "accelerate_fp8.py",
    "peft": "door_peft.py",
    "lightning": "door_lightning.py",
    "torchtitan": "door_torchtitan.py",
    "megatron": "door_megatron.py",
}
"""Axolotl's is a YAML file: tests/doors/test_axolotl.py trains with it."""
TIMED = """
import runpy, sys, time
sys.argv.pop(0)
start = time.perf_counter()
def said(what, seen=set()):
    if what not in seen:
        seen.add(what)
        print(f"timed {what} {time.perf_counter() - start:.1f}", flush=True)
import ottava
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
after_step(lambda *_: said("step"))
receipt = ottava.receipt
def first(*args, **kwargs):
    found = receipt(*args, **kwargs)
    assert found.fp8_fraction > 0
    said("receipt")
    return found
ottava.receipt = first
runpy.run_path(sys.argv[0], run_name="__main__")
said("end")
"""


def tried(host: str) -> dict[str, Any]:
    """The seconds of one path, and the versions that it got."""
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python, start = str(Path(folder, "bin", "python")), time.perf_counter()
        done: dict[str, Any] = {"example": EXAMPLES[host]}
        for what in ("torch==2.13.0", f"{ROOT}[{host}]"):
            pip = subprocess.run([python, "-m", "pip", "install", "-q", what], capture_output=True, text=True)
            if pip.returncode:
                return done | {"failed": pip.stderr.strip().splitlines()[-1]}
            done["install" if "[" in what else "torch"] = round(time.perf_counter() - start, 1)
            start = time.perf_counter()
        script = [python, "-c", TIMED, str(ROOT / "examples" / EXAMPLES[host])]
        ran = subprocess.run(script, capture_output=True, text=True, cwd=folder)
        timed = (line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("timed "))
        done |= {what: float(seconds) for what, seconds in timed}
        if ran.returncode:
            done["failed"] = ran.stderr.strip().splitlines()[-1]
        ask = f"from importlib.metadata import version; print(version({HOSTS[host].package!r}))"
        done["version"] = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    return done


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {"hosts": {}}
    for name in sys.argv[1:] or EXAMPLES:
        results["hosts"][name] = tried(name)
        print(name, results["hosts"][name], flush=True)
        results |= {"python": platform.python_version(), "machine": platform.machine(), "torch": "2.13.0"}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")

"""Tables for people and pipes, Ctrl-C and SIGTERM as a request, and torchrun, of whose processes one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by name only

import warm
from ottava.cli.console import joined, print_error, stop_on_interrupt
from ottava.train.config import load_config
from ottava.train.loop import Trainer

# --- console ---------------------------------------------------------------------------------------------------------


SETTINGS = (
    "model={d_model: 32, layers: 4, heads: 4, kv_heads: 4, ffn: 64}",
    "data.max_bytes=100000",
    "batch_size=8",
    "sequence_length=32",
    "steps=40",
    "recipe=delayed",
    "checkpoint.every=5",
    "evaluation={every: 20, batches: 2}",
    "optimizer.grad_clip=1e9",
)


def test_a_process_without_torchrun_is_alone() -> None:
    with joined(1.0):
        import torch.distributed as dist

        assert not dist.is_initialized()


def test_rank_0_prints_a_common_error_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another error is printed with its rank, also if rank 0 has none."""

    def printed(rank: int, text: str) -> str:
        monkeypatch.setenv("RANK", str(rank))
        print_error(text)
        return capsys.readouterr().err

    assert printed(3, "ottava: alone") == "ottava: alone\n"
    store = TCPStore("127.0.0.1", 0, is_master=True)
    started = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in (started | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    assert printed(0, "ottava: rank 1 has stopped: no text") == "ottava: rank 1 has stopped: no text\n"
    assert printed(1, "ottava: no text") == ""
    assert printed(1, "ottava: rank 1 has stopped: no text") == ""
    assert printed(1, "ottava: the disk is full") == "[rank1]: ottava: the disk is full\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("ottava.cli.console.PATIENCE", 0.2)
    assert printed(1, "ottava: no text") == "[rank1]: ottava: no text\n"  # rank 0 does not fail
    monkeypatch.setenv("MASTER_PORT", "1")
    assert printed(0, "ottava: no text") == "ottava: no text\n"  # the store is gone
    assert printed(1, "ottava: no text") == "[rank1]: ottava: no text\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


SCRIPT = """
import os, signal, sys, threading, time
from ottava.cli.app import main

def kill():
    while not os.path.exists(metrics) or open(metrics).read().count("\\n") < 7:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

metrics = sys.argv[-1] + "/metrics.jsonl"
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=kill, daemon=True).start()
main()
"""
"""`ottava`, of which rank 1 kills itself once: another process could sleep through the run on a busy machine."""


TERMINATED = """
import os, signal, sys, threading, time
from ottava.cli.app import main

def terminate():
    while not os.path.exists(metrics) or open(metrics).read().count("\\n") < 3:
        time.sleep(0.01)
    os.kill(os.getpid() if sys.argv[1] == "self" else os.getppid(), signal.SIGTERM)

metrics = sys.argv[-1] + "/metrics.jsonl"
if os.environ["RANK"] == "1":
    threading.Thread(target=terminate, daemon=True).start()
try:
    main(sys.argv[2:])
except SystemExit as end:
    open(f"{sys.argv[-1]}-{os.environ['RANK']}.code", "w").write(str(end.code))
    raise
"""
"""`ottava`, of which rank 1 terminates itself or torchrun; each process writes its exit code beside the run."""


@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
@pytest.mark.parametrize("whom", ["self", "torchrun"])
def test_a_terminated_run_of_several_processes_saves_and_is_no_success(whom: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "terminated.py").write_text(TERMINATED)
    settings = [
        f"--set={s}" for s in (*SETTINGS, "steps=100000", "checkpoint.every=0", "parallel={dp: 2, timeout: 300}")
    ]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(tmp_path / "terminated.py"),
        whom,
    ]
    ended = warm.run([*launcher, "train", *settings, "--run-dir", str(run)], timeout=800)
    assert ended.returncode not in (0, None)
    assert "terminated and saved; continue with: ottava train --resume" in ended.stderr
    codes = {path.read_text() for path in tmp_path.glob("run-*.code")}
    assert codes == {"143"}
    (saved,) = (run / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == len(losses(run))


@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
def test_a_killed_process_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """The bits are those of one process with the same microbatches that nobody killed. Each holds a stage of the model;
    tests/distributed/train_scenarios.py resumes other layouts."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    Trainer(load_config(None, [*SETTINGS, "microbatches=2"]), alone).advance()
    config = load_config(None, [*SETTINGS, "parallel={pp: 2, timeout: 300}", "microbatches=2"])
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    (tmp_path / "killed.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    words = [str(tmp_path / "killed.py"), "train", str(tmp_path / "run.yaml"), "--resume", "--run-dir", str(run)]
    ended = warm.run([*launcher, *words], timeout=800)
    assert ended.returncode == 0, ended.stderr
    assert losses(run) == losses(alone)
    manifest = json.loads((run / "manifest.json").read_text())
    assert [entry["at_step"] % 5 for entry in manifest["resumed"]] == [0]
    assert manifest["resumed"][0]["at_step"] >= 5


# --- interrupt -------------------------------------------------------------------------------------------------------


def test_first_interrupt_asks_and_the_second_insists() -> None:
    with stop_on_interrupt() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping() is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_on_interrupt() as stopping:
        assert stopping() is None
        for _ in range(2):  # a scheduler may send several
            signal.raise_signal(signal.SIGTERM)
            assert stopping() is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_is_given_back_whatever_happens() -> None:
    def fail() -> None:
        with stop_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not before[0]
            assert signal.getsignal(signal.SIGTERM) is not before[1]
            raise RuntimeError("inside")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# --- the browser -----------------------------------------------------------------------------------------------------


def test_a_page_opens_only_where_somebody_sees_it(tmp_path: Path) -> None:
    """A browser that writes down its address stands at the end of Python's own search for one."""
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {told}\n')
    browser.chmod(0o700)
    quiet = {k: v for k, v in os.environ.items() if k not in ("CI", "SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY")}
    quiet |= {"BROWSER": f"{browser} %s"}
    places = {
        "seen": (True, {"DISPLAY": ":9"}),
        "no display": (True, {}),
        "ssh": (True, {"DISPLAY": ":9", "SSH_CONNECTION": "1"}),
        "CI": (True, {"DISPLAY": ":9", "CI": "1"}),
        "a pipe": (False, {"DISPLAY": ":9"}),
    }
    for name, (terminal, more) in places.items():
        ours, theirs = os.openpty()
        call = f"from ottava.cli.console import open_page; open_page('file:///{name.replace(' ', '_')}')"
        streams = theirs if terminal else subprocess.DEVNULL
        subprocess.run([sys.executable, "-c", call], env=quiet | more, stderr=streams, check=True, timeout=600)
        os.close(ours)
        os.close(theirs)
    assert told.read_text().split() == ["file:///seen"]

"""The page of a run that goes on: it follows, it ends, and nobody else reads it."""

from __future__ import annotations

import gc
import http.client
import json
import shutil
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ottava.record.writer import RunWriter
from ottava.report.live import LiveReport


def steps(folder: Path, first: int, last: int) -> None:
    with RunWriter(folder, append=first > 1) as writer:
        for step in range(first, last + 1):
            writer.step(step, loss=5.0 / step)


def ask(live: LiveReport, path: str | None = None, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    """Status, body and headers of an answer; the path without the token is relative to the page."""
    port = live.url.split(":")[2].split("/")[0]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
    connection.putrequest(method, live.url.partition(port)[2] if path is None else path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    found = connection.getresponse()
    return found.status, found.read().decode(), found.headers


def test_the_page_follows_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with LiveReport(folder, every=0.05) as live:
        assert "No step is recorded yet" in ask(live)[1]
        with urllib.request.urlopen(live.url + "events", timeout=20) as events:

            def told(wanted: int) -> dict[str, Any]:
                while True:
                    line = events.readline().decode()
                    if line.startswith("data: ") and (state := json.loads(line[6:]))["steps"] >= wanted:
                        return state  # type: ignore[no-any-return]

            steps(folder, 1, 3)
            assert told(3)["steps"] == 3
            assert "LIVE = " in ask(live)[1]
            steps(folder, 4, 9)
            assert told(9)["state"] in ("running", "ended")
            assert "</h1>" in ask(live)[1]
    assert live.refresh()["steps"] == 9  # of the folder, not of the server


def test_nobody_else_reads_it(tmp_path: Path) -> None:
    steps(tmp_path / "run", 1, 2)
    with LiveReport(tmp_path / "run") as live:
        live.refresh()
        status, page, headers = ask(live)
        assert (status, "<main>" in page) == (200, True)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        token = live.url.rstrip("/").rpartition("/")[2]
        assert len(token) >= 32
        assert token not in page
        port = live.url.split(":")[2].split("/")[0]
        refused = (
            {"path": "/"},
            {"path": ""},
            {"path": f"/{token[:-1]}x/"},
            {"path": f"/%C3%A9{token}/"},
            {"path": "/events"},
            {"Host": f"evil.example:{port}"},
            {"Host": "127.0.0.1"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        )
        for request in refused:
            assert ask(live, **request)[0] in (400, 403), request  # type: ignore[arg-type]
        for path in (f"/{token}/../../etc/passwd", f"/{token}/steps.jsonl", f"/{token}"):
            status, body, _ = ask(live, path)
            assert status == 404, path
            assert "loss" not in body
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert ask(live, method=method)[0] == 501, method
        assert ask(live, Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_a_folder_that_goes_and_a_file_that_is_broken_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "</script><b>"
    steps(folder, 1, 2)
    with LiveReport(folder, every=60) as live:
        assert live.refresh()["steps"] == 2
        (folder / "watch.json").write_text("{")
        assert "watch.json" in live.refresh()["why"]
        assert "<main>" in live.page()  # the last page stays
        assert "</script><b>" not in live.page().partition("LIVE = ")[2].partition("</script>")[0]
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        assert live.refresh()["state"] == "gone"


def test_memory_is_flat(tmp_path: Path) -> None:
    """The server holds one page, not the pages before it."""
    steps(tmp_path / "run", 1, 5)
    live = LiveReport(tmp_path / "run", every=60)
    sizes = []
    tracemalloc.start()
    try:
        for i in range(10):
            steps(tmp_path / "run", 6 + i, 6 + i)
            assert live.refresh()["steps"] == 6 + i
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        live._server.server_close()
    assert sizes[-1] - sizes[-5] < len(live.page()), sizes  # the first rounds import what they need


def test_the_command_runs_until_it_is_told(tmp_path: Path) -> None:
    steps(tmp_path / "run", 1, 2)
    words = [sys.executable, "-m", "ottava", "live", str(tmp_path / "run"), "--every", "0.1"]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        line = child.stderr.readline()
        assert line.startswith("ottava live: http://127.0.0.1:")
        with urllib.request.urlopen(line.split()[-1], timeout=20) as answer:
            assert answer.status == 200
    finally:
        child.terminate()
        assert child.wait(30) == 0


def test_an_open_page_shows_new_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs chromium")
    folder = tmp_path / "run"
    steps(folder, 1, 2)
    flags = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "disable-sync")
    words = [chromium, *(f"--{flag}" for flag in flags), f"--user-data-dir={tmp_path / 'profile'}"]
    with LiveReport(folder, every=0.1) as live:
        live.refresh()
        made, page = [], live.page
        monkeypatch.setattr(live, "page", lambda: made.append(live.refresh()["steps"]) or page())  # type: ignore[func-returns-value]
        browser = subprocess.Popen([*words, "--remote-debugging-port=0", live.url], stderr=subprocess.DEVNULL)
        try:
            wait(lambda: made == [2])
            steps(folder, 3, 4)
            wait(lambda: made == [2, 4])  # it has asked again, once
        finally:
            browser.kill()
            browser.wait()


def wait(true: Callable[[], bool]) -> None:
    """Fails if it is not true within twenty seconds."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)

"""A page follows a run that is being written: what is new is read once, memory is flat, strangers get nothing."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_pipe import opened
from report_samples import manifest
from test_page import KEY

from command import gone
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import RunError
from ottava.record.writer import RunWriter
from ottava.report import live
from ottava.report.live import Following, PageServer, follow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ONE = Tally(n=8, n_total=8, n_nonzero=8, n_underflow=2, amax=3.0, sxx=9.0, see=0.1, scale_min=2.0, scale_max=2.0)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server that follows a folder."""
    stop, addresses = threading.Event(), list[str]()
    thread = threading.Thread(
        target=functools.partial(follow, folder, say=addresses.append, stopping=stop.is_set, parent=None)
    )
    thread.start()
    try:
        while not addresses:
            time.sleep(0.01)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(60)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """A torn line waits for its end; a step of the trainer and the watch is one; other ranks are counted."""
    with RunWriter(tmp_path) as writer, RunWriter(tmp_path, rank=1) as other:
        run = Following(tmp_path)
        assert run.poll() == []
        writer.step(1, loss=2.5)
        with (tmp_path / "steps.jsonl").open("a") as stream:
            stream.write('{"step": 2, "lo')
        assert run.poll() == [(1, 2.5, None)]
        version = run.version
        assert (run.poll(), run.version) == ([], version)
        with (tmp_path / "steps.jsonl").open("a") as stream:
            stream.write('ss": "nan", "grad_norm": 0.5}\n')
        assert run.poll() == [(2, None, 0.5)]
        other.step(1)
        for one, steps in ((writer, (2, 4)), (other, (2,))):
            for step in steps:
                one.tally(step, KEY, replace(ONE, n_underflow=4.0))
                one.flush()
        run.poll()
        assert run.state == {"kind": "running", "text": "Live: step 2; 2 ranks, rank 1 is at step 1"}
        seen, whole = run.run().table(), Run.open(tmp_path).table()
        assert seen["step"].tolist() == whole["step"].tolist() == [2, 4]
        assert seen.metric("underflow_pct").tolist() == whole.metric("underflow_pct").tolist() == [50, 50]
        writer.describe(ended="closed")
        run.poll()
        assert run.state["text"].startswith("The run has ended at step 2")


def test_a_run_that_goes_back_is_read_anew(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 9):
            writer.step(step, loss=float(step))
        run = Following(tmp_path)
        assert len(run.poll()) == 8
        writer.rewind(3)
        assert run.poll() == [(step, float(step), None) for step in (1, 2, 3)]
        assert run.run().steps["step"].tolist() == [1, 2, 3]
    shutil.rmtree(tmp_path)
    with pytest.raises((RunError, OSError)):
        run.poll()


def test_memory_is_flat_while_a_run_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the steps that fit; a spike in a forgotten step stays in the curve, the worst look in the heat map."""
    for name, value in (("_MOST_STEPS", 2048), ("_MOST_BYTES", 150_000), ("_KEPT_LOOKS", 4)):
        monkeypatch.setattr(live, name, value)
    used = []
    with RunWriter(tmp_path) as writer:
        run = Following(tmp_path)
        tracemalloc.start()
        for block in range(8):
            steps = range(block * 1000, block * 1000 + 1000)
            with (tmp_path / "steps.jsonl").open("a") as stream:
                stream.writelines(json.dumps({"step": s, "loss": 9.0 if s == 700 else 2.0}) + "\n" for s in steps)
            for step in steps[::200]:
                writer.tally(step, KEY, replace(ONE, n_underflow=8.0 * (step == 1200)))
                writer.flush()
            assert len(run.poll()) == 1000
            used.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert min(used[5:]) < 1.25 * used[3], used  # the least: another thread of the process may hold memory for a while
    steps_kept, losses = run.earlier["loss"]
    assert len(steps_kept) <= 802
    assert steps_kept[losses.index(9.0)] == 700
    table = run.run().table()
    assert len(table) < 25
    assert {1200, 7800} <= set(table["step"].tolist())
    assert len(run.run().steps["step"]) <= 2048


def attacks(url: str) -> dict[str, tuple[int, Callable[[], http.client.HTTPResponse]]]:
    """Name -> (expected status, request)."""
    host, token = url.split("/")[2:4]

    def ask(path: str, method: str = "GET", **headers: str) -> Callable[[], http.client.HTTPResponse]:
        def send() -> http.client.HTTPResponse:
            line = http.client.HTTPConnection(host, timeout=60)
            line.putrequest(method, path, skip_host=True)
            for name, value in ({"Host": host} | {k.replace("_", "-"): v for k, v in headers.items()}).items():
                line.putheader(name, value)
            line.endheaders()
            return line.getresponse()

        return send

    page, port = f"/{token}/", host.partition(":")[2]
    cases = {
        "the page": (200, ask(page)),
        "a link from elsewhere": (
            200,
            ask(page, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document"),
        ),
        "no token": (404, ask("/")),
        "wrong token": (404, ask(f"/{'A' * len(token)}/")),
        "half a token": (404, ask(f"/{token[:-1]}/")),
        "not ASCII": (404, ask("/%C3%A9/")),
        "out of the folder": (404, ask(f"{page}../../etc/passwd")),
        "a file of the run": (404, ask(f"{page}watch.json")),
        "another name": (421, ask(page, Host=f"evil.example:{port}")),
        "another port": (421, ask(page, Host="127.0.0.1:1")),
        "cross-origin": (403, ask(f"{page}events", Origin="http://evil.example")),
        "origin null": (403, ask(page, Origin="null")),
        "a picture elsewhere": (
            403,
            ask(page, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="image"),
        ),
        "a frame elsewhere": (
            403,
            ask(page, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe"),
        ),
    }
    return cases | {
        method: (405, ask(page, method)) for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
    }


def test_strangers_get_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.step(1, loss=2.5)
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with served(tmp_path) as url:
            assert len(url.split("/")[3]) >= 43  # 256 bits
            for name, (status, send) in attacks(url).items():
                answer = send()
                body = answer.read()
                assert answer.status == status, (name, answer.status)
                assert (b"ottava report" in body) == (status == 200), name
                headers = {key.lower(): value for key, value in answer.getheaders()}
                assert "access-control-allow-origin" not in headers, name
                assert headers["referrer-policy"] == "no-referrer", name
                assert headers["cross-origin-resource-policy"] == "same-origin", name
                assert "unsafe" not in headers["content-security-policy"].replace("style-src 'unsafe-inline'", ""), name
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
    server = PageServer()
    assert server.server_address[0] == "127.0.0.1"
    assert server.token not in url
    server.server_close()


def test_a_page_that_cannot_be_made_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged histogram is read when the page is made; the next page may be made of other parts."""
    failures, make = [RunError("part-0-000001.parquet: is damaged")], live.make_report

    def first_fails(*run: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(*run, **options)

    monkeypatch.setattr(live, "make_report", first_fails)
    with RunWriter(tmp_path) as writer, served(tmp_path) as url:
        for step in range(1, 60):
            writer.step(step, loss=2.5)
            time.sleep(0.5)
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=60) as answer:
                assert b"ottava report" in answer.read()
                break
    assert not failures
    assert step < 59


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_sees_the_run_grow(tmp_path: Path) -> None:
    """New steps, a new heat map, the zoom that stays, the end of the run; the page's memory is flat."""
    assert CHROMIUM is not None
    heap = "gc(), performance.memory.usedJSHeapSize / 1e6"
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(**manifest(1, "delayed"), ended="")
        writer.step(1, loss=2.5)
        with served(tmp_path / "run") as url, opened(CHROMIUM, url, tmp_path / "profile") as page:
            page.until("document.documentElement.dataset.drawn === 'yes'")
            for step in range(2, 6):
                writer.step(step, loss=2.0, grad_norm=1.0)
            page.until("$('live').textContent === 'Live: step 5' && $('to').value === '5'")
            writer.tally(5, KEY, ONE)
            writer.flush()
            page.until("document.querySelectorAll('#heat path').length > 0")
            assert "did not end" not in page.ask("document.body.innerText")
            page.ask("$('from').value = 3; $('from').dispatchEvent(new Event('change')); scrollTo(0, 300)")
            before = page.ask(heap)
            for block in range(20):
                number = int(page.ask("$('live').dataset.page"))
                for step in range(6 + block * 500, 506 + block * 500):
                    writer.step(step, True, loss=2.0 + step % 7, grad_norm=1.0)
                writer.tally(5 + block * 500, KEY, ONE)
                writer.flush()
                page.until(f"$('live').textContent === 'Live: step {(505 + block * 500):,}'")
                page.until(f"$('live').dataset.page > {number}") if block % 5 == 4 else None
            page.until("$('to').value === '5'")  # a page that was swapped in a moment ago is still being drawn
            assert (page.ask("$('from').value"), page.ask("$('to').value"), page.ask("scrollY")) == ("3", "5", 300)
            assert page.ask(heap) < before + 6
            writer.describe(ended="closed")
            page.until("$('live').textContent === 'The run has ended at step 10,005'")
            page.until("$('live').dataset.page > 0 && !document.body.innerText.includes('no finite loss')")
            shutil.move(tmp_path / "run", tmp_path / "away")
            page.until("$('live').textContent.startsWith('The folder cannot be read')")
            shutil.move(tmp_path / "away", tmp_path / "run")
            assert page.problems == []


SMALL = (
    "model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    *("data.max_bytes=200000", "batch_size=4", "sequence_length=32", "steps=40", "evaluation={every: 40, batches: 1}"),
)
TRAININGS = {
    "watch": ("watch", "--live", "--out", "run", "--", "train.py"),
    "train": ("train", "--live", "--run-dir", "run", *(f"--set={one}" for one in SMALL)),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_brings_its_page_and_takes_it_away(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(32, 32)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while not __import__('pathlib').Path('enough').exists():\n"
        "    model(torch.randn(64, 32)).square().mean().backward()\n"
        "    optimizer.step(); optimizer.zero_grad(); time.sleep(0.05)\n"
    )
    command = [sys.executable, "-m", "ottava", *TRAININGS[name]]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ | {"CI": "1"})
    assert process.stderr is not None
    url = next(line for line in process.stderr if line.startswith("ottava live: ")).split()[-1]
    assert url.startswith("http://127.0.0.1:")
    assert len(url.split("/")[3]) >= 43  # 256 bits
    with urllib.request.urlopen(url + "events?page=0") as events:
        assert any(line == b"event: steps\n" for line in events)
    assert b"ottava report" in urllib.request.urlopen(url).read()
    (tmp_path / "enough").touch()
    process.stderr.read()  # else a full pipe holds the process
    assert process.wait(600) == 0
    assert gone(url), "the server outlived the training"


def test_a_server_ends_with_its_training_although_another_run_goes_on_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LINGER", 0.1), ("_POLL", 0.01)):
        monkeypatch.setattr(live, name, value)
    asked = itertools.count(1)
    with RunWriter(tmp_path) as writer:

        def stopping() -> bool:
            writer.step(next(asked), loss=1.0)
            return next(asked) > 3000

        live.follow(tmp_path, say=str, stopping=stopping, parent=-1)
    assert next(asked) <= 3000

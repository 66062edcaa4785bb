"""The report of a run that goes on: a process of its own reads the folder and serves the page on 127.0.0.1.

The page has an address with a random token, and is read only. `Following` reads what the files of a run have got since
the last time; `PageServer` answers; `follow` brings them together. New steps are pushed at once (server-sent events).
A new page, with verdict and heat map, is made while somebody looks, in at most a fifth of the time.

Memory stays flat: the last 4,096 steps are exact, earlier ones are a curve of 800 points. Statistics have 2 MiB;
beyond it every second look is forgotten, but for the last 32 and the 32 most alarming.

Whoever reads the address can read the page. Other web pages cannot: a request needs the token, the Host of this server
(no rebinding of names), and, from a script, the page's own origin.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pyarrow as pa

from ottava.base.text import finite
from ottava.base.untrusted import MAX_LINE, UntrustedError, regular_size
from ottava.record.reader import Run, Table, joined, number_of, parsed, part_files, table_of
from ottava.record.schema import EVENTS, EXPERIMENTS, MANIFEST, RANKS, STEPS, TRAINER_STEPS, TRAINING, Part, RunError
from ottava.report import sections
from ottava.report.grid import Grid
from ottava.report.page import CURVES, MOST_POINTS, Curve, make_report

_POLL, _SHARE, _SOONEST, _LINGER = 0.5, 0.2, 1.0, 10.0
"""Seconds between two looks at the folder; largest share of the time for pages; least seconds between two pages; how
long the server of a training that is over waits for its readers."""
_MOST_STEPS, _MOST_LINES, _MOST_READ = 4096, 4096, 8 << 20
_MOST_BYTES, _KEPT_LOOKS = 2 << 20, 32
_PUSHED, _MOST_CONNECTIONS, _SILENCE, _PATIENCE = 4096, 32, 10.0, 30.0
Point = tuple[int, float | None, float | None]
"""Step, loss, gradient norm; None where unknown."""


class _Rewritten(Exception):
    """A file became shorter or another one: the run was resumed or went back."""


class _Tail:
    """The lines that a file has got since the last time."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._rest, self._file = path, 0, b"", 0

    def lines(self) -> list[dict[str, Any]]:
        try:
            size, file = regular_size(self.path), self.path.stat().st_ino
        except FileNotFoundError:
            if self._file:
                raise _Rewritten from None
            return []
        if self._file not in (0, file) or size < self._at:
            raise _Rewritten
        self._file = file
        if size == self._at:
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read(_MOST_READ)
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:  # its remainder is a torn line
            self._rest = b""
        return list(parsed(self.path, (line for line in lines if len(line) <= MAX_LINE)))


class Following:
    """A run folder, read as it grows.

    Args:
        folder: of a run.
    Raises:
        RunError: it is none.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(folder) as writer:
        ...     run = Following(Path(folder))
        ...     before = run.poll()
        ...     writer.step(1, loss=2.5)
        ...     before, run.poll(), run.poll()
        ([], [(1, 2.5, None)], [])
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0
        self._begin()

    def _begin(self) -> None:
        self.manifest = Run.open(self.folder).manifest
        self.earlier: dict[str, Curve] = {name: [[], []] for name in CURVES}
        """Curves of the steps that are no longer at hand."""
        self._manifest_at = -1
        names = (STEPS, TRAINER_STEPS, EVENTS, EXPERIMENTS, TRAINING)
        self._tails = {name: _Tail(self.folder / name) for name in names}
        self._lines = {name: deque[dict[str, Any]](maxlen=_MOST_LINES) for name in names[2:]}
        self._of: dict[str, dict[int, dict[str, Any]]] = {STEPS: {}, TRAINER_STEPS: {}}
        self._others: dict[int, tuple[_Tail, int]] = {}
        self._parts: dict[tuple[str, int, int], Part | None] = {}
        self._ranks: set[int] = set()
        self._forgotten: set[int] = set()
        self.version += 1

    def poll(self) -> list[Point]:
        """Reads what is new, and returns the new steps. `version` rises if a page would change.

        Raises:
            RunError, OSError, UntrustedError: the folder is gone, or a file in it is damaged.
        """
        try:
            return self._poll()
        except _Rewritten:
            self._begin()
            return self._poll()

    def _poll(self) -> list[Point]:
        path = self.folder / MANIFEST
        stamp = path.stat().st_mtime_ns if path.is_file() else 0
        if stamp != self._manifest_at:
            self.manifest, self._manifest_at = Run.open(self.folder).manifest, stamp
            self.version += 1
        new = {name: tail.lines() for name, tail in self._tails.items()}
        for name, kept in self._lines.items():
            kept.extend(new[name])
        fresh = []
        for name, known in self._of.items():
            for line in new[name]:
                if all(line["step"] not in other for other in self._of.values()):
                    fresh.append(line["step"])
                known[line["step"]] = line
        self.version += any(new.values())
        self._read_parts()
        self._read_ranks()
        points = [self._point(step) for step in fresh]
        if max(map(len, self._of.values())) > _MOST_STEPS:
            self._shorten()
        return points

    def _point(self, step: int) -> Point:
        line = joined({step: self._of[STEPS].get(step, {})}, {step: self._of[TRAINER_STEPS].get(step, {})}, {})[0]
        loss, norm = (float(f"{number_of(line.get(name)):.6g}") for name in CURVES)
        return step, finite(loss), finite(norm)

    def _shorten(self) -> None:
        """Turns the oldest steps into points of curves: three quarters of the limit stay."""
        steps = sorted(self._of[STEPS].keys() | self._of[TRAINER_STEPS].keys())[: -3 * _MOST_STEPS // 4]
        points = [self._point(step) for step in steps]
        for known in self._of.values():
            for step in steps:
                known.pop(step, None)
        for i, (name, (xs, ys)) in enumerate(self.earlier.items(), start=1):
            if ys or any(point[i] is not None for point in points):
                values = np.array([*ys, *(point[i] for point in points)], dtype=np.float64)  # None is NaN
                self.earlier[name] = sections.thin(np.array(xs + steps), values, MOST_POINTS)

    def _read_parts(self) -> None:
        parts: dict[tuple[str, int, int], Part | None] = {}
        for _, rank, path in part_files(self.folder):
            try:
                about = path.stat()
                key = (path.name, about.st_ino, about.st_mtime_ns)
                if key not in self._parts:
                    part = Part(path)
                    parts[key] = part.without(self._forgotten) if self._forgotten else part
                else:
                    parts[key] = self._parts[key]
                self._ranks.add(rank)
            except (FileNotFoundError, pa.ArrowInvalid):
                continue  # merged a moment ago, or not yet whole
        self.version += parts.keys() != self._parts.keys()
        self._parts = parts
        if sum(part.nbytes for part in parts.values() if part is not None) > _MOST_BYTES:
            self._forget()

    @property
    def _table(self) -> Table:
        return table_of([part for part in self._parts.values() if part is not None])

    def _forget(self) -> None:
        """Forgets every second look, but for the last ones and the worst ones."""
        table = self._table
        full, steps = table.where(phase="full"), np.unique(table["step"])
        worst = Grid.of(full, len(steps)) if len(full) else None
        levels = {} if worst is None else zip(worst.looks, worst.worst_of_looks(), strict=True)
        alarming = sorted(((cell.level, look[0]) for look, cell in levels if cell is not None), reverse=True)
        kept = {step for _, step in alarming[:_KEPT_LOOKS]} | set(steps[-_KEPT_LOOKS:].tolist())
        if more := {step for step in steps[1::2].tolist() if step not in kept}:
            self._forgotten |= more
            self._parts = {key: part and part.without(more) for key, part in self._parts.items()}

    def _read_ranks(self) -> None:
        folder = self.folder / RANKS
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.isdecimal():
                tail, last = self._others.get(int(path.name)) or (_Tail(path / STEPS), -1)
                self._others[int(path.name)] = tail, max((line["step"] for line in tail.lines()), default=last)

    @property
    def ended(self) -> str:
        """Why the run ended; "" while it goes on."""
        return str(self.manifest.get("ended") or "")

    @property
    def state(self) -> dict[str, str]:
        """In words: how far the run is, and its slowest rank."""
        last = max((max(known, default=-1) for known in self._of.values()), default=-1)
        text = f"step {last:,}" if last >= 0 else "no step yet"
        if self._others:
            rank, (_, step) = min(self._others.items(), key=lambda item: item[1][1])
            text += f"; {len(self._others) + 1} ranks" + (f", rank {rank} is at step {step:,}" if step < last else "")
        if not self.ended:
            return {"kind": "running", "text": f"Live: {text}"}
        return {"kind": "ended", "text": f"The run has ended at {text}" + f": {self.ended}" * (self.ended != "closed")}

    def run(self) -> Run:
        """What is at hand, as a run."""
        lines = {STEPS: joined(self._of[STEPS], self._of[TRAINER_STEPS], self.manifest), **self._lines}
        run = Run.of(self.folder, self.manifest, lines, self._table)
        run.ranks, run.of_ranks = sorted(self._ranks) or [0], {}
        return run


class PageServer(ThreadingHTTPServer):
    """Serves one page to whoever has its address, on 127.0.0.1 only.

    Args:
        port: 0 for a free one.
    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(32)
        self.changed = threading.Condition()
        self.page, self.policy, self.number = b"", "", 0
        self.state: Mapping[str, str] = {"kind": "running", "text": "Live: reading the run"}
        self.points: deque[Point] = deque(maxlen=_PUSHED)
        self.pushed, self.readers, self.open = 0, 0, True
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    @property
    def url(self) -> str:
        """The address, with its token."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def publish(self, html: str) -> None:
        """Replaces the page. Its policy allows its own script and no other."""
        (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        with self.changed:
            self.number += 1
            self.page = html.replace('<p id="live"', f'<p id="live" data-page="{self.number}"', 1).encode()
            self.policy = (
                f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            self.changed.notify_all()

    def tell(self, state: Mapping[str, str], points: list[Point] | None = None) -> None:
        """Pushes steps and the state."""
        with self.changed:
            self.points.extend(points or ())
            self.pushed += len(points or ())
            if points or state != self.state:
                self.state = state
                self.changed.notify_all()

    def server_bind(self) -> None:
        """Binds without asking for the machine's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Refuses a connection beyond the limit."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    """GET /TOKEN/ is the page, GET /TOKEN/events what is pushed; everything else is refused."""

    server: PageServer
    server_version, sys_version, timeout = "ottava", "", _PATIENCE

    def do_GET(self) -> None:
        """Answers, if the request may come from the page or from a person."""
        own = f"127.0.0.1:{self.server.server_address[1]}"
        path, _, query = self.path.removeprefix(f"http://{own}").partition("?")  # a parser of URLs raises at "//["
        first, _, rest = path.removeprefix("/").partition("/")
        if self.headers.get_all("Host") != [own]:
            self.send_error(421)
        elif not hmac.compare_digest(first.encode(), self.server.token.encode()):
            self.send_error(404)
        elif not self._is_own(f"http://{own}"):
            self.send_error(403)
        elif rest == "":
            self._send_page()
        elif rest == "events":
            self._push(parse_qs(query))
        else:
            self.send_error(404)

    def _is_own(self, origin: str) -> bool:
        """Whether no other web page asks; a person may follow a link from anywhere."""
        site, mode, kind = (self.headers.get(f"Sec-Fetch-{name}", "") for name in ("Site", "Mode", "Dest"))
        person = (mode, kind) == ("navigate", "document")
        return self.headers.get("Origin", origin) == origin and (site in ("", "none", "same-origin") or person)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line, which repeats nothing of the request."""
        words = {403: "not from another page", 404: "no such page", 405: "read only", 421: "wrong host"}
        self._start(405 if code == 501 else code, "text/plain", "default-src 'none'")
        self.wfile.write(words.get(405 if code == 501 else code, "refused").encode())

    def _start(self, code: int, kind: str, policy: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response_only(code)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        for name, value in (headers | dict(more)).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_page(self) -> None:
        server = self.server
        with server.changed:
            server.changed.wait_for(lambda: server.number > 0 or not server.open, _PATIENCE)
            page, policy = server.page, server.policy
        if not page:  # a busy machine: the browser asks again
            self._start(503, "text/plain", "default-src 'none'", {"Refresh": "1"})
            self.wfile.write(b"The first page is being made; this one asks again by itself.")
            return
        self._start(200, "text/html", policy)
        self.wfile.write(page)

    def _push(self, asked: Mapping[str, list[str]]) -> None:
        """Pushes until the reader goes or the server stops."""
        words = asked.get("page", ["0"])[0]
        told: Mapping[str, str] = {}
        page = int(words) if words.isdecimal() and len(words) < 10 else 0
        server, seen = self.server, 0
        self._start(200, "text/event-stream", "default-src 'none'")
        with server.changed:
            server.readers += 1
        try:
            while True:
                with server.changed:
                    if (server.pushed, server.number, server.state) == (seen, page, told) and server.open:
                        server.changed.wait(_SILENCE)
                    points = list(server.points)[-(server.pushed - seen) :] if server.pushed > seen else []
                    number, state, going, seen = server.number, server.state, server.open, server.pushed
                self.wfile.write(_event("steps", points) if points else b": \n\n")
                self.wfile.write(_event("state", state) if state != told else b"")
                self.wfile.write(_event("page", number) if number > page else b"")
                self.wfile.flush()
                page, told = max(page, number), state
                if not going:
                    return
        except OSError:
            return
        finally:
            with server.changed:
                server.readers -= 1

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line would have the token."""


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


def follow(
    folder: Path,
    *,
    port: int = 0,
    say: Callable[[str], None],
    page: Callable[[str], str] = str,
    stopping: Callable[[], object],
    parent: int | None,
) -> None:
    """Serves the page of a run until it is stopped.

    Args:
        say: gets the address.
        page: translates a page.
        stopping: asked twice a second.
        parent: the process that trains; the server ends some seconds after it, or after the end of the run.
    Raises:
        RunError: the folder has no run.  OSError: the port is taken.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # M_MMAP_THRESHOLD: an array goes back when it is freed, and leaves no hole
            ctypes.CDLL(None).mallopt(-3, 1 << 16)
    following, server = Following(folder), PageServer(port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(server.url)
    again = f"ottava live {folder}"
    state = {"kind": "stopped", "text": f"The server has stopped; this page stays as it is. Again: {again}"}
    try:
        with ThreadPoolExecutor(1) as renderer:
            _serve(following, server, renderer, page, stopping, parent)
        if following.ended:
            state["text"] = f"{following.state['text']}. This page stays as it is. Again: {again}"
    finally:
        server.tell(state)
        with server.changed:
            server.open = False
            server.changed.notify_all()
        deadline = time.monotonic() + 2
        while server.readers and time.monotonic() < deadline:
            time.sleep(0.05)
        server.shutdown()
        server.server_close()


def _serve(
    following: Following,
    server: PageServer,
    renderer: ThreadPoolExecutor,
    page: Callable[[str], str],
    stopping: Callable[[], object],
    parent: int | None,
) -> None:
    """Polls, pushes and renders."""
    job: Future[tuple[str, float]] | None = None
    made, due, over = 0, 0.0, None
    while not stopping():
        try:
            points = following.poll()
            server.tell(following.state, points)
            if job is not None and job.done():
                done, job, due = job, None, time.monotonic() + _SOONEST
                html, seconds = done.result()
                server.publish(html)
                _give_back()
                due = time.monotonic() + max(_SOONEST, seconds / _SHARE)
        except (OSError, RunError, UntrustedError) as error:
            server.tell({"kind": "gone", "text": f"The folder cannot be read: {error}"})
        ends = parent is not None and (bool(following.ended) or os.getppid() != parent)
        over = over or (time.monotonic() if ends else None)
        late = over is not None and time.monotonic() - over > 3 * _LINGER
        if late and job is None:  # another run goes on in the folder: it is not ours to follow
            return
        wanted = over or ((server.readers or not server.page) and time.monotonic() >= due)
        if job is None and made != following.version and wanted:
            made = following.version
            job = renderer.submit(_render, following.run(), dict(following.earlier), page)
        if over and job is None and (not server.readers or time.monotonic() - over > _LINGER):
            return
        time.sleep(_POLL)


def _give_back() -> None:
    """What a page took and freed, to the system: the allocators of C and of pyarrow would keep it."""
    pa.default_memory_pool().release_unused()
    if sys.platform == "linux":
        with suppress(AttributeError):  # a libc that has no such call
            ctypes.CDLL(None).malloc_trim(0)


def _render(run: Run, earlier: Mapping[str, Curve], page: Callable[[str], str] = str) -> tuple[str, float]:
    """A page, and the seconds that it took."""
    began = time.monotonic()
    return page(make_report(run, live=True, earlier=earlier).html), time.monotonic() - began

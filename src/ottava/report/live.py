"""Shows the report of a run that is still being written, on this machine alone: `ottava live RUN`.

A server of Python's own on 127.0.0.1 reads the run's folder, makes its page again after a change, and tells open pages.
The training is another process and knows nothing of it. The server keeps one page, so its memory does not grow with
time. Nobody else can read it: a path with a secret, requests to this host's name only, GET only, no other origin.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from ottava.record.reader import Run
from ottava.report.frame import script_json
from ottava.report.page import make_report

_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
_SHARE = 0.1
"""Of one core: a page that takes a second to make is made every ten seconds."""
_WAITING = "<!doctype html><meta charset=utf-8><title>ottava live</title><h1>{}</h1><body>"


class LiveReport:
    """The page of a run's folder, and the server that shows it.

    Args:
        folder: of a run; it may be empty yet.
        every: seconds between two looks at the folder.
        port: 0 takes a free one.
    Raises:
        OSError: the port is taken.

    Example:
        >>> import tempfile, urllib.request
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder, LiveReport(Path(folder), every=0.1) as live:
        ...     with RunWriter(folder) as writer:
        ...         writer.step(1, loss=2.5)
        ...     live.refresh()["steps"], urllib.request.urlopen(live.url).status
        (1, 200)
    """

    def __init__(self, folder: Path, *, every: float = 2.0, port: int = 0) -> None:
        self.folder, self.every = folder, every
        self._seen: object = None
        self._page = _WAITING.format("No step is recorded yet.")
        self._state: dict[str, Any] = {"version": 0, "steps": 0, "state": "waiting", "why": ""}
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._token = secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler_of(self))
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]

    @property
    def url(self) -> str:
        """Where the page is; the token in it is the key."""
        return f"http://127.0.0.1:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> LiveReport:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._tell(state="stopped", why="The server was stopped; the page stays as it is.")
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> str:
        """The last page, with the script that follows the run."""
        script = resources.files(__package__).joinpath("live.js").read_text(encoding="utf-8")
        follow = f"<script>const LIVE = {script_json(self._state)};\n{script}</script></body>"
        head, end, tail = self._page.rpartition("</body>")
        return head + follow + tail if end else self._page + follow

    def wait(self, version: int, timeout: float) -> dict[str, Any]:
        """The state, as soon as it has another version, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._state["version"] != version, timeout)
            return dict(self._state)

    def refresh(self) -> Mapping[str, Any]:
        """Looks at the folder now; makes the page again if a file has changed. Returns the state."""
        seen = _sizes(self.folder)
        if seen == self._seen:
            return self._state
        try:
            run = Run.open(self.folder)
            self._page = make_report(run).html
        except (ValueError, OSError) as error:
            gone = not self.folder.is_dir()
            # a folder that appears, or a line that is half written: the next look reads it
            self._tell(state="gone" if gone and self._seen else "waiting", why=str(error))
            return self._state
        self._seen = seen
        ended = run.manifest.get("ended")
        self._tell(state="ended" if ended else "running", why="", steps=len(run.steps.get("step", ())))
        return self._state

    def allowed(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request has the token and comes from a page of this server, or from no page."""
        port = self._server.server_port
        hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        origin = headers.get("Origin")
        own = origin is None or origin in [f"http://{host}" for host in hosts]
        given = path.split("/")[1] if path.count("/") else ""
        same = secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())
        return own and same and headers.get("Host", "") in hosts

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            self.refresh()
            self._stop.wait(max(self.every, (time.perf_counter() - began) * (1 / _SHARE - 1)))

    def _tell(self, **values: Any) -> None:
        with self._changed:
            if any(self._state[name] != value for name, value in values.items()) or values.get("state") == "running":
                self._state |= values | {"version": self._state["version"] + 1}
                self._changed.notify_all()


def _sizes(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file of a run: they change if the run does."""
    found = []
    for path in sorted([*folder.glob("*"), *folder.glob("ranks/*/*")]):
        try:
            if path.is_file() and path.name != "report.html":
                stat = path.stat()
                found.append((str(path), stat.st_size, stat.st_mtime_ns))
        except OSError:  # it went away between the two calls
            continue
    return tuple(found)


def _handler_of(live: LiveReport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """GET of the page and of its events; everything else is refused."""

        timeout = 30

        def do_GET(self) -> None:
            if not live.allowed(self.path, self.headers):  # type: ignore[arg-type]
                self.send_error(HTTPStatus.FORBIDDEN)
            elif (rest := self.path.split("/", 2)[2:]) == [""]:
                self._send("text/html; charset=utf-8", live.page().encode())
            elif rest == ["events"]:
                self._events()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, kind: str, body: bytes | None) -> None:
            self.send_response(HTTPStatus.OK)
            for name, value in (("Content-Type", kind), *_HEADERS):
                self.send_header(name, value)
            if body is not None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body is not None:
                self.wfile.write(body)

        def _events(self) -> None:
            """Server-sent events: the state at each change, and every ten seconds, so that a dead page is noticed."""
            self._send("text/event-stream", None)
            version = -1
            try:
                while True:
                    state = live.wait(version, 10.0)
                    version = state["version"]
                    self.wfile.write(f"data: {json.dumps(state)}\n\n".encode())
                    self.wfile.flush()
                    if state["state"] == "stopped":
                        return
            except OSError:  # the page was closed
                return

        def log_message(self, *values: Any) -> None:
            """Says nothing: the token is in every path."""

    return Handler

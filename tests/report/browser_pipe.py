"""A page in headless Chromium that goes on in real time, driven over the debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
FLAGS += ["--remote-debugging-pipe", "--js-flags=--expose-gc", "--enable-precise-memory-info"]


class Page:
    """A tab. Every call waits for its answer."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self.problems: list[str] = []
        """What the console and the page's own errors said."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Page.enable")
        self("Runtime.enable")
        self("Log.enable")

    def _call(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values} | ({"sessionId": session} if session else {})
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._receive, 1 << 20) or b'{"id": -1, "error": "the browser is gone"}\0'
            one, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(one)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(one.decode()[:500])
            if answer.get("id") in (self._number, -1):
                assert "error" not in answer, answer
                return dict(answer["result"])

    def __call__(self, method: str, **values: Any) -> dict[str, Any]:
        return self._call(method, self._session, **values)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 120) -> None:
        """Waits for an expression to be true."""
        deadline = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < deadline, (expression, self.ask("document.body.innerText.slice(0, 400)"))
            time.sleep(0.1)

    def picture(self, path: Path, width: int, height: int, dark: bool = False) -> Path:
        """A PNG of the top of the page."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        time.sleep(0.5)
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=False)["data"]))
        return path


@contextmanager
def opened(browser: str, url: str, profile: Path) -> Iterator[Page]:
    """A tab at an address."""
    (theirs, send), (receive, back) = os.pipe(), os.pipe()
    command = f'exec 3<&{theirs} 4>&{back}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", browser, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs, back),
        stderr=subprocess.DEVNULL,
    )
    try:
        page = Page(send, receive)
        page("Page.navigate", url=url)
        yield page
    finally:
        process.kill()
        process.wait()
        for pipe in (theirs, send, receive, back):
            os.close(pipe)

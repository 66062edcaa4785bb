"""Writes the pictures of pages: docs/report.webp and docs/report.zh.webp of README, docs/explorer.webp, docs/live.webp.

`python docs/report_picture.py RUN BASELINE` takes the folders of two watched runs. The pictures here are of those of
examples/good_bad_run.py. A picture of a report shows three parts of it: verdict, loss and heat map. That of the live
page is served from a copy of RUN whose training goes on.
The script needs Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from queue import Queue

from ottava.base.language import LANGUAGES, Language
from ottava.explorer import explorer_page
from ottava.record.reader import Run
from ottava.record.schema import MANIFEST
from ottava.report.live import follow
from ottava.report.page import make_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT, TIME = 1520, 1080, 740
SMALL = (1000, 700)
PAGE = f"""<!doctype html><style>
body {{ margin: 0; display: grid; grid-template: {TIME}px {HEIGHT - TIME}px / 1fr 1fr; height: {HEIGHT}px; }}
iframe {{ border: 0; width: 100%; height: 100%; }}
iframe:first-child {{ grid-row: 1 / 3; }}
</style>"""


def main(run: str, baseline: str) -> None:
    """Writes a picture in each language."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    report = make_report(Run.open(run), baseline=Run.open(baseline))
    for language in LANGUAGES:
        picture = Path(__file__).with_name("report.webp" if language == "en" else f"report.{language}.webp")
        with tempfile.TemporaryDirectory() as scratch:
            take(browser, Language(language).page(report.html), picture, Path(scratch))
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch, "explorer.html")
        page.write_text(explorer_page() + "<style>.tongues { display: none; }</style>", encoding="utf-8")
        shoot(browser, f"{page.as_uri()}#lang=en", Path(__file__).with_name("explorer.webp"), Path(scratch), *SMALL)
    with tempfile.TemporaryDirectory() as scratch:
        take_live(browser, Path(run), Path(__file__).with_name("live.webp"), Path(scratch))


def say(picture: Path) -> None:
    """Prints a picture's size."""
    print(f"{picture}  {picture.stat().st_size // 1000} kB")


def take_live(browser: str, run: Path, picture: Path, folder: Path) -> None:
    """The page that follows a run, from a server as `ottava live` starts it."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    manifest = json.loads((copy / MANIFEST).read_text("utf-8")) | {"ended": ""}
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    stop, addresses = threading.Event(), Queue[str]()
    serve = partial(follow, copy, say=addresses.put, stopping=stop.is_set, parent=None)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        shoot(browser, addresses.get(timeout=60), picture, folder, *SMALL)
    finally:
        stop.set()
        thread.join()


def take(browser: str, html: str, picture: Path, folder: Path) -> None:
    """The whole page on the left, two of its sections without their words on the right."""
    page = PAGE
    for part in ("", "#time", "#heat-map"):
        style = f"<style>main > :not({part}) {{ display: none; }} main > * {{ margin: -32px 0 0; }}"
        style += "section > :is(p, details, .controls) { display: none; }</style>"
        (folder / f"{part[1:]}.html").write_text(html + style * bool(part), encoding="utf-8")
        page += f'<iframe src="{part[1:]}.html" scrolling="no"></iframe>'
    (folder / "page.html").write_text(page, encoding="utf-8")
    shoot(browser, (folder / "page.html").as_uri(), picture, folder, WIDTH, HEIGHT)


def shoot(browser: str, address: str, picture: Path, folder: Path, width: int, height: int) -> None:
    """A picture of the top of a page, when it is drawn."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    # time of its own makes a page draw at once; a page that listens to a server has none
    flags += ["--timeout=20000" if address.startswith("http") else "--virtual-time-budget=3000"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", f"--screenshot={picture}"]
    subprocess.run([browser, *flags, address], check=True, stderr=subprocess.DEVNULL, timeout=300)
    say(picture)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} RUN BASELINE")
    main(*sys.argv[1:])

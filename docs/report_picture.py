"""Writes README's pictures of the debugger's report, docs/report.webp and docs/report.zh.webp.

`python docs/report_picture.py RUN BASELINE` takes the folders of two watched runs. README shows those of
examples/good_bad_run.py. A picture shows three parts of one report: verdict, loss and heat map.
The script needs Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ottava.base.language import LANGUAGES, Language
from ottava.record.reader import Run
from ottava.report.page import make_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT, TIME = 1520, 1040, 690
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
        print(f"{picture}  {picture.stat().st_size // 1000} kB")


def take(browser: str, html: str, picture: Path, folder: Path) -> None:
    """The whole page on the left, two of its sections without their words on the right."""
    page = PAGE
    for part in ("", "#time", "#heat-map"):
        style = f"<style>main > :not({part}) {{ display: none; }} main > * {{ margin: -32px 0 0; }}"
        style += "section > :is(p, details, .controls) { display: none; }</style>"
        (folder / f"{part[1:]}.html").write_text(html + style * bool(part), encoding="utf-8")
        page += f'<iframe src="{part[1:]}.html" scrolling="no"></iframe>'
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=3000"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
    subprocess.run([browser, *flags, (folder / "page.html").as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} RUN BASELINE")
    main(*sys.argv[1:])

"""Writes docs/report.webp, README's picture of the debugger's report: `python docs/report_picture.py RUN BASELINE`.

RUN and BASELINE are folders of watched runs. README shows `runs/bad runs/good`, which the example of docs/debugging.md
writes. The picture shows three parts of one report: verdict, loss and heat map.
The script needs Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ottava.record.reader import Run
from ottava.report.page import make_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1520, 1040
PAGE = f"""<!doctype html><style>
body {{ margin: 0; display: grid; grid-template: 475px {HEIGHT - 475}px / 1fr 1fr; height: {HEIGHT}px; }}
iframe {{ border: 0; width: 100%; height: 100%; }}
iframe:first-child {{ grid-row: 1 / 3; }}
</style>"""


def main(run: str, baseline: str) -> None:
    """Writes docs/report.webp."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    picture = Path(__file__).with_name("report.webp")
    with tempfile.TemporaryDirectory() as scratch:
        folder, page = Path(scratch), PAGE
        report = make_report(Run.open(run), baseline=Run.open(baseline))
        html = report.write(folder / "report.html").read_text(encoding="utf-8")
        for part in ("", "#time", "#heat-map"):  # the whole page, and two of its sections
            style = f"<style>main > :not({part}) {{ display: none; }} main > * {{ margin: -32px 0 0; }}</style>"
            (folder / f"{part[1:]}.html").write_text(html + style * bool(part), encoding="utf-8")
            page += f'<iframe src="{part[1:]}.html" scrolling="no"></iframe>'
        (folder / "page.html").write_text(page, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=3000"]
        flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
        subprocess.run([browser, *flags, (folder / "page.html").as_uri()], check=True, stderr=subprocess.DEVNULL)
    print(f"{picture}  {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} RUN BASELINE")
    main(*sys.argv[1:])

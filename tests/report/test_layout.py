"""How every page lies on a screen, a tablet, a phone and paper, seen by headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_pipe import Page, opened
from torch import nn

from demo_samples import made_demo, made_run, usual_runs
from lab_samples import study
from ottava.base.language import Language
from ottava.cli.diagnose import _text as printed
from ottava.diagnose.diagnose import diagnose as explain
from ottava.explorer import explorer_page
from ottava.lab.page import lab_page
from ottava.numerics.formats import get_format
from ottava.prove import check
from ottava.prove.adapters import KernelAdapter
from ottava.prove.certificate import certify
from ottava.prove.page import check_page
from ottava.prove.page import page as certify_page
from ottava.recipe import RECIPES
from ottava.record.reader import Run
from ottava.report.page import make_report, make_results
from ottava.serving.page import render_page
from ottava.serving.parity import Certificate, LinearRow, Mismatch
from ottava.train.demo import render_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENS = {"screen": 1280, "tablet": 768, "phone": 390}
LINES = {"screen": 2, "tablet": 3, "phone": 4, "paper": 2}
"""The most lines of a headline."""
FACTS = Path(__file__).with_name("facts.js").read_text(encoding="utf-8")


def parity_page() -> str:
    """Two linears that differ and one that does not."""
    block, cast = "model.layers.{}.self_attn.o_proj".format, "E4M3[128x128]"
    rows = [LinearRow(block(i), cast, cast, cast, cast, "a", "ab"[i < 2], (0.25, 1e-5, None)[i]) for i in range(3)]
    found = [Mismatch(block(i), "scales", "8 to 8 times those of training, for equal codes") for i in range(2)]
    said = ("nothing of vllm on cuda; its rules are assumed", "128 bytes of a sentence", ("kernels did not run",))
    return render_page(Certificate("vllm", tuple(rows), tuple(found), "a" * 64, "b" * 64, {}, "cuda", *said))


def certificates() -> str:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.to(get_format("e5m2").storage_dtype)

    found = certify(KernelAdapter("a_module_with_a_name.py:its_encode", wrong, "encode", {"format": "e5m2"}), count=4)
    return certify_page([found], {"cases": 4, "seed": 0, "device": "cpu"})


def checked(other: nn.Module) -> str:
    """A model against itself, or with another function in a layer of a long path."""

    def net(gelu: nn.Module) -> nn.Module:
        deep = nn.Sequential(OrderedDict({"a_layer_with_a_name": nn.Sequential(OrderedDict({"its_function": gelu}))}))
        return nn.Sequential(nn.Linear(8, 8), deep, *(nn.Linear(8, 8) for _ in range(20)))

    torch.manual_seed(0)
    return check_page(check(net(nn.GELU()), net(other), torch.randn(16, 8)), "ottava check train.py -- --compile")


def results(folder: Path, *runs: Run) -> str:
    """One page of runs and of what other commands wrote."""
    for run in runs:
        shutil.copytree(run.path, folder / run.path.name)
    (folder / "check.html").write_text(checked(nn.GELU("tanh")), encoding="utf-8")
    (folder / "parity.html").write_text(parity_page(), encoding="utf-8")
    return make_results(folder, baseline=Run.open(folder / runs[-1].path.name)).html


@pytest.fixture(scope="module")
def pages(small_run: Run, good_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], str]]:
    """Name -> the page, with findings, with every picture, and with names as long as they get."""
    many = [made_run(f"recipe{i}", final=1.69 + 0.02 * i) for i in range(9)]
    lost = made_run("nvfp4/fp8_inputs_bf16_gemm", broken_at=60)
    recipes = {"nvfp4": [0.11, 0.12], "mxfp8": [0.001, 0.002], max(RECIPES, key=len): [0.0, 0.01]}
    return {
        "report": lambda: make_report(small_run, baseline=good_run).html,
        "results": lambda: results(tmp_path_factory.mktemp("results"), small_run, good_run),
        "demo": lambda: render_report(made_demo(usual_runs())),
        "demo of ten": lambda: render_report(made_demo([*usual_runs()[:3], *many, lost])),
        "lab": lambda: lab_page(study(recipes, seeds=2)),
        "parity": parity_page,
        "certify": certificates,
        "explorer": explorer_page,
        "check": lambda: checked(nn.GELU("tanh")),
        "check of equals": lambda: checked(nn.GELU()),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One tab for all pages."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with opened(CHROMIUM, "about:blank", tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def show(browser: Page, text: str, folder: Path) -> None:
    """Opens a page, and waits until it has drawn what it draws."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    browser("Page.navigate", url=path.as_uri())
    drawn = "document.documentElement.dataset.drawn === 'yes'" if "dataset.drawn" in text else "true"
    browser.until(f"document.readyState === 'complete' && {drawn}")


NAMES = ("report", "results", "demo", "demo of ten", "lab", "parity", "certify", "explorer", "check", "check of equals")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"explorer"}))
def test_no_sentence_of_a_page_stays_english(
    name: str, pages: dict[str, Callable[[], str]], small_run: Run, good_run: Run
) -> None:
    """Text and tooltips of every page in Chinese, but for code, lists of names and the sample's own words."""
    page = Language("zh").page(pages[name]())
    assert '<html lang="zh">' in page
    read = re.sub(r"(?s)<(script|style|code|pre)\b.*?</\1>", "", page)
    if name == "report":  # what the command prints of the same runs
        say = Language("zh")
        for run, other in ((small_run, good_run), (small_run, None), (good_run, small_run)):
            read += "".join(f">{say(line)}<" for line in printed(explain(run, baseline=other), True).splitlines())
    texts = [
        " ".join(html.unescape(one).split()) for one in re.findall(r'(?:>|label="|title=")([^<>"]+)(?=[<"])', read)
    ]
    assert len([one for one in texts if re.search("[一-鿿]", one)]) > 9
    sentences = [one for one in texts if re.search(r"(?:\b[a-z]{2,}[ ,]+){2}[a-z]{2,}\b", one)]
    assert [one for one in sentences if one != "128 bytes of a sentence."] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_screen_tablet_phone_and_paper(
    name: str, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    """Nothing is cut off but in a box that scrolls, texts of pictures stay inside them and are legible, no dead gap."""
    show(browser, pages[name](), tmp_path)
    for screen, width in {**SCREENS, "paper": 1040}.items():
        scheme = [{"name": "prefers-color-scheme", "value": "light" if screen == "screen" else "dark"}]
        media = "print" if screen == "paper" else "screen"
        browser("Emulation.setEmulatedMedia", media=media, features=scheme)
        browser("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)
        facts: dict[str, Any] = json.loads(browser.ask(FACTS))
        wrong = {one: facts[one] for one in ("over", "cut", "out", "on", "small", "empty", "gaps") if facts[one]}
        assert not wrong, (screen, wrong)
        assert facts["lines"] < LINES[screen] + 0.5, (screen, facts["headline"])
        assert facts["light"] is (screen in ("screen", "paper")), screen
    assert browser.problems == []


@pytest.mark.parametrize("name", ["report", "explorer", "check"])
def test_a_screen_reader_has_a_name_for_everything_and_nothing_moves_where_nobody_wants_it(
    name: str, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    """Names as the browser computes them, of what is operated and of pictures; motion as the system asks for it."""
    motion = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser("Emulation.setEmulatedMedia", media="screen", features=[motion])
    show(browser, pages[name](), tmp_path)
    moves = "[getComputedStyle(document.documentElement).scrollBehavior, document.getAnimations().length]"
    assert browser.ask(moves) == ["auto", 0]
    told = browser("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "combobox", "checkbox", "slider", "spinbutton", "link", "image", "application", "tab", "region"}
    wanted = [one for one in told if not one.get("ignored") and one["role"].get("value") in roles]
    assert len(wanted) >= 2
    assert [one["role"]["value"] for one in wanted if not one.get("name", {}).get("value", "").strip()] == []
    assert browser.problems == []


def test_a_pointer_on_a_picture_is_told_its_numbers(
    pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    """Curves that Python drew: step 200 is the right end, where BF16 with seed 0 is at 1.700."""
    browser("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    show(browser, pages["demo"](), tmp_path)
    told = browser.ask(Path(__file__).with_name("pointed.js").read_text(encoding="utf-8"))
    assert told[:3] == ["step 200", "bf16", "1.70"]


@pytest.mark.parametrize(("name", "width", "end"), [("demo", 1280, 200), ("check", 390, 140), ("results", 1280, 140)])
def test_a_chart_shows_a_part_of_its_axis_and_another_scale(
    name: str, width: int, end: int, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    """Dragged over, in the wide picture and in the phone's; typed; all charts with that axis; and back as it was."""
    browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    browser("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    show(browser, pages[name](), tmp_path)
    found = browser.ask(Path(__file__).with_name("zoomed.js").read_text(encoding="utf-8"))
    begun, dragged, other, back = (found[one] for one in ("begun", "dragged", "other", "back"))
    assert begun["wide"] is (width > 600)
    (changed,) = {one for one in dragged["shown"] if one not in begun["shown"]}
    assert [float(one) for one in changed.split(",")] == pytest.approx([end / 2, end], abs=2)
    assert dragged["shown"].count(changed) == (2 if name == "demo" else 1)
    assert (begun["all"], dragged["all"], back["all"]) == (False, True, False)
    assert str(end) in found["tip"] or name != "demo"
    assert other["log"] is not dragged["log"] is begun["log"] is (name != "demo")
    for one in (dragged, other):
        assert one["ticks"] != begun["ticks"]
        assert one["paths"] != begun["paths"]
        assert not re.search("NaN|Infinity|undefined", "".join(one["paths"] + one["ticks"]))
    assert (back["shown"], found["empty"]["shown"]) == (begun["shown"], begun["shown"])
    assert [path.count("h0") for path in back["paths"]] == [path.count("h0") for path in begun["paths"]]
    places = [[float(x) for path in one["paths"] for x in re.findall(r"[\d.]+", path)] for one in (begun, back)]
    if len(places[0]) == len(places[1]):
        assert places[0] == pytest.approx(places[1], abs=0.11)
    assert (found["focus"], found["moving"], browser.problems) == (True, 0, [])

"""The page is one complete, offline, balanced HTML file, whatever the run holds."""

import base64
import json
import re
import shutil
import zlib
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from report_samples import comparison_of, diagnosis_of

import ottava
from ottava.base.text import number
from ottava.diagnose.what_if import predict
from ottava.measure.tally import Tally
from ottava.measure.walk import measure_packed
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter
from ottava.report.charts import DARK, LIGHT
from ottava.report.frame import PagePart
from ottava.report.page import make_report, make_results, render_report
from page_checker import Checker

LAYER = "layers.2.mlp.down_proj"
NOTHING = {"verdict": "none", "sentence": "No FP8 evidence found; coverage 50 %.", "coverage_pct": 50.0, "findings": []}
KEY = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


@pytest.fixture(scope="module")
def whole(small_run: Run, good_run: Run) -> str:
    """Every part filled."""
    return render_report(
        small_run,
        diagnosis=diagnosis_of(LAYER, 20),
        predictions=predict(small_run.table().where(step=[2, 24])),
        baseline=good_run,
        comparison=comparison_of(LAYER, 20),
    )


def facts_of(html: str) -> bytes:
    """The JSON of a page."""
    found = re.search(r'id="facts">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return zlib.decompress(base64.b64decode(found[1]))


def test_page_is_balanced_offline_and_small(whole: str) -> None:
    Checker(whole)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)|fetch\(|XMLHttpRequest", whole)
    assert len(whole.encode()) < 250_000


def test_page_says_all_that_is_known(whole: str) -> None:
    text = re.sub(r"\s+", " ", Checker(whole).text)
    for words in (
        "loses most of its elements since step 10.",
        "Outlier tokens own the scale",
        "61.7 %",
        "Float8BlockScaling()",
        "On unseen faults, answers of this kind were right 11 times in 12.",
        "max_logit",
        "Does a BF16 run spike as often?",
        "The watch saw 12 of 13 linear layers",
        "2.13 % of the run's time",
        "'small model.yaml'",
        "torch 2.13.0",
        "the cast clipped 0.0130 % of X of layers.2.mlp.down_proj",
        "It leaves 14 steps before the loss",
        "rowwise",
        "not converted",
        "The strip in words",
        "underflow_pct",
    ):
        assert words in text, words


def test_numbers_are_those_of_the_run(whole: str, small_run: Run) -> None:
    """Every look's loss is in the table under the curve."""
    for step, loss in zip(small_run.steps["step"], small_run.steps["loss"], strict=True):
        if step % 2 == 0:
            assert f'<td class="num">{step}</td><td class="num">{number(float(loss))}</td>' in whole


def test_every_evidence_links_to_a_cell_of_the_page(whole: str) -> None:
    facts = json.loads(facts_of(whole))
    links = re.findall(r'href="#slot=(\d+)&amp;(?:metric=(\w+)&amp;)?step=(\d+)"', whole)
    assert links
    known = {metric["name"] for metric in facts["metrics"]}
    assert all(int(slot) < len(facts["slots"]) and (not metric or metric in known) for slot, metric, _ in links)


def degenerate(path: Path, kind: str) -> Run:
    """A run that lacks most of what runs have."""
    one = Tally(n=8, n_total=8, n_nonzero=8, n_underflow=2, amax=3.0, sxx=9.0, see=0.1, scale_min=2.0, scale_max=2.0)
    with RunWriter(path) as writer:
        if kind in ("loss only", "one step", "loss turns nan"):
            writer.step(1, loss=2.5)
        if kind == "loss turns nan":
            writer.step(2, loss=float("nan"))
            writer.step(3, loss=float("inf"), grad_norm=float("inf"))
        if kind in ("one step", "no loss"):
            writer.tally(1, KEY, one)
        if kind == "light rows only":
            for step in range(4):
                writer.tally(
                    step,
                    KEY,
                    Tally(n_total=8, n_casts=1, amax=2.0 + step, scale_min=100.0, scale_max=100.0),
                    phase="light",
                )
        if kind == "reported only":
            imported = KEY._replace(format="FP8", granularity="", scale_format="", scaling="", source="import:te_log")
            for step in (100, 200):
                writer.tally(step, imported, Tally(), reported={"underflow_pct_numel": 3.0, "mse": 1e-5})
        if kind == "numbers":
            x = torch.randn(64, 64)
            x_q = ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))
            for step in (1, 2):
                writer.tally(step, KEY, measure_packed(x, x_q, detail="numbers").tally())
        if kind == "infinite":
            writer.tally(1, KEY, Tally(n=4, n_nonzero=4, n_nonfinite=4, amax=1.0, sxx=4.0, n_casts=1))
    return Run.open(path)


KINDS = (
    "nothing",
    "loss only",
    "one step",
    "no loss",
    "loss turns nan",
    "light rows only",
    "reported only",
    "numbers",
    "infinite",
)


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_runs_make_a_page(tmp_path: Path, kind: str) -> None:
    html = render_report(degenerate(tmp_path / "run", kind), diagnosis=NOTHING)
    text = Checker(html).text
    assert "No law is broken, which does not prove that the run is healthy." in text
    assert ("folder has no statistics of tensors" in text) == (kind in ("nothing", "loss only", "loss turns nan"))
    assert ("This run has no loss" in text) == (kind not in ("loss only", "one step", "loss turns nan"))
    unknown = 'The run has no histograms to compare recipes with: this run was watched with detail="numbers"'
    if kind in ("numbers", "reported only", "light rows only", "nothing"):
        assert (unknown in text) == (kind == "numbers")
    if kind == "reported only":
        assert "3.00 %" in text


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = "a</script><script>alert(1)</script>&\"'"
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(config={evil: evil}, command=[evil])
        writer.event(1, evil, text=evil)
        writer.tally(1, KEY._replace(layer=evil), Tally(n=8, n_nonzero=8, n_underflow=2))
    html = render_report(Run.open(tmp_path / "run"), diagnosis={**NOTHING, "sentence": evil})
    Checker(html)
    assert "<script>alert" not in html


HOSTILE = """<!doctype html><meta name="generator" content="ottava check"><main id="x"><h1 onclick="a()">A page of
another</h1></section></main><p>late</p><main>
<p title="&quot;><script>b()</script>" style="background:url(//c)">kept</p>
<script>d()</script><img src="//e"><a href="//f">g</a><a href="#x">h</a><svg onload="i()"><use href="//j"/></svg>"""


def test_a_folder_has_one_page_of_all_its_results(tmp_path: Path, small_run: Run, good_run: Run) -> None:
    """Runs, the worst first, and pages of other commands, which keep their words and nothing that runs or loads."""
    for run in (small_run, good_run):
        shutil.copytree(run.path, tmp_path / "runs" / run.path.name)
    (tmp_path / "check.html").write_text(HOSTILE.replace("</section></main><p>late</p><main>", "</section>"))
    (tmp_path / "foreign.html").write_text("<main><h1>no page of ours</h1></main>")
    for name in ("a", "check"):  # one has a page
        told = {"written_by": "ottava certify", "sentence": "No <b>fault", "adapters": [{"cases": 1234.5}] * 41}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    (tmp_path / "foreign.json").write_text('{"sentence": "no page of ours", "a": [["written_by"]]}')
    good = Run.open(tmp_path / "runs" / "good")
    page = make_results(tmp_path, baseline=good)
    text = Checker(page.html).text
    found = re.findall(r'<li><a href="#(s\d)">(.*?)</a>', page.html)
    assert found[:3] == [
        ("s1", "ottava report: small"),
        ("s2", "ottava report: good"),
        ("s3", "ottava check: check.html"),
    ]
    assert found[3:] == [("s4", "ottava certify: a.json")]
    assert page.diagnosis == make_report(small_run, baseline=good_run).diagnosis
    assert "Compared with the good run" in text
    assert all(words in text for words in ("No <b>fault", "1,230", "1 more rows are not listed"))
    assert {"facts", "s2-numbers", "s1-heat"} <= {*re.findall(r'id="([\w-]+)"', page.html)}
    part = page.html.partition('id="s3"')[2].partition('id="s4"')[0]
    assert all(words in part for words in ("A page of\nanother", "kept", 'href="#s3-x"'))
    assert not re.search(r"<script|onclick|onload|//|<img|<use|no page of ours", part)
    assert make_results(small_run.path).html == make_report(Run.open(small_run.path)).html
    with pytest.raises(RunError, match="needs a folder of"):
        make_results(tmp_path / "runs" / "nothing")


def test_what_follows_the_body_of_a_page_is_no_part_of_it() -> None:
    assert PagePart(HOSTILE, "s1").html == '<h1 aria-level="2" id="s1-h0">A page of\nanother</h1>'
    nested = '<main><g id="a-drawn"><use href="#b-drawn"/></g><use href="#a-drawn"/></main>'
    assert PagePart(nested, "s").html == '<g id="s-a-drawn"></g><use href="#s-a-drawn"></use>'


def test_ranks_are_merged_and_said_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunWriter(tmp_path / "run", rank=rank) as writer:
            writer.tally(1, KEY, Tally(n=8, n_nonzero=8, n_underflow=4 * rank))
    html = render_report(Run.open(tmp_path / "run"), diagnosis=NOTHING)
    assert "2 ranks merged" in html
    assert number(100 * 4 / 16, "%") in html


def test_hostile_numbers_stay_json(tmp_path: Path) -> None:
    run = degenerate(tmp_path / "run", "infinite")
    html = render_report(run, diagnosis=NOTHING)
    json.loads(facts_of(html), parse_constant=lambda word: pytest.fail(word))
    assert np.isfinite(run.table().metric("nonfinite")).all()


def palettes() -> dict[str, dict[str, str]]:
    """Colours by name, light and dark."""
    css = resources.files("ottava.report").joinpath("report.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    own = {"light": (LIGHT, light), "dark": (DARK, dark)}
    return {name: {**shared, **dict(re.findall(r"--(\w+): (#\w+);", text))} for name, (shared, text) in own.items()}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str) -> None:
    """WCAG AA: 4.5 to 1 for text on either background, 3 to 1 for curves."""
    colours = {name: luminance(value) for name, value in palettes()[scheme].items() if value.startswith("#")}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((colours[one], colours[other]))
        return (high + 0.05) / (low + 0.05)

    for background in ("paper", "raised"):
        for text in ("ink", "muted", "link", "warn", "bad"):
            assert contrast(text, background) >= 4.5, (text, background)
    for curve in ("s1", "s2", "s3"):
        assert contrast(curve, "paper") >= 3, curve


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ramp", ["h", "n"])
def test_heat_is_told_by_lightness_alone(scheme: str, ramp: str) -> None:
    """Colour-blind readers and black-and-white prints order the nine shades as all others do, away from the paper."""
    colours = palettes()[scheme]
    shades = [luminance(colours[f"{ramp}{i}"]) for i in range(9)]
    away = [abs(shade - luminance(colours["paper"])) for shade in shades]
    assert away == sorted(away)
    assert all((max(a, b) + 0.05) / (min(a, b) + 0.05) > 1.08 for a, b in pairwise(shades))

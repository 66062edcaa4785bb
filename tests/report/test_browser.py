"""What the page's script makes of a run, seen by a browser: headless Chromium, driven by the page's address."""

import html as markup
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from report_samples import comparison_of, diagnosis_of
from test_page import KINDS, NOTHING, degenerate

from ottava.base.text import number
from ottava.measure.statistics import STATISTICS
from ottava.record.reader import Run
from ottava.report.grid import Grid
from ottava.report.page import render_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
LAYER = "layers.2.mlp.down_proj"
FIRST = "#slot=0&metric=amax&look=0"


def dom(page: Path) -> str:
    """The document after its script has run."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    flags += ["--allow-file-access-from-files"]  # else a page may not look into its frames
    flags += [
        f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1280,2000",
        "--virtual-time-budget=30000",
    ]
    command = [CHROMIUM, *flags, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert 'data-drawn="yes"' in done.stdout[:200]
    return done.stdout


def together(addresses: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The documents at these addresses after their scripts have run. One start of the browser opens all, in frames."""
    frames = "".join(
        f'<iframe width="1280" height="2000" src="{markup.escape(place)}"></iframe>' for place in addresses.values()
    )
    script = Path(__file__).with_name("together.js").read_text(encoding="utf-8")
    page = folder / "together.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{script}</script></body>")
    texts = [markup.unescape(text) for text in re.findall("<textarea>(.*?)</textarea>", dom(page), re.DOTALL)]
    assert all('data-drawn="yes"' in text[:200] for text in texts)
    return dict(zip(addresses, texts, strict=True))


def element(text: str, name: str) -> str:
    """The inner text of an element with an id, tables row by row."""
    inner = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>(.*?)</\1>', text, re.DOTALL)
    assert inner is not None, name
    return markup.unescape(re.sub(r"<[^>]+>", "|", inner[2]))


def cells(text: str, name: str) -> dict[str, list[str]]:
    """A table's rows by their first cell."""
    rows = re.search(rf'<table id="{name}".*?</table>', text, re.DOTALL)
    assert rows is not None, name
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", rows[0], re.DOTALL):
        first, *others = [
            markup.unescape(re.sub("<[^>]+>", "", c)) for c in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        ]
        found[first] = others
    return found


@pytest.fixture(scope="module")
def page(small_run: Run, good_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    comparison = comparison_of(LAYER, 20)
    made = render_report(small_run, diagnosis=diagnosis_of(LAYER, 20), baseline=good_run, comparison=comparison)
    path.write_text(made, encoding="utf-8")
    return path


def slot_of(grid: Grid, layer: str, tensor: str) -> int:
    return next(i for i, slot in enumerate(grid.slots) if (slot.layer, slot.tensor) == (layer, tensor))


QKV, DOWN = "layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"


ACTS = Path(__file__).with_name("acts.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def documents(page: Path, small_run: Run) -> dict[str, str]:
    """The page as it opens, at addresses that select a cell, a statistic, or nothing there is; and after a script has
    acted on it, as a person would."""
    grid = Grid.of(small_run.table(), 1000)
    fragments = {
        "": "",
        "kurtosis": f"#slot={slot_of(grid, QKV, 'weight')}&metric=kurtosis&step=12",
        "step 24": f"#slot={slot_of(grid, LAYER, 'input')}&step=24",
        "step 2": f"#slot={slot_of(grid, DOWN, 'grad_output')}&step=2",
        "series": f"#slot={slot_of(grid, LAYER, 'input')}",
        "nonsense": "#slot=9999&metric=nothing&look=x",
        "first": FIRST,
    }
    addresses = {name: page.as_uri() + fragment for name, fragment in fragments.items()}
    for name in re.findall(r"^  (\w+)\(\)", ACTS, re.MULTILINE):
        acting = page.with_name(f"{name}.html")
        seen = "observe(document.documentElement, { attributeFilter: ['data-drawn'] })"  # a busy machine draws late
        act = f"setTimeout(() => {{ {ACTS} acts.{name}(); }})"
        wait = f"<script>new MutationObserver(() => {act}).{seen}</script></body>"
        acting.write_text(page.read_text(encoding="utf-8").replace("</body>", wait), encoding="utf-8")
        addresses[name] = acting.as_uri() + FIRST
    return together(addresses, page.parent)


@pytest.fixture(scope="module")
def opened(documents: dict[str, str]) -> str:
    return documents[""]


def test_page_opens_at_the_evidence_of_its_first_finding(opened: str, small_run: Run) -> None:
    first = diagnosis_of(LAYER, 20)["findings"][0]["evidence"][0]
    assert f" of {first['layer']}; step {first['step']}; {first['metric']} " in element(opened, "cell")


def test_every_picture_is_drawn_and_named(opened: str) -> None:
    for name in ("loss", "norm", "strip", "heat", "window", "row-sqnr", "spread", "scales"):
        inner = re.search(rf'<div id="{name}"><svg[^>]*aria-label="[^"]+"', opened)
        assert inner is not None, name
    assert opened.count('class="event"') == 3  # two triggers and a fallback; a burst and a dump are only listed
    shown = re.sub(r"<script.*?</script>", "", opened, flags=re.DOTALL)
    assert not re.search(r"\b(NaN|undefined|Infinity)\b", shown)


def test_address_selects_cell_and_statistic(documents: dict[str, str], small_run: Run) -> None:
    """All statistics of that look are shown, written as Python writes them."""
    table = small_run.table()
    grid, text = Grid.of(table, 1000), documents["kurtosis"]
    rows = table.where(layer=QKV, tensor="weight", step=12)
    shown = cells(text, "numbers-table")
    for name in grid.values:
        assert shown[name][0] == number(float(rows.metric(name)[0]), STATISTICS[name].unit), name
    assert element(text, "tensor-title") == f"W of {QKV}"
    assert '<option value="kurtosis" selected' in text
    assert '<option value="weight" selected' in text


def test_browser_and_python_write_numbers_alike(tmp_path: Path) -> None:
    """The same digits for the same number: halves, their neighbours, all sizes, units, what is no number."""
    random = np.random.default_rng(0)
    halves = (random.integers(100, 1000, 300) + 0.5) * 2.0 ** random.integers(-20, 20, 300)
    wide = random.normal(size=300) * 10.0 ** random.uniform(-300, 300, 300)
    values = [
        *halves,
        *(random.integers(100, 1000, 300) + 0.5),
        *wide,
        0.0,
        -0.0,
        999.5,
        9.995,
        9995000.0,
        1e-3,
        999500.0,
    ]
    chart = resources.files("ottava.report").joinpath("draw.js").read_text(encoding="utf-8")
    page = tmp_path / "numbers.html"
    script = f"document.title = {[float(v) for v in values]}.map((x) => human(x, 'dB')).join('; ');"
    done = "document.documentElement.dataset.drawn = 'yes';"
    page.write_text(f"<!doctype html><meta charset=utf-8><title></title><script>{chart}{script}{done}</script>")
    shown = re.search("<title>(.*?)</title>", dom(page))
    assert shown is not None
    assert markup.unescape(shown[1]).split("; ") == [number(float(v), "dB") for v in values]


def test_window_predicts_what_the_cast_did(documents: dict[str, str], small_run: Run) -> None:
    """From the histogram alone, at the scale that was used: facts 3.8, underflow within 0.05 points of what was
    measured; here the tensor is small, and 0.5 is asked."""
    table = small_run.table()
    for layer, tensor, step in ((LAYER, "input", 24), (DOWN, "grad_output", 2)):
        text = documents[f"step {step}"]
        assert f"This is step {step}." in text
        shown = cells(text, "predicted")
        row = table.where(layer=layer, tensor=tensor, step=step)
        for name, metric, slack in (
            ("cast to 0", "underflow_pct", 0.5),
            ("subnormal", "subnormal_pct", 3.0),
            ("clipped", "overflow_pct", 0.2),
        ):
            predicted, measured = shown[name]
            assert measured == number(float(row.metric(metric)[0]), "%")
            assert float(predicted.split()[0]) == pytest.approx(float(row.metric(metric)[0]), abs=slack)
        assert float(shown["SQNR"][0].split()[0]) == pytest.approx(float(row.metric("sqnr_db")[0]), abs=2.0)


def test_window_as_a_table_adds_up(opened: str) -> None:
    shares = [
        float(row[0].split()[0].replace("e−", "e-")) for key, row in cells(opened, "window-table").items() if "^" in key
    ]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_series_is_that_of_the_run(documents: dict[str, str], small_run: Run) -> None:
    rows = small_run.table().where(layer=LAYER, tensor="input", direction="row")
    shown = cells(documents["series"], "scales-table")
    amaxes = {str(step): number(float(amax)) for step, amax in zip(rows["step"], rows.metric("amax"), strict=True)}
    assert {step: row[0] for step, row in shown.items() if step != "step"} == amaxes


def test_first_patch_is_shown_and_all_are_there(opened: str) -> None:
    panels = re.findall(r'<div class="panel" role="tabpanel" id="patch-0-1-panel(\d)"[^>]*?( hidden="")?>', opened)
    assert panels == [("1", ""), ("2", ' hidden=""'), ("3", ' hidden=""'), ("4", ' hidden=""')]
    assert opened.count('aria-selected="true"') == 2  # one for each of the two remedies


def test_nonsense_in_the_address_is_ignored(documents: dict[str, str], opened: str) -> None:
    assert element(documents["nonsense"], "cell") == element(opened, "cell")


def test_degenerate_runs_are_drawn(tmp_path: Path) -> None:
    addresses = {}
    for kind in KINDS:
        path = tmp_path / f"{kind}.html"
        path.write_text(render_report(degenerate(tmp_path / kind, kind), diagnosis=NOTHING), encoding="utf-8")
        addresses[kind] = path.as_uri()
    for kind, text in together(addresses, tmp_path).items():
        check_degenerate(kind, text)


def check_degenerate(kind: str, text: str) -> None:
    assert ('aria-label="Heat map' in text) == (kind not in ("nothing", "loss only", "loss turns nan"))
    assert ("no finite loss from here" in text.split("<script")[0]) == (kind == "loss turns nan")
    if kind in ("light rows only", "reported only"):
        assert "This tensor has no histograms" in text
    if kind == "numbers":  # rows and blocks are drawn, and what was not counted is said
        assert 'id="no-magnitudes" class="muted">' in text
        assert 'id="magnitudes" hidden' in text
        assert cells(text, "row-sqnr-table")
        assert cells(text, "spread-table")
    if kind == "light rows only":
        assert cells(text, "scales-table")["3"] == ["5.00", number(448.0 / 100)]
    if kind == "reported only":
        assert cells(text, "numbers-table")["underflow_pct_numel"][0] == "3.00 %"


def drawn(text: str, name: str) -> str:
    """The SVG of a picture."""
    found = re.search(rf'<div id="{name}">(<svg.*?</svg>)', text, re.DOTALL)
    assert found is not None, name
    return found[1]


def steps_of(text: str, name: str) -> list[int]:
    """The numbers on the axis of steps of a picture: its texts below the others."""
    texts = re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>(\d+)</text>', drawn(text, name))
    return [int(value) for y, value in texts if float(y) == max(float(y) for y, _ in texts)]


def test_pictures_above_each_other_share_their_steps(opened: str) -> None:
    """The same place for the same step in the strip and in the heat map."""
    tick = r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">(\d+)<'
    places = [{step: x for x, step in re.findall(tick, drawn(opened, name))} for name in ("strip", "heat")]
    assert len(places[0]) > 3
    assert places[0] == places[1]


def test_chosen_steps_are_shown_alone_everywhere(documents: dict[str, str]) -> None:
    for name in ("strip", "heat"):
        assert steps_of(documents["first"], name)[0] < 10, name
        assert min(steps_of(documents["zoom"], name)) >= 11, name
    assert '<button type="button" id="all-steps">' in documents["zoom"]
    assert '<button type="button" id="all-steps" hidden="">' in documents["first"]
    assert drawn(documents["zoom"], "loss").count("L") < drawn(documents["first"], "loss").count("L")


def test_dragging_over_the_loss_chooses_steps(documents: dict[str, str]) -> None:
    shown = steps_of(documents["drag"], "heat")
    assert shown
    assert 8 <= min(shown) <= max(shown) <= 16  # from 40 to 60 % of a picture of 24 steps


def test_the_loss_has_both_axes(documents: dict[str, str]) -> None:
    first, other = (drawn(documents[name], "loss") for name in ("first", "axis"))
    assert first != other
    assert drawn(documents["first"], "norm") == drawn(documents["axis"], "norm")


def test_the_good_run_has_a_heat_map_of_its_own(documents: dict[str, str], good_run: Run, small_run: Run) -> None:
    """amax of the first tensor differs in the second half, where the bad run has outliers."""
    first, good = (drawn(documents[name], "heat") for name in ("first", "good"))
    assert re.findall(r'<path class="n\d"', good)
    assert first != good
    table, slot = good_run.table(), Grid.of(small_run.table(), 1000).slots[0]
    amax = table.where(layer=slot.layer, tensor=slot.tensor, step=2, direction=slot.direction).metric("amax")[0]
    assert f"; the good run: {number(float(amax))}" in element(documents["first"], "cell")


def test_the_experiment_is_a_picture_and_a_table(opened: str) -> None:
    """Errors of 5 and 20 % of the gradient, 0.3 times the noise of the batch; those of the good run beside them."""
    assert drawn(opened, "experiment").count("<circle") == 6
    cell = '<td class="num">{}</td>'.format
    rows = re.findall(cell("(5|20)") + cell("([^<]+)") + cell("([^<]+ %)"), opened)
    assert rows == [("5", "5.00 %", "16.7 %"), ("20", "20.0 %", "66.7 %")]


def test_keys_move_in_the_heat_map_and_the_address_follows(documents: dict[str, str], small_run: Run) -> None:
    grid, text = Grid.of(small_run.table(), 1000), documents["keys"]
    assert f"; step {grid.looks[1][0]}; amax " in element(text, "cell")
    assert element(text, "tensor-title") == f"X of {grid.slots[1].layer}"
    assert f"<title>#slot=1&amp;metric=amax&amp;step={grid.looks[1][0]}</title>" in text


def test_tensor_selector_stays_in_the_layer(documents: dict[str, str]) -> None:
    assert element(documents["weight"], "tensor-title") == f"W of {QKV}"


def test_scale_slider_and_format_predict_anew(documents: dict[str, str]) -> None:
    """Scale up by 2**12: clipped. Down by 2**16: half of a healthy tensor is cast to zero, and less in E5M2."""
    up, down, wide, still = (cells(documents[name], "predicted") for name in ("up", "down", "wide", "still"))
    assert float(up["clipped"][0].split()[0]) > 50
    assert 30 < float(down["cast to 0"][0].split()[0]) < 60  # flushed below amax * 2**16 / (448 * 2**10), a 0.6 sigma
    assert float(wide["cast to 0"][0].split()[0]) < 2  # 7 octaves more below
    assert still == cells(documents["first"], "predicted")


def test_tabs_show_the_other_patches(documents: dict[str, str]) -> None:
    panels = re.findall(
        r'<div class="panel" role="tabpanel" id="patch-0-1-panel\d"[^>]*?( hidden="")?>', documents["tab"]
    )
    assert panels == [' hidden=""', ' hidden=""', "", ' hidden=""']


def test_a_good_run_is_beside_the_bad_one_in_every_picture_of_steps(opened: str) -> None:
    """Loss, gradient norm, experiment, alarming tensors, the statistic and amax: a curve of each run."""
    for name in ("loss", "norm", "experiment", "strip", "curve", "scales"):
        picture = drawn(opened, name)
        assert re.search(r"good run(, %)?</text>", picture), name
        assert len(re.findall(r'<path class="curve (?:faint|s3)"', picture)) >= 2, name  # its line and its key
    assert "good run" in drawn(opened, "heat") or '<option value="good">' in opened  # a map of its own
    for name, table in (("window", "window-table"), ("row-sqnr", "row-sqnr-table"), ("spread", "spread-table")):
        outline = re.search(r'class="curve faint beside" d="(M[^"]{20,})"', drawn(opened, name))
        assert outline is not None, name
        head, *rows = cells(opened, table).values()
        assert head[-1] == "the good run", table
        shares = [float(row[-1].removesuffix(" %").replace("−", "-")) for row in rows]
        assert abs(sum(shares) - 100) < 1, (table, shares)


def test_a_pointer_on_one_picture_shows_its_step_in_all(documents: dict[str, str]) -> None:
    """One vertical line in each picture of the axis, at one place; none before."""
    line = r'<line class="cross"[^>]*visibility="visible"[^>]*>'
    places = {}
    for name in ("loss", "norm", "experiment", "strip", "heat", "curve"):
        assert not re.search(line, drawn(documents["first"], name)), name
        found = re.search(line, drawn(documents["hover"], name))
        assert found is not None, name
        places[name] = re.search(r'x1="([\d.]+)"', found[0])[1]  # type: ignore[index]
    assert len({places[name] for name in ("loss", "norm", "experiment", "strip", "heat")}) == 1, places


def test_pictures_speak_the_language_of_the_page(page: Path, tmp_path: Path) -> None:
    """Words that a script draws are those of the catalog, with their numbers; names of layers stay."""
    from ottava.base.language import Language

    path = tmp_path / "zh.html"
    path.write_text(Language("zh").page(page.read_text(encoding="utf-8")), encoding="utf-8")
    text = dom(path)
    assert "梯度范数" in drawn(text, "norm")
    assert re.search(r"^\S+ 的 \S+；第 \d+ 步；\S+ .*；好的那次训练：", element(text, "cell"))
    assert "所用的 scale" in element(text, "shift-text")
    assert "次正规" in cells(text, "predicted")
    assert f'<code title="{LAYER}">' in text

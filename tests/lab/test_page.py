"""The page holds every finding, and no number that is none."""

from __future__ import annotations

import math
import re
import statistics
from html.parser import HTMLParser

import pytest

from lab_samples import study
from ottava.base.text import to_json
from ottava.lab.page import LabResult, lab_page, parts
from ottava.lab.study import DISTRIBUTIONS
from ottava.recipe import GEMMS
from ottava.train.verdict import Interval


def test_the_page_holds_every_finding_and_no_number_that_is_none() -> None:
    """Well-formed, offline, with every recipe, sentence and chart; also with one seed, one recipe, and a lost run."""
    for result in (
        study({"mxfp8": [0.01, 0.02, 0.03, 0.02], "nvfp4": [0.1, math.nan, 0.1, 0.1]}),
        study({"tensorwise": [0.01]}, seeds=1),
    ):
        page = lab_page(result)
        HTMLParser().feed(page)
        assert not re.search(r"nan|None|\binf\b", re.sub(r"(?s)<(style|script)>.*?</\1>", "", page)), (
            "a number is missing"
        )
        assert not re.search(r"(src|href)=(?!.#)", page)  # nothing but parts of the page itself
        for finding in result.findings:
            assert finding.sentence.replace("'", "&#39;") in page
        charts = [one for one in re.findall(r'<svg[^>]* id="([\w-]+)"', page) if not one.endswith("-narrow")]
        assert charts == [
            "loss",
            "training",
            *(f"error-{g}" for g in GEMMS),
            "price",
            *(f"bias-{g}" for g in GEMMS),
        ] + [
            "shrink",
            *(f"parts{i}" for i in range(len(DISTRIBUTIONS))),
        ]
        assert parts(result, result.others[0], "normal", "X") == pytest.approx([10, 0, -5, 95])
        assert parts(result, "bf16", "normal", "X") == []
        assert "NaN" not in to_json(result.to_dict())
    with pytest.raises(ValueError, match="no measurement"):
        lab_page(LabResult(result.settings, {}, ""))


def test_a_claim_needs_an_interval_without_zero() -> None:
    """Paired: BF16's seeds lie 0.3 apart, yet a difference of 0.01 that all seeds share is found."""
    result = study(
        {
            "mxfp8": [0.010, 0.011, 0.012, 0.009],
            "rowwise": [-0.010, -0.011, -0.012, -0.009],
            "tensorwise": [0.02, -0.02, 0.01, -0.012],
            "nvfp4": [0.1, math.nan, 0.1, 0.1],
        }
    )
    outcomes = {finding.recipe: finding.outcome for finding in result.findings}
    assert outcomes == {"mxfp8": "worse", "rowwise": "better", "tensorwise": "open", "nvfp4": "diverged"}
    found = result.findings[0].difference
    assert found is not None
    deltas = [0.010, 0.011, 0.012, 0.009]
    assert found.mean == pytest.approx(statistics.fmean(deltas))
    assert found.half == pytest.approx(3.18245 * statistics.stdev(deltas) / 2, rel=1e-4)
    assert "costs +0.0105 ± 0.0021" in result.findings[0].sentence
    assert "with seed 1" in result.findings[3].sentence
    assert result.headline.startswith("nvfp4 diverged; mxfp8 costs 0.01")
    assert result.slowdown("mxfp8").mean == pytest.approx(1.5)
    one = study({"mxfp8": [0.5]}, seeds=1)
    assert one.findings[0].outcome == "unknown"
    assert "no claim" in one.findings[0].sentence
    assert one.headline == "Nothing can be said with one seed"
    lost = study({"mxfp8": [0.1] * 2}, seeds=2)
    lost.measurements["bf16", 0].__dict__["validation"] = lost.measurements["bf16", 1].__dict__["validation"] = math.nan
    assert lost.findings[0].outcome == "unknown"


def test_unbiased_is_said_only_of_a_narrow_interval_at_zero() -> None:
    for systematic, seeds, said in ((1.0, 4, "biased"), (0.0, 4, "unbiased"), (0.049, 4, "open"), (0.0, 1, "open")):
        result = study({"mxfp8": [0.0] * seeds}, seeds=seeds, systematic=systematic)
        assert result.bias("mxfp8", "wgrad", "normal")[0] == said, systematic
    values = [1.0, 2.0, 4.0]
    assert Interval.of(values).half == pytest.approx(4.303 * statistics.stdev(values) / math.sqrt(3), rel=1e-4)
    assert (Interval.of([3.0]), Interval.of([3.0]).sign) == (Interval(3.0, None), 0)
    assert [Interval(m, 1.0).sign for m in (2.0, 0.5, -2.0)] == [1, 0, -1]

"""The page holds every finding, and no number that is none."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from lab_samples import study
from ottava.base.text import to_json
from ottava.lab.page import LabResult, parts, write_page
from ottava.lab.study import DISTRIBUTIONS
from ottava.recipe import GEMMS


def test_the_page_holds_every_finding_and_no_number_that_is_none() -> None:
    """Well-formed, offline, with every recipe, sentence and chart; also with one seed, one recipe, and a lost run."""
    for result in (
        study({"mxfp8": [0.01, 0.02, 0.03, 0.02], "nvfp4": [0.1, math.nan, 0.1, 0.1]}),
        study({"tensorwise": [0.01]}, seeds=1),
    ):
        page = write_page(result)
        HTMLParser().feed(page)
        assert not re.search(r"nan|None|\binf\b", re.sub(r"(?s)<(style|script)>.*?</\1>", "", page)), (
            "a number is missing"
        )
        assert not re.search(r"(src|href)=", page)
        for finding in result.findings:
            assert finding.sentence.replace("'", "&#39;") in page
        charts = re.findall(r'<svg[^>]* id="([\w-]+)"', page)
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
        write_page(LabResult(result.settings, {}, ""))

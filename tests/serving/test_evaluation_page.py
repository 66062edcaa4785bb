"""The page of an evaluation holds every number, escapes what a model said, and needs no other file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ottava.serving.evaluate import Generation, evaluate
from ottava.serving.evaluation_page import render_page, write_page
from serving_samples import TEXT, learned, view


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    found = evaluate(view(learned()), view(learned("rowwise")), {"a & b": TEXT}, chunks=4, generate=0)
    said = Generation("p", "<script>alert(1)</script>\n", "y", 0, 2)
    path = write_page(replace(found, generations=(said,)), tmp_path / "new" / "page.html")
    page = path.read_text(encoding="utf-8")
    assert found.verdict.sentence in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;⏎" in page
    assert "a &amp; b" in page
    assert "src=" not in page
    assert f"{found.answers.perplexity_b:.4g}" in page
    for tensor in found.weights.tensors:
        assert tensor.name.replace(".", ".<wbr>") in page
    assert "<svg" in page
    assert "<svg" not in render_page(replace(found, blocks=()))
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]

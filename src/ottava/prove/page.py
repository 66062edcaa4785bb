"""The page of `ottava certify`: one HTML file without other files, on the report's frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ottava.prove.certificate import KernelCertificate
from ottava.report.frame import render


def page(found: Sequence[KernelCertificate], settings: Mapping[str, Any]) -> str:
    """All certificates as HTML."""
    bad = [one for one in found if not one.good]
    headline = f"{len(bad)} of {len(found)} adapters are wrong" if bad else f"No fault found in {len(found)} adapters"
    return render("ottava.prove", "certify.html.j2", found=found, settings=settings, headline=headline)

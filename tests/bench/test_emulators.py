"""Rivals on a CPU compute what their names say; nothing is converted where they are not installed."""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn

from ottava import convert
from ottava.bench.emulators import EMULATORS, emulated

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 32, bias=False))).bfloat16()
X = torch.randn(16, 64, dtype=torch.bfloat16)
PACKAGES = {"torchao tensorwise": "torchao", "microxcaling mxfp8": "mx"}


@pytest.mark.parametrize("name", EMULATORS)
def test_a_rival_comes_as_near_to_bf16_as_ours(name: str) -> None:
    """Its error against BF16 is that of the recipe of ours with the same name, within a quarter: it did quantize."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    (theirs,) = emulated(lambda: copy.deepcopy(MODEL), [name]).values()
    ours = copy.deepcopy(MODEL)
    convert(ours, {"tensorwise": "tensorwise", "mxfp8": "mxfp8_floor"}[name.split()[1]], filter=lambda *_: True)
    truth = MODEL(X)
    own, other = ((model(X) - truth).float().norm() for model in (ours, theirs))
    assert 0.75 * own < other < 1.25 * own
    assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), MODEL.parameters(), strict=True))


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No contender, and no error."""
    monkeypatch.setitem(sys.modules, "mx.mx_ops", None)
    assert emulated(lambda: copy.deepcopy(MODEL), ["microxcaling mxfp8"]) == {}

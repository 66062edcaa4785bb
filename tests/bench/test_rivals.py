"""Who is measured, and who is left out by name."""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn

import ottava
from ottava.bench.method import Run
from ottava.bench.models import EMULATORS, RECIPES, RIVALS, contenders, emulated, missing

SMOKE = Run(torch.device("cpu"), smoke=True, rounds=2, compiled=False)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64)).bfloat16()


def test_all_contenders_have_the_same_weights_and_run() -> None:
    """BF16 first; every recipe; torchao by its emulation here. Outputs are near, and of FP8 not equal."""
    found = contenders(SMOKE, make)
    names = [one.name for one in found]
    here = [name for name in RIVALS if name.startswith("torchao") and name not in missing()]
    assert names == ["bf16", *RECIPES, *here]
    x = torch.randn(8, 64).bfloat16()
    truth = found[0].forward(x)
    for one in found[1:]:
        y = one.forward(x)
        assert not torch.equal(y, truth), one.name
        assert (y - truth).norm() < 0.15 * truth.norm(), one.name
    assert all(isinstance(one.model[0], ottava.nn.Linear) for one in found[1 : 1 + len(RECIPES)])


def test_a_rival_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and nothing fails."""
    for package in ("torchao.float8", "liger_kernel", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, package, None)  # what a failed import looks like
    assert set(missing()) == set(RIVALS)
    assert [one.name for one in contenders(SMOKE, make, ("tensorwise",))] == ["bf16", "tensorwise"]


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 32, bias=False))).bfloat16()
X = torch.randn(16, 64, dtype=torch.bfloat16)
PACKAGES = {"torchao tensorwise": "torchao", "microxcaling mxfp8": "mx"}


@pytest.mark.parametrize("name", EMULATORS)
def test_an_emulator_comes_as_near_to_bf16_as_ours(name: str) -> None:
    """Its error against BF16 is within a quarter of that of ottava's recipe of the same name, so it quantizes."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    (theirs,) = emulated(lambda: copy.deepcopy(MODEL), [name]).values()
    ours = copy.deepcopy(MODEL)
    ottava.convert(ours, {"tensorwise": "tensorwise", "mxfp8": "mxfp8_floor"}[name.split()[1]], filter=lambda *_: True)
    truth = MODEL(X)
    own, other = ((model(X) - truth).float().norm() for model in (ours, theirs))
    assert 0.75 * own < other < 1.25 * own
    assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), MODEL.parameters(), strict=True))

"""How much Python a warm training step of one Linear runs: calls of ours, files of ours, and who is asked.

All that does not change from step to step is decided once and kept (`CastPlan`, `GemmPlan`); these counts hold it so.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava.kernels.native import build as native_build
from ottava.ops.dispatch import torch_is_beaten

PACKAGE = str(Path(ottava.__file__).parent)
MOST_CALLS = {
    "bf16": 50 if torch_is_beaten() else 4,  # a CPU without BF16 units has a faster GEMM than torch's
    "tensorwise": 36,
    "tensorwise_e4m3": 36,
    "delayed": 78,  # 13 of them once a backward, for all layers
    "guarded": 78,
    "blockwise": 38,
    "blockwise_fp32": 38,
    "mxfp8": 38,
    "mxfp8_floor": 38,
    "rowwise": 47,
    "rowwise_with_gw_hp": 44 if torch_is_beaten() else 42,  # its wgrad is a dense GEMM
    # C++ decodes each operand with two levels of scales by itself; transforms and rules keep their plans all the same
    "nvfp4": 55,
    "nvfp4_rht": 71,
    "four_over_six": 80,
    "four_over_six_te": 64,
    "ms_eden": 105,
    "averis": 135,  # products of parts decode a tensor, by no plan
    "mxfp4": 43,
}
MOST_FILES = {"delayed": 12, "guarded": 12, "nvfp4": 10, "nvfp4_rht": 12, "mxfp4": 9}
MOST_FILES |= {"four_over_six": 12, "four_over_six_te": 10, "ms_eden": 12, "averis": 15}
MOST_FILES["rowwise_with_gw_hp"] = 10 if torch_is_beaten() else 9  # sums of columns beside our own dense GEMM
OTHERS = 40, 8


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """(file, function) of each Python call in ottava's own files."""
    seen: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.skipif(native_build.load("gemm").library is None, reason="the reference takes other ways")
@pytest.mark.usefixtures("native_first")
def test_a_warm_step_asks_nothing_that_was_answered(recipe: ottava.Recipe) -> None:
    """Forward and backward of a layer after a step of its optimizer; counted, not timed."""
    layer = ottava.nn.Linear(64, 64, recipe=recipe, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x, dy = torch.randn(64, 64).bfloat16().requires_grad_(), torch.randn(64, 64).bfloat16()
    for _ in range(3):
        layer(x).backward(dy)
        optimizer.step()
    with calls() as seen:
        layer(x).backward(dy)
    files = [file for file, _ in seen]
    moves = sum(one != other for one, other in itertools.pairwise(files))
    print(f"{recipe.name}: {len(seen)} calls, {len(set(files))} files, {moves} moves between them")
    assert len(seen) <= MOST_CALLS.get(recipe.name, OTHERS[0])
    assert len(set(files)) <= MOST_FILES.get(recipe.name, OTHERS[1])
    asked = [name for _, name in seen if name.startswith(("supports", "choose", "plan_", "refuse"))]
    if recipe.wgrad.lhs is not None and recipe.wgrad.lhs.transform is not None:
        by_no_plan = {"supports_decode", "plan_dequantize"}  # products of parts decode a tensor
        asked = [name for name in asked if name not in by_no_plan]
    assert [name for name in asked if "<locals>" not in name] == []


@pytest.mark.usefixtures("native_first")
def test_a_kept_plan_follows_what_changes() -> None:
    """Another shape, dtype, layout or recipe is decided anew; what comes back finds its plan again, with equal bits."""
    torch.manual_seed(0)
    kept = ottava.nn.Linear(48, 32, recipe="tensorwise", dtype=torch.bfloat16)
    inputs = [torch.randn(5, 48).bfloat16(), torch.randn(48, 7).bfloat16().t(), torch.randn(2, 3, 48).bfloat16()]
    for _ in range(2):
        for name in ("tensorwise", "rowwise", "mxfp8"):
            for x in inputs:
                fresh = ottava.nn.Linear(48, 32, recipe=name, dtype=torch.bfloat16)
                fresh.load_state_dict(kept.state_dict())
                grads = []
                with ottava.autocast(name):
                    for layer in (kept, fresh):
                        leaf = x.detach().requires_grad_()
                        layer.zero_grad()
                        layer(leaf).square().sum().backward()
                        grads.append((leaf.grad, layer.weight.grad, layer.bias.grad))
                assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert len(kept.plans) == 3 * 3 * 3  # three recipes, three inputs, three GEMMs

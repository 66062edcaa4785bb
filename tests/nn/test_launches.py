"""What a Linear launches on a GPU, counted here: the same Python, with Triton interpreted and torch's operators listed.

An operator that only makes memory or a view launches nothing; every other one, and every Triton kernel, is one launch.
On a GPU (-m gpu) torch's profiler counts them, and torch watches for waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.engine import quantizer
from ottava.kernels import scaled_mm
from ottava.kernels.triton import quantize as triton_quantize
from ottava.ops import dispatch
from ottava.ops import quantize as casts
from triton_mode import ON_GPU, never_waits, with_triton

with_triton()
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

FREE = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "view", "_unsafe_view", "t", "transpose"}
    | {"slice", "expand", "unsqueeze", "squeeze", "as_strided", "select"}
)
"""Operators that move nothing."""
BUDGET = 12
"""Kernels of a Linear without bias, forward and backward: three casts and three GEMMs."""
CAST = {"new_zeros": 1, "amax_kernel": 1, "cast_kernel": 1}
PREDICTED = {"new_zeros": 1, "predicted_kernel": 2}
LAUNCHES = {
    "tensorwise": {**{name: 3 * n for name, n in CAST.items()}, "_scaled_mm_v2": 3},
    "tensorwise_e4m3": {**{name: 3 * n for name, n in CAST.items()}, "_scaled_mm_v2": 3},
    "delayed": {**{name: 3 * n for name, n in PREDICTED.items()}, "_scaled_mm_v2": 3},
    "guarded": {**{name: 3 * n for name, n in PREDICTED.items()}, "_scaled_mm_v2": 3},
}
"""Everything that one step of the layer launches, by name."""
ONCE = ("_foreach_maximum_", "_foreach_zero_")
"""Once a backward, for all layers: what was seen is staged; after a step that no optimizer took, it is dropped."""


class Launches(TorchDispatchMode):
    """Counts launches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.interpreting = False  # what the interpreter does in torch is inside a kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not self.interpreting and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """A Triton kernel of that name, counted as it is launched."""
        from ottava.kernels.triton import device_code

        kernel, launches = getattr(device_code, name), self

        class Counted:
            def __getitem__(self, grid: Any) -> Any:
                def run(*args: Any, **kwargs: Any) -> None:
                    launches.counts[name] += 1
                    launches.interpreting = True
                    kernel[grid](*args, **kwargs)
                    launches.interpreting = False

                return run

        return Counted()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels of a GPU where a CPU's would run; all that chooses, lays out and calls them is untouched."""
    monkeypatch.setattr(triton_quantize, "supports_quantize", lambda *_: None)
    monkeypatch.setattr(casts, "_CPU_CASTS", (triton_quantize,))
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (scaled_mm,))
    monkeypatch.setattr(quantizer, "_on_accelerator", lambda x: x.device.type != "meta")
    launches = Launches()  # one for the test: kept plans hold their kernels
    monkeypatch.setattr(triton_quantize, "_device_code", lambda: launches)
    return launches


@contextmanager
def counted(launches: Launches) -> Iterator[Counter[str]]:
    """The launches inside the block."""
    launches.counts = Counter()
    with launches:
        yield launches.counts


def sample(recipe: str, bias: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    layer = ottava.nn.Linear(64, 32, bias=bias, recipe=recipe, dtype=torch.bfloat16)
    return layer, torch.randn(48, 64).bfloat16().requires_grad_(), torch.randn(48, 32).bfloat16()


def forward_backward(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    """The gradient comes from outside, and gradients are made anew."""
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    layer(x).backward(dy)


@pytest.mark.scaled_mm_on_cpu
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_a_step_launches_these_and_nothing_else(recipe: str, as_on_a_gpu: Launches) -> None:
    """x and x.T from one launch, the amax in the cast or its own one, no copy, no cast of a scale, no fill but one."""
    layer, x, dy = sample(recipe)
    forward_backward(layer, x, dy)  # the second step is like all that follow
    with counted(as_on_a_gpu) as counts:
        forward_backward(layer, x, dy)
    assert {name: count for name, count in counts.items() if name not in ONCE} == LAUNCHES[recipe]
    assert all(counts[name] <= 1 for name in ONCE)
    for name in ONCE:
        del counts[name]
    assert counts.total() <= BUDGET


def test_scales_of_blocks_lie_as_the_gemm_reads_them(as_on_a_gpu: Launches) -> None:
    """Of 17 launches a step (scales took 6 to pad and 5 to copy) 7 are left: casts, GEMMs, and a copy."""
    recipe = ottava.RECIPES["blockwise"]
    matrices = (torch.randn(128, 512), torch.randn(512, 512), torch.randn(128, 512))
    with counted(as_on_a_gpu) as counts:
        (x, x_t), (w, w_t), (dy, dy_t) = (
            casts.cast_both(matrix, *cells)[:2]
            for matrix, cells in zip(matrices, map(recipe.cells, ("input", "weight", "grad_output")), strict=True)
        )
        for a, b in ((x, w), (dy, w_t), (dy_t, x_t)):
            ready = scaled_mm.arguments(a, b)
            assert ready.scale_a.stride(0) == ready.scale_b.stride(0) == 1
            assert ready.scale_a.data_ptr() == a.scale_inv.data_ptr()
            assert (ready.scale_b.data_ptr() == b.scale_inv.data_ptr()) == (b is not w_t)
    assert counts == {"cast_kernel": 3, "clone": 1}


@pytest.mark.scaled_mm_on_cpu
def test_later_micro_batches_do_not_cast_the_weight(as_on_a_gpu: Launches) -> None:
    """From the second step on, when it is known that there are several; also with a history."""
    for recipe, cast in (("tensorwise", CAST), ("delayed", PREDICTED)):
        layer, x, dy = sample(recipe)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        ottava.ScalingState(layer).listen(moves=recipe == "delayed")
        for _ in range(2):
            forward_backward(layer, x, dy)
        optimizer.step()
        for first in (True, False, False):
            with counted(as_on_a_gpu) as counts:
                forward_backward(layer, x, dy)
            less = Counter() if first else Counter(cast)
            assert Counter(LAUNCHES[recipe]) - counts == less


@pytest.mark.scaled_mm_on_cpu
def test_evaluation_of_a_history_casts_once_and_notes_nothing(as_on_a_gpu: Launches) -> None:
    """x only, no x.T."""
    layer, x, _ = sample("delayed")
    with torch.no_grad():
        layer(x)  # the process's first GEMM asks who takes such formats
        with counted(as_on_a_gpu) as counts:
            layer(x)
    assert counts == {"new_zeros": 2, "predicted_kernel": 4, "_scaled_mm_v2": 1}
    assert all(door.staged.count_nonzero() == 0 for door in layer.quantizers.doors)


# --- what only a device shows ----------------------------------------------------------------------------------------


def on_device(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    layer = ottava.nn.Linear(256, 512, bias=False, recipe=recipe, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(384, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(384, 512, dtype=torch.bfloat16, device="cuda")
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True), x, dy


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [name for name in ottava.RECIPES if name != "nvfp4"])
def test_three_training_steps_never_wait_for_the_device(recipe: str) -> None:
    """Forward, backward, optimizer and the boundary of the scales, under torch's watch for synchronization."""
    layer, optimizer, x, dy = on_device(recipe)
    for _ in range(2):
        forward_backward(layer, x, dy)
        optimizer.step()
    with never_waits():
        for _ in range(3):
            forward_backward(layer, x, dy)
            optimizer.step()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_a_step_takes_twelve_kernels_on_a_device(recipe: str) -> None:
    """As torch's profiler counts them: kernels and fills, but for those that serve all layers at once."""
    layer, _, x, dy = on_device(recipe)
    for _ in range(2):
        forward_backward(layer, x, dy)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward_backward(layer, x, dy)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in kernels if "multi_tensor" not in name]  # ONCE
    assert len(kernels) <= BUDGET, kernels

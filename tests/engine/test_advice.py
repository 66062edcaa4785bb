"""What is said once: a start of predicted scales without a history, scales that stand still, sums that are cut short.

That no boundary comes at all is tested in test_state.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.measure.statistics import STATISTICS
from ottava.measure.walk import measure
from ottava.numerics.accumulator import lost_share
from ottava.numerics.tensor import QuantizationSpec
from scaling_samples import WIDTH, loss_of, noise, train, with_cells

SPEC = QuantizationSpec(ottava.E4M3)


def normed(*, trained: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two layers behind norms, of which training would have changed the weights."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    if trained:
        with torch.no_grad():
            model[2].weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
    return model.to(dtype)


def said(model: nn.Module, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """The warnings of a training loop, each text as often as it came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, steps, optimizer)  # type: ignore[arg-type]
    return [str(w.message) for w in caught]


def descent(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.01)


def test_a_start_on_trained_weights_without_a_history_says_once_what_it_does() -> None:
    model = normed(trained=True)
    ottava.convert(model, "delayed")
    (text,) = said(model, range(3))
    assert "the first step casts with the current scale of each tensor" in text
    assert "ottava.calibrate(model, batches, loss=loss)" in text


def test_nothing_is_said_of_other_starts() -> None:
    """From scratch; calibrated; with a history from a checkpoint; under current scaling; on meta."""
    fresh = normed(trained=False)
    ottava.convert(fresh, "delayed")
    assert said(fresh, range(3)) == []
    calibrated = normed(trained=True)
    ottava.convert(calibrated, "delayed")
    ottava.calibrate(calibrated, [noise(0)], loss=loss_of)
    assert said(calibrated, range(3)) == []
    resumed = normed(trained=True)
    ottava.convert(resumed, "delayed")
    resumed.load_state_dict(calibrated.state_dict())
    assert said(resumed, range(3)) == []
    current = normed(trained=True)
    ottava.convert(current, "tensorwise")
    assert said(current, range(3)) == []
    empty = normed(trained=True).to("meta")
    ottava.convert(empty, "delayed")
    empty(torch.empty(4, WIDTH, dtype=torch.bfloat16, device="meta")).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descent(empty.parameters()).step()


def test_trainable_layers_that_no_optimizer_steps_are_named_once() -> None:
    """The second layer is trained by nobody; its scales stand still. Stepped rarely, frozen or idle is fine."""
    model = normed(trained=False)
    ottava.convert(model, "delayed")
    (text,) = said(model, range(40), descent(model[1].parameters()))
    assert "no optimizer has stepped the trainable weights of 3, so" in text
    assert "requires_grad_(False)" in text

    model = normed(trained=False)
    ottava.convert(model, "delayed")
    model[3].weight.requires_grad_(False)
    assert said(model, range(20), descent(model[1].parameters())) == []

    model = normed(trained=False)
    ottava.convert(model, "delayed")
    rare, often = descent(model[3].parameters()), descent(model[1].parameters())
    assert said(model, range(8), often) + said(model, [8], rare) + said(model, range(9, 40), often) == []

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Idle()).bfloat16()
    ottava.convert(model, "delayed")
    assert said(model, range(20), descent(model[0].used.parameters())) == []  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("bootstrap", [True, False])
def test_it_says_which_scale_the_first_step_takes(bootstrap: bool) -> None:
    model = normed(trained=True)
    ottava.convert(model, with_cells("delayed", bootstrap=bootstrap))
    (text,) = said(model, range(1))
    assert ("scale 1, whatever the tensor" in text) is not bootstrap


def hints(x: Tensor, w: Tensor, recipe: str, forwards: int = 3) -> list[str]:
    """What forwards of a linear say about their sums."""
    layer = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False)).to(x.dtype)
    with torch.no_grad():
        layer[0].weight.copy_(w)
    ottava.convert(layer, recipe)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(forwards):
            layer(x)
        layer(x[:16])
    return [str(w.message) for w in caught]


def test_biased_sums_in_a_short_accumulator_are_told_once() -> None:
    """Of long K, where both operands have a mean, and where the accumulator is short: else it loses nothing."""
    x, w = torch.randn(32, 4096).bfloat16(), torch.randn(48, 4096).bfloat16()
    (hint,) = hints(x.abs(), w.abs(), "tensorwise/hopper")
    assert "a GEMM over K = 4,096 keeps its sums in a short accumulator (hopper)" in hint
    assert "lose about 7% of their magnitude" in hint
    for more, some, recipe in (
        (x.relu(), w, "tensorwise/hopper"),  # weights without a mean
        (x, w, "tensorwise/hopper"),
        (x.abs()[:, :768], w.abs()[:, :768], "tensorwise/hopper"),
        (x.abs(), w.abs(), "tensorwise/hopper_promoted"),
        (x.abs(), w.abs(), "tensorwise/tcgen05"),
        (x.abs(), w.abs(), "tensorwise"),  # this CPU sums in fp32
        (x.abs(), w.abs(), "blockwise/hopper"),  # sums of 128
    ):
        assert hints(more, some, recipe) == [], recipe


def test_the_loss_of_sums_is_foretold() -> None:
    """By K and the bias of both: to 15 % for numbers of one sign, else never too small, nor 2.5 times as large."""
    kinds: dict[str, tuple[float, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "magnitudes": (1.15, Tensor.abs, Tensor.abs),
        "relu": (2.5, Tensor.relu, Tensor.relu),
        "mean 1": (2.5, lambda x: x + 1, lambda x: x + 1),
        "gradient": (2.5, lambda x: x + 0.25, Tensor.abs),
    }
    torch.manual_seed(0)
    for k in (4096, 14336, 65536):
        for name, (most, left, right) in kinds.items():
            a, b = (ottava.quantize(make(torch.randn(24, k)), SPEC) for make in (left, right))
            exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
            y = ottava.gemm(a, b, out_dtype=torch.float32, accumulator="hopper").double()
            lost = float((exact.sign() * (exact - y)).mean() / exact.abs().mean())
            numbers = [side.dequantize() for side in (a, b)]
            bias = [STATISTICS["bias"].finish(measure(x, x_q)) for x, x_q in zip(numbers, (a, b), strict=True)]
            assert lost / 1.15 < lost_share(k, bias[0] * bias[1], "hopper") < most * lost, (name, k, lost)
    for accumulator in ("fp32", "tcgen05", "blackwell_mma", "hopper_promoted"):
        assert lost_share(65536, 0.64, accumulator) < 2e-3


def test_the_bias_of_a_tensor_is_its_mean_over_its_rms() -> None:
    x = torch.tensor([[3.0, 4.0, -1.0, 0.0]])
    bias = STATISTICS["bias"].finish(measure(x, ottava.quantize(x, SPEC)))
    assert bias == pytest.approx(1.5 / (26 / 4) ** 0.5, rel=1e-6)

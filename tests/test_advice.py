"""What predicted scales say, each thing once: a start without a history, and layers whose scales stand still.

That no boundary comes at all is tested in test_state.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import ottava
from scaling_samples import WIDTH, loss_of, noise, train, with_cells


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

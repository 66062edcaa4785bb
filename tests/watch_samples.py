"""What tests of the taps share: a recorder, small models, and every way to checkpoint one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ottava.watching.modules import ModuleTap

ALL = ("input", "weight", "grad_output", "output", "grad_input", "grad_weight")  # of a linear layer


class Seen:
    """What a tap handed over."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, str, Tensor]] = []

    def __call__(self, layer: str, tensor: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
        assert x.dim() == 2
        assert not x.requires_grad
        self.tensors.append((layer, tensor, x.clone() if dtype is None else x.to(dtype)))

    def of(self, layer: str, tensor: str) -> list[Tensor]:
        return [x for name, which, x in self.tensors if (name, which) == (layer, tensor)]

    def one(self, layer: str, tensor: str) -> Tensor:
        (x,) = self.of(layer, tensor)
        return x

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((layer, tensor) for layer, tensor, _ in self.tensors)


@contextmanager
def tapped(**settings: Any) -> Iterator[tuple[Seen, ModuleTap]]:
    seen = Seen()
    tap = ModuleTap(seen, **settings)
    tap.attach()
    try:
        yield seen, tap
    finally:
        tap.detach()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))


def keep_some(*args: Any, **kwargs: Any) -> Any:
    aten = torch.ops.aten
    saved = (aten.mm.default, aten.addmm.default, aten._to_copy.default, aten.amax.default, aten.clone.default)
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
    )


reentrant = partial(checkpoint, use_reentrant=True)
plainly = partial(checkpoint, use_reentrant=False)
CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "none": lambda model, x: model(x),
    "reentrant": reentrant,
    "non-reentrant": plainly,
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "reentrant in reentrant": lambda model, x: reentrant(lambda x: reentrant(model, x), x),
    "reentrant in non-reentrant": lambda model, x: plainly(lambda x: reentrant(model, x), x),
    "non-reentrant in reentrant": lambda model, x: reentrant(lambda x: plainly(model, x), x),
    "non-reentrant in non-reentrant": lambda model, x: plainly(lambda x: plainly(model, x), x),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=keep_some),
}

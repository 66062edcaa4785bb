"""Delayed scaling changes its scales here and nowhere else: once per optimizer step, for one model.

Between two updates every scale is a constant, so recomputation, micro-batches, pipeline order and graph replay all see
the same one, without TransformerEngine's stash and restore.
"""

from __future__ import annotations

from torch import nn

from ottava.quantizer import Quantizer


class ScalingState:
    """The delayed-scaling state of one model; a no-op for recipes that keep none.

    Example:
        >>> import torch, ottava
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "delayed")
        >>> state = ottava.ScalingState(model)
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()   # first step: current scales
        >>> state.update()                                                    # after optimizer.step()
        >>> model[0].quantizers.input.scale                                   # 448 / amax 1
        tensor(448.)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self) -> None:
        """Rolls every window and sets every scale. Call it once per optimizer step, after `optimizer.step()`."""
        for module in self.model.modules():
            if isinstance(module, Quantizer):
                module.update()

"""TransformerEngine's activation checkpointing, on torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from ottava.compat.transformer_engine.pytorch.refused import refuse


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **others: Any) -> Any:
    """Runs a function without saving tensors for its backward, and runs it again in the backward.

    The recomputation uses the recipe and the scales of the forward. ottava stashes no scales for this.

    Args:
        function: a module or a function of tensors.
        args: its arguments.
        use_reentrant: as in torch.utils.checkpoint.
        others: keyword arguments of the function.
    Raises:
        NotImplementedError: distribute_saved_activations or another TransformerEngine argument that ottava lacks.

    Example:
        >>> import torch
        >>> checkpoint(torch.nn.ReLU(), torch.ones(2), use_reentrant=False)
        tensor([1., 1.])
    """
    theirs = {"distribute_saved_activations", "get_rng_state_tracker", "tp_group"} & others.keys()
    refuse("checkpoint", {name: others.pop(name) for name in sorted(theirs)})
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **others)

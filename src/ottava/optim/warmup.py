"""A second warm-up of the learning rate, after a change of precision."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from ottava.base.errors import need, need_type


def rewarm_factor(done: int, steps: int) -> float:
    """Share of the learning rate in the step after `done` steps of a warm-up of `steps`.

    Example:
        >>> [rewarm_factor(done, 3) for done in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (done + 1) / (steps + 1))


def rewarm(optimizer: Optimizer, steps: int, *, done: int = 0) -> RemovableHandle:
    """Lowers the learning rate in the next steps of an optimizer, and lets it rise to its schedule.

    After a switch to FP8, or to another storage of states, gradients and moments do not fit each other for a while, and
    full steps may throw the model back. The factor applies only within each step, on top of any schedule.

    Args:
        optimizer: any of torch's or of `ottava.optim`; its lr are numbers.
        steps: number of steps with a lower rate: the first with 1 / (steps + 1), the last with steps / (steps + 1).
        done: how many of these steps a resumed run has done.
    Returns:
        A handle; `.remove()` ends the warm-up at once.
    Raises:
        ValueError: steps or done below 0.  TypeError: no optimizer, or no whole numbers.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> handle = rewarm(optimizer, 1)
        >>> for _ in range(3):
        ...     weight.grad = -torch.ones(1)
        ...     optimizer.step()
        ...     print(float(weight.detach()), optimizer.param_groups[0]["lr"])
        0.5 1.0
        1.5 1.0
        2.5 1.0
    """
    need("rewarm", optimizer, Optimizer, "a torch.optim.Optimizer; its scheduler stays as it is")
    need_type("rewarm: steps", steps, int)
    need_type("rewarm: done", done, int)
    if steps < 0 or done < 0:
        raise ValueError(f"rewarm: steps is {steps} and done {done}; each needs 0 or more")
    count = done
    wanted: list[Any] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        wanted[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * rewarm_factor(count, steps)

    def after(optimizer: Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for group, lr in zip(optimizer.param_groups, wanted, strict=False):  # none, if it was removed meanwhile
            group["lr"] = lr
        wanted.clear()
        if count >= steps:
            handle.remove()

    handle = optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return handle

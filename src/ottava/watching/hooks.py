"""Attaches and detaches torch's global forward hooks so that torch.compile does not recompile.

Dynamo guards compiled code on the numbers of the hooks that existed when it compiled. A hook that is registered again
for every step gets a new number each time. Every step would then compile again, until Dynamo gives up and runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, Any], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
Left = Callable[[nn.Module, Any, Any], None]


class GlobalHooks:
    """Hooks on every module of the process, with numbers that never change.

    Args:
        before: called with (module, args) before every forward.
        after: called with (module, args, kwargs, output) after it, unless the forward raised.
        left: called with (module, args, output) last; output is None if the forward raised.

    All must begin with `if torch.compiler.is_compiling(): return`, because Dynamo traces them.

    Example:
        >>> import torch
        >>> seen = []
        >>> hooks = GlobalHooks(lambda module, args: None, lambda module, args, kwargs, output: seen.append(module))
        >>> layer = nn.Linear(2, 2)
        >>> for attached in (True, False, True):
        ...     (hooks.attach if attached else hooks.detach)()
        ...     _ = layer(torch.ones(1, 2))
        >>> hooks.detach()
        >>> len(seen)
        2
    """

    def __init__(self, before: Before, after: After, left: Left | None = None) -> None:
        self._before, self._after, self._left = before, after, left
        self._handles: tuple[RemovableHandle, ...] = ()
        self.attached = False

    def attach(self) -> None:
        """Starts calling the hooks."""
        if self.attached:
            return
        self.attached = True
        if not self._handles:
            before = register_module_forward_pre_hook(self._before)
            self._handles = before, register_module_forward_hook(self._after, with_kwargs=True)
            if self._left is not None:
                self._handles += (register_module_forward_hook(self._left, always_call=True),)
            return
        first, second, *third = self._handles
        torch_module._global_forward_pre_hooks[first.id] = self._before
        torch_module._global_forward_hooks[second.id] = self._after
        torch_module._global_forward_hooks_with_kwargs[second.id] = True
        for handle in third:
            assert self._left is not None
            torch_module._global_forward_hooks[handle.id] = self._left
            torch_module._global_forward_hooks_always_called[handle.id] = True

    def detach(self) -> None:
        """Removes every trace of the hooks from torch."""
        self.attached = False
        for handle in self._handles:
            handle.remove()
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets this one

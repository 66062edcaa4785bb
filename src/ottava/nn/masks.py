"""Which query may see which key: one rule of positions for every mask.

Query i stands at position i, or, aligned to the bottom right, at i + keys - queries, so that the last query stands at
the last key. A key is seen if its position less that of the query lies within the window (-left ... right), if it lies
within its sequence's length, and if the caller's mask allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import unknown_name


class MaskRule(NamedTuple):
    """A mask by positions."""

    left: int | None = None
    """The number of keys before its own position that a query sees; None: all."""
    right: int | None = None
    """Keys after it; None: all, 0: causal."""
    bottom_right: bool = False
    """The last query stands at the last key, as in decoding; False: the first at the first."""

    def is_causal(self, queries: int, keys: int) -> bool:
        """Whether it is torch's `is_causal`, which needs no mask in memory."""
        no_left = self.left is None or self.left >= max(queries, keys)
        return no_left and self.right == 0 and (not self.bottom_right or queries == keys)

    def sees_all(self, queries: int, keys: int) -> bool:
        """Whether nothing is masked: one query at the bottom right sees all keys of its past, too."""
        past = keys if self.bottom_right else queries  # the most keys that lie before a query
        future = queries if self.bottom_right else keys
        return (self.left is None or self.left >= past - 1) and (self.right is None or self.right >= future - 1)


MASKS: Mapping[str, MaskRule] = MappingProxyType(
    {
        "no_mask": MaskRule(),
        "causal": MaskRule(right=0),
        "causal_bottom_right": MaskRule(right=0, bottom_right=True),
    }
)


def mask_rule(mask: str, window: tuple[int | None, int | None] | None = None) -> MaskRule:
    """The rule of a name, narrowed by a window (left, right); None or -1 in a window is no limit.

    Raises:
        ValueError: unknown mask, or a limit below -1.

    Example:
        >>> mask_rule("causal", (3, None))
        MaskRule(left=3, right=0, bottom_right=False)
    """
    if mask not in MASKS:
        raise ValueError(f"attention: {unknown_name('mask', mask, MASKS)}")
    if window is None:
        return MASKS[mask]
    if len(window) != 2 or any(limit is not None and limit < -1 for limit in window):
        raise ValueError(
            f"attention: window is {window}; needs (left, right), each a count of keys, or -1 for no limit"
        )
    rule = MASKS[mask]
    left, right = (None if limit == -1 else limit for limit in window)
    return rule._replace(left=left, right=right if rule.right is None else rule.right)


def build_mask(
    rule: MaskRule,
    queries: int,
    keys: int,
    *,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    given: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """The mask: a float added to the scores (-inf: not seen) or a bool (True: seen), for (B, H, queries, keys).

    Args:
        query_lengths, key_lengths: int (B,): how many rows of each sequence are real; the rest is padding. Aligned to
            the bottom right, the last real query stands at the last real key.
        given: the caller's, bool (True: is seen) or float (added to the scores), of a shape that broadcasts.
    Returns:
        None where all keys are seen.

    Example:
        >>> build_mask(MaskRule(left=1, right=0), 3, 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    seen: Tensor | None = None
    if not rule.sees_all(queries, keys):  # nor, then, within any lengths
        row = torch.arange(queries, device=device)[:, None]
        if rule.bottom_right:
            last = keys if key_lengths is None else key_lengths[:, None, None, None]
            row = row + last - (queries if query_lengths is None else query_lengths[:, None, None, None])
        gap = torch.arange(keys, device=device) - row
        seen = torch.ones_like(gap, dtype=torch.bool)
        if rule.left is not None:
            seen = gap >= -rule.left
        if rule.right is not None:
            seen = seen & (gap <= rule.right)
        seen = seen if seen.dim() == 4 else seen[None, None]
    if key_lengths is not None:
        real = torch.arange(keys, device=device) < key_lengths[:, None, None, None]
        seen = real if seen is None else seen & real
    if given is None or seen is None:
        return seen if given is None else given
    if given.dtype == torch.bool:
        return given & seen
    return given.masked_fill(~seen, -torch.inf)

"""Whether two runs gave the same tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor] | Sequence[Tensor]


def assert_same(got: Tensors, expected: Tensors) -> None:
    """The same names or places, dtypes and numbers; says where not."""
    one, other = (dict[Any, Tensor](x if isinstance(x, Mapping) else enumerate(x)) for x in (got, expected))
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype] == []
    assert [name for name in one if not torch.equal(one[name], other[name])] == []

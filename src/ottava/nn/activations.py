"""Activations in front of a cast, as a table: one entry is a forward and a backward, and whether it has a gate.

A gated one takes rows of 2 F features, the gate first: y = act(gate) * up. Forward and backward give the bits of the
same lines in plain torch, with torch's roundings in between; a formula without a torch kernel computes in fp32 and
rounds once. Backward needs only the input, kept in its dtype or as FP8 codes (`ActivationFormula`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.base.errors import need_known
from ottava.engine.autocast import in_tiles
from ottava.kernels.native import pointwise
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import make_rows, supports_gradient, supports_rows
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X128
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize

KEPT = QuantizationSpec(E4M3, BLOCK_1X128, "pow2")
"""How `save="fp8"` keeps an activation's input: as DeepSeek-V3 caches inputs of SwiGLU (arXiv 2412.19437, 3.3.3)."""


@dataclass(frozen=True, slots=True)
class Activation:
    """One entry of the table.

    Example:
        >>> ACTIVATIONS["relu2"].forward(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    """x (..., F or 2 F) -> y (..., F), in x's dtype."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(dy, x) -> dx, in x's dtype."""
    gated: bool = False
    """Whether x has 2 F features: F of the gate, then the F that the gate multiplies."""
    kernel: str = ""
    """Its name in the device code of `kernels.triton.rows`, without the gate; "": there is no device code."""


def get_activation(activation: Activation | str) -> Activation:
    """An entry of the table by its name, or the given Activation itself.

    Raises:
        ValueError: no such name.
    """
    if isinstance(activation, Activation):
        return activation
    need_known("", "activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


def gated(name: str, act: Activation) -> Activation:
    """y = act(gate) * up of an activation without a gate.

    Example:
        >>> gated("reglu", ACTIVATIONS["relu"]).forward(torch.tensor([[2.0, -1.0, 10.0, 10.0]]))
        tensor([[20.,  0.]])
    """

    def forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return act.forward(gate) * up

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.cat((act.backward(dy * up, gate), dy * act.forward(gate)), -1)

    return Activation(name, forward, backward, gated=True, kernel=act.kernel)


def fused(act: Activation, forward: Callable[..., Tensor | None], backward: Callable[..., Tensor | None]) -> Activation:
    """The same by kernels with the bits of its lines, where they take the tensors: they return None for others."""

    def either(kernel: Callable[..., Tensor | None], lines: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        y = kernel(*tensors)
        return lines(*tensors) if y is None else y

    return replace(act, forward=partial(either, forward, act.forward), backward=partial(either, backward, act.backward))


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Activation:
    """gpt-oss: (up + offset) gate sigmoid(alpha gate), gate clamped to at most `limit`, up to +-limit; in fp32 inside.

    gpt-oss stores gates and ups in turns; here the gates come first.

    Example:
        >>> clamped_swiglu(limit=1.0, alpha=100.0).forward(torch.tensor([[5.0, 3.0]]))
        tensor([[2.]])
    """

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = _inside(x).chunk(2, -1)
        clamped = gate.clamp(max=limit)
        return gate, up, clamped, up.clamp(-limit, limit) + offset, (alpha * clamped).sigmoid()

    def forward(x: Tensor) -> Tensor:
        _, _, gate, up, s = parts(x)
        return (up * gate * s).to(x.dtype)

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        raw_gate, raw_up, gate, up, s = parts(x)
        dy = _inside(dy)
        d_gate = dy * up * s * (1 + alpha * gate * (1 - s)) * (raw_gate <= limit)
        d_up = dy * gate * s * (raw_up.abs() <= limit)
        return torch.cat((d_gate, d_up), -1).to(x.dtype)

    return Activation("clamped_swiglu", forward, backward, gated=True)


def _inside(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _swish(beta: float, x: Tensor) -> Tensor:
    inside = _inside(x)
    return (inside * (beta * inside).sigmoid()).to(x.dtype)


def _swish_backward(beta: float, dy: Tensor, x: Tensor) -> Tensor:
    inside = _inside(x)
    s = (beta * inside).sigmoid()
    return (_inside(dy) * s * (1 + beta * inside * (1 - s))).to(x.dtype)


def _sigmoid_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = _inside(x).sigmoid()  # of 16 bits 1 - s would be nothing but rounding
    return (_inside(dy) * s * (1 - s)).to(x.dtype)


_PLAIN = (
    Activation("gelu", F.gelu, torch.ops.aten.gelu_backward, kernel="gelu"),
    Activation(
        "gelu_tanh",
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
        kernel="gelu_tanh",
    ),
    Activation("silu", F.silu, torch.ops.aten.silu_backward, kernel="silu"),
    Activation("relu", F.relu, lambda dy, x: torch.ops.aten.threshold_backward(dy, x, 0), kernel="relu"),
    Activation("relu2", lambda x: x.relu().square(), lambda dy, x: dy * 2 * x.relu(), kernel="relu2"),
    # gelu as its authors first approximated it (arXiv 1606.08415, section 2)
    Activation("qgelu", partial(_swish, 1.702), partial(_swish_backward, 1.702)),
)
_SIGMOID = Activation("sigmoid", torch.sigmoid, _sigmoid_backward)
_GATES = MappingProxyType(
    {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu", "reglu": "relu", "sreglu": "relu2"}
    | {"qgeglu": "qgelu"}
)

_GATED = MappingProxyType(
    {name: gated(name, next(one for one in _PLAIN if one.name == act)) for name, act in _GATES.items()}
)

ACTIVATIONS = MappingProxyType(
    {one.name: one for one in _PLAIN}
    | dict(_GATED)
    | {"swiglu": fused(_GATED["swiglu"], pointwise.swiglu, pointwise.swiglu_backward)}
    | {"glu": gated("glu", _SIGMOID), "clamped_swiglu": clamped_swiglu()}
)
"""name -> Activation. A new one is one entry."""


@dataclass(frozen=True, slots=True)
class ActivationFormula:
    """An activation as a `functional.Producer`; an optional parameter scales the channels of its rows."""

    activation: Activation
    save: Literal["bf16", "fp8"] = "bf16"
    """Keep the input in its dtype ("bf16") or as codes in `KEPT` ("fp8")."""

    def batch_invariant(self) -> ActivationFormula:
        """The same with bits of a row that depend on no other row."""
        act = self.activation
        tiled = replace(act, forward=partial(in_tiles, act.forward), backward=partial(in_tiles, act.backward))
        return ActivationFormula(tiled, self.save)

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """x (..., F or 2 F), factors (F,) or nothing -> y (..., F)."""
        self._check(x)
        rows = self.activation.forward(x)
        for factors in parameters:
            rows = rows if factors is None else rows * factors.to(rows.dtype)
        return rows, (*self._kept(x), *parameters)

    def unmade(
        self, x: Tensor, dtype: torch.dtype, *parameters: Tensor | None
    ) -> tuple[UnmadeRows, tuple[Tensor | None, ...]] | str:
        """As `forward`, x (M, F or 2 F), for a kernel that makes the rows while it casts them; or why there is none."""
        self._check(x)
        if any(factors is not None for factors in parameters):
            return "triton: makes activated rows without factors of their channels"
        if reason := supports_rows(self.activation.kernel or self.activation.name, x, dtype):
            return reason
        return UnmadeRows(self.activation.kernel, x, dtype, self.activation.gated), (*self._kept(x), *parameters)

    def _check(self, x: Tensor) -> None:
        if self.activation.gated and x.shape[-1] % 2:
            raise ValueError(
                f"{self.activation.name}: got {x.shape[-1]} features; needs a gate for each, so an even number"
            )

    def _kept(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.save == "bf16":
            return x, None
        kept = quantize(x.flatten(0, -2), KEPT)
        return kept.data, kept.scale_inv

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """(dx, nothing for the factors)."""
        if self.activation.gated and not torch.compiler.is_compiling():
            made = self.unmade_gradient(d_rows, saved)
            if isinstance(made, UnmadeRows):  # one launch in the place of torch's six, with their bits
                return (make_rows(made).view(*d_rows.shape[:-1], -1), *(None for _ in saved[2:]))
        _, _, *parameters = saved
        x = self._read(d_rows, saved)
        d = d_rows.to(x.dtype)
        for factors in parameters:
            d = d if factors is None else d * factors.to(d.dtype)
        return (self.activation.backward(d, x), *(None for _ in parameters))

    def unmade_gradient(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> UnmadeRows | str:
        """dx as `backward` has it, in two dimensions, for a kernel that casts what it makes; or why none does."""
        if any(factors is not None for factors in saved[2:]) or d_rows.dim() < 2:
            return "triton: makes gradients of matrices without factors of their channels"
        name, gated = self.activation.kernel or self.activation.name, self.activation.gated
        if reason := supports_rows(name, d_rows, d_rows.dtype):  # before x is decoded
            return reason
        x, d_rows = self._read(d_rows, saved).flatten(0, -2), d_rows.flatten(0, -2)
        return supports_gradient(name, d_rows, x, gated=gated) or UnmadeRows(name, x, x.dtype, gated, d_rows)

    def _read(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> Tensor:
        """x, as it was kept."""
        x, scale_inv, *_ = saved
        assert x is not None
        if scale_inv is None:
            return x
        return QuantizedTensor(x, scale_inv, KEPT, d_rows.dtype).dequantize().view(*d_rows.shape[:-1], x.shape[-1])

"""LayerNorm and RMSNorm, alone or in front of a linear's cast: the same formulas, as Producers (see `functional`).

    layernorm   x^ = (x - mean) rstd    y = x^ g + b    rstd = 1 / sqrt(var + eps)
    rmsnorm     x^ = x rstd             y = x^ g        rstd = 1 / sqrt(mean(x^2) + eps)
    backward    dx = rstd (dg - mean(dg) - x^ mean(dg x^)), dg = dy g; without mean(dg) for rmsnorm
                d_gamma = sum over rows of dy x^            d_beta = sum over rows of dy

They compute in fp32 (fp64 for fp64), round once at the end, and keep for backward the input and a mean or rstd a row.
In `NormLinear` the norm hands its rows to the cast, and the layer never keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ottava.base.errors import need_known
from ottava.engine.functional import produced
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import norm, norm_gradient, normed, supports_norm, supports_rows
from ottava.nn.layer import Layer, Linear
from ottava.recipe import Recipe, get_recipe

Unmade = tuple[UnmadeRows, tuple[Tensor | None, ...]] | str
"""Rows that a kernel makes and the tensors for backward, or why no kernel makes them."""
NormName = Literal["layernorm", "rmsnorm"]


@dataclass(frozen=True, slots=True)
class NormFormula:
    """Makes the rows of a norm over the last dimension; a `functional.Producer`.

    Its parameters are gamma (K,) and, for a layernorm, beta (K,); each may be None.

    Example:
        >>> rows, kept = NormFormula("layernorm", eps=0.0).forward(torch.tensor([[1.0, 3.0]]), None, None)
        >>> rows
        tensor([[-1.,  1.]])
    """

    kernel: NormName
    """Its name in the device code of `kernels.triton.rows`, too."""
    eps: float = 1e-5
    zero_centered: bool = False
    """Whether gamma is added to 1."""

    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """x (..., K) -> y (..., K) in x's dtype."""
        gamma, beta = (*parameters, None)[:2]
        _check(x, gamma)
        if supports_norm(x, gamma, beta) is None:  # one kernel makes rows and statistics
            y, statistics = norm(self.kernel, x, gamma, beta, eps=self.eps, zero_centered=self.zero_centered)
            return y, (x, *parameters, *self._kept(statistics.view(2, *x.shape[:-1], 1)))
        dtype = _inside(x)
        if self.kernel == "rmsnorm":
            # a copy, so that the in-place operations below need no other memory, and strides of x change no sum
            rows = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
            rstd = (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            rows, factor = rows.mul_(rstd), self._gamma(gamma, dtype)
            return (rows if factor is None else rows.mul_(factor)).to(x.dtype), (x, gamma, rstd)
        multiplier = self._multiplier(x, gamma)  # never None: a CPU would give mean and rstd in 16 bits
        added = None if beta is None else beta.to(dtype)
        taken = x if x.is_cpu else x.to(dtype)  # CPUs read 16 bits beside an fp32 weight, GPUs want one dtype
        y, mean, rstd = torch.native_layer_norm(taken, x.shape[-1:], multiplier, added, self.eps)
        if mean.dtype != dtype:  # torch traces it in 16 bits; 2.11 then makes wrong gradients
            y, mean, rstd = torch.native_layer_norm(x.to(dtype), x.shape[-1:], multiplier, added, self.eps)
        return y.to(x.dtype), (x, gamma, beta, mean, rstd)

    def unmade(self, x: Tensor, dtype: torch.dtype, *parameters: Tensor | None) -> Unmade:
        """As `forward`, x (M, K), for a kernel that makes the rows while it casts them; or why there is none."""
        gamma, beta = (*parameters, None)[:2]
        _check(x, gamma)
        if reason := supports_rows(self.kernel, x, dtype, *parameters):
            return reason
        rows = normed(self.kernel, x, dtype, gamma, beta, eps=self.eps, zero_centered=self.zero_centered)
        assert rows.beside is not None
        return rows, (x, *parameters, *self._kept(rows.beside[:, :, None]))

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """(dx, d_gamma, and for a layernorm d_beta)."""
        x, gamma, rstd = saved[0], saved[1], saved[-1]
        assert x is not None
        assert rstd is not None
        if self.kernel == "layernorm":
            return self._layernorm_backward(d_rows, x, gamma, saved[2], saved[3], rstd)
        if supports_norm(x, d_rows, gamma) is None:
            return self._at_once(d_rows, x, gamma, None, rstd, rstd)[:2]
        dtype = _inside(x)
        rows, dy = (t.to(dtype, copy=True, memory_format=torch.contiguous_format) for t in (x, d_rows))
        rows = rows.mul_(rstd)
        d_gamma, factor = None, self._gamma(gamma, dtype)
        if gamma is not None and factor is not None:
            d_gamma = (dy * rows).reshape(-1, x.shape[-1]).sum(0).to(gamma.dtype)
            dy = dy.mul_(factor)
        aligned = (dy * rows).mean(-1, keepdim=True)
        return dy.sub_(rows.mul_(aligned)).mul_(rstd).to(x.dtype), d_gamma

    def _layernorm_backward(
        self, d_rows: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, rstd: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert mean is not None
        if supports_norm(x, d_rows, gamma) is None:
            return self._at_once(d_rows, x, gamma, beta, mean, rstd)
        dtype, multiplier = _inside(x), self._multiplier(x, gamma)
        mask = [True, gamma is not None, beta is not None]
        # in fp32: given 16 bits, torch 2.13 sums the gradients of weight and bias in 16 bits on a CPU, 8% off at 512
        # rows
        dx, d_gamma, d_beta = torch.ops.aten.native_layer_norm_backward(
            d_rows.to(dtype), x.to(dtype), x.shape[-1:], mean, rstd, multiplier, torch.zeros_like(multiplier), mask
        )
        d_weight = None if gamma is None else d_gamma.to(gamma.dtype)
        return dx.to(x.dtype), d_weight, None if beta is None else d_beta.to(beta.dtype)

    def _at_once(
        self, dy: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor | None, ...]:
        """(dx, d_gamma, d_beta) by one kernel, which reads x and dy once."""
        statistics = torch.stack((mean, rstd)).view(2, -1)
        dx, d_gamma, d_beta = norm_gradient(
            self.kernel, dy, x, statistics, gamma, beta=beta is not None, zero_centered=self.zero_centered
        )
        d_weight = None if gamma is None or d_gamma is None else d_gamma.to(gamma.dtype)
        return dx, d_weight, None if beta is None or d_beta is None else d_beta.to(beta.dtype)

    def _kept(self, statistics: Tensor) -> Sequence[Tensor]:
        """Of mean and rstd what the backward reads."""
        return statistics.unbind() if self.kernel == "layernorm" else (statistics[1],)

    def _gamma(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if weight is None:
            return None
        return weight.to(dtype) + 1 if self.zero_centered else weight.to(dtype)

    def _multiplier(self, x: Tensor, weight: Tensor | None) -> Tensor:
        gamma = self._gamma(weight, _inside(x))
        return torch.ones(x.shape[-1:], dtype=_inside(x), device=x.device) if gamma is None else gamma


class _Norm(nn.Module):
    """The base class of both: one width, a weight that may be centred at 0, and a formula."""

    formula: Any
    """The Producer that makes its rows."""
    zero_centered_gamma: bool
    eps: Any
    normalized_shape: tuple[int, ...]
    weight: Any
    sharding: Any = None
    """A `nn.sharding.TokenSharding` where ranks norm a part of the rows each."""

    def _settle(self, kernel: NormName, zero_centered_gamma: bool) -> None:
        if len(self.normalized_shape) != 1:
            raise ValueError(
                f"{type(self).__name__}: got normalized_shape {self.normalized_shape}; needs one size, that of the "
                "last dimension. Flatten the dimensions that one norm covers"
            )
        self.zero_centered_gamma, self.formula = zero_centered_gamma, NormFormula(kernel, self.eps, zero_centered_gamma)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The norm multiplies with 1 and adds nothing."""
        super().reset_parameters()  # type: ignore[misc]  # torch's class comes behind this one
        if getattr(self, "zero_centered_gamma", False) and self.weight is not None:
            nn.init.zeros_(self.weight)

    def producer_parameters(self) -> tuple[Tensor | None, ...]:
        """(weight, bias) or (weight,): what `formula` takes beside the input."""
        return (self.weight, self.bias) if isinstance(self, nn.LayerNorm) else (self.weight,)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., K), in the input's dtype."""
        own = self.producer_parameters()
        if self.sharding is not None:
            return self.sharding.forward(self.formula, input, own)  # type: ignore[no-any-return]
        return produced(self.formula, input, *own)

    def extra_repr(self) -> str:
        """torch's, and the centre of the weight."""
        own = super().extra_repr()
        return f"{own}, zero_centered_gamma=True" if self.zero_centered_gamma else own


class LayerNorm(_Norm, nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension; fp32 inside, and keeps its input and two numbers a row.

    Args:
        normalized_shape: features K; elementwise_affine, bias, device, dtype: torch's.
        zero_centered_gamma: the weight is added to 1 and starts at 0, so that weight decay pulls towards 1.
    Shapes: (..., K) -> (..., K), in the input's dtype (float32, bfloat16, float16, float64), for any dtype of the
    weight
        and under any torch.autocast.
    Raises:
        ValueError: more than one size; an input whose last dimension is not K.
        NotImplementedError: a second derivative is asked for.

    Example:
        >>> import ottava
        >>> ottava.nn.LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).tolist()
        [[-1.0, 1.0]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self._settle("layernorm", zero_centered_gamma)


class RMSNorm(_Norm, nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension; fp32 inside, and keeps its input and one number a row.

    Args:
        normalized_shape: features K; elementwise_affine, device, dtype: torch's.
        eps: added to the mean square; a number, not torch's None.
        zero_centered_gamma: the weight is added to 1 and starts at 0 (Gemma's), so that weight decay pulls towards 1.
    Shapes, errors: as `LayerNorm`.

    Example:
        >>> import ottava
        >>> ottava.nn.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, -3.0]])).tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self._settle("rmsnorm", zero_centered_gamma)


def make_norm(
    norm: NormName,
    features: int,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerNorm | RMSNorm:
    """Makes the norm with this name over `features`.

    Raises:
        ValueError: no such name.
    """
    classes: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
    need_known("", "norm", norm, classes)
    return classes[norm](features, eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=dtype)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point() or (weight is not None and x.shape[-1] != weight.shape[0]):
        width = "K" if weight is None else weight.shape[0]
        raise ValueError(f"norm: got input {tuple(x.shape)} of {x.dtype}; needs floats (..., {width})")


def _inside(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class NormLinear(Layer, nn.Linear):
    """linear(norm(x)) under a recipe; one backward, in which the normed rows live as codes only.

    Args:
        norm: "layernorm" or "rmsnorm"; eps, zero_centered_gamma: of the norm, see `LayerNorm`.
        bias: of the linear; a LayerNorm always has its own bias.
        recipe: a Recipe or its name; device, dtype: torch's.
        return_norm_output: return (y, normed rows); the norm then runs alone, and the rows live as long as the caller
            keeps them.
    Shapes: input (..., in_features) -> (..., out_features), any sizes. dtypes: float32, bfloat16, float16; under
        torch.autocast the norm reads the input in its own dtype and rounds its rows to autocast's dtype.
    Parameters: weight, bias, norm.weight, norm.bias. State dicts and optimizers see the norm as a module, but hooks on
        it do not run, because the linear makes its rows.
    Raises: as `Linear` and `LayerNorm`.
    Edge cases: a recipe that casts nothing runs the norm and torch's linear.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.NormLinear(64, 32, norm="rmsnorm", bias=False, dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'norm.weight'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: NormName = "layernorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        return_norm_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.norm = make_norm(
            norm, in_features, eps=eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=dtype
        )
        self.return_norm_output = return_norm_output
        self.produce = None if return_norm_output else self.norm.formula
        self.adopt(get_recipe(recipe), name="")

    def produced_with(self) -> tuple[Tensor | None, ...]:
        """The norm's weight and, for a LayerNorm, its bias."""
        return self.norm.producer_parameters()

    def forward(self, input: Tensor, *more: Any) -> Any:
        """(..., in_features) -> (..., out_features), or (that, the normed rows) with return_norm_output."""
        if not self.return_norm_output:
            return super().forward(input, *more)
        rows = self.norm(input)
        return super().forward(rows, *more), rows


def normed_linear(
    norm: NormName | None, width: int, wide: int, *, eps: float, zero_centered_gamma: bool, **settings: Any
) -> Layer:
    """A linear with the norm of that name in front, or with none; settings: bias, recipe, device and dtype."""
    if norm is None:
        return Linear(width, wide, **settings)
    return NormLinear(width, wide, norm=norm, eps=eps, zero_centered_gamma=zero_centered_gamma, **settings)

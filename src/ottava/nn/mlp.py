"""The feed-forward half of a transformer block: norm, linear, activation, linear; two casts, no row kept twice.

Smooth-SwiGLU spreads the outliers of an MLP over its channels, without changing its result. A channel whose gate and up
rows align makes far larger products than the other channels, and one scale a tensor then flushes the others (Fishman et
al., arXiv 2409.12517: FP8 training diverges after 200 billion tokens). Each channel c gets a power of two:

    rows_c = act(x)_c s_c  before the cast,   fc2 column c / s_c          s_c = 2^round(log2(mean amax / amax_c))

Powers of two multiply without rounding, so every sum keeps its bits. s stays with the activation. If fc1 held it, one
scale a tensor would flush the rows of fc1 that it makes small; `fold_smooth_swiglu` puts it there for engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ottava.engine.autocast import ambient, autocast
from ottava.engine.functional import produced
from ottava.engine.quantizer import Quantizer
from ottava.nn.activations import Activation, ActivationFormula, get_activation
from ottava.nn.layer import Layer, Projection
from ottava.nn.norms import NormName, normed_linear
from ottava.recipe import Recipe, get_recipe
from ottava.weights.parameter import is_quantized_weight

Save = Literal["bf16", "fp8", "recompute"]


class ActivatedLinear(Layer, nn.Linear):
    """linear(activation(x)) under a recipe; one backward, in which the activated rows live as codes only.

    Args:
        activation: a name of `activations.ACTIVATIONS`, or an Activation.
        save: keep the activation's input as it is ("bf16") or as FP8 codes ("fp8"), which changes its gradient by
            their rounding.
        in_features, out_features, bias, recipe, device, dtype: as `Linear`.
    Shapes: input (..., in_features), or (..., 2 in_features) with the gate first, -> (..., out_features).
    Raises:
        ValueError: unknown activation or recipe, or an input of another width; else as `Linear`.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.ActivatedLinear(64, 32, activation="swiglu", dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 128, dtype=torch.bfloat16)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation | str = "gelu",
        save: Literal["bf16", "fp8"] = "bf16",
        bias: bool = True,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if save not in ("bf16", "fp8"):
            raise ValueError(f"ActivatedLinear: got save={save!r}; needs 'bf16' or 'fp8'")
        self.produce = ActivationFormula(get_activation(activation), save)
        self.smooth: Tensor | None
        self.register_buffer("smooth", None)
        self.adopt(get_recipe(recipe), name="")

    def produced_with(self) -> tuple[Tensor | None, ...]:
        """Factors of the activated channels, set by `smooth_swiglu`."""
        return () if self.smooth is None else (self.smooth,)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.smooth is None and f"{prefix}smooth" in state_dict:
            self.smooth = torch.ones(self.in_features, device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """torch's, the activation and the recipe."""
        made = self.produce  # none in an MLP that recomputes: it makes the rows
        settings = (
            f", activation={made.activation.name}, save={made.save}" if isinstance(made, ActivationFormula) else ""
        )
        return f"{nn.Linear.extra_repr(self)}{settings}, recipe={self.recipe.name}"


class NormMLP(nn.Module):
    """fc2(activation(fc1(norm(x)))): a `NormLinear` and an `ActivatedLinear`.

    Args:
        hidden, ffn_hidden: H and F; a gated activation makes fc1 (H -> 2 F), the gate first.
        activation: a name of `activations.ACTIVATIONS`, or an Activation.
        norm, eps, zero_centered_gamma: of the norm in front; None: no norm.
        bias: of both linears.
        save: for the activation's backward keep its input ("bf16"), its input as FP8 codes ("fp8"),
            or nothing ("recompute": norm, fc1 and activation run again in backward, with the same bits).
        recipe, device, dtype: as `Linear`.
    Shapes: (..., H) -> (..., H).
    Raises:
        ValueError: an unknown name, or sizes that do not fit.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(64, 96, activation="swiglu", norm="rmsnorm", bias=False, dtype=torch.bfloat16)
        >>> mlp(torch.ones(2, 64, dtype=torch.bfloat16)).shape, mlp.fc1.weight.shape
        (torch.Size([2, 64]), torch.Size([192, 64]))
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation | str = "gelu",
        norm: NormName | None = "layernorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        save: Save = "bf16",
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation = get_activation(activation)
        if save not in ("bf16", "fp8", "recompute"):
            raise ValueError(f"NormMLP: got save={save!r}; needs 'bf16', 'fp8' or 'recompute'")
        factory: dict[str, Any] = {"bias": bias, "recipe": recipe, "device": device, "dtype": dtype}
        wide = 2 * ffn_hidden if activation.gated else ffn_hidden
        self.fc1 = normed_linear(norm, hidden, wide, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory)
        if activation.gated:
            self.fc1.projections = Projection("gate", ffn_hidden), Projection("up", ffn_hidden)
        kept: Literal["bf16", "fp8"] = "fp8" if save == "fp8" else "bf16"
        self.fc2 = ActivatedLinear(ffn_hidden, hidden, activation=activation, save=kept, **factory)
        self.save = save
        if save == "recompute":  # fc2 makes the rows and does not keep them
            self.fc2.produce = None
        self.activation = ActivationFormula(activation)

    def forward(self, input: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        if self.save != "recompute":
            return self.fc2(self.fc1(input))  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return self.fc2(self.activated(input))  # type: ignore[no-any-return]
        return self.fc2(checkpoint(self.activated, input, use_reentrant=False))  # type: ignore[no-any-return]

    def activated(self, input: Tensor) -> Tensor:
        """(..., H) -> (..., F): the rows in front of fc2."""
        invariant = ambient().recipe_for(self.fc2.name, self.fc2.resolved).fprop.batch_invariant
        activation = self.activation.batch_invariant() if invariant else self.activation
        return produced(activation, self.fc1(input), *self.fc2._produced_with())


def smooth_swiglu(mlp: NormMLP, batches: Tensor | Iterable[Tensor]) -> Tensor:
    """Gives each channel between the linears of an MLP a power of two, so that all reach about the same magnitude.

    It multiplies the weight of fc2 in place by the inverse; `mlp.fc2.smooth` holds the powers, and is in state dicts.

    Args:
        mlp: of any activation; gated ones have the outliers.
        batches: inputs of the MLP, (..., H); they give the magnitude of each channel, in high precision.
    Returns:
        fp32 (F,): the factors of the rows from now on, from this call and earlier ones; 1 for channels that are always
        0, and for channels whose weights would leave their dtype.
    Raises:
        ValueError: there is no batch.
    Edge cases: amax histories of fc2 start again. An optimizer's moments of fc2 would fit the old weight: call it
        between two runs, or before you make the optimizer.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(32, 64, activation="swiglu", bias=False)
        >>> with torch.no_grad():
        ...     _ = mlp.fc1.weight[64].mul_(1000.0)                                      # the first channel's up row
        >>> bool(smooth_swiglu(mlp, torch.randn(16, 32))[0] < 0.01)
        True
    """
    amax = _amax(mlp, [batches] if isinstance(batches, Tensor) else batches)
    weight = mlp.fc2.weight
    usable = (amax > 0) & amax.isfinite()
    logs = torch.where(usable, amax, 1.0).log2()
    most = -math.log2(torch.finfo(weight.dtype).tiny)  # the power and its inverse are normal numbers
    exponent = (logs.sum() / usable.sum().clamp(min=1) - logs).round().clamp(-most, most)
    scale = torch.where(usable, exponent.exp2(), 1.0)
    with torch.no_grad():
        inverse = (1 / scale).to(weight.dtype)
        folded = weight * inverse
        exact = ((folded / inverse == weight) & folded.isfinite()).all(0)
        weight.copy_(torch.where(exact, folded, weight))
        scale = torch.where(exact, scale, 1.0)
    mlp.fc2.smooth = scale if mlp.fc2.smooth is None else mlp.fc2.smooth.float() * scale
    for door in mlp.fc2.modules():
        if isinstance(door, Quantizer):
            door.reset()
    return mlp.fc2.smooth


def fold_smooth_swiglu(model: nn.Module) -> list[str]:
    """Moves the powers of `smooth_swiglu` into the up rows of fc1, for engines that know no factor of channels.

    Args:
        model: its MLPs with `fc2.smooth` become plain ones, in place: the up rows of `fc1.weight` and `fc1.bias` are
            multiplied by the powers, and fc2 stays as it is.
    Returns:
        Names of the MLPs. In high precision no bit of the result changes, and the rows that fc2 casts are the same. The
        casts of fc1's weight change, since its rows do.
    Raises:
        ValueError: an activation whose result is no product with an up row (one without a gate, or with a clamp);
            weights that exist only as codes. Nothing is changed then.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(32, 64, activation="swiglu", bias=False)
        >>> _ = smooth_swiglu(mlp, torch.randn(16, 32))
        >>> fold_smooth_swiglu(mlp), mlp.fc2.smooth
        ([''], None)
    """
    mlps = {name: m for name, m in model.named_modules() if isinstance(m, NormMLP) and m.fc2.smooth is not None}
    for name, mlp in mlps.items():
        reason = ""
        activation = mlp.activation.activation
        x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0)) * 10  # gate and up
        twice = activation.forward(x * torch.tensor([1.0, 2.0]))
        if not (activation.gated and torch.equal(twice, 2 * activation.forward(x))):
            reason = f"the result of {activation.name} is no product with an up row, which could hold the power"
        elif is_quantized_weight(mlp.fc1.weight):
            reason = "the weight of fc1 exists only as codes; call ottava.convert(model, recipe, weights='bf16') first"
        if reason:
            raise ValueError(f"fold_smooth_swiglu: {name or 'the MLP'}: {reason}")
    for mlp in mlps.values():
        powers = mlp.fc2.smooth
        assert powers is not None
        with torch.no_grad():
            for rows in (mlp.fc1.weight, mlp.fc1.bias):
                if rows is not None:
                    up = rows[powers.numel() :]
                    up.mul_(powers.to(rows.dtype).view(-1, *[1] * (up.dim() - 1)))
        mlp.fc2.smooth = None
    return list(mlps)


def _amax(mlp: NormMLP, batches: Iterable[Tensor]) -> Tensor:
    """fp32 (F,): of each channel in front of fc2."""
    found = None
    with torch.no_grad(), autocast(enabled=False):
        for batch in batches:
            rows = mlp.activated(batch).flatten(0, -2)
            if rows.shape[0]:
                amax = rows.abs().amax(0).float()
                found = amax if found is None else torch.maximum(found, amax)
    if found is None:
        raise ValueError("smooth_swiglu: got no batch; needs inputs of the MLP to take magnitudes on")
    return found

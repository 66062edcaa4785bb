"""The feed-forward half of a transformer block: norm, linear, activation, linear; two casts, no row kept twice."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ottava.engine.autocast import ambient
from ottava.engine.functional import produced
from ottava.nn.activations import Activation, ActivationFormula, get_activation
from ottava.nn.layer import Layer
from ottava.nn.norm_linear import NormLinear
from ottava.nn.norms import NormName
from ottava.nn.pieces import Piece
from ottava.recipe import Recipe, get_recipe

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
        assert isinstance(self.produce, ActivationFormula)
        formula = self.produce
        settings = f"activation={formula.activation.name}, save={formula.save}, recipe={self.recipe.name}"
        return f"{super().extra_repr()}, {settings}"


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
        self.fc1: Layer
        if norm is None:
            from ottava.nn.linear import Linear

            self.fc1 = Linear(hidden, wide, **factory)
        else:
            self.fc1 = NormLinear(hidden, wide, norm=norm, eps=eps, zero_centered_gamma=zero_centered_gamma, **factory)
        if activation.gated:
            self.fc1.pieces = Piece("gate", ffn_hidden), Piece("up", ffn_hidden)
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

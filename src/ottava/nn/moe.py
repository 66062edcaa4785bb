"""Mixture of experts: a router, the experts' two grouped GEMMs with an activation between, and the weighted sum.

    index, probs = router(x)                                  each token's experts
    h = activation(up(rows of x, sorted by expert))           cast before sending if scales run along K
    y = sum over a token's experts of probs * down(h)         in the order of the experts, in fp32

If the recipe allows it, an expert layer makes only two casts of activations, of x and h: it makes the operand of a
weight's gradient from the forward GEMM's codes (`casts.turn`). Else it casts again, and the receipt says why.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.functional import produced
from ottava.nn.activations import Activation, ActivationFormula, get_activation
from ottava.nn.grouped import GroupedLinear
from ottava.nn.mlp import NormMLP
from ottava.nn.permutation import sort_by_expert, unpermute
from ottava.nn.router import Router
from ottava.recipe import Recipe, get_recipe


class MoE(nn.Module):
    """A feed-forward layer of experts; each token runs `top_k` of them.

    Args:
        hidden, ffn_hidden: H and F of one expert.
        activation: a name of `activations.ACTIVATIONS`, or an Activation; a gated one has the gate first.
        shared_experts: number of experts that every token runs, as one MLP of `shared_experts` * F.
        bias: of the experts' linears.
        capacity_factor: the most rows of an expert, as a multiple of its even share; it drops the tokens with the
            smallest probabilities, and they get nothing from it. None: it drops no token.
        cast_once: as for `GroupedLinear`. False gives the bits of one Linear per expert.
        router: arguments of `Router`: score, normalize, aux_loss, bias_rate, ...
        recipe, device, dtype: as `Linear`.
    Shapes: (..., H) -> (..., H).  Parameters: `up.weight` (E, F or 2 F, H), `down.weight` (E, H, F), `router.weight`.
    Raises:
        ValueError: unknown names, or sizes that do not fit.

    Example:
        >>> import ottava
        >>> moe = ottava.nn.MoE(64, 32, 4, 2, recipe="blockwise", dtype=torch.bfloat16)
        >>> moe(torch.ones(2, 3, 64, dtype=torch.bfloat16)).shape
        torch.Size([2, 3, 64])
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation | str = "swiglu",
        shared_experts: int = 0,
        bias: bool = False,
        capacity_factor: float | None = None,
        cast_once: bool = True,
        router: dict[str, Any] | None = None,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation, recipe = get_activation(activation), get_recipe(recipe)
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"MoE: capacity_factor is {capacity_factor}; needs a positive number, or None for all")
        factory: dict[str, Any] = {"bias": bias, "recipe": recipe, "device": device, "dtype": dtype}
        self.router = Router(hidden, num_experts, top_k, **(router or {}), device=device, dtype=dtype)
        stacked: dict[str, Any] = {"cast_once": cast_once, "top_k": top_k}
        wide = 2 * ffn_hidden if activation.gated else ffn_hidden
        self.up = GroupedLinear(num_experts, hidden, wide, **stacked, **factory)
        self.down = GroupedLinear(num_experts, ffn_hidden, hidden, **stacked, **factory)
        self.activation, self.capacity_factor = ActivationFormula(activation), capacity_factor
        self.shared: NormMLP | None = None
        if shared_experts:
            self.shared = NormMLP(hidden, ffn_hidden * shared_experts, activation=activation, norm=None, **factory)
        self.ranks: Any = None
        """An `expert_parallel.ExpertRanks` where ranks hold some experts each."""
        self.adopt(recipe, "")

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model, for all layers in it."""
        prefix = f"{name}." if name else ""
        self.up.adopt(recipe, f"{prefix}up")
        self.down.adopt(recipe, f"{prefix}down")

    def forward(self, input: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        tokens = input.flatten(0, -2) if input.dim() != 2 else input
        routing = self.router(tokens)
        experts, capacity = self.router.weight.shape[0], None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * routing.experts.numel() / experts) or 1
        plan = sort_by_expert(routing.experts, experts, capacity=capacity, probs=routing.probs)
        sent = plan if self.ranks is None else self.ranks.plan(plan)
        splits = sent.counts.tolist()
        rows = self.down(produced(self.activation, self.up(tokens, splits, sent)), splits)
        output = unpermute(rows if self.ranks is None else self.ranks.collect(rows, sent), plan, routing.probs)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view(*input.shape[:-1], output.shape[-1])

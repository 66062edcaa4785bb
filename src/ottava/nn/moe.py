"""Mixture of experts: a router, the experts' two grouped GEMMs with an activation between, and the weighted sum.

    index, probs = router(x)                                  each token's experts
    h = activation(up(rows of x, sorted by expert))           cast before sending if scales run along K
    y = sum over a token's experts of probs * down(h)         in the order of the experts, in fp32

The router's GEMM runs in fp32: a rounding error of a logit changes which expert runs. If the recipe allows it, an
expert layer makes only two casts of activations, of x and h: it makes the operand of a weight's gradient from the
forward GEMM's codes (`ops.turn`). Else it casts again, and the receipt says why.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.base.errors import need_known, need_type
from ottava.engine.functional import produced
from ottava.kernels.gate import applied, no_autocast
from ottava.nn.activations import Activation, ActivationFormula, get_activation
from ottava.nn.grouped import GroupedLinear, sort_by_expert, unpermute
from ottava.nn.layer import recomputing
from ottava.nn.mlp import NormMLP
from ottava.recipe import Recipe, get_recipe

Score = Literal["softmax", "sigmoid", "softmax_of_top_k"]


class Routing(NamedTuple):
    """The experts of each token.

    Example: see `Router`.
    """

    probs: Tensor
    """fp32 (tokens, top_k): the weights of the experts' outputs."""
    experts: Tensor
    """int64 (tokens, top_k): numbers of the experts, by falling score."""
    logits: Tensor
    """fp32 (tokens, experts)."""


def choose_experts(scores: Tensor, top_k: int, groups: int, top_groups: int, best: int = 2) -> Tensor:
    """int64 (tokens, top_k), from the top_groups of the groups of experts by the sum of a group's best scores."""
    if groups > 1:
        grouped = scores.view(len(scores), groups, -1)
        sums = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(-1)
        used = torch.zeros_like(sums).scatter_(1, sums.topk(top_groups, dim=-1).indices, 1.0)
        scores = grouped.masked_fill(used[..., None] == 0, -torch.inf).flatten(1)
    return scores.topk(top_k, dim=-1).indices


class Router(nn.Module):
    """Sends each token to `top_k` of `num_experts` experts.

    Args:
        score: function of the logits. "softmax": over all experts, before the choice (Mixtral, Qwen3-MoE). "sigmoid":
            of each logit (DeepSeek-V3). "softmax_of_top_k": choose by logits, then a softmax over the chosen experts
            (gpt-oss).
        normalize: divide the chosen probabilities by their sum.
        scaling: final factor of the probabilities (DeepSeek-V3: 2.5).
        num_groups, top_groups: the experts form groups of equal size, and a token uses only its best `top_groups`
            groups, by the sum of a group's two best scores (DeepSeek-V3: 8 and 4).
        aux_loss: coefficient of the load-balance loss E * sum_e f_e P_e, with f_e the share of choices that expert e
            got and P_e its mean probability: 1 where all are alike (Switch Transformer, with top_k choices a token).
        z_loss: coefficient of mean(logsumexp(logits)**2) (ST-MoE).
        bias_rate: step of a bias that balances without a loss (DeepSeek-V3: 0.001): only the choice adds it to the
            scores, and `update_bias` moves it. None: no bias.
        dtype: of the weight; the GEMM is fp32 in any case.
    Shapes: (tokens, hidden) -> Routing.
    Raises:
        ValueError: numbers that do not go together; an unknown score.
    Edge cases: it does not return the losses. In backward their gradients join those of the probabilities, times
        `loss_scale` (set it to the scale of a GradScaler), so that recomputation by torch.utils.checkpoint keeps them.
        `last_aux_loss` and `last_z_loss` hold their values without coefficients. In training each forward adds to
        `tokens_per_expert`; recomputations do not.

    Example:
        >>> import ottava
        >>> router = ottava.nn.Router(64, 8, 2, normalize=True)
        >>> routing = router(torch.randn(5, 64))
        >>> routing.experts.shape, bool((routing.probs.sum(1) - 1).abs().max() < 1e-6)
        (torch.Size([5, 2]), True)
    """

    bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        normalize: bool = False,
        scaling: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "num_experts": num_experts, "top_k": top_k}
        for name, value in (sizes | {"num_groups": num_groups, "top_groups": top_groups}).items():
            need_type(f"Router: {name}", value, int)
            if value < 1:
                raise ValueError(f"Router: {name} is {value}; needs 1 or more")
        need_known("Router", "score", score, get_args(Score))
        if num_experts % num_groups or top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
            raise ValueError(
                f"Router: {num_experts} experts in {num_groups} groups, of which {top_groups} are used, give no "
                f"{top_k} experts: needs groups of equal size, and top_k experts in the groups that are used"
            )
        self.top_k, self.score, self.normalize, self.scaling = top_k, score, normalize, scaling
        self.num_groups, self.top_groups = num_groups, top_groups
        self.aux_loss, self.z_loss, self.bias_rate, self.loss_scale = aux_loss, z_loss, bias_rate, 1.0
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias", None if bias_rate is None else zeros)
        self.register_buffer("tokens_per_expert", zeros.clone(), persistent=False)
        self.last_aux_loss: Tensor | None = None
        self.last_z_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Linear."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Routing:
        """(tokens, hidden) -> Routing."""
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"Router: got input {tuple(x.shape)}; needs (tokens, {self.weight.shape[1]})")
        with no_autocast(x.device):
            logits = nn.functional.linear(x.float(), self.weight.float())
            scores = logits.sigmoid() if self.score == "sigmoid" else logits
            if self.score == "softmax":
                scores = logits.softmax(dim=-1)
            biased = scores.detach() if self.bias is None else scores.detach() + self.bias
            index = choose_experts(biased, self.top_k, self.num_groups, self.top_groups)
            probs = scores.gather(1, index)
            if self.score == "softmax_of_top_k":
                probs = probs.softmax(dim=-1)
            if self.normalize:
                probs = probs / probs.sum(dim=-1, keepdim=True)
            if self.scaling != 1.0:
                probs = probs * self.scaling
            probs = self._balance(logits, scores, index, probs)
        return Routing(probs, index, logits)

    def _balance(self, logits: Tensor, scores: Tensor, index: Tensor, probs: Tensor) -> Tensor:
        """Counts the choices, and attaches the gradients of the losses to the probabilities."""
        experts, tokens = self.weight.shape[0], max(len(logits), 1)
        chosen = torch.zeros_like(logits).scatter_(1, index, 1.0).sum(0)
        if self.training and not recomputing():
            with torch.no_grad():
                self.tokens_per_expert += chosen
        losses = []
        if self.aux_loss:
            shares = logits.softmax(-1) if self.score != "sigmoid" else scores / scores.sum(-1, keepdim=True)
            aux = experts * (chosen / (tokens * self.top_k) * (shares.sum(0) / tokens)).sum()
            losses.append(self.aux_loss * aux)
            self.last_aux_loss = aux.detach()
        if self.z_loss:
            z = logits.logsumexp(-1).square().sum() / tokens
            losses.append(self.z_loss * z)
            self.last_z_loss = z.detach()
        if not losses or not torch.is_grad_enabled():
            return probs
        total = losses[0] if len(losses) == 1 else losses[0] + losses[1]
        return applied(_WithLoss, probs, total, self.loss_scale)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Once a step: experts that got fewer tokens than the mean become likelier, the others less likely.

            bias += bias_rate * sign(mean(tokens_per_expert) - tokens_per_expert)

        Then the count starts again. group: sums the counts over these ranks; each of them must call it.
        Source: DeepSeek-V3 (arXiv 2412.19437), 2.1.2.
        """
        if self.bias is None or self.bias_rate is None:
            raise ValueError("Router.update_bias: this router has no bias; give it a bias_rate, such as 0.001")
        if group is not None:
            dist.all_reduce(self.tokens_per_expert, group=group)
        counts = self.tokens_per_expert
        self.bias += self.bias_rate * torch.sign(counts.mean() - counts)
        counts.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # moves with the model; counts and biases stay fp32 when the model is cast to another dtype
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in own.items():
            after = self._buffers[name]
            assert after is not None
            if after.dtype != torch.float32:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Its settings."""
        experts, hidden = self.weight.shape
        return f"{hidden} -> {self.top_k} of {experts}, {self.score}"


class _WithLoss(torch.autograd.Function):
    """Returns the probabilities unchanged; backward adds the gradient of a loss, as a term of the training loss."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.like
        return grads[0], torch.full((), ctx.scale, dtype=dtype, device=device), None


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
        """A `sharding.ExpertRanks` where ranks hold some experts each."""
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
        splits = sent.sizes
        rows = self.down(produced(self.activation, self.up(tokens, splits, sent)), splits)
        output = unpermute(rows if self.ranks is None else self.ranks.collect(rows, sent), plan, routing.probs)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view(*input.shape[:-1], output.shape[-1])

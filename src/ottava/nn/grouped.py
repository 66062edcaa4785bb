"""One linear layer for each group of rows: experts; and how rows are sorted by expert, and come back.

    y[rows of g] = x[rows of g] (M_g, K) @ weight[g] (N, K).T + bias[g]

Every group is an ottava layer with doors, scales and a recipe of its own, so a stack of experts gives the bits of one
Linear per expert, under every recipe. If a recipe casts only rows of x, with scales along K, one cast serves all
groups, before the rows go to their groups. Else the groups go one by one.

The way back sums over the experts of a token in the order of the experts, in fp32, and rounds once: the same bits on
every device and in every run, unlike scattered additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ottava.base.errors import need_type
from ottava.engine.autocast import AMBIENT
from ottava.engine.functional import (
    Call,
    backward_gemms,
    flattened,
    forward_gemm,
    refuse_second_derivative,
    unflattened,
)
from ottava.engine.quantizer import Notes, Record
from ottava.kernels.gate import applied, mapped
from ottava.nn.layer import LayerView, ViewOwner, ready_input
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import Operand, QuantizedTensor
from ottava.ops.quantize import cast_both, refuse_turn, turn
from ottava.recipe import Recipe, get_recipe
from ottava.weights.checkpoint import decode_codes
from ottava.weights.operands import in_high_precision, shared_bytes
from ottava.weights.parameter import local


@dataclass(frozen=True, eq=False)
class Permutation:
    """Rows sorted by expert, for tokens that each go to k experts; see `sort_by_expert`.

    Example: see `sort_by_expert`.
    """

    rows: Tensor
    """int64 (M,): the token of each row."""
    places: Tensor
    """int64 (tokens, k): the places of a token's rows, in the order of its experts; M for a dropped row."""
    slots: Tensor
    """int64 (M,): the place of each row in the routing (tokens, k), flat."""
    counts: Tensor
    """int64 (experts,): rows of each expert."""
    sizes: tuple[int, ...]
    """The same as numbers, for which the host has waited once."""
    travels: ClassVar[bool] = False
    """Whether rows go to other ranks."""

    def gather(self, x: Tensor) -> Tensor:
        """(tokens, N) -> (M, N), without a gradient."""
        return x.index_select(0, self.rows)

    def combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """(M, N) -> (tokens, N): the sum of a token's rows, each times its weight (M,); without a gradient."""
        tokens = self.places.shape[0]
        total = y.new_zeros(tokens, y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
        if not y.shape[0]:
            return total.to(y.dtype)
        for place in self.places.unbind(1):
            there = place < y.shape[0]
            at = torch.where(there, place, 0)
            row = y.index_select(0, at).to(total.dtype)
            if weights is not None:
                row = row * weights.index_select(0, at).to(total.dtype)[:, None]
            total += torch.where(there[:, None], row, 0)
        return total.to(y.dtype)


def sort_by_expert(
    index: Tensor, num_experts: int, *, capacity: int | None = None, probs: Tensor | None = None
) -> Permutation:
    """Sorts the rows of tokens by expert; rows of one expert stay in the order of their tokens.

    Args:
        index: integers (tokens, k): the experts of each token; num_experts stands for none.
        capacity: the most rows of an expert; None: no limit. It drops the rows with the smallest probs, or without
            probs the last rows.
        probs: (tokens, k).
    Raises:
        ValueError: shapes, or a capacity below 1.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[2, 0], [0, 1]]), 3)
        >>> plan.rows, plan.counts, plan.places
        (tensor([0, 1, 1, 0]), tensor([2, 1, 1]), tensor([[0, 3],
                [1, 2]]))
    """
    if index.dim() != 2 or (probs is not None and probs.shape != index.shape):
        got = f"index {tuple(index.shape)}" + ("" if probs is None else f", probs {tuple(probs.shape)}")
        raise ValueError(f"sort_by_expert: got {got}; needs (tokens, k) for both")
    if capacity is not None and capacity < 1:
        raise ValueError(f"sort_by_expert: capacity is {capacity}; needs 1 or more rows, or None for all")
    index = index.to(torch.int64)
    tokens, k = index.shape
    flat = index.flatten()
    if capacity is not None:
        flat = torch.where(_rank(flat, probs, num_experts) < capacity, flat, num_experts)
    order = flat.argsort(stable=True)
    counts = _counts(flat, num_experts)[:num_experts]
    sizes = tuple(counts.tolist())  # the only number that the host waits for: it cuts the rows of the experts
    slots = order[: sum(sizes)]
    at = torch.full((tokens * k,), len(slots), dtype=torch.int64, device=index.device)
    at[slots] = torch.arange(len(slots), device=index.device)
    places = at.view(tokens, k).sort(dim=1).values  # rows lie in the order of experts
    return Permutation(slots // max(k, 1), places, slots, counts, sizes)


def _counts(flat: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert, and of none; torch's bincount would wait for the device to learn the largest number."""
    return flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))


def _rank(flat: Tensor, probs: Tensor | None, num_experts: int) -> Tensor:
    """The rank of each entry within its expert: by falling probs, or in order."""
    first = torch.arange(len(flat), device=flat.device)
    if probs is not None:
        first = probs.detach().flatten().argsort(descending=True, stable=True)
    by_expert = first[flat[first].argsort(stable=True)]
    counts = _counts(flat, num_experts)
    starts = counts.cumsum(0) - counts
    return by_expert.argsort() - starts[flat]


def permute(x: Tensor, plan: Permutation) -> Tensor:
    """x (tokens, N) -> (M, N), rows sorted by expert.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[1], [0]]), 2)
        >>> permute(torch.tensor([[10.0], [20.0]]), plan)
        tensor([[20.],
                [10.]])
    """
    return mapped(plan.gather, plan.combine, x)  # type: ignore[no-any-return]


def unpermute(y: Tensor, plan: Permutation, probs: Tensor | None = None) -> Tensor:
    """y (M, N), rows sorted by expert -> (tokens, N): the sum of a token's rows, each times its probability.

    Args:
        probs: (tokens, k), any float dtype; None: the plain sum. Summed in fp32 and rounded once to the dtype of y.
    Edge cases: a token without rows, all dropped, gets zeros.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[0, 1]]), 2)
        >>> unpermute(torch.tensor([[1.0], [10.0]]), plan, torch.tensor([[0.25, 0.75]]))
        tensor([[7.7500]])
    """
    if probs is None:
        return applied(_Unpermute, plan, y, None)  # type: ignore[no-any-return]
    return applied(_Unpermute, plan, y, probs.flatten().index_select(0, plan.slots))  # type: ignore[no-any-return]


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Permutation, y: Tensor, weights: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*(() if weights is None else (y, weights)))
        return plan.combine(y, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows: Tensor = ctx.plan.gather(grads[0])
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them once
        if not saved:
            return None, rows, None
        y, weights = saved
        wide = torch.promote_types(rows.dtype, torch.float32)
        dy = (rows.to(wide) * weights.to(wide)[:, None]).to(y.dtype) if ctx.needs_input_grad[1] else None
        d_weights = (rows.to(wide) * y.to(wide)).sum(1).to(weights.dtype) if ctx.needs_input_grad[2] else None
        return None, dy, d_weights


Splits = Sequence[int] | Tensor
"""Rows of each group, in order; they add up to the rows of x."""


class GroupedLinear(ViewOwner):
    """`num_groups` linear layers over rows that are sorted by group, each under a recipe.

    Args:
        num_groups: G.
        in_features, out_features: K, N.
        bias: whether each group has one.
        recipe: a Recipe or its name.
        cast_once: if the recipe's scales are powers of two, make the operand of x.T from the codes of x instead of a
            second cast. The weight's gradient then has other bits than a Linear's: a number is rounded once more if its
            block of x.T has far larger numbers. If the recipe does not allow it, x is cast again, and the receipt says
            why.
        top_k: groups that each token of the model goes to; predictions of speed (`convert(plan=...)`) count rows by it.
    Shapes: input (tokens, K) -> (tokens, N). Parameters: weight (G, N, K), bias (G, N): one parameter each, as in
        Hugging Face's experts and torch's grouped GEMMs, so that checkpoints load by name, FSDP shards by whole
        experts, an optimizer has one tensor to step, and no parameter is ever without a gradient.
    dtypes: as `ottava.nn.Linear`.
    Raises:
        ValueError: splits that do not fit; unknown recipe.
        TypeError: as `ottava.nn.Linear`.
    Edge cases: groups without a row run nothing, and get zeros as gradients. The layer of group g has the name
        "NAME.groups.g", which patterns of overrides match.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.GroupedLinear(3, 64, 32, recipe="tensorwise", dtype=torch.bfloat16)
        >>> layer(torch.ones(5, 64, dtype=torch.bfloat16), [4, 0, 1]).shape, list(layer.state_dict())
        (torch.Size([5, 32]), ['weight', 'bias'])
    """

    bias: Tensor | None
    first: int | None = None
    """The first group that this rank holds, where ranks hold some each; None: this process holds all."""

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str = "tensorwise",
        cast_once: bool = False,
        top_k: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            need_type(f"GroupedLinear: {name}", value, int)
            if value < 1:
                raise ValueError(f"GroupedLinear: {name} is {value}; needs 1 or more")
        self.in_features, self.out_features, self.cast_once = in_features, out_features, cast_once
        shape = num_groups, out_features
        self.weight = nn.Parameter(torch.empty(*shape, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()
        self.groups = stack(self, "weight", "bias" if bias else None, num_groups, top_k=top_k)
        self.adopt(get_recipe(recipe), "")

    def reset_parameters(self) -> None:
        """As torch's Linear: uniform in +-1/sqrt(K)."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        decode_codes(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model, for all groups."""
        for number, part in enumerate(self.groups):
            part.adopt(recipe, f"{name}.groups.{number}" if name else f"groups.{number}")

    def forward(self, input: Tensor, splits: Splits, plan: Permutation | None = None) -> Tensor:
        """(tokens, K), rows of each group -> (rows, N).

        plan: sends rows of the input to their groups first, as codes if the recipe allows it; None: the input is sorted
            by group.
        """
        weight, bias = local(self.weight), local(self.bias)
        groups: Sequence[LayerView] = self.groups  # type: ignore[assignment]  # a ModuleList is no Sequence to mypy
        if self.first is not None:
            groups = [*self.groups][self.first : self.first + weight.shape[0]]
        return grouped_linear(
            self, groups, input, splits, weight, bias, plan=plan, cast_once=self.cast_once, every=self.groups
        )

    def extra_repr(self) -> str:
        """Shape and recipe."""
        return (
            f"{len(self.groups)} x ({self.in_features} -> {self.out_features}), bias={self.bias is not None}, "
            f"recipe={self.groups[0].recipe.name}"
        )


class Stack(nn.ModuleList):
    """The layers of a stack of matrices; it prints as one line."""

    def __iter__(self) -> Iterator[LayerView]:
        return super().__iter__()  # type: ignore[return-value]

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(number)

    def __repr__(self) -> str:
        return f"{len(self)} x {self[0]!r}" if len(self) else "no group"


def stack(
    owner: nn.Module, weight: str, bias: str | None, count: int, *, turned: bool = False, top_k: int = 1
) -> Stack:
    """A layer for each matrix of a parameter (count, N, K), or (count, K, N) if it is turned.

    top_k: how many of them each token goes to; for predictions of speed.
    """
    groups = Stack(LayerView(owner, weight, bias, number, turned=turned) for number in range(count))
    for part in groups:
        part.share = top_k / count
    return groups


def grouped_linear(
    owner: ViewOwner,
    groups: Sequence[LayerView],
    input: Tensor,
    splits: Splits,
    weight: Tensor,
    bias: Tensor | None,
    *,
    plan: Permutation | None = None,
    cast_once: bool = False,
    every: Iterable[LayerView] = (),
) -> Tensor:
    """Runs the layers of a stack, see `GroupedLinear`.

    Args:
        owner: the module that has the stack.
        weight: (G, N, K), any strides.  bias: (G, N) or None.
        every: the layers of all ranks where the plan sends rows to other ranks, which must all send codes or none.
    """
    sizes = _sizes(input, splits, len(groups), weight.shape[-1], plan)
    owner.bind(groups)
    busy, start = [], 0
    for number, size in enumerate(sizes):
        if size:
            busy.append(_Group(number, groups[number], start, start + size))
        start += size
    travels = plan is not None and plan.travels
    deciding = every if travels else [group.part for group in busy]
    shared, remark = _together(deciding, cast_once, torch.is_grad_enabled() and weight.requires_grad, travels)
    if travels:
        remark = "; ".join(filter(None, (remark, f"rows came from other ranks {'as codes' if shared else 'uncast'}")))
    if shared is not None:
        calls = []
        for group in busy:
            call = group.part.begin_call(input.new_empty(0).expand(group.end - group.start, 0), AMBIENT.get())
            call.remark, call.cast_specs = remark, (shared.fprop.lhs,)
            calls.append(call)
        lead = calls[0] if calls else Call(groups[0].quantizers, shared)  # the rows of this rank may all go to others
        input = ready_input(groups[0], input, weight, bias, lead)
        return applied(_Together, busy, lead, calls, torch.is_grad_enabled(), plan, input, weight, bias)  # type: ignore[no-any-return]
    if plan is not None:
        input = permute(input, plan)
    weights = torch.unbind(weight)  # one gradient for the whole stack
    biases = [None] * len(groups) if bias is None else torch.unbind(bias)
    if not busy:
        return nn.functional.linear(
            input, in_high_precision(weights[0]), biases[0]
        )  # (0, N): no rows, and gradients are zeros
    results = []
    for group in busy:
        results.append(group.part.run(input[group.start : group.end], weights[group.number], biases[group.number]))
        if remark and group.part.last_call is not None:
            group.part.last_call.remark = remark
    return torch.cat(results)


class _Group(NamedTuple):
    """A group that has rows."""

    number: int
    part: LayerView
    start: int
    end: int


def _sizes(input: Tensor, splits: Splits, count: int, features: int, plan: Permutation | None) -> list[int]:
    sizes = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    total = input.shape[0] if plan is None else len(plan.rows)
    if input.dim() != 2 or input.shape[1] != features:
        raise ValueError(f"GroupedLinear: got input {tuple(input.shape)}; needs (tokens, {features})")
    if len(sizes) != count or any(size < 0 for size in sizes) or sum(sizes) != total:
        raise ValueError(
            f"GroupedLinear: got splits {sizes} for {total} rows; needs {count} numbers, none negative, that add up to "
            f"{total}"
        )
    return sizes


def _together(parts: Iterable[LayerView], cast_once: bool, needs_dw: bool, travels: bool) -> tuple[Recipe | None, str]:
    """The recipe for one cast of the rows of all groups, or None: each group casts its rows; and a remark."""
    if torch.compiler.is_compiling() or (settings := AMBIENT.get()).calibrating:
        return None, ""
    recipes = {settings.recipe_for(part.name, part.resolved) for part in parts}
    if not recipes:
        return None, ""
    recipe = recipes.pop()
    row, col = recipe.cells("input")
    if recipes or row is None:
        return None, ""
    if travels and row.granularity == PER_TENSOR and row.scaling == "current" and row.repeatable:
        return (recipe, "") if col in (None, row) or not needs_dw else (None, "")
    reason = None
    if needs_dw:  # the backward needs x.T too
        if not cast_once or col is None or (row == col and row.granularity.transposes):
            return None, ""  # the caller wants two casts, or one cast serves both anyway
        reason = refuse_turn(row, col)
    if reason is not None:
        return None, f"input cast twice: {reason}"
    one_by_one = row.predicted or row.granularity.rows != 1 or not row.repeatable
    if one_by_one or row.scale_format == "e4m3":  # two levels: one of them belongs to the tensor
        return None, ""
    return recipe, "x.T made from the codes of x" if needs_dw else ""


class _Together(torch.autograd.Function):
    """The formulas of `functional` for all groups: one cast of the rows, whose codes go to their groups."""

    @staticmethod
    def forward(
        ctx: Any,
        busy: list[_Group],
        lead: Call,
        calls: list[Call],
        grad_enabled: bool,
        plan: Permutation | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        needs_dx, needs_dw, _ = (grad_enabled and needed for needed in ctx.needs_input_grad[5:])
        notes: Notes = []
        record: Record = notes if grad_enabled else False
        codes = _rows_cast(busy, lead, calls, x, plan, record)
        y = x.new_empty(codes.shape[0], weight.shape[1])
        kept: list[Operand | None] = [codes if needs_dw else None]
        for (number, _, start, end), call in zip(busy, calls, strict=True):
            x_row, own_bias = _lines(codes, start, end), None if bias is None else bias[number]
            y[start:end], w_col = forward_gemm(
                call, x_row, weight[number], own_bias, x.dtype, needs_dx=needs_dx, record=record
            )
            kept.append(w_col)
            w_bytes = w_col.nbytes - shared_bytes(w_col, weight) if isinstance(w_col, QuantizedTensor) else 0
            call.saved_bytes = w_bytes + (x_row.nbytes if needs_dw else 0)
            call.high_precision_bytes = (end - start) * x.shape[1] * x.element_size() if needs_dw else 0
        tensors, ctx.described, _ = flattened(kept)
        ctx.notes = lead.keep(notes, linked=True in ctx.needs_input_grad)
        ctx.save_for_backward(*tensors)
        ctx.busy, ctx.calls, ctx.plan, ctx.shapes = busy, calls, plan, (x.shape, weight.shape)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("a grouped linear", "run that forward under ottava.autocast(enabled=False)")
        (dy,), (x_shape, weight_shape), (x_dtype, weight_dtype, bias_dtype) = grads, ctx.shapes, ctx.dtypes
        codes, *w_cols = unflattened(ctx.saved_tensors, ctx.described)
        notes: Notes = [*ctx.notes]
        needs: tuple[bool, bool, bool] = ctx.needs_input_grad[5:]
        dx = dy.new_empty(dy.shape[0], x_shape[1], dtype=x_dtype) if needs[0] else None
        dw = dy.new_zeros(weight_shape, dtype=weight_dtype) if needs[1] else None
        db = dy.new_zeros(weight_shape[:2], dtype=bias_dtype) if needs[2] else None
        for (number, _, start, end), call, w_col in zip(ctx.busy, ctx.calls, w_cols, strict=True):
            x_col = None
            if needs[1]:
                assert isinstance(codes, QuantizedTensor)
                assert call.recipe.wgrad.rhs is not None
                x_row, x_spec = _lines(codes, start, end), call.recipe.wgrad.rhs
                x_col = x_row.t() if x_spec == x_row.spec and x_spec.granularity.transposes else turn(x_row, x_spec)
            own = backward_gemms(call, dy[start:end], x_col, w_col, ctx.dtypes, needs, notes)
            for whole, place, part in zip((dx, dw, db), (slice(start, end), number, number), own, strict=True):
                if whole is not None and part is not None:
                    whole[place] = part
            call.take(notes)
            notes = []
            if call.after_backward is not None:
                call.after_backward()
        if dx is not None and ctx.plan is not None:
            dx = ctx.plan.combine(dx)
        return None, None, None, None, None, dx, dw, db


def _rows_cast(
    busy: list[_Group], lead: Call, calls: list[Call], x: Tensor, plan: Permutation | None, record: Record
) -> QuantizedTensor:
    """Casts the rows of all groups: by the door of each group if an observer watches it, else before they are sent."""
    spec = lead.recipe.fprop.lhs
    assert spec is not None
    if plan is not None and plan.travels and spec.granularity == PER_TENSOR:
        return plan.cast(x, spec, lead.doors.input.plans)  # type: ignore[attr-defined, no-any-return]  # a RankPermutation
    if not (plan is not None and plan.travels) and any(call.doors.input.hooked for call in calls):
        own = x if plan is None else plan.gather(x)
        cast = [
            call.doors.input(own[group.start : group.end], spec, None, columnwise=False, record=record)[0]
            for group, call in zip(busy, calls, strict=True)
        ]
        data = torch.cat([one.data.view(torch.uint8) for one in cast]).view(spec.format.storage_dtype)
        return QuantizedTensor(data, torch.cat([one.scale_inv for one in cast]), spec, x.dtype)
    codes = cast_both(x, spec, None, plans=lead.doors.input.plans).row
    assert codes is not None
    if plan is None:
        return codes
    data = plan.gather(codes.data.view(torch.uint8)).view(codes.data.dtype)
    return QuantizedTensor(data, plan.gather(codes.scale_inv), spec, x.dtype)


def _lines(codes: QuantizedTensor, start: int, end: int) -> QuantizedTensor:
    last = start + 1 if codes.spec.granularity == PER_TENSOR else end  # all rows of a group have the same
    return QuantizedTensor(codes.data[start:end], codes.scale_inv[start:last], codes.spec, codes.dtype)

"""TransformerEngine's functions for mixtures of experts: routing, and moving rows to experts and back.

On `ottava.nn.grouped`: rows of one expert lie together, in the order of their tokens; sums over a token's experts are
FP32. A `row_id_map` of this file is an int32 tensor with a row for each token: the places of its rows, -1 where a
choice has none. TransformerEngine's has the same use and another layout: only `moe_unpermute` reads it.

Source: transformer_engine/pytorch/permutation.py and router.py, 2.20.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ottava.base.errors import need_known, unknown_name
from ottava.engine.autocast import AMBIENT
from ottava.kernels.gate import no_autocast
from ottava.nn.grouped import Permutation, permute, sort_by_expert, unpermute
from ottava.nn.moe import choose_experts
from ottava.numerics.formats import E2M1

_EPS = 1e-20  # that TransformerEngine adds to a sum of scores


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = 0, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Copies each token to its experts' rows, sorted by expert.

    Args:
        inp: (tokens, features).
        routing_map: "mask": (tokens, experts), not 0 where a token goes; "index": integers (tokens, k), its experts.
        num_out_tokens: rows of the result. More than there are: zeros behind them; fewer: it drops the last rows. 0
            or less: all.
        max_token_num: unused; in TransformerEngine the size of a workspace.
        map_type: "mask" or "index".
    Returns:
        rows (num_out_tokens, features), and the row_id_map for `moe_unpermute`; of an "index" map it is flat.
    Raises:
        ValueError: another map_type, or shapes that do not go together.

    Example:
        >>> rows, places = moe_permute(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 1]]), 3)
        >>> rows.flatten(), places
        (tensor([2., 1., 2.]), tensor([[-1,  1],
                [ 0,  2]], dtype=torch.int32))
    """
    index = _experts_of("moe_permute", inp, routing_map, map_type)
    experts = routing_map.shape[1] if map_type == "mask" else int(index.max()) + 1 if index.numel() else 1
    slots = sort_by_expert(index, experts).slots
    slots = slots[:num_out_tokens] if num_out_tokens > 0 else slots
    places = index.new_full((index.numel(),), -1, dtype=torch.int32)  # of each choice among the rows
    places[slots] = torch.arange(len(slots), dtype=torch.int32, device=index.device)
    row_id_map = places.view(index.shape)
    plan = _plan(row_id_map)
    rows = permute(inp, plan)
    if num_out_tokens > len(plan.rows):
        rows = torch.nn.functional.pad(rows, (0, 0, 0, num_out_tokens - len(plan.rows)))
    return rows, row_id_map.flatten() if map_type == "index" else row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` for a mask, and the probability of each row.

    Args:
        probs: (tokens, experts).
    Returns:
        rows, their probabilities (num_out_tokens,), and the row_id_map.

    Example:
        >>> probs = torch.tensor([[0.0, 1.0], [0.25, 0.75]])
        >>> moe_permute_with_probs(torch.ones(2, 4), probs, probs > 0, 3)[1]
        tensor([0.2500, 1.0000, 0.7500])
    """
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    own = probs.flatten().index_select(0, _plan(row_id_map).slots)
    return rows, torch.nn.functional.pad(own, (0, len(rows) - len(own))), row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`moe_permute_with_probs` with zero rows behind those of each expert, up to a multiple of align_size.

    Args:
        tokens_per_expert: (experts,): rows of each expert.
    Returns:
        rows, their probabilities, the row_id_map, the pad_offsets for `moe_unpermute` (None: no padding was needed),
        and the padded number of rows of each expert, int64.
    Raises:
        ValueError: tokens_per_expert is None, or align_size is below 1.
    """
    if tokens_per_expert is None or align_size < 1:
        raise ValueError(
            f"moe_permute_and_pad_with_probs: got tokens_per_expert={tokens_per_expert} and align_size={align_size}; "
            "needs the number of rows of each expert, and a size of 1 or more"
        )
    counts = tokens_per_expert.to(inp.device, torch.int64)
    padded = -(-counts // align_size) * align_size
    rows, own, row_id_map = moe_permute_with_probs(inp, probs, routing_map)
    if torch.equal(counts, padded):
        return rows, own, row_id_map, None, padded
    pads = padded - counts
    pad_offsets = pads.cumsum(0) - pads
    places, total = _padded_places(_plan(row_id_map), pad_offsets), int(padded.sum())
    rows = rows.new_zeros(total, rows.shape[1]).index_copy(0, places, rows)
    return rows, own.new_zeros(total).index_copy(0, places, own), row_id_map, pad_offsets, padded


class Fp8Padding(nn.Module):
    """Puts zero rows behind those of each expert, up to a multiple of align_size. `GroupedLinear` needs none.

    Args:
        num_gemms: number of experts.
        align_size: None: 128 for NVFP4 and a CustomRecipe, 32 for MXFP8, else 16, by the recipe of the first forward.

    Example:
        >>> Fp8Padding(2, 4)(torch.ones(5, 1), [3, 2])[1]
        [4, 4]
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """The padded number of rows of each expert.

        Raises:
            ValueError: another number of experts.
        """
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"{type(self).__name__}: got rows of {len(m_splits)} experts; needs those of {self.num_gemms}"
            )
        if self.align_size is None:
            recipe = AMBIENT.get().recipe
            spec = None if recipe is None else recipe.fprop.lhs
            size = 16 if spec is None else 128 if spec.format == E2M1 else 32 if spec.scale_format == "e8m0" else 16
            self.align_size = getattr(recipe, "alignment", size)
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Rows (rows, features), sorted by expert, and the number of each -> both padded."""
        padded, parts = self.padded(m_splits), inp.split(list(m_splits))
        rows = [nn.functional.pad(part, (0, 0, 0, n - len(part))) for part, n in zip(parts, padded, strict=True)]
        return (inp if padded == list(m_splits) else torch.cat(rows)), padded


class Fp8Unpadding(Fp8Padding):
    """Takes away the rows that `Fp8Padding` has put there."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]  # as TransformerEngine's
        """Padded rows, and the number of rows of each expert without padding -> those rows."""
        parts = inp.split(self.padded(m_splits))
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Adds the rows of each token, each times its probability: the inverse of `moe_permute`.

    Args:
        inp: (rows, features), sorted by expert.
        row_id_map: the second result of `moe_permute`.
        merging_probs: (tokens, experts), or for an "index" map (tokens, k); None: the plain sum, and for an "index"
            map a row for each choice.
        restore_shape: (tokens, features); only checked.
        map_type: that of `moe_permute`.
        probs: an old name of merging_probs.
        pad_offsets: the fourth result of `moe_permute_and_pad_with_probs`.
    Returns:
        (tokens, features), summed in FP32, in the dtype of inp.
    Raises:
        ValueError: both names of the probabilities, another map_type, or another shape than restore_shape.

    Example:
        >>> x, mask = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1], [1, 1]])
        >>> moe_unpermute(*moe_permute(x, mask, 3)).flatten()
        tensor([1., 4.])
    """
    if merging_probs is not None and probs is not None:
        raise ValueError("moe_unpermute: got merging_probs and probs, two names of one argument; give merging_probs")
    merging_probs = probs if merging_probs is None else merging_probs
    need_known("moe_unpermute", "map_type", map_type, ("mask", "index"))
    if map_type == "index":
        row_id_map = row_id_map.view(-1, 1 if merging_probs is None else merging_probs.shape[1])
    plan = _plan(row_id_map)
    inp = inp[: len(plan.rows)] if pad_offsets is None else inp.index_select(0, _padded_places(plan, pad_offsets))
    y = unpermute(inp, plan, merging_probs)
    if restore_shape is not None and tuple(restore_shape) != tuple(y.shape):
        raise ValueError(f"moe_unpermute: the tokens have shape {tuple(y.shape)}; got {tuple(restore_shape)}")
    return y


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Cuts the rows into chunks and puts these into another order.

    Args:
        inp: (rows, ...).  split_sizes: rows of each chunk.  sorted_index: the chunks in their new order.

    Example:
        >>> moe_sort_chunks_by_index(torch.arange(4), torch.tensor([1, 3]), torch.tensor([1, 0]))
        tensor([1, 2, 3, 0])
    """
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """`moe_sort_chunks_by_index` for rows and for their probabilities (rows,)."""
    order = split_sizes, sorted_index
    return moe_sort_chunks_by_index(inp, *order), moe_sort_chunks_by_index(probs, *order)


def _experts_of(where: str, inp: Tensor, routing_map: Tensor, map_type: str) -> Tensor:
    """(tokens, choices): the experts of each token; the number of choices stands for none in a mask."""
    need_known(where, "map_type", map_type, ("mask", "index"))
    if map_type == "index" and routing_map.dim() == 1:
        routing_map = routing_map[:, None]
    if inp.dim() != 2 or routing_map.dim() != 2 or len(inp) != len(routing_map):
        raise ValueError(
            f"{where}: got rows {tuple(inp.shape)} and a routing_map {tuple(routing_map.shape)}; needs (tokens, "
            "features) and a row for each token"
        )
    if map_type == "index":
        return routing_map
    experts = routing_map.shape[1]
    return torch.where(routing_map.bool(), torch.arange(experts, device=routing_map.device), experts)


def _plan(row_id_map: Tensor) -> Permutation:
    """The permutation that a row_id_map of (tokens, choices) describes."""
    flat = row_id_map.flatten().to(torch.int64)
    rows = int((flat >= 0).sum())
    at = torch.where(flat < 0, rows, flat)
    slots = at.argsort(stable=True)[:rows]
    choices = max(row_id_map.shape[1], 1)
    counts = torch.bincount(slots % choices, minlength=choices)
    return Permutation(
        slots // choices, at.view(row_id_map.shape).sort(dim=1).values, slots, counts, tuple(counts.tolist())
    )


def _padded_places(plan: Permutation, pad_offsets: Tensor) -> Tensor:
    """int64 (rows,): the places of a mask's rows among padded ones."""
    expert = plan.slots % plan.places.shape[1]
    return torch.arange(len(expert), device=expert.device) + pad_offsets.to(torch.int64)[expert]


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: object = "bytemap",
    topk_indices: Tensor | None = None,
    **quantiles: object,
) -> tuple[Tensor, Tensor]:
    """Sends each token to its `topk` best experts, in FP32; autograd makes the gradient.

    Args:
        logits: (..., experts), FP32, BF16 or FP16.
        use_pre_softmax: with "softmax", choose by probabilities of all experts and keep these; else choose by logits,
            and take the softmax of the chosen ones.
        num_groups, group_topk: choose only in the best group_topk of num_groups groups, by the sum of a group's
            topk / group_topk best scores.
        scaling_factor: of the probabilities.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by the sum of the chosen.
        expert_bias: fp32 (experts,), added to scores for the choice only; not with "softmax".
        routing_map_format: "bytemap", bool (..., experts), or "bitmap_u8", with expert e in bit e % 8 of byte e / 8.
        topk_indices: integers (..., topk), filled with the experts and returned in place of the map.
    Returns:
        probabilities (..., experts) in the dtype of the logits, 0 where a token does not go, and the map.
    Raises:
        NotImplementedError: quantile balancing (qb_histogram and the like).  ValueError: FP64, an unknown name, or
            expert_bias with "softmax", as TransformerEngine's.

    Example:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0]])
        >>> fused_topk_with_score_function(logits, 1, True, None, None, None, "softmax", None)[1]
        tensor([[False,  True, False]])
    """
    if any(value is not None for value in quantiles.values()):
        raise NotImplementedError(
            f"fused_topk_with_score_function: {', '.join(quantiles)} are not in ottava: balance with expert_bias, as "
            "ottava.nn.Router.update_bias does"
        )
    if logits.dtype == torch.float64:
        raise ValueError("fused_topk_with_score_function: got FP64 logits; needs FP32, BF16 or FP16")
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(
            "fused_topk_with_score_function: got expert_bias with score_function 'softmax'; needs 'sigmoid' or "
            "'sqrtsoftplus', or expert_bias=None"
        )
    flat = logits.reshape(-1, logits.shape[-1])
    with no_autocast(logits.device):
        scores = _scores(flat, score_function, pre_softmax=use_pre_softmax)
        biased = scores if expert_bias is None else scores + expert_bias
        groups, used = (num_groups, group_topk) if num_groups and group_topk else (1, 1)
        chosen = choose_experts(biased.detach(), topk, groups, used, topk // used)
        own = scores.gather(1, chosen)
        if score_function == "softmax":
            own = own if use_pre_softmax else own.softmax(-1)
        elif topk > 1:
            own = own / (own.sum(-1, keepdim=True) + _EPS)
        if scaling_factor:
            own = own * scaling_factor
        probs = torch.zeros_like(scores).scatter(1, chosen, own).to(logits.dtype).view(logits.shape)
    if topk_indices is not None:
        return probs, topk_indices.copy_(chosen.view(topk_indices.shape))
    return probs, _map(chosen, logits, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: object = "bytemap"
) -> tuple[Tensor, Tensor]:
    """The scores of all experts, summing to 1 for each token, and the map of its best `topk`.

    Returns:
        the map, as of `fused_topk_with_score_function`, and fp32 scores (..., experts).

    Example:
        >>> fused_compute_score_for_moe_aux_loss(torch.tensor([[0.0, 0.0]]), 1, "sigmoid")[1]
        tensor([[0.5000, 0.5000]])
    """
    flat = logits.reshape(-1, logits.shape[-1])
    with no_autocast(logits.device):
        scores = _scores(flat, score_function, pre_softmax=True)
        if score_function != "softmax":
            scores = scores / (scores.sum(-1, keepdim=True) + _EPS)
    chosen = scores.detach().topk(topk, dim=-1).indices
    return _map(chosen, logits, routing_map_format), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """The load-balance loss: coeff * experts / (topk * tokens**2) * sum over experts of (sum of probs) * tokens.

    Args:
        probs: (tokens, experts): the scores of `fused_compute_score_for_moe_aux_loss`.
        tokens_per_expert: (experts,).  total_num_tokens: tokens.

    Example:
        >>> fused_moe_aux_loss(torch.full((4, 2), 0.5), torch.tensor([2, 2]), 4, 2, 1, 0.25)
        tensor(0.2500)
    """
    with no_autocast(probs.device):
        total = (probs.float().sum(0) * tokens_per_expert.float()).sum()
        return (total * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))).to(probs.dtype)


def _scores(flat: Tensor, score_function: str, *, pre_softmax: bool) -> Tensor:
    known = {
        "softmax": lambda z: z.softmax(-1) if pre_softmax else z,
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda z: torch.nn.functional.softplus(z).sqrt(),
    }
    need_known("router", "score_function", score_function, known)
    scores: Tensor = known[score_function](flat.float())
    return scores


def _map(chosen: Tensor, logits: Tensor, form: object) -> Tensor:
    """The routing map in one of TransformerEngine's forms, by its name or number."""
    experts = logits.shape[-1]
    there = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
    if form in ("bytemap", 0):
        return there.view(logits.shape)
    if form not in ("bitmap_u8", 1):
        raise ValueError(f"router: {unknown_name('routing_map_format', str(form), ['bytemap', 'bitmap_u8'])}")
    bits = torch.nn.functional.pad(there, (0, -experts % 8)).view(len(chosen), -1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, device=chosen.device, dtype=torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(*logits.shape[:-1], -1)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Rows of all gates, then of all ups, become blocks of interleave_size rows in turn: gates, ups, gates, ...

    Raises:
        ValueError: the rows are no multiple of two blocks.

    Example:
        >>> interleave_glu_tensor(torch.arange(8), 2)
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    return _swap_blocks("interleave_glu_tensor", tensor, interleave_size, (2, -1))


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Undoes `interleave_glu_tensor`.

    Example:
        >>> deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _swap_blocks("deinterleave_glu_tensor", tensor, interleave_size, (-1, 2))


def _swap_blocks(where: str, tensor: Tensor, size: int, blocks: tuple[int, int]) -> Tensor:
    if size < 1 or tensor.shape[0] % (2 * size):
        raise ValueError(f"{where}: got {tensor.shape[0]} rows and blocks of {size}; needs a multiple of two blocks")
    return tensor.reshape(*blocks, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

"""Attention proper: softmax(q k.T * scale + mask) v, by a kernel of torch's, batch invariant, or on FP8 operands.

    scores (B, H, Sq, Sk) = q (B, H, Sq, D) @ k (B, G, Sk, D).T * scale + mask
    y      (B, H, Sq, Dv) = softmax(scores) @ v (B, G, Sk, Dv)           H / G query heads share a key and value head

torch chooses the kernel and falls back to plain formulas that hold all scores in memory. `DotProductAttention` asks
torch in the order that measurements gave, and notes torch's choice.

One rule of positions makes every mask. Query i stands at position i, or, aligned to the bottom right, at i + keys -
queries, so that the last query stands at the last key. A key is seen if its position less that of the query lies within
the window (-left ... right), if it lies within its sequence's length, and if the caller's mask allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.base.errors import need_known
from ottava.engine.autocast import LANES, ambient, in_tiles
from ottava.engine.functional import refuse_second_derivative
from ottava.engine.quantizer import AttentionQuantizers
from ottava.kernels.gate import applied, constant_in_graph, no_autocast
from ottava.kernels.native.gemm import multiply_bf16, supports_dense
from ottava.nn.fp8_attention import fp8_attention, move_histories, shared, softmax
from ottava.nn.layer import recomputing
from ottava.recipe import AttentionRecipe, Recipe, get_recipe
from ottava.weights.parameter import local


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
    need_known("attention", "mask", mask, MASKS)
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


LAYOUTS: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
)
"""Layout -> its dimensions of batch, heads, positions and entries. "thd" is missing: the layer cuts packed
sequences."""
BACKENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
)
"""In the order of choice on a GPU: on Hopper cuDNN is the fastest kernel that takes a call."""
_NAME_OF = MappingProxyType({int(backend.value): name for name, backend in BACKENDS.items()})
Sink = float | Literal["learned"] | None
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
FP8_EMULATION = "FP8 emulation"
"""The name of attention on FP8 operands in `last_backend`."""


def read_once(ends: Tensor) -> list[int]:
    """The numbers of a small tensor; the host waits for a device at the first call, and not in the other layers."""
    if torch.compiler.is_compiling():
        return ends.tolist()
    kept: tuple[int, list[int]] | None = getattr(ends, "_ottava_numbers", None)
    version = 0 if ends.is_inference() else ends._version
    if kept is None or kept[0] != version:
        # the tensor keeps its own numbers: who makes another one gets them anew
        kept = ends._ottava_numbers = version, ends.tolist()  # type: ignore[attr-defined]
    return kept[1]


class DotProductAttention(nn.Module):
    """Scaled dot-product attention with every usual mask, by a fused kernel that `last_backend` names.

    Args:
        mask: "no_mask", "causal" (the first query at the first key) or "causal_bottom_right" (the last at the last).
        window: (left, right) keys that a query sees before and after its own position; -1 or None: no limit.
        softmax_scale: multiplies q k.T; None: 1 / sqrt(head_dim).
        dropout: of softmax's probabilities, while training.
        sink: one more logit in each head's softmax, whose value is zero (gpt-oss): a number for all heads (0 is
            "off by one"), or "learned", a parameter `sink` (heads,) that begins at 0.
        heads: of the queries; a learned sink needs it.
        layout: of q, k, v and the result: "bshd" (B, S, H, D), "sbhd", "bhsd", or "thd": packed sequences (T, H, D).
        recipe: only its `attention` matters here: FP8 attention is off in every registered recipe.
        backend: "cudnn", "flash", "efficient" or "math": only that kernel may run. None: the best that takes a call.
    Raises:
        ValueError: unknown names, sizes that do not fit, or a pinned backend that does not take a call.
    Edge cases: rows that see no key are zeros. q has a multiple of the heads of k and v (grouped-query). "math" holds
        all scores in memory; `last_note` and the receipt give torch's reason to run it (dropout on a CPU, training a
        learned sink on a CPU, value heads of another size).

    Example:
        >>> attention = DotProductAttention(mask="causal")
        >>> q, k = torch.ones(2, 5, 8, 16), torch.ones(2, 5, 2, 16)
        >>> attention(q, k, k).shape, attention.last_backend
        (torch.Size([2, 5, 8, 16]), 'flash')
    """

    sink: Any

    def __init__(
        self,
        *,
        mask: str = "causal",
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        dropout: float = 0.0,
        sink: Sink = None,
        heads: int | None = None,
        layout: str = "bshd",
        backend: str | None = None,
        recipe: Recipe | str = "bf16",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        need_known("DotProductAttention", "layout", layout, (*LAYOUTS, "thd"))
        need_known("DotProductAttention", "backend", backend, (None, *BACKENDS))
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"DotProductAttention: dropout is {dropout}; needs 0 or more, and less than 1")
        if sink == "learned" and heads is None:
            raise ValueError("DotProductAttention: a learned sink has a logit for each head: give heads=")
        self.rule, self.mask, self.window = mask_rule(mask, window), mask, window
        self.softmax_scale, self.dropout = softmax_scale, dropout
        learned = torch.zeros(heads or 0, device=device, dtype=dtype)
        self.sink = nn.Parameter(learned) if sink == "learned" else sink
        self.layout, self.backend = layout, backend
        self.last_backend: str | None = None
        """The kernel of the last call; None before the first. "compiled": torch chooses when the compiled code runs."""
        self.last_note = ""
        """Why no fused kernel ran."""
        self.last_recipe: Recipe | None = None
        """Of the last forward in eager code."""
        self.keeps_max_logit = False
        """Whether each call sets `last_max_logit`, for which it multiplies q and k once more."""
        self.last_max_logit: Tensor | None = None
        """fp32 (H,): each head's largest score, scaled and masked, of the last call; -inf where none was seen."""
        self.last_shape: tuple[int, ...] = ()
        """B, H, G, Sq, Sk, D of the last call."""
        self.keys: Any = None
        """A `distributed.context.GatheredKeys` or `RingKeys` where ranks hold parts of each sequence."""
        self.adopt(get_recipe(recipe), "")

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model. The recipe matters only if it casts for attention."""
        self.recipe, self.name, self.resolved = recipe, name, recipe.for_layer(name)
        if not hasattr(self, "quantizers"):
            self.quantizers = AttentionQuantizers()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None = None,
        *,
        query_lengths: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        mask: str | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """q, k, v in the layer's layout -> the heads' results in the same, (..., H, Dv).

        Args:
            attention_mask: bool (True: visible, as in torch) or float (added to the scores, for example ALiBi); any
                shape that broadcasts to (B, H, Sq, Sk). It applies on top of the layer's mask.
            query_lengths, key_lengths: int (B,), for padding: no query sees rows past the lengths, and they come out
                as zeros.
            cu_seqlens, cu_seqlens_k: int (B + 1,), for "thd": the beginning of each packed sequence, and the end of the
                last; cu_seqlens_k for keys of other lengths. The host reads them. On a GPU one call of torch's flash
                kernel takes all sequences, if it knows the settings. Else each sequence gives the bits that it gives
                alone.
            mask: replaces the layer's mask in this call; a cache needs it.
            score_mod: changes scaled scores, as in torch's FlexAttention: (score, batch, head, query, key) -> score,
                elementwise; masks apply behind it. A GPU runs torch's compiled kernel, a CPU plain formulas.
        Raises:
            ValueError: score_mod with "thd", dropout, a sink, FP8, or keys on other ranks.
        """
        self.last_max_logit = None
        rule = self.rule if mask is None else mask_rule(mask, self.window)
        if score_mod is not None and (self.layout == "thd" or self.keys is not None):
            raise ValueError("DotProductAttention: score_mod needs whole sequences, in a layout of four dimensions")
        if self.layout == "thd":
            if cu_seqlens is None or attention_mask is not None or q.dim() != 3:
                raise ValueError(
                    f"DotProductAttention: layout 'thd' needs q (T, H, D) and cu_seqlens, and takes no attention_mask; "
                    f"got q {tuple(q.shape)}, cu_seqlens {cu_seqlens}"
                )
            return self._packed(q, k, v, rule, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
        order = LAYOUTS[self.layout]
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError(
                f"DotProductAttention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; layout "
                f"{self.layout!r} needs four dimensions each"
            )
        q, k, v = (t.permute(order) for t in (q, k, v))
        y = self._attend(q, k, v, rule, attention_mask, query_lengths, key_lengths, score_mod)
        return y.permute(tuple(order.index(d) for d in range(4)))

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, cu_seqlens: Tensor, of_keys: Tensor) -> Tensor:
        """(T, H, D): one call, or one for each sequence."""
        ends = [read_once(cu_seqlens), *[read_once(of_keys)] * 2]
        for name, tensor, cut in zip("qkv", (q, k, v), ends, strict=True):
            if len(cut) != len(ends[0]) or cut[0] != 0 or cut[-1] != tensor.shape[0] or sorted(cut) != cut:
                raise ValueError(
                    f"DotProductAttention: cu_seqlens {cut} do not cut {name} {tuple(tensor.shape)} into "
                    f"{len(ends[0]) - 1} sequences; they need to rise from 0 to {tensor.shape[0]}"
                )
        if self._refuse_varlen(q, k, v, rule, ends[0] == ends[1]) is None:
            return self._varlen(q, k, v, rule, (cu_seqlens, of_keys), ends)
        split = [t.split([b - a for a, b in pairwise(cut)]) for t, cut in zip((q, k, v), ends, strict=True)]
        results = []
        for one in zip(*split, strict=True):
            a, b, c = (t.transpose(0, 1)[None] for t in one)
            results.append(self._attend(a, b, c, rule)[0].transpose(0, 1))
        return torch.cat(results)

    def _refuse_varlen(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, same: bool) -> str | None:
        """Why torch's kernel for packed sequences does not take them; None if it does.

        same: whether keys are cut as queries are.
        """
        recipe, dims = self._recipe(), {q.shape[2], k.shape[2], v.shape[2]}
        asked = {
            "compiled code": torch.compiler.is_compiling(),
            "dropout": self.dropout and self.training,
            "a sink": self.sink is not None,
            "FP8": recipe.attention is not None,
            "batch invariance": recipe.fprop.batch_invariant,
            "the largest logit": self.keeps_max_logit,
            "keys on other ranks": self.keys is not None,
            f"the backend {self.backend!r}": self.backend not in (None, "flash"),
            "a mask from the top left for keys of other lengths": not (same or rule.bottom_right or rule == MaskRule()),
            f"heads of {sorted(dims)} entries": len(dims) > 1 or min(dims) % 8 or max(dims) > 256,
            f"{q.shape[1]} heads of q, {k.shape[1]} of k": (
                not k.shape[1] or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]
            ),
            "other dtypes than one of 16 bits": len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype.itemsize != 2,
        }
        if told := ", ".join(name for name, no in asked.items() if no):
            return f"varlen_attn: knows no {told}"
        if not q.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(q.device) < (8, 0):
            return f"varlen_attn: flash runs on NVIDIA's GPUs from sm_80 on; got {q.device.type}"
        return None

    def _varlen(
        self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, cuts: tuple[Tensor, Tensor], ends: list[list[int]]
    ) -> Tensor:
        """All packed sequences in one call. It has never run on a GPU."""
        from torch.nn.attention.varlen import varlen_attn

        most = [max((b - a for a, b in pairwise(cut)), default=0) for cut in ends[:2]]
        # torch 2.11 takes as many heads of k as of q
        k, v = shared(k, q), shared(v, q)
        window = tuple(-1 if limit is None else limit for limit in (rule.left, rule.right))
        scale = self.softmax_scale if self.softmax_scale is not None else q.shape[2] ** -0.5
        places = [cut.to(q.device, torch.int32) for cut in cuts]
        self._note(q.transpose(0, 1)[None], k.transpose(0, 1)[None], "flash", "all packed sequences in one call")
        y: Tensor = varlen_attn(q, k, v, *places, *most, scale=scale, window_size=window)  # type: ignore[arg-type,assignment]
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, *more: Any) -> Tensor:
        """(B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv) -> (B, H, Sq, Dv); more: as of `attend_here`."""
        (batch, heads, _, dim), (groups, keys) = q.shape, k.shape[1:3]
        if k.shape != (batch, groups, keys, dim) or v.shape[:3] != k.shape[:3] or groups == 0 or heads % groups:
            raise ValueError(
                f"DotProductAttention: as (B, H, S, D) got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
                "needs one B and D, k and v of one S, and heads of q that are a multiple of those of k and v"
            )
        if self.keys is not None:
            y: Tensor = self.keys.attend(self, q, k, v, rule, alone=all(one is None for one in more))
            return y
        return self.attend_here(q, k, v, rule, *more)

    def attend_here(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: MaskRule,
        given: Tensor | None = None,
        query_lengths: Tensor | None = None,
        key_lengths: Tensor | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """(B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv) -> (B, H, Sq, Dv), for keys that are all here."""
        queries, keys, dim = q.shape[2], k.shape[2], q.shape[3]
        scale = self.softmax_scale if self.softmax_scale is not None else dim**-0.5
        settings = ambient()
        if settings.batch_invariant and torch.compiler.is_compiling():
            from ottava.nn.compile import apart  # it imports Dynamo, which is loaded: it is tracing

            return apart(self.attend_here, q, k, v, rule, given, query_lengths, key_lengths, score_mod)  # type: ignore[no-any-return]
        recipe = self._recipe()
        fp8, invariant = recipe.attention, recipe.fprop.batch_invariant
        alone = given is None and key_lengths is None and self.sink is None and fp8 is None and not invariant
        alone = alone and score_mod is None and not self.keeps_max_logit
        mask, causal = None, True
        # a branch: in a graph for any length the comparison is a symbol, and torch takes none for `is_causal`
        if not (alone and rule.is_causal(queries, keys)):
            lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
            mask, causal = build_mask(rule, queries, keys, **lengths, given=given, device=q.device), False
        if mask is not None and mask.dtype not in (torch.bool, q.dtype):
            mask = mask.to(q.dtype)
        if self.keeps_max_logit:
            self._note_max_logit(q, k, mask, scale)
        if score_mod is not None:
            y = self._run_modified(q, k, v, mask, scale, score_mod, plain=fp8 is None and not invariant)
        elif invariant:
            asked = {"dropout": self.dropout and self.training, "a sink": self.sink is not None, "FP8": fp8 is not None}
            if what := [name for name, on in asked.items() if on]:
                raise ValueError(f"DotProductAttention: batch invariant attention knows no {' and no '.join(what)}")
            self._note(q, k, BACKEND, "bits of a query depend on its keys alone")
            y = invariant_attention(q, k, v, mask, scale)
        else:
            y = self._run(q, k, v, mask, causal, scale) if fp8 is None else self._run_fp8(q, k, v, mask, scale, fp8)
        if query_lengths is not None:
            y = y.masked_fill(torch.arange(queries, device=q.device)[:, None] >= query_lengths[:, None, None, None], 0)
        return y

    def _recipe(self) -> Recipe:
        """Of this call."""
        recipe = ambient().recipe_for(self.name, self.resolved)
        if recomputing() and self.last_recipe is not None:
            return self.last_recipe  # torch.utils.checkpoint repeats a forward outside of its autocast
        if not torch.compiler.is_compiling():
            self.last_recipe = recipe
        return recipe

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        if self.sink is not None:
            k, v, mask = _with_sink(q, k, v, mask, local(self.sink))
        p, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        with _order(self.backend, q):
            if torch.compiler.is_compiling():
                self._note_compiled()
            else:
                choice = self._choice(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)
                if choice == SDPBackend.MATH.value and grouped:  # some fused kernels want as many heads of k as of q
                    k, v = shared(k, q), shared(v, q)
                    grouped = False
                    choice = self._choice(q, k, v, mask, p, causal, scale=scale)
                name = _NAME_OF.get(choice, "another device's")
                self._note(q, k, name, _why_math(q, k, v, mask, p) if name == "math" else "")
            return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)

    def _run_fp8(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fp8: AttentionRecipe
    ) -> Tensor:
        if self.dropout and self.training:
            raise ValueError(
                "DotProductAttention: FP8 attention knows no dropout; needs dropout=0, or a recipe without it"
            )
        if mask is not None and mask.requires_grad:
            raise NotImplementedError(
                "FP8 attention: a mask gets no gradient here; run it under a recipe without attention"
            )
        if not torch.compiler.is_compiling():
            self._note(q, k, FP8_EMULATION, str(fp8))
        sink = local(self.sink)
        sink = q.new_full((q.shape[1],), sink) if isinstance(sink, float | int) else sink
        if fp8.predicted and self.training and not recomputing():
            move_histories(self.quantizers, ambient().group)
        return fp8_attention(q, k, v, mask, sink, scale, self.quantizers, fp8)

    def _run_modified(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, score_mod: ScoreMod, *, plain: bool
    ) -> Tensor:
        """Scores through a function of the caller; torch's kernel has no backward on a CPU."""
        if not plain or self.sink is not None or (self.dropout and self.training):
            raise ValueError("DotProductAttention: score_mod knows no dropout, no sink, and no recipe for attention")

        def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            score = score_mod(score, b, h, i, j)
            if mask is None:
                return score
            seen = mask.expand(*q.shape[:3], k.shape[2])[b, h, i, j]
            return torch.where(seen, score, -torch.inf) if seen.dtype == torch.bool else score + seen

        if q.is_cuda:  # never run: no machine of ours has a GPU
            from torch.nn.attention.flex_attention import flex_attention  # it imports Dynamo

            self._note(q, k, "flex", "")
            y: Tensor = torch.compile(flex_attention)(q, k, v, score_mod=modified, scale=scale, enable_gqa=True)
            return y
        self._note(q, k, "math", "scores through score_mod: all of them are held in memory")
        with no_autocast(q.device):
            scores = (q.float() @ shared(k, q).float().mT) * scale
            sizes = zip(scores.shape, ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True)
            scores = modified(scores, *(torch.arange(size, device=q.device).view(shape) for size, shape in sizes))
            return (softmax(scores, None, None)[0] @ shared(v, q).float()).to(q.dtype)

    @torch.no_grad()
    def _note_max_logit(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> None:
        """One head at a time."""
        found, sharers = [], q.shape[1] // k.shape[1]
        whole = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
        for head in range(q.shape[1]):
            scores = (q[:, head].float() @ k[:, head // sharers].float().mT) * scale
            if whole is not None:
                own = whole[:, head]
                scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
            found.append(scores.amax() if scores.numel() else scores.new_full((), -torch.inf))
        now = torch.stack(found)
        self.last_max_logit = now if self.last_max_logit is None else now.maximum(self.last_max_logit)

    def _choice(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, **more: Any) -> int:
        """The kernel that torch will run: torch asks the same function."""
        try:
            return torch._fused_sdp_choice(q, k, v, mask, p, causal, **more)
        except RuntimeError as error:
            raise ValueError(
                f"DotProductAttention: backend {self.backend!r} does not take this call on {q.device.type}: q "
                f"{tuple(q.shape)} {q.dtype}, k {tuple(k.shape)}, v {tuple(v.shape)} "
                f"({_why_math(q, k, v, mask, p)}). Leave backend=None for the best that does"
            ) from error

    def _note(self, q: Tensor, k: Tensor, backend: str, note: str) -> None:
        self.last_backend, self.last_note = backend, note
        self.last_shape = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:])

    @constant_in_graph  # runs while tracing
    def _note_compiled(self) -> None:
        self.last_backend, self.last_note, self.last_shape = "compiled", "chosen when the compiled code runs", ()

    def extra_repr(self) -> str:
        """Its settings."""
        sink = "learned" if isinstance(self.sink, Tensor) else self.sink
        shown = {"mask": self.mask, "window": self.window, "softmax_scale": self.softmax_scale, "sink": sink}
        shown |= {"dropout": self.dropout or None, "layout": self.layout, "backend": self.backend}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """One more key, of zeros, with a value of zeros: the mask alone makes its logit, for the denominator."""
    k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    shape = (1, 1, q.shape[2], k.shape[2] - 1)
    if mask is None:
        added = q.new_zeros(shape)
    elif mask.dtype == torch.bool:
        added = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    else:
        added = mask
    column = sink.to(q.dtype)[:, None, None] if isinstance(sink, Tensor) else q.new_full((1, 1, 1), sink)
    lead = torch.broadcast_shapes(added.shape[:-2], column.shape[:-2])
    added = added.expand(*lead, *shape[2:])
    return k, v, torch.cat((added, column.expand(*lead, q.shape[2], 1)), -1)


def _order(backend: str | None, q: Tensor) -> AbstractContextManager[Any]:
    """Which kernels torch may take, best first."""
    if backend is not None:
        return sdpa_kernel(BACKENDS[backend])
    return sdpa_kernel(list(BACKENDS.values()), set_priority=True) if q.device.type == "cuda" else nullcontext()


def _why_math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> str:
    """The known reasons why no fused kernel runs."""
    needs_gradient = mask is not None and mask.requires_grad
    reasons = (
        (p > 0, "dropout"),
        (needs_gradient, "a mask or a sink with a gradient"),
        (v.shape[-1] != q.shape[-1], f"values of {v.shape[-1]} entries for keys of {q.shape[-1]}"),
        (q.numel() == 0 or k.numel() == 0, "an empty tensor"),
        (q.dtype == torch.float32 and q.device.type == "cuda", "float32"),
    )
    found = ", ".join(reason for here, reason in reasons if here)
    return f"no fused kernel takes {found or 'this call'}: all scores are held in memory"


# --- batch invariant -------------------------------------------------------------------------------------------------

BACKEND = "batch_invariant"
"""The name of this attention in `last_backend`."""
_WIDE = 2 * LANES


def invariant_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k.T scale + mask) v with bits that depend on a query, its keys and their values alone.

    It multiplies by the batch invariant GEMM and sums softmax's denominator with it: neither other queries, nor
    padding, nor whether keys came from a cache change a bit.

    Args:
        q: (B, H, Sq, D); k, v: (B, G, Sk, D), (B, G, Sk, Dv), H a multiple of G; bf16, on a CPU.
        mask: bool (True: seen) or float (added), broadcast to (B, H, Sq, Sk); None: all keys are seen.
    Returns:
        (B, H, Sq, Dv).
    Raises:
        ValueError: another dtype or device, or no compiler.

    Example:
        >>> q, k = torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 1, 7, 16).bfloat16()
        >>> whole = invariant_attention(q, k, k, None, 0.25)
        >>> torch.equal(invariant_attention(q[:, :, 3:], k, k, None, 0.25), whole[:, :, 3:])
        True
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return q.new_zeros(*q.shape[:3], v.shape[3])
    for one in (k, v):
        if reason := supports_dense(q[0, 0], one[0, 0]):
            raise ValueError(f"DotProductAttention: batch_invariant was asked for, but {reason}")
    y: Tensor = applied(_Attention, q, k, v, mask, scale)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        y = q.new_empty(*q.shape[:3], v.shape[3])
        for b, g, heads, seen in _groups(q, k, mask):
            p, total = _exponents(_rows(q[b, heads]), k[b, g], seen, scale)
            y[b, heads] = (multiply_bf16(p, v[b, g].t()) / total).to(q.dtype).view_as(y[b, heads])
        ctx.save_for_backward(q, k, v, y, mask)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("batch invariant attention", "run that forward without batch_invariant")
        (dy,), (q, k, v, y, mask) = grads, ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        for b, g, heads, seen in _groups(q, k, mask):
            rows, d_rows = _rows(q[b, heads]), _rows(dy[b, heads])
            codes, total = _exponents(rows, k[b, g], seen, ctx.scale)
            p = codes.float() / total
            aligned = (d_rows.float() * _rows(y[b, heads]).float()).sum(-1, keepdim=True)
            ds = (p * (multiply_bf16(d_rows, v[b, g]) - aligned) * ctx.scale).to(q.dtype)
            dq[b, heads] = multiply_bf16(ds, k[b, g].t()).to(q.dtype).view_as(dq[b, heads])
            dk[b, g] = multiply_bf16(ds.t(), rows.t()).to(k.dtype)
            dv[b, g] = multiply_bf16(p.to(q.dtype).t(), d_rows.t()).to(v.dtype)
        return dq, dk, dv, None, None


def _groups(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[int, int, slice, Tensor | None]]:
    """(sequence, key head, the query heads that share it, their mask (rows, Sk)), one after the other."""
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    shared = heads // groups
    whole = None if mask is None else mask.expand(batch, heads, queries, keys)
    for b in range(batch):
        for g in range(groups):
            own = slice(g * shared, (g + 1) * shared)
            yield b, g, own, None if whole is None else whole[b, own].reshape(-1, keys)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _exponents(rows: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(exp(scores - the largest) (rows, Sk) in bf16, their sum (rows, 1) in fp32, 1 where no key is seen).

    Keys behind the last one that a row sees add zeros at the end of each sum, which change no bit.
    """
    scores = multiply_bf16(rows, keys) * scale
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    top = scores.amax(-1, keepdim=True)
    scores = F.pad(scores - torch.where(top == -torch.inf, 0.0, top), (0, -keys.shape[0] % _WIDE), value=-torch.inf)
    p = in_tiles(torch.exp, scores.view(-1, _WIDE)).view_as(scores).to(rows.dtype)[:, : keys.shape[0]]
    total = multiply_bf16(p, p.new_ones(1, keys.shape[0]))
    return p, torch.where(total == 0, 1.0, total)

"""Attention proper: softmax(q k.T * scale + mask) v, by torch's fused kernels; it reports which kernel ran.

    scores (B, H, Sq, Sk) = q (B, H, Sq, D) @ k (B, G, Sk, D).T * scale + mask
    y      (B, H, Sq, Dv) = softmax(scores) @ v (B, G, Sk, Dv)           H / G query heads share a key and value head

torch chooses the kernel and falls back to plain formulas that hold all scores in memory. This module asks torch in the
order that measurements gave, and notes torch's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.base.errors import unknown_name
from ottava.engine.autocast import ambient
from ottava.engine.quantizer import AttentionQuantizers
from ottava.kernels.custom_operator import constant_in_graph
from ottava.nn.fp8_attention import fp8_attention
from ottava.nn.invariant import BACKEND, invariant_attention
from ottava.nn.masks import MaskRule, build_mask, mask_rule
from ottava.nn.pieces import local
from ottava.recipe import AttentionRecipe, Recipe, get_recipe

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
FP8_EMULATION = "FP8 emulation"
"""The name of attention on FP8 operands in `last_backend`."""


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
        if layout not in (*LAYOUTS, "thd"):
            raise ValueError(f"DotProductAttention: {unknown_name('layout', layout, (*LAYOUTS, 'thd'))}")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"DotProductAttention: {unknown_name('backend', backend, BACKENDS)}")
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
        self.last_shape: tuple[int, ...] = ()
        """B, H, G, Sq, Sk, D of the last call."""
        self.keys: Any = None
        """A `distributed.GatheredKeys` where ranks hold parts of each sequence."""
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
    ) -> Tensor:
        """q, k, v in the layer's layout -> the heads' results in the same, (..., H, Dv).

        Args:
            attention_mask: bool (True: visible, as in torch) or float (added to the scores, for example ALiBi); any
                shape that broadcasts to (B, H, Sq, Sk). It applies on top of the layer's mask.
            query_lengths, key_lengths: int (B,), for padding: no query sees rows past the lengths, and they come out
                as zeros.
            cu_seqlens, cu_seqlens_k: int (B + 1,), for "thd": the beginning of each packed sequence, and the end of the
                last; cu_seqlens_k for keys of other lengths. Each sequence gives the bits that it gives alone. The
                host reads them.
            mask: replaces the layer's mask in this call; a cache needs it.
        """
        rule = self.rule if mask is None else mask_rule(mask, self.window)
        if self.layout == "thd":
            return self._packed(q, k, v, rule, attention_mask, cu_seqlens, cu_seqlens_k)
        order = LAYOUTS[self.layout]
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError(
                f"DotProductAttention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; layout "
                f"{self.layout!r} needs four dimensions each"
            )
        q, k, v = (t.permute(order) for t in (q, k, v))
        y = self._attend(q, k, v, rule, attention_mask, query_lengths, key_lengths)
        return y.permute(tuple(order.index(d) for d in range(4)))

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: MaskRule,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> Tensor:
        """(T, H, D): a call for each sequence."""
        if cu_seqlens is None or attention_mask is not None or q.dim() != 3:
            raise ValueError(
                f"DotProductAttention: layout 'thd' needs q (T, H, D) and cu_seqlens, and takes no attention_mask; got "
                f"q {tuple(q.shape)}, cu_seqlens {cu_seqlens}"
            )
        ends = [(cu_seqlens if cu is None else cu).tolist() for cu in (None, cu_seqlens_k, cu_seqlens_k)]
        for name, tensor, cut in zip("qkv", (q, k, v), ends, strict=True):
            if len(cut) != len(ends[0]) or cut[0] != 0 or cut[-1] != tensor.shape[0] or sorted(cut) != cut:
                raise ValueError(
                    f"DotProductAttention: cu_seqlens {cut} do not cut {name} {tuple(tensor.shape)} into "
                    f"{len(ends[0]) - 1} sequences; they need to rise from 0 to {tensor.shape[0]}"
                )
        split = [t.split([b - a for a, b in pairwise(cut)]) for t, cut in zip((q, k, v), ends, strict=True)]
        results = []
        for one in zip(*split, strict=True):
            a, b, c = (t.transpose(0, 1)[None] for t in one)
            results.append(self._attend(a, b, c, rule, None, None, None)[0].transpose(0, 1))
        return torch.cat(results)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: MaskRule,
        given: Tensor | None,
        query_lengths: Tensor | None,
        key_lengths: Tensor | None,
    ) -> Tensor:
        """(B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv) -> (B, H, Sq, Dv)."""
        (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
        if k.shape != (batch, groups, keys, dim) or v.shape[:3] != k.shape[:3] or groups == 0 or heads % groups:
            raise ValueError(
                f"DotProductAttention: as (B, H, S, D) got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
                "needs one B and D, k and v of one S, and heads of q that are a multiple of those of k and v"
            )
        if self.keys is not None:
            k, v, rule = self.keys.gather(k, v, rule, queries, alone=given is query_lengths is key_lengths is None)
            keys = k.shape[2]
        scale = self.softmax_scale if self.softmax_scale is not None else dim**-0.5
        settings = ambient()
        if settings.batch_invariant and torch.compiler.is_compiling():
            from ottava.nn.compile import apart  # it imports Dynamo, which is loaded: it is tracing

            return apart(self._attend, q, k, v, rule, given, query_lengths, key_lengths)  # type: ignore[no-any-return]
        recipe = settings.recipe_for(self.name, self.resolved)
        fp8, invariant = recipe.attention, recipe.fprop.batch_invariant
        causal = rule.is_causal(queries, keys) and given is None and key_lengths is None and self.sink is None
        causal = causal and fp8 is None and not invariant  # else the mask is built
        mask = None
        if not causal:
            lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
            mask = build_mask(rule, queries, keys, **lengths, given=given, device=q.device)
        if mask is not None and mask.dtype not in (torch.bool, q.dtype):
            mask = mask.to(q.dtype)
        if invariant:
            y = self._run_invariant(q, k, v, mask, scale, fp8)
        else:
            y = self._run(q, k, v, mask, causal, scale) if fp8 is None else self._run_fp8(q, k, v, mask, scale, fp8)
        if query_lengths is not None:
            y = y.masked_fill(torch.arange(queries, device=q.device)[:, None] >= query_lengths[:, None, None, None], 0)
        return y

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        if self.sink is not None:
            k, v, mask = _with_sink(q, k, v, mask, local(self.sink))
        p, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        with _order(self.backend, q):
            if torch.compiler.is_compiling():
                self._note_compiled()
            else:
                choice = self._choice(q, k, v, mask, p, causal, scale, grouped)
                if choice == SDPBackend.MATH.value and grouped:  # some fused kernels want as many heads of k as of q
                    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
                    grouped = False
                    choice = self._choice(q, k, v, mask, p, causal, scale, grouped)
                self.last_shape = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:])
                self.last_backend = _NAME_OF.get(choice, "another device's")
                self.last_note = _why_math(q, k, v, mask, p) if self.last_backend == "math" else ""
            return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)

    def _run_fp8(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fp8: AttentionRecipe
    ) -> Tensor:
        if self.dropout and self.training:
            raise ValueError(
                "DotProductAttention: FP8 attention knows no dropout; needs dropout=0, or a recipe without it"
            )
        if not torch.compiler.is_compiling():
            self.last_shape = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:])
            self.last_backend, self.last_note = FP8_EMULATION, str(fp8)
        sink = local(self.sink)
        sink = q.new_full((q.shape[1],), sink) if isinstance(sink, float | int) else sink
        return fp8_attention(q, k, v, mask, sink, scale, self.quantizers, fp8)

    def _run_invariant(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fp8: AttentionRecipe | None
    ) -> Tensor:
        refused = {"dropout": self.dropout and self.training, "a sink": self.sink is not None, "FP8": fp8 is not None}
        if what := [name for name, asked in refused.items() if asked]:
            raise ValueError(f"DotProductAttention: batch invariant attention knows no {' and no '.join(what)}")
        self.last_shape = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:])
        self.last_backend, self.last_note = BACKEND, "bits of a query depend on its keys alone"
        return invariant_attention(q, k, v, mask, scale)

    def _choice(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        p: float,
        causal: bool,
        scale: float,
        grouped: bool,
    ) -> int:
        """The kernel that torch will run: torch asks the same function."""
        try:
            return torch._fused_sdp_choice(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)
        except RuntimeError as error:
            raise ValueError(
                f"DotProductAttention: backend {self.backend!r} does not take this call on {q.device.type}: q "
                f"{tuple(q.shape)} {q.dtype}, k {tuple(k.shape)}, v {tuple(v.shape)} "
                f"({_why_math(q, k, v, mask, p)}). Leave backend=None for the best that does"
            ) from error

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

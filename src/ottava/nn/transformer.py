"""One block of a transformer, encoder or decoder, in the shapes that models have.

    pre        x = x + attention(norm(x));  x = x + mlp(norm(x))                 GPT-2, Llama
    post       x = norm(x + attention(x));  x = norm(x + mlp(x))                 BERT, the first transformer
    parallel   x = x + attention(norm(x)) + mlp(norm'(x))                        GPT-NeoX; with one norm for both GPT-J

A decoder has cross attention between the two. Dropout and stochastic depth act on the branch before the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.base.errors import need_known
from ottava.nn.activations import Activation
from ottava.nn.attention import Sink
from ottava.nn.mlp import NormMLP, Save
from ottava.nn.multihead import MultiheadAttention
from ottava.nn.norms import NormName, make_norm
from ottava.recipe import Recipe

Arrangement = Literal["pre", "post", "parallel", "parallel_one_norm"]
ARRANGEMENTS = ("pre", "post", "parallel", "parallel_one_norm")


class TransformerLayer(nn.Module):
    """Attention and an MLP, each added to the stream.

    Args:
        hidden, ffn_hidden, heads: H, F and query heads.
        arrangement: "pre", "post", "parallel" or "parallel_one_norm", see the module.
        activation, save: of the MLP, see `NormMLP`.
        norm, eps, zero_centered_gamma: of every norm.
        kv_heads, head_dim, qk_norm, qk_norm_after_rotary, attention_dropout, sink, layout, backend: of self attention.
        mask, window, softmax_scale: as of `MultiheadAttention`; mask="no_mask" makes an encoder.
        bias: of the MLP's linears, and of attention unless attention_bias and out_bias are given.
        cross: cross attention to a `memory` of width memory_size, in the same heads.
        dropout: of each branch before the sum, while training.
        drop_path: the chance to leave out a sample's branch while training (stochastic depth); a branch that stays is
            divided by the chance to stay.
        recipe, device, dtype: as `Linear`.
    Shapes: (B, S, H), (S, B, H) or packed (T, H), as the layout says -> the same.
    Raises:
        ValueError: unknown names, sizes or chances that do not fit, drop_path for packed sequences, cross attention
            beside a parallel MLP.

    Example:
        >>> import ottava
        >>> llama = ottava.nn.TransformerLayer(
        ...     64, 96, 8, kv_heads=2, norm="rmsnorm", activation="swiglu", bias=False, dtype=torch.bfloat16
        ... )
        >>> table = ottava.nn.RotaryEmbedding(8)(torch.arange(5))
        >>> llama(torch.ones(2, 5, 64, dtype=torch.bfloat16), rotary=table).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        heads: int,
        *,
        arrangement: Arrangement = "pre",
        activation: Activation | str = "gelu",
        save: Save = "bf16",
        norm: NormName = "layernorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: NormName | None = None,
        qk_norm_after_rotary: bool = False,
        mask: str = "causal",
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        sink: Sink = None,
        layout: str = "bshd",
        backend: str | None = None,
        bias: bool = True,
        attention_bias: bool | None = None,
        out_bias: bool | None = None,
        cross: bool = False,
        memory_size: int | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._check(arrangement, dropout, drop_path, layout, cross)
        norms: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma}
        norms |= {"device": device, "dtype": dtype}
        inside = norms | {"norm": norm if arrangement in ("pre", "parallel") else None, "recipe": recipe}
        attention = partial(
            MultiheadAttention,
            hidden,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qk_norm_after_rotary=qk_norm_after_rotary,
            softmax_scale=softmax_scale,
            dropout=attention_dropout,
            layout=layout,
            backend=backend,
            bias=bias if attention_bias is None else attention_bias,
            out_bias=out_bias,
            **inside,
        )
        self.attention = attention(mask=mask, window=window, sink=sink)
        self.cross = attention(cross=True, memory_size=memory_size) if cross else None
        self.mlp = NormMLP(hidden, ffn_hidden, activation=activation, save=save, bias=bias, **inside)
        self.norms = nn.ModuleList(
            make_norm(norm, hidden, **norms)
            for _ in range({"post": 2 + cross, "parallel_one_norm": 1}.get(arrangement, 0))
        )
        self.arrangement, self.dropout, self.drop_path = arrangement, dropout, drop_path
        self.batch_dim = 1 if layout == "sbhd" else 0

    @staticmethod
    def _check(arrangement: str, dropout: float, drop_path: float, layout: str, cross: bool) -> None:
        need_known("TransformerLayer", "arrangement", arrangement, ARRANGEMENTS)
        if not (0 <= dropout < 1 and 0 <= drop_path <= 1):
            raise ValueError(
                f"TransformerLayer: dropout is {dropout}, drop_path {drop_path}; needs 0 to 1 each, dropout below 1"
            )
        if drop_path and layout == "thd":
            raise ValueError("TransformerLayer: drop_path leaves out samples, and packed sequences ('thd') have none")
        if cross and arrangement.startswith("parallel"):
            raise ValueError(
                "TransformerLayer: cross attention follows self attention; needs arrangement 'pre' or 'post'"
            )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        memory_cu_seqlens: Tensor | None = None,
        **attention: Any,
    ) -> Tensor:
        """x -> x after this layer.

        Args:
            memory: the input of cross attention; its mask, lengths (B,), or, packed, the limits of its sequences.
            attention_mask, and attention (rotary, cache, query_lengths, key_lengths, cu_seqlens): of self attention,
                see `MultiheadAttention.forward`.
        """
        if (memory is None) != (self.cross is None):
            raise ValueError(
                f"TransformerLayer: got {'no' if memory is None else 'a'} memory; the layer was made with "
                f"cross={self.cross is not None}"
            )
        if self.arrangement.startswith("parallel"):
            rows = self.norms[0](x) if self.norms else x
            beside = self._dropped(self.attention(rows, None, attention_mask, **attention))
            return self._dropped(self.mlp(rows)) + beside + x
        x = self._added(0, x, self.attention(x, None, attention_mask, **attention))
        if self.cross is not None:
            read = self.cross(
                x,
                memory,
                memory_mask,
                key_lengths=memory_lengths,
                query_lengths=attention.get("query_lengths"),
                cu_seqlens=attention.get("cu_seqlens"),
                cu_seqlens_k=memory_cu_seqlens,
            )
            x = self._added(1, x, read)
        return self._added(-1, x, self.mlp(x))

    def _added(self, norm: int, x: Tensor, branch: Tensor) -> Tensor:
        x = x + self._dropped(branch)
        return self.norms[norm](x) if self.norms else x

    def _dropped(self, branch: Tensor) -> Tensor:
        branch = F.dropout(branch, self.dropout, self.training) if self.dropout else branch
        if not (self.drop_path and self.training):
            return branch
        shape = [branch.shape[d] if d == self.batch_dim else 1 for d in range(branch.dim())]
        stays = torch.rand(shape, dtype=torch.float32, device=branch.device) >= self.drop_path
        # a chance of 1 divides by nothing: the gradient of what is left out would be 0 * infinity
        return torch.where(stays, branch / ((1 - self.drop_path) or 1.0), 0.0)

    def extra_repr(self) -> str:
        """Its arrangement."""
        return f"arrangement={self.arrangement}, dropout={self.dropout}, drop_path={self.drop_path}"

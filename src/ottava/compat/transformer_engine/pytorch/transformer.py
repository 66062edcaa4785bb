"""TransformerEngine's TransformerLayer on ottava's, with its arguments and names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava import nn as ours
from ottava.base.errors import need_known
from ottava.compat.transformer_engine.pytorch.attention import (
    ContextParallel,
    Window,
    attention_arguments,
    attention_keys,
    mask_for,
    with_heads,
)
from ottava.compat.transformer_engine.pytorch.megatron import Sharded, extras_of, shards_for
from ottava.compat.transformer_engine.pytorch.module import activation_for, mlp_keys, norm_heads
from ottava.compat.transformer_engine.pytorch.state import Init, Parts
from ottava.nn.layer import autocast_input
from ottava.nn.transformer import Arrangement


class TransformerLayer(Sharded, ContextParallel, ours.TransformerLayer):
    """`ottava.nn.TransformerLayer` with TransformerEngine's arguments and names of parameters.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: sizes.
        layernorm_epsilon, normalization, zero_centered_gamma: settings of every norm.
        hidden_dropout, attention_dropout, drop_path_rate: probabilities, in training only.
        layer_type: "encoder", or "decoder" with cross attention.
        self_attn_mask_type, enc_dec_attn_mask_type, window_size, softmax_type: as in `DotProductAttention`.
        parallel_attention_mlp: attention and MLP both read the stream, each through its own norm.
        output_layernorm and apply_residual_connection_post_layernorm, both: norms behind the sums (BERT).
        activation, activation_params: as in `LayerNormMLP`.  attn_input_format: "sbhd", "bshd" or "thd".
        layer_number, tp_group, tp_size, sequence_parallel, set_parallel_mode, others: as in `MultiheadAttention`.
    Raises:
        NotImplementedError: ottava cannot honour an argument.  ValueError: a name is unknown.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.TransformerLayer(64, 256, 4, hidden_dropout=0.0, attention_dropout=0.0)
        >>> with te.autocast():
        ...     y = layer(torch.ones(5, 2, 64, device=layer.attention.out.weight.device))
        >>> y.shape
        torch.Size([5, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window = None,
        enc_dec_attn_mask_type: str = "no_mask",
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layer_number: int | None = None,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        extras = extras_of(where := "TransformerLayer", locals())
        need_known(where, "layer_type", layer_type, ("encoder", "decoder"))
        arranged = _arrangement(parallel_attention_mlp, output_layernorm, apply_residual_connection_post_layernorm)
        shards = shards_for(where, tp_group, tp_size, sequence_parallel, split=set_parallel_mode)
        super().__init__(
            hidden_size,
            shards.of("ffn_hidden_size", ffn_hidden_size),
            **with_heads(where, extras.given, shards),
            arrangement=arranged,
            activation=activation_for(where, activation, activation_params),
            mask=mask_for(where, self_attn_mask_type)[0],
            attention_dropout=attention_dropout,
            layout=attn_input_format,
            cross=layer_type == "decoder",
            dropout=hidden_dropout,
            drop_path=drop_path_rate,
        )
        norm_heads(where, (self.attention, self.cross), extras.given)
        self.finish(extras, shards, *self._their_names(fuse_qkv_params, qkv_weight_interleaved))

    def _their_names(
        self, fused: bool, interleaved: bool
    ) -> tuple[dict[str, Parts], dict[str, tuple[str, ...]], dict[str, list[int]]]:
        keys, states, orders = attention_keys(self.attention, "attention.", "self_attention.", fused, interleaved)
        if self.cross is not None:
            more = attention_keys(self.cross, "cross.", "inter_attention.", fused, interleaved)
            keys, states, orders = keys | more[0], states | more[1], orders | more[2]
        keys |= mlp_keys("mlp.", "layernorm_mlp.")
        if self.arrangement == "post":
            for part in ("weight", "bias"):
                del keys[f"mlp.fc1.norm.{part}"]
                keys |= {f"norms.0.{part}": f"layernorm_mlp.layer_norm_{part}", f"norms.1.{part}": f"layernorm.{part}"}
        return keys, states | {"layernorm_mlp": ("mlp.fc1", "mlp.fc2")}, orders

    def forward(  # type: ignore[override]  # TransformerEngine's signature
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        *,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        cu_seqlens_kv: Tensor | None = None,
        **call: Any,
    ) -> Tensor:
        """hidden_states -> the stream after this layer.

        Args:
            cu_seqlens_kv: ends of the packed sequences of the keys; for a decoder, those of encoder_output.
            call: the other keywords of `attention_arguments`.
        """
        hidden_states = autocast_input(hidden_states)
        self.begins(call.get("is_first_microbatch"))
        where, ends = "TransformerLayer", cu_seqlens_kv if self.cross is None else None
        options = attention_arguments(
            where, self.attention, hidden_states, self_attn_mask_type or self.self_attn_mask_type, attention_mask,
            rotary_interleaved=self.rotary_pos_interleaved, layer_number=self.layer_number, cu_seqlens_kv=ends, **call,
        )  # fmt: skip
        if self.cross is not None:
            kind = enc_dec_attn_mask_type or self.enc_dec_attn_mask_type
            cross = attention_arguments(where, self.cross, hidden_states, kind, enc_dec_attn_mask, encoder_output)
            options["memory_mask"] = cross.get("attention_mask")
            if self.attention.attention.layout == "thd":
                options["memory_cu_seqlens"] = cu_seqlens_kv
        return super().forward(hidden_states, encoder_output, **options)


def _arrangement(parallel: bool, output_layernorm: bool, post: bool) -> Arrangement:
    if output_layernorm != post:
        raise NotImplementedError(
            f"TransformerLayer: output_layernorm={output_layernorm} with "
            f"apply_residual_connection_post_layernorm={post} is not in ottava; give both (norms behind the sums, as "
            "in BERT) or neither"
        )
    if parallel and post:
        raise ValueError(
            "TransformerLayer: parallel_attention_mlp goes with norms in front; leave output_layernorm out"
        )
    return "parallel" if parallel else "post" if post else "pre"

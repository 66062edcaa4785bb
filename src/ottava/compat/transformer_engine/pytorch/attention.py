"""TransformerEngine's attention: its arguments, masks and layouts, on ottava's.

Its boolean masks say what is left out (True: not seen), torch's and ottava's what is seen; heads of a result are flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava import nn as ours
from ottava.compat.transformer_engine.pytorch.module import Init, device_for, norm_name, start
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.compat.transformer_engine.pytorch.state import Parts, TEState
from ottava.errors import unknown_name
from ottava.nn.attention import Sink
from ottava.nn.rope import RotaryTable, packed_positions
from ottava.quantized_layer import quantized_layers

Window = tuple[int | None, int | None] | None

MASKS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "no_mask": ("no_mask", False),
        "causal": ("causal", False),
        "causal_bottom_right": ("causal_bottom_right", False),
        "padding": ("no_mask", True),
        "padding_causal": ("causal", True),
        "causal_padding": ("causal", True),
        "padding_causal_bottom_right": ("causal_bottom_right", True),
        "arbitrary": ("no_mask", True),
    }
)
"""TransformerEngine's mask type -> ottava's mask, and whether attention_mask (or cu_seqlens) counts."""
SINKS: Mapping[str, Sink] = MappingProxyType({"vanilla": None, "off-by-one": 0.0, "learnable": "learned"})
"""softmax_type -> ottava's sink."""


def mask_for(where: str, mask_type: str) -> tuple[str, bool]:
    """The entry of MASKS; "padding,causal" is "padding_causal".

    Raises:
        ValueError: unknown type.
    """
    name = mask_type.replace(",", "_")
    if name not in MASKS:
        raise ValueError(f"{where}: {unknown_name('attn_mask_type', mask_type, MASKS)}")
    return MASKS[name]


def sink_for(where: str, softmax_type: str) -> Sink:
    """The entry of SINKS.

    Raises:
        ValueError: unknown type.
    """
    if softmax_type not in SINKS:
        raise ValueError(f"{where}: {unknown_name('softmax_type', softmax_type, SINKS)}")
    return SINKS[softmax_type]


def seen(attention_mask: Any, bias_type: str, bias: Tensor | None) -> Tensor | None:
    """What ottava's attention takes: True where TransformerEngine's mask is False, or the bias with the mask in it.

    Args:
        attention_mask: bool. Cross attention may get a pair; the mask of the keys is used.
        bias_type, bias: core_attention_bias_type and core_attention_bias.
    Raises:
        NotImplementedError: another bias than "no_bias" and "post_scale_bias".
    """
    if bias_type not in ("no_bias", "post_scale_bias"):
        raise NotImplementedError(
            f"attention: core_attention_bias_type={bias_type!r} is not in ottava; compute the bias and give it as "
            "'post_scale_bias'"
        )
    mask = attention_mask[-1] if isinstance(attention_mask, tuple | list) else attention_mask
    allowed = None if mask is None else ~mask.bool()
    if bias_type == "no_bias" or bias is None:
        return allowed
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


class DotProductAttention(nn.Module):
    """`ottava.nn.DotProductAttention` with TransformerEngine's arguments.

    Args:
        num_attention_heads, kv_channels, num_gqa_groups: heads, entries of a head, heads of keys and values.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: a key of MASKS.  window_size: (left, right).  softmax_type: a key of SINKS.
        others: TransformerEngine's other arguments, taken where they change nothing.
    Shapes: q, k, v in the format -> the heads' results, flat: (S, B, H * D), (B, S, H * D) or (T, H * D).
    Raises:
        NotImplementedError: an argument that ottava cannot honour.  ValueError: an unknown name.

    Example:
        >>> q = torch.ones(5, 2, 4, 8)
        >>> DotProductAttention(4, 8)(q, q, q).shape
        torch.Size([5, 2, 32])
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window = None,
        *,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        **others: Any,
    ) -> None:
        super().__init__()
        refuse("DotProductAttention", others, ("softmax_scale", "softmax_type"))
        self.attn_mask_type = attn_mask_type
        self.core = ours.DotProductAttention(
            mask=mask_for("DotProductAttention", attn_mask_type)[0],
            window=window_size,
            softmax_scale=softmax_scale,
            dropout=attention_dropout,
            sink=sink_for("DotProductAttention", softmax_type),
            heads=num_attention_heads,
            layout=qkv_format,
        )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        *,
        attn_mask_type: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        checkpoint_core_attention: bool = False,
        **others: Any,
    ) -> Tensor:
        """q, k and v -> the heads' results; a mask type of the call goes before that of the layer."""
        refuse("DotProductAttention", others)
        mask, counts = mask_for("DotProductAttention", attn_mask_type or self.attn_mask_type)
        given = seen(attention_mask if counts else None, core_attention_bias_type, core_attention_bias)
        packed = self.core.layout == "thd"
        lengths: dict[str, Any] = {}
        if packed:
            lengths = {"cu_seqlens": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_kv}
        elif counts and cu_seqlens_q is not None:
            keys = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
            lengths = {"query_lengths": cu_seqlens_q.diff(), "key_lengths": keys.diff()}
        y = self.core(query_layer, key_layer, value_layer, None if packed else given, mask=mask, **lengths)
        return y.flatten(-2)  # type: ignore[no-any-return]


class RotaryPositionEmbedding(nn.Module):
    """Angles of positions, fp32 (positions, 1, 1, dim), as TransformerEngine's modules take them.

    Example:
        >>> RotaryPositionEmbedding(64)(128).shape
        torch.Size([128, 1, 1, 64])
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10_000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.interleaved, self.rotary_base = interleaved, rotary_base
        self.factor, self.pretrained = seq_len_interpolation_factor, pretrained_max_position_embeddings

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of the positions offset ... offset + max_seq_len - 1."""
        positions = torch.arange(max_seq_len, device=device_for(None), dtype=torch.float32) + offset
        if self.factor is not None and self.pretrained is not None:
            # beyond that length the positions are squeezed into it
            longer = max_seq_len > self.pretrained * self.factor
            positions = positions * (self.pretrained / max_seq_len if longer else 1 / self.factor)
        powers = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32) / self.dim
        angles = positions[:, None] * (1.0 / self.rotary_base**powers)
        pairs = torch.stack((angles, angles), -1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]


def rotary_table(
    angles: Any, interleaved: bool, layout: str, x: Tensor, cu_seqlens: Tensor | None = None
) -> RotaryTable | None:
    """TransformerEngine's angles, of as many positions as x has or more, as ottava's table.

    Args:
        x: in the layout; packed sequences ("thd") each begin at position 0, where cu_seqlens says.
    Raises:
        NotImplementedError: a pair of angles, one for queries and one for keys.
        ValueError: angles of too few positions.
    """
    if angles is None:
        return None
    if isinstance(angles, tuple | list):
        raise NotImplementedError("rotary_pos_emb: different angles for queries and keys are not in ottava")
    sign = torch.ones(angles.shape[-1], device=angles.device)
    sign[:: 2 if interleaved else 1][: angles.shape[-1] // 2] = -1.0
    length = x.shape[1 if layout == "bshd" else 0]
    if layout == "thd" and cu_seqlens is not None:
        angles = angles[packed_positions(cu_seqlens)].squeeze(1)
    elif len(angles) < length:
        raise ValueError(f"rotary_pos_emb: got angles of {len(angles)} positions; needs {length}, as x has")
    else:
        angles = angles[:length].transpose(0, 1) if layout == "bshd" else angles[:length]
    return RotaryTable(angles.cos(), angles.sin() * sign, interleaved)


def qkv_keys(own: str, theirs: str, sizes: tuple[int, int], fused: bool, has_norm: bool) -> dict[str, Parts]:
    """Own key -> TransformerEngine's, of self attention: q, k and v as three parameters unless they are fused."""
    q, kv = sizes
    keys: dict[str, Parts] = {}
    for name in ("weight", "bias"):
        parts = tuple((f"{theirs}{part}_{name}", rows) for part, rows in (("query", q), ("key", kv), ("value", kv)))
        keys[f"{own}{name}"] = f"{theirs}{name}" if fused else parts
        if has_norm:
            keys[f"{own}norm.{name}"] = f"{theirs}layer_norm_{name}"
    return keys


class MultiheadAttention(TEState, ours.MultiheadAttention):
    """`ottava.nn.MultiheadAttention` with TransformerEngine's arguments and names of parameters.

    Args:
        hidden_size, num_attention_heads, kv_channels, num_gqa_groups: width, heads, entries of a head, heads of keys.
        input_layernorm: a norm in front; normalization, layernorm_epsilon, zero_centered_gamma: of it.
        attention_type: "self" or "cross".  qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type, window_size, softmax_type: as `DotProductAttention`.
        qk_norm_type: "LayerNorm" or "RMSNorm" over each head, before the rotation.
        fuse_qkv_params: one parameter "weight" for q, k and v, which then lie one after the other.
    Raises:
        NotImplementedError: an argument that ottava cannot honour.  ValueError: an unknown name.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> te.MultiheadAttention(64, 4, input_layernorm=True, attention_dropout=0.0)(torch.ones(5, 2, 64)).shape
        torch.Size([5, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        attn_mask_type: str = "causal",
        window_size: Window = None,
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        zero_centered_gamma: bool = False,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        refuse("MultiheadAttention", others, ("num_gqa_groups", "attn_mask_type", "qkv_format", "params_dtype"))
        check_qkv("MultiheadAttention", fuse_qkv_params, qkv_weight_interleaved, qk_norm_type, qk_norm_before_rope)
        super().__init__(
            hidden_size,
            num_attention_heads,
            kv_heads=num_gqa_groups,
            head_dim=kv_channels,
            norm=norm_name("MultiheadAttention", normalization) if input_layernorm else None,
            eps=layernorm_epsilon,
            zero_centered_gamma=zero_centered_gamma,
            qk_norm=None if qk_norm_type is None else norm_name("MultiheadAttention", qk_norm_type),
            bias=bias,
            cross=attention_type == "cross",
            mask=mask_for("MultiheadAttention", attn_mask_type)[0],
            window=window_size,
            dropout=attention_dropout,
            sink=sink_for("MultiheadAttention", softmax_type),
            layout=qkv_format,
            recipe="bf16",
            device=device_for(device),
            dtype=params_dtype,
        )
        self.attn_mask_type, self.rotary_pos_interleaved = attn_mask_type, rotary_pos_interleaved
        for layer in quantized_layers(self):
            start(layer.weight, layer.bias, output_layer_init_method if layer is self.out else init_method)
        keys, states = attention_keys(self, "", "", fuse_qkv_params)
        self.uses_their_keys(keys, states)

    def forward(  # type: ignore[override]  # TransformerEngine's signature
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        *,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        checkpoint_core_attention: bool = False,
        **others: Any,
    ) -> Tensor:
        """hidden_states -> what attention adds to them; a mask type of the call must be the layer's kind of mask."""
        refuse("MultiheadAttention", others)
        kind = attn_mask_type or self.attn_mask_type
        arguments = attention_arguments(
            self.attention,
            kind,
            attention_mask,
            core_attention_bias_type,
            core_attention_bias,
            cu_seqlens_q,
            cu_seqlens_kv,
        )
        table = rotary_table(
            rotary_pos_emb, self.rotary_pos_interleaved, self.attention.layout, hidden_states, cu_seqlens_q
        )
        return super().forward(hidden_states, encoder_output, rotary=table, **arguments)


def check_qkv(where: str, fused: bool, interleaved: bool, qk_norm: str | None, norm_first: bool) -> None:
    """Refuses the orders of q, k and v, and of norm and rotation, that ottava's layer does not have."""
    if fused and interleaved:
        raise NotImplementedError(
            f"{where}: fuse_qkv_params with qkv_weight_interleaved=True is not in ottava, where q, k and v lie one "
            "after the other; give qkv_weight_interleaved=False"
        )
    if qk_norm is not None and not norm_first:
        raise NotImplementedError(
            f"{where}: qk_norm_type={qk_norm!r} after the rotation is not in ottava; give qk_norm_before_rope=True"
        )


def attention_arguments(
    core: ours.DotProductAttention,
    kind: str,
    attention_mask: Any,
    bias_type: str,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
) -> dict[str, Any]:
    """What `ottava.nn.MultiheadAttention` is called with.

    Raises:
        NotImplementedError: the call wants another kind of mask than the layer was made with.
    """
    mask, counts = mask_for("attention", kind)
    if mask != core.mask:
        raise NotImplementedError(
            f"attention: the layer was made with {core.mask!r}, and attn_mask_type={kind!r} of this call asks for "
            f"{mask!r}; give it to the constructor"
        )
    given = seen(attention_mask if counts else None, bias_type, bias)
    if core.layout == "thd":
        return {"cu_seqlens": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_kv}
    if not counts or cu_seqlens_q is None:
        return {"attention_mask": given}
    keys = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    return {"attention_mask": given, "query_lengths": cu_seqlens_q.diff(), "key_lengths": keys.diff()}


def attention_keys(
    module: ours.MultiheadAttention, own: str, theirs: str, fused: bool
) -> tuple[dict[str, Parts], dict[str, tuple[str, ...]]]:
    """Of an attention, with prefixes: own key -> TransformerEngine's; its modules with histories -> own layers."""
    sizes = module.heads * module.head_dim, module.kv_heads * module.head_dim
    has_norm = hasattr(module.q if module.cross else module.qkv, "norm")
    keys: dict[str, Parts] = {f"{own}out.{name}": f"{theirs}proj.{name}" for name in ("weight", "bias")}
    states: dict[str, tuple[str, ...]] = {f"{theirs}proj": (f"{own}out",)}
    keys |= {f"{own}attention.sink": f"{theirs}core_attention.softmax_offset"}
    for norm in ("q_norm", "k_norm"):
        keys |= {f"{own}{norm}.{name}": f"{theirs}{norm}.{name}" for name in ("weight", "bias")}
    if not module.cross:
        name = "layernorm_qkv" if has_norm else "qkv"
        keys |= qkv_keys(f"{own}qkv.", f"{theirs}{name}.", sizes, fused, has_norm)
        return keys, states | {f"{theirs}{name}": (f"{own}qkv",)}
    name = "layernorm_query" if has_norm else "query_layer"
    for part in ("weight", "bias"):
        keys[f"{own}q.{part}"] = f"{theirs}{name}.{part if fused else f'query_{part}'}"
        pair = tuple((f"{theirs}key_value.{which}_{part}", sizes[1]) for which in ("key", "value"))
        keys[f"{own}kv.{part}"] = f"{theirs}key_value.{part}" if fused else pair
        if has_norm:
            keys[f"{own}q.norm.{part}"] = f"{theirs}{name}.layer_norm_{part}"
    return keys, states | {f"{theirs}{name}": (f"{own}q",), f"{theirs}key_value": (f"{own}kv",)}

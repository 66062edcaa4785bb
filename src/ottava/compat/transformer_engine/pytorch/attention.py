"""TransformerEngine's attention on ottava's attention, with its arguments, masks, layouts, rotary angles and caches.

True in a mask of TransformerEngine hides a key; True in a mask of torch and ottava shows it. The result has its heads
flattened into one dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava import nn as ours
from ottava.base.errors import need_known, unknown_name
from ottava.compat.transformer_engine.pytorch.inference import InferenceParams
from ottava.compat.transformer_engine.pytorch.megatron import Sharded, Shards, extras_of, shards_for
from ottava.compat.transformer_engine.pytorch.module import device_for, norm_heads, with_norm
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.compat.transformer_engine.pytorch.rope import table_of
from ottava.compat.transformer_engine.pytorch.state import Advising, Init, Parts
from ottava.distributed.context import GatheredKeys, RingKeys, positions
from ottava.nn.attention import Sink
from ottava.nn.layer import autocast_input
from ottava.nn.rope import RotaryTable, packed_positions


class RotaryPositionEmbedding(nn.Module):
    """Angles of positions, fp32 (positions, 1, 1, dim), in the form that TransformerEngine's modules read.

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
            # positions beyond that length are squeezed into it
            longer = max_seq_len > self.pretrained * self.factor
            positions = positions * (self.pretrained / max_seq_len if longer else 1 / self.factor)
        powers = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32) / self.dim
        angles = positions[:, None] * (1.0 / self.rotary_base**powers)
        pairs = torch.stack((angles, angles), -1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]


def rotary_table(
    angles: Any,
    interleaved: bool,
    layout: str,
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    past: InferenceParams | None = None,
) -> RotaryTable | None:
    """Converts TransformerEngine's angles to ottava's table.

    Args:
        angles: one for each position of x, or more.
        x: the input, in the layout.
        cu_seqlens: starts of packed sequences ("thd"). The positions of each sequence begin at 0.
        past: the cache; the positions of x begin behind it.
    Raises:
        NotImplementedError: queries and keys have different angles.
        ValueError: there are angles of too few positions.
    """
    if angles is None:
        return None
    if isinstance(angles, tuple | list):
        raise NotImplementedError("rotary_pos_emb: different angles for queries and keys are not in ottava")
    length = x.shape[1 if layout == "bshd" else 0]
    if past is not None:
        if len(angles) < (most := max(past.sequences.values(), default=0)):
            raise ValueError(f"rotary_pos_emb: got angles of {len(angles)} positions; this step needs {most}")
        angles = angles[past.positions(len(angles) - 1, angles.device)].squeeze(2)
        angles = angles if layout == "bshd" else angles.transpose(0, 1)
    elif layout == "thd" and cu_seqlens is not None:
        angles = angles[packed_positions(cu_seqlens)].squeeze(1)
    elif len(angles) < length:
        raise ValueError(f"rotary_pos_emb: got angles of {len(angles)} positions; needs {length}, as x has")
    else:
        angles = angles[:length].transpose(0, 1) if layout == "bshd" else angles[:length]
    return table_of(angles, interleaved)


Window = tuple[int | None, int | None] | None

__all__ = ["DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding"]

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
"""TransformerEngine's mask type -> ottava's mask, and whether attention_mask (or cu_seqlens) is applied, too."""
SINKS: Mapping[str, Sink] = MappingProxyType({"vanilla": None, "off-by-one": 0.0, "learnable": "learned"})
"""softmax_type -> ottava's sink."""


def mask_for(where: str, mask_type: str) -> tuple[str, bool]:
    """The entry of MASKS; "padding,causal" is "padding_causal".

    Raises:
        ValueError: the type is unknown.
    """
    name = mask_type.replace(",", "_")
    if name not in MASKS:
        raise ValueError(f"{where}: {unknown_name('attn_mask_type', mask_type, MASKS)}")
    return MASKS[name]


def sink_for(where: str, softmax_type: str) -> Sink:
    """The entry of SINKS.

    Raises:
        ValueError: the type is unknown.
    """
    need_known(where, "softmax_type", softmax_type, SINKS)
    return SINKS[softmax_type]


def alibi_bias(slopes: Tensor | None, heads: int, queries: int, keys: int, *, last: bool, like: Tensor) -> Tensor:
    """ALiBi (arXiv 2108.12409): -slope |distance| for each head, (1, H, Sq, Sk); for slopes (B, H), (B, H, Sq, Sk).

    Args:
        slopes: fp32 (H,) or (B, H). None: the paper's slopes, 2 ** (-8 h / H) if H is a power of two; else those of the
            next lower power of two, and every second one of the next higher.
        last: True aligns the last query with the last key; False aligns the first query with the first key.
        like: a tensor with the device and dtype of the bias.

    Example:
        >>> alibi_bias(None, 2, 1, 3, last=True, like=torch.ones(()))[0, 0]       # of the first of two heads: 2**-4
        tensor([[-0.1250, -0.0625, -0.0000]])
    """
    if slopes is None:
        power = 1 << (heads.bit_length() - 1)
        exponents = [-8 * (i + 1) / power for i in range(power)]
        exponents += [-4 * (2 * i + 1) / power for i in range(heads - power)]
        slopes = torch.tensor([2.0**e for e in exponents])
    i = torch.arange(queries, device=like.device)[:, None] + (keys - queries if last else 0)
    distance = (i - torch.arange(keys, device=like.device)).abs()
    slopes = slopes.to(like.device, torch.float32)
    return (-slopes.view(-1, heads, 1, 1) * distance).to(like.dtype)


class ContextParallel(nn.Module):
    """A module whose attention may run on parts of sequences."""

    cp_group: Any = None
    cp_comm_type = "p2p"

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Sets the ranks that hold parts r and 2n - 1 - r of 2n of each sequence; None or one rank: they are whole.

        Args:
            cp_global_ranks, cp_stream: unused: the group knows its ranks.
            cp_comm_type: "p2p": keys travel round a ring; "all_gather": each rank gathers all keys.
        Raises:
            NotImplementedError: another cp_comm_type, or several groups.
        """
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        kinds = {"p2p": RingKeys, "all_gather": GatheredKeys}
        whole = cp_group is None or (isinstance(cp_group, dist.ProcessGroup) and dist.get_world_size(cp_group) == 1)
        if not whole and (cp_comm_type not in kinds or not isinstance(cp_group, dist.ProcessGroup)):
            raise NotImplementedError(
                f"{type(self).__name__}: cp_comm_type={cp_comm_type!r} is not in ottava; give one group, and 'p2p' or "
                "'all_gather'"
            )
        keys = None if whole else kinds[cp_comm_type](cp_group, balanced=True)
        for module in self.modules():
            if isinstance(module, ours.DotProductAttention):
                module.keys = keys


class DotProductAttention(Advising, ContextParallel):
    """`ottava.nn.DotProductAttention` with TransformerEngine's arguments.

    Args:
        num_attention_heads, kv_channels, num_gqa_groups: heads, width of a head, heads of keys and values.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: a key of MASKS.  window_size: (left, right).  softmax_type: a key of SINKS.
        layer_number: the number of this layer in `InferenceParams`.
        tp_group, tp_size: the ranks that share the heads. Each rank calls the forward with its own heads.
        return_max_logit: also return each head's largest score, which QK-Clip reads.
        cp_group, cp_comm_type: the ranks that share sequences, see `set_context_parallel_group`. Each rank calls the
            forward with its tokens; cu_seqlens are those of whole sequences.
        others: TransformerEngine's other arguments, accepted where they change nothing.
    Shapes: q, k, v in the format -> the results of all heads, flat: (S, B, H * D), (B, S, H * D) or (T, H * D).
    Raises:
        NotImplementedError: ottava cannot honour an argument.  ValueError: a name is unknown.

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
        layer_number: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        return_max_logit: bool = False,
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        **others: Any,
    ) -> None:
        extras = extras_of("DotProductAttention", locals())
        super().__init__()
        self.drawn = nullcontext if sequence_parallel else extras.drawn
        shards = shards_for("DotProductAttention", tp_group, tp_size, sequence_parallel, split=True)
        self.core = ours.DotProductAttention(
            mask=mask_for("DotProductAttention", attn_mask_type)[0],
            window=window_size,
            softmax_scale=softmax_scale,
            dropout=attention_dropout,
            sink=sink_for("DotProductAttention", softmax_type),
            heads=shards.of("num_attention_heads", num_attention_heads),
            layout=qkv_format,
        )
        self.remembers(extras.given)
        self.return_max_logit = self.core.keeps_max_logit = bool(return_max_logit)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        *,
        attn_mask_type: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        pad_between_seqs: bool | None = None,
        score_mod: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        **others: Any,
    ) -> Any:
        """q, k and v -> the results of all heads; with return_max_logit, (results, the largest score of each head).

        Args:
            qkv_layer, kv_layer: q, k and v, or k and v, as one tensor, with qkv_interleave_dim of size 3 or 2.
            attn_mask_type: replaces that of the layer.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: where packed sequences begin, if padding lies between them;
                cu_seqlens_q and cu_seqlens_kv then give their lengths. Results of padding are zeros.
            pad_between_seqs: unused; the tensors tell.
            score_mod: torch's form, (score, batch, head, query, key) -> score; TransformerEngine's form builds a graph
                of cuDNN.
        """
        where, kind = "DotProductAttention", attn_mask_type or self.attn_mask_type
        refuse(where, others)
        if score_mod is not None and (count := len(inspect.signature(score_mod).parameters)) != 5:
            raise NotImplementedError(
                f"{where}: a score_mod of {count} arguments builds a graph of cuDNN, "
                "which is not in ottava; give torch's form (score, batch, head, query, key) -> score"
            )
        apart = query_layer, key_layer, value_layer
        query_layer, key_layer, value_layer = _unpacked(where, apart, qkv_layer, kv_layer, qkv_interleave_dim)
        rows, starts = len(query_layer), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        real = _without_padding(where, self.core, (cu_seqlens_q, cu_seqlens_kv), starts, query_layer.device)
        if real is not None:
            query_layer = query_layer.index_select(0, real[0])
            key_layer, value_layer = (t.index_select(0, real[1]) for t in (key_layer, value_layer))
        if inference_params is not None:
            refuse_cached(where, kind, attention_mask, core_attention_bias_type, inference_params)
            qkv = query_layer, key_layer, value_layer
            key_layer, value_layer, options = inference_params.append(where, self.layer_number, *qkv, self.core.layout)
        else:
            bias, ends = (core_attention_bias_type, core_attention_bias, alibi_slopes), (cu_seqlens_q, cu_seqlens_kv)
            sizes = query_layer, key_layer, query_layer.shape[-2]
            options = {"mask": mask_for(where, kind)[0]}
            options |= core_arguments(self.core, kind, attention_mask, bias, ends, *sizes)
        more = {} if score_mod is None else {"score_mod": score_mod}
        with self.drawn():
            y = self.core(query_layer, key_layer, value_layer, **options, **more).flatten(-2)
        if real is not None:
            y = y.new_zeros(rows, y.shape[1]).index_copy(0, real[0], y)
        if not self.return_max_logit:
            return y
        assert self.core.last_max_logit is not None
        return y, self.core.last_max_logit.to(y.dtype)


def _unpacked(where: str, apart: Any, qkv: Tensor | None, kv: Tensor | None, dim: int) -> Any:
    """The three tensors, each given once: by itself or as a part of qkv or kv."""
    packed, count = (kv, 2) if qkv is None else (qkv, 3)
    given = tuple(one is not None for one in apart)
    if packed is None:
        count = 0
    if given != (True,) * (3 - count) + (False,) * count or (qkv is not None and kv is not None):
        names = [name for name, one in zip(("query_layer", "key_layer", "value_layer"), given, strict=True) if one]
        names += [name for name, one in (("qkv_layer", qkv), ("kv_layer", kv)) if one is not None]
        raise ValueError(
            f"{where}: got {', '.join(names) or 'no tensor'}; needs q, k and v; or qkv_layer; or q and kv_layer"
        )
    if packed is None:
        return apart
    if dim not in (-3, -2) or packed.ndim < 4 or packed.shape[dim] != count:
        raise ValueError(
            f"{where}: got a packed tensor {tuple(packed.shape)} with qkv_interleave_dim={dim}; needs {count} there, "
            "at -3 or -2"
        )
    return *apart[: 3 - count], *packed.unbind(dim)


def _without_padding(
    where: str, core: ours.DotProductAttention, ends: Any, starts: Any, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """int64: the rows of queries and of keys that are no padding between packed sequences; None: all."""
    if core.layout != "thd" or starts == (None, None) or ends[0] is None:
        return None
    ends = ends[0], ends[0] if ends[1] is None else ends[1]
    starts = tuple(end if start is None else start for start, end in zip(starts, ends, strict=True))
    if all(torch.equal(start, end) for start, end in zip(starts, ends, strict=True)):
        return None
    if core.keys is not None:
        raise NotImplementedError(f"{where}: padding between sequences with a cp_group is not in ottava; pack without")
    rows = [
        torch.cat([torch.arange(b, b + n) for b, n in zip(start.tolist(), end.diff().tolist(), strict=False)])
        for start, end in zip(starts, ends, strict=True)
    ]
    return rows[0].to(device), rows[1].to(device)


def interleaved_rows(module: ours.MultiheadAttention) -> list[int]:
    """The rows of fused q, k, v (or k, v) in TransformerEngine's order: group by group of heads.

    Example:
        >>> interleaved_rows(ours.MultiheadAttention(4, 4, kv_heads=2))          # heads of one row: q q k v, q q k v
        [0, 1, 4, 6, 2, 3, 5, 7]
    """
    shared, dim = module.heads // module.kv_heads, module.head_dim
    counts = [1, 1] if module.cross else [shared, 1, 1]
    starts = [sum(counts[:i]) * module.kv_heads for i in range(len(counts))]
    heads = [
        start + group * count + i
        for group in range(module.kv_heads)
        for start, count in zip(starts, counts, strict=True)
        for i in range(count)
    ]
    return [head * dim + row for head in heads for row in range(dim)]


class MultiheadAttention(Sharded, ContextParallel, ours.MultiheadAttention):
    """`ottava.nn.MultiheadAttention` with TransformerEngine's arguments and names of parameters.

    Args:
        hidden_size, num_attention_heads, kv_channels, num_gqa_groups: width, heads, width of a head, heads of keys.
        input_layernorm: put a norm in front, with normalization, layernorm_epsilon and zero_centered_gamma.
        attention_type: "self" or "cross".  qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type, window_size, softmax_type: as in `DotProductAttention`.
        qk_norm_type: "LayerNorm", "RMSNorm" or "L2Normalization" over each head, with qk_norm_eps, behind the rotation
            unless qk_norm_before_rope.
        fuse_qkv_params: state dicts have one parameter "weight" for q, k and v.
        qkv_weight_interleaved: state dicts have the rows of this parameter group by group of heads. In the module all
            rows of q come first, then those of k and of v.
        set_parallel_mode, tp_group, tp_size, sequence_parallel: this rank holds its share of the heads, see `Linear`.
    Raises:
        NotImplementedError: ottava cannot honour an argument.  ValueError: a name is unknown.

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
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        return_bias: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layer_number: int | None = None,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        extras = extras_of("MultiheadAttention", locals())
        need_known("MultiheadAttention", "attention_type", attention_type, ("self", "cross"))
        shards = shards_for("MultiheadAttention", tp_group, tp_size, sequence_parallel, split=set_parallel_mode)
        super().__init__(
            hidden_size,
            **with_heads("MultiheadAttention", extras.given, shards),
            cross=attention_type == "cross",
            mask=mask_for("MultiheadAttention", attn_mask_type)[0],
            dropout=attention_dropout,
            layout=qkv_format,
        )
        norm_heads("MultiheadAttention", (self,), extras.given)
        self.out.returns_bias = self.returns_bias = return_bias
        self.finish(extras, shards, *attention_keys(self, "", "", fuse_qkv_params, qkv_weight_interleaved))

    def forward(  # type: ignore[override]  # TransformerEngine's signature
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        **call: Any,
    ) -> Any:
        """hidden_states -> the output of attention, in the same shape; with return_bias, a tuple with the bias.

        Args:
            attn_mask_type: a type with the same mask as the layer's.
            call: the keywords of `attention_arguments`.
        """
        kind, keys = attn_mask_type or self.attn_mask_type, encoder_output
        self.begins(call.get("is_first_microbatch"))
        hidden_states = autocast_input(hidden_states)
        options = attention_arguments(
            "MultiheadAttention", self, hidden_states, kind, attention_mask, keys,
            rotary_interleaved=self.rotary_pos_interleaved, layer_number=self.layer_number, **call,
        )  # fmt: skip
        y = super().forward(hidden_states, encoder_output, **options)
        return (y, None if self.out.bias is None else self.out.bias.to(y.dtype)) if self.returns_bias else y


def with_heads(where: str, given: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """`with_norm`, and what the constructors of ottava's modules with attention share; heads are this rank's."""
    heads, groups, head_dim = (given[name] for name in ("num_attention_heads", "num_gqa_groups", "kv_channels"))
    return with_norm(where, given) | {
        "heads": shards.of("num_attention_heads", heads),
        "kv_heads": None if groups is None else shards.of("num_gqa_groups", groups),
        "head_dim": given["hidden_size"] // heads if head_dim is None and shards.size > 1 else head_dim,
        "qk_norm_after_rotary": not given["qk_norm_before_rope"],
        "window": given["window_size"],
        "sink": sink_for(where, given["softmax_type"]),
    }


def attention_arguments(
    where: str,
    module: ours.MultiheadAttention,
    x: Tensor,
    kind: str,
    attention_mask: Any = None,
    memory: Tensor | None = None,
    *,
    rotary_interleaved: bool = False,
    layer_number: int | None = None,
    inference_params: InferenceParams | None = None,
    rotary_pos_emb: Any = None,
    core_attention_bias_type: str = "no_bias",
    core_attention_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    checkpoint_core_attention: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """Translates the arguments of a TransformerEngine module's call to those of `ottava.nn.MultiheadAttention`.

    Args:
        x: the input of the queries.  memory: the input of the keys, for cross attention.
        kind: attn_mask_type of the call.
    Raises:
        NotImplementedError: ottava cannot honour an argument, or the mask differs from the constructor's.
    """
    refuse(where, others)
    core, mask, past = module.attention, mask_for(where, kind)[0], inference_params
    if core_attention_bias_type == "alibi" and module.out.sharding is not None:
        raise NotImplementedError(f"{where}: ALiBi with heads split over ranks is not in ottava; use 'post_scale_bias'")
    if past is not None:
        refuse_cached(where, kind, attention_mask, core_attention_bias_type, past)
    if core.keys is not None and rotary_pos_emb is not None:
        rotary_pos_emb = _own_angles(where, rotary_pos_emb, core, x)
    table = rotary_table(rotary_pos_emb, rotary_interleaved, core.layout, x, cu_seqlens_q, past)
    rotary = {} if table is None else {"rotary": table}
    if past is not None:
        cache = past.layer(where, layer_number, x, core.layout)
        return {"cache": cache, "query_lengths": past.query_lengths(x.device), **rotary}
    if mask != core.mask:
        raise NotImplementedError(
            f"{where}: the layer was built with {core.mask!r}, but attn_mask_type={kind!r} of this call needs "
            f"{mask!r}; give it to the constructor"
        )
    bias, ends = (core_attention_bias_type, core_attention_bias, alibi_slopes), (cu_seqlens_q, cu_seqlens_kv)
    keys = x if memory is None else memory
    return core_arguments(core, kind, attention_mask, bias, ends, x, keys, module.heads) | rotary


def _own_angles(where: str, angles: Any, core: ours.DotProductAttention, x: Tensor) -> Tensor:
    """The angles of this rank's positions."""
    group, each = core.keys.group, x.shape[1 if core.layout == "bshd" else 0]
    ranks = dist.get_world_size(group)
    if core.layout == "thd" or not isinstance(angles, Tensor) or len(angles) < each * ranks:
        raise NotImplementedError(
            f"{where}: with a cp_group, rotary_pos_emb needs one tensor of angles for all {each * ranks} positions of "
            "sequences that are not packed; rotate q and k yourself, and call DotProductAttention"
        )
    return angles[positions(each, ranks, dist.get_rank(group), angles.device, balanced=True)]


def refuse_cached(where: str, kind: str, attention_mask: Any, bias_type: str, past: InferenceParams) -> None:
    """Refuses masks and biases with a cache: attention to a cache is causal, and `pre_step` gives the new tokens.

    Raises:
        NotImplementedError: the call has a mask or a bias, or its mask type shows later tokens to new ones.
        TypeError: inference_params is no InferenceParams.
    """
    if not isinstance(past, InferenceParams):
        raise TypeError(f"{where}: inference_params is a {type(past).__name__}; needs an InferenceParams")
    several = mask_for(where, kind)[0] == "no_mask" and max(past.new_tokens, default=0) > 1
    if several or attention_mask is not None or bias_type != "no_bias":
        raise NotImplementedError(
            f"{where}: with inference_params got attn_mask_type={kind!r}, core_attention_bias_type={bias_type!r} and "
            f"{'no' if attention_mask is None else 'an'} attention_mask; attention to a cache is causal "
            "('padding_causal', or 'padding' for one new token), and pre_step gives the number of new tokens"
        )


def core_arguments(
    core: ours.DotProductAttention,
    kind: str,
    attention_mask: Any,
    bias: tuple[str, Tensor | None, Tensor | None],
    ends: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    heads: int,
) -> dict[str, Any]:
    """The keywords of a call of `ottava.nn.DotProductAttention`, but its mask.

    Args:
        kind: attn_mask_type.  attention_mask: True hides; of a pair of masks, for cross attention, that of the keys.
        bias: core_attention_bias_type, core_attention_bias, alibi_slopes.
        ends: cu_seqlens_q, cu_seqlens_kv.
        q, k: tensors as long as the queries and as the keys, in the layout.
    Raises:
        NotImplementedError: a bias in front of the scale, or one of packed sequences.
    """
    (name, masked), (q_ends, k_ends), (bias_type, added, slopes) = mask_for("attention", kind), ends, bias
    if bias_type not in ("no_bias", "post_scale_bias", "alibi"):
        raise NotImplementedError(
            f"attention: core_attention_bias_type={bias_type!r} is not in ottava; compute the bias and give it as "
            "'post_scale_bias'"
        )
    if core.layout == "thd":
        if bias_type == "alibi" or (bias_type != "no_bias" and added is not None):
            what = "ALiBi" if bias_type == "alibi" else "a bias"
            raise NotImplementedError(f"attention: {what} with packed sequences ('thd') is not in ottava; use 'bshd'")
        if core.keys is not None:  # each rank holds as much of every sequence
            q_ends, k_ends = (None if cut is None else cut // dist.get_world_size(core.keys.group) for cut in ends)
        return {"cu_seqlens": q_ends, "cu_seqlens_k": k_ends}
    hidden = attention_mask[-1] if isinstance(attention_mask, tuple | list) else attention_mask
    shown = None if hidden is None or not masked else ~hidden.bool()
    if bias_type == "alibi":
        axis = 1 if core.layout == "bshd" else 0
        added = alibi_bias(slopes, heads, q.shape[axis], k.shape[axis], last=name != "causal", like=q)
    if bias_type != "no_bias" and added is not None:
        shown = added if shown is None else added.masked_fill(~shown, -torch.inf)
    if not masked or q_ends is None:
        return {"attention_mask": shown}
    lengths = {"query_lengths": q_ends.diff(), "key_lengths": (q_ends if k_ends is None else k_ends).diff()}
    return {"attention_mask": shown, **lengths}


def attention_keys(
    module: ours.MultiheadAttention, prefix: str, theirs: str, fused: bool, interleaved: bool
) -> tuple[dict[str, Parts], dict[str, tuple[str, ...]], dict[str, list[int]]]:
    """The arguments of `TEState.uses_their_keys` for an attention; `prefix` and `theirs` begin the keys."""
    several = f"{prefix}{'kv' if module.cross else 'qkv'}."
    ordered = fused and interleaved
    orders = {f"{several}{name}": interleaved_rows(module) for name in ("weight", "bias")} if ordered else {}
    q_rows, kv_rows = module.heads * module.head_dim, module.kv_heads * module.head_dim
    has_norm = hasattr(module.q if module.cross else module.qkv, "norm")
    keys: dict[str, Parts] = {f"{prefix}out.{name}": f"{theirs}proj.{name}" for name in ("weight", "bias")}
    states: dict[str, tuple[str, ...]] = {f"{theirs}proj": (f"{prefix}out",)}
    keys |= {f"{prefix}attention.sink": f"{theirs}core_attention.softmax_offset"}
    for norm in ("q_norm", "k_norm"):
        keys |= {f"{prefix}{norm}.{name}": f"{theirs}{norm}.{name}" for name in ("weight", "bias")}
    rows = {"query": q_rows, "key": kv_rows, "value": kv_rows}
    first = f"layernorm_{'query' if module.cross else 'qkv'}" if has_norm else "query_layer" if module.cross else "qkv"
    places = {"qkv": (first, list(rows))}
    if module.cross:
        places = {"q": (first, ["query"]), "kv": ("key_value", ["key", "value"])}
    for part in ("weight", "bias"):
        for own, (name, holds) in places.items():
            apart = tuple((f"{theirs}{name}.{which}_{part}", rows[which]) for which in holds)
            alone = apart[0][0] if len(apart) == 1 else apart
            keys[f"{prefix}{own}.{part}"] = f"{theirs}{name}.{part}" if fused else alone
        if has_norm:
            keys[f"{prefix}{next(iter(places))}.norm.{part}"] = f"{theirs}{first}.layer_norm_{part}"
    return keys, states | {f"{theirs}{name}": (f"{prefix}{own}",) for own, (name, _) in places.items()}, orders

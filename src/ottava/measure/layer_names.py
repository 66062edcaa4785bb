"""Names of layers and tensors: which part of a transformer a layer is, and what a pattern or a symbol of a user means.

Known are the names of Llama, GPT-2, Megatron, TransformerEngine and others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import MappingProxyType

from ottava.base.errors import unknown_name

KINDS = MappingProxyType(
    {
        "lm_head": "lm_head output_layer embed_out head output predictions.decoder",
        "router": "router mlp.gate gate.wg router.classifier router.layer",
        "qkv": "q_proj k_proj v_proj qkv_proj q k v qkv query key value query_key_value c_attn in_proj Wqkv wq wk wv "
        "to_q to_k to_v linear_qkv linear_q linear_kv layernorm_qkv q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj",
        "proj": "o_proj out_proj linear_proj attn.proj attn.c_proj attention.proj "
        "self_attention.proj attention.dense attention.output.dense wo to_out.0 SelfAttention.o EncDecAttention.o",
        "fc2": "down_proj fc2 linear_fc2 dense_4h_to_h w2 mlp.c_proj down linear2 fc_out ffn.wo wo_ff output.dense "
        "DenseReluDense.wo w2_EDF",
        "fc1": "gate_proj up_proj gate_up_proj fc1 linear_fc1 dense_h_to_4h w1 w3 c_fc up gate linear1 fc_in "
        "intermediate.dense wi wi_0 wi_1 w1_EFD w3_EFD",
    }
)
"""Kind -> endings of layer names. The longest ending that fits decides; if none fits, the kind is "linear"."""

_REGEX = "re:"
_PART = re.compile(r"(?<=expert).*(\.\d+)$|\.base_layer$")
"""A suffix to remove first: the number of an expert's matrix, or PEFT's name for the layer that it wraps."""


@functools.lru_cache(maxsize=4096)
def layer_kind(name: str) -> str:
    """The kind of a layer.

    Example:
        >>> [layer_kind(f"model.layers.3.{n}") for n in ("mlp.down_proj", "self_attn.q_proj", "mlp.gate_proj", "x")]
        ['fc2', 'qkv', 'fc1', 'linear']
        >>> layer_kind("mlp.experts.down_proj.7"), layer_kind("self_attn.q_proj.base_layer")
        ('fc2', 'qkv')
    """
    dotted = f".{_plain(name)}"
    fits = [(len(word), kind) for kind, words in KINDS.items() for word in words.split() if dotted.endswith(f".{word}")]
    return max(fits, default=(0, "linear"))[1]


def only_simulated(name: str, source: str) -> bool:
    """Whether a watch only simulated this cast of a router, which every framework leaves in high precision.

    An error in a router changes which expert runs. Its sparse gradients would raise false alarms.

    Example:
        >>> only_simulated("layers.0.mlp.gate", "hook"), only_simulated("layers.0.mlp.gate", "door")
        (True, False)
    """
    return source == "hook" and layer_kind(name) == "router"


def _plain(name: str) -> str:
    suffix = _PART.search(name)
    return name if suffix is None else name.removesuffix(suffix[1] or suffix[0])


def layer_index(name: str) -> int | None:
    """The block that a layer belongs to: the first whole number in its dotted name.

    Example:
        >>> layer_index("model.layers.12.mlp.experts.3.w1"), layer_index("lm_head")
        (12, None)
    """
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def starred(name: str) -> tuple[str, int | None]:
    """A name whose first whole number is replaced by a star, and that number.

    Example:
        >>> starred("layers.3.mlp.down_proj"), starred("lm_head")
        (('layers.*.mlp.down_proj', 3), ('lm_head', None))
    """
    parts, number = name.split("."), layer_index(name)
    if number is not None:
        parts[next(i for i, part in enumerate(parts) if part.isdecimal())] = "*"
    return ".".join(parts), number


SYMBOLS = MappingProxyType(
    {
        "input": "X",
        "weight": "W",
        "grad_output": "dY",
        "output": "Y",
        "grad_input": "dX",
        "grad_weight": "dW",
        "qkv": "QKV",
        "s": "S",
        "o": "O",
        "do": "dO",
        "dp": "dP",
        "dqkv": "dQKV",
    }
)
"""Symbols of papers for the tensors of y = x @ w.T and of attention. Users may name a tensor either way."""


def symbol(tensor: str, direction: str = "row") -> str:
    """The symbol of a tensor; an unknown name stays as it is.

    Example:
        >>> symbol("input"), symbol("weight", "col"), symbol("bias")
        ('X', 'W.T', 'bias')
    """
    return SYMBOLS.get(tensor, tensor) + (".T" if direction == "col" else "")


def tensor_names(names: Iterable[str]) -> tuple[str, ...]:
    """The long names of tensors given by long name or symbol.

    Raises:
        ValueError: a name is neither.

    Example:
        >>> tensor_names(["X", "grad_output"])
        ('input', 'grad_output')
    """
    by_symbol = {symbol: name for name, symbol in SYMBOLS.items()}
    long_names = tuple(by_symbol.get(name, name) for name in names)
    for name in long_names:
        if name not in SYMBOLS:
            raise ValueError(unknown_name("tensor", name, [*SYMBOLS, *by_symbol]))
    return long_names


def usable(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns, if `matches` can use them.

    Raises:
        ValueError: what follows "re:" is no regular expression.
    """
    for pattern in patterns:
        if pattern.startswith(_REGEX):
            try:
                re.compile(pattern[len(_REGEX) :])
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return patterns


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Whether a full layer name matches one of the patterns.

    Args:
        patterns: shell patterns for the whole name; or "re:" and a regular expression, found anywhere in the name.

    Example:
        >>> matches("layers.3.fc2", ["*.fc2"]), matches("layers.3.fc2", [r"re:layers\\.[0-2]\\."])
        (True, False)
    """
    return any(
        re.search(pattern[len(_REGEX) :], layer) is not None
        if pattern.startswith(_REGEX)
        else fnmatchcase(layer, pattern)
        for pattern in patterns
    )

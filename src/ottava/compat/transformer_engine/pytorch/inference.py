"""TransformerEngine's InferenceParams: the memory of keys and values, for generation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ottava.compat.transformer_engine.pytorch.module import device_for
from ottava.nn.transformer import Cached, KVCache, LayerCache


class InferenceParams:
    """Keys and values of earlier tokens, for generation: one `ottava.nn.KVCache` for each layer_number.

    Args:
        max_batch_size, max_sequence_length: the most sequences, and the most positions of each.
        num_heads_kv, head_dim_k, head_dim_v, dtype: sizes and dtype of keys and values; head_dim_v None: head_dim_k.
        qkv_format: "bshd", "sbhd" or "thd". Only stored: each call has its own format.
        is_paged, page_size, total_num_pages: a layer has that many pages of that many positions, and a sequence takes
            pages as it grows; not paged: room for max_batch_size times max_sequence_length.
        custom_cache_manager: only None.  max_ctx_len: unused.
    Usage: call `pre_step({id: number of new tokens, ...})` before each forward. Row i of the batch is the i-th id, with
        padding behind its new tokens. `pre_step` drops each sequence that it does not name. A sequence may get any
        number of tokens in a step; in TransformerEngine a started sequence gets one.
    Raises:
        NotImplementedError: pages, another cache manager, or a name of TransformerEngine 2.1 and older.
        ValueError: the sizes are missing, there was no step, or the step does not fit.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, layer_number=1).eval()
        >>> past = InferenceParams(2, 16, num_heads_kv=4, head_dim_k=8, dtype=torch.float32)
        >>> for tokens in (5, 1):                                                    # a prompt, then one token
        ...     past.pre_step({"a": tokens, "b": tokens})
        ...     y = layer(torch.ones(tokens, 2, 32, device=layer.mlp.fc1.weight.device), inference_params=past)
        >>> y.shape, dict(past.sequences)
        (torch.Size([1, 2, 32]), {'a': 6, 'b': 6})
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        if num_heads_kv is None or head_dim_k is None or dtype is None:
            raise ValueError("InferenceParams: needs num_heads_kv, head_dim_k and dtype, as TransformerEngine 2.2 does")
        if custom_cache_manager is not None:
            raise NotImplementedError("InferenceParams: custom_cache_manager is not in ottava. Leave it out")
        if is_paged and not (page_size and total_num_pages):
            raise ValueError(
                f"InferenceParams: is_paged=True with page_size={page_size} and total_num_pages={total_num_pages}; "
                "needs both numbers"
            )
        self.page_size, self.total_num_pages = page_size or 0, total_num_pages or 0
        self.max_batch_size, self.max_sequence_length, self.dtype = max_batch_size, max_sequence_length, dtype
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v or head_dim_k
        self.is_paged, self.input_qkv_format = is_paged, qkv_format
        self.caches: dict[int, KVCache] = {}
        """layer_number -> cache."""
        self.sequences: OrderedDict[Any, int] = OrderedDict()
        """Id -> length with the new tokens of this step."""
        self.sequences_pre_step: OrderedDict[Any, int] = OrderedDict()
        """Id -> length before this step."""

    def __getattr__(self, name: str) -> NoReturn:
        if name in _OLD:
            raise NotImplementedError(
                f"InferenceParams.{name} is a name of TransformerEngine 2.1 and older: before each forward, give "
                "pre_step the number of new tokens of each sequence"
            )
        raise AttributeError(f"InferenceParams has no attribute {name!r}")

    cache_manager = property(lambda self: self)

    def print_cache(self) -> None:
        """Prints each sequence with its length."""
        print(f"InferenceParams: {dict(self.sequences)}")

    @property
    def batch_size(self) -> int:
        """Number of sequences in this step."""
        return len(self.sequences)

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Declares the sequences of the next forward, in the order of its rows, with their numbers of new tokens.

        Raises:
            ValueError: there is no sequence, there are more than max_batch_size, or one gets no tokens or too many.
        """
        old = list(self.sequences)
        past = OrderedDict((name, self.sequences.get(name, 0)) for name in step_dict)
        now = OrderedDict((name, past[name] + int(new)) for name, new in step_dict.items())
        if not 0 < len(now) <= self.max_batch_size or min(step_dict.values()) < 1:
            raise ValueError(
                f"InferenceParams.pre_step: got {dict(step_dict)}; needs 1 to {self.max_batch_size} sequences "
                "(max_batch_size), with 1 or more new tokens each"
            )
        if max(now.values()) > self.max_sequence_length:
            raise ValueError(
                f"InferenceParams.pre_step: the lengths become {dict(now)}, but max_sequence_length is "
                f"{self.max_sequence_length}"
            )
        for cache in self.caches.values():
            cache.lengths = list(self.sequences.values())
            cache.select([old.index(name) if name in self.sequences else None for name in now])
        self.sequences, self.sequences_pre_step = now, past

    def reset(self) -> None:
        """Drops all sequences and keeps the memory."""
        self.sequences, self.sequences_pre_step = OrderedDict(), OrderedDict()

    def get_seqlens_pre_step(self) -> Tensor:
        """int32 (sequences,): the length of each sequence before this step."""
        return torch.tensor(list(self.sequences_pre_step.values()), dtype=torch.int32)

    def allocate_memory(self, layer_number: int, device: torch.device | None = None) -> None:
        """Allocates the memory of a layer. Without this call its first forward does so, on the device of its input."""
        sizes = self.max_batch_size, self.max_sequence_length, self.num_heads_kv, self.head_dim_k
        device = device_for(None) if device is None else device
        more: dict[str, Any] = {"value_dim": self.head_dim_v, "device": device, "dtype": self.dtype}
        if self.is_paged:
            cache: KVCache = PagedCache(self.total_num_pages, self.page_size, *sizes[2:], batch=sizes[0], **more)
        else:
            cache = KVCache(1, *sizes, **more)
        cache.lengths = list(self.sequences_pre_step.values())
        self.caches[layer_number] = cache

    def layer(self, where: str, layer_number: int | None, x: Tensor, layout: str) -> LayerCache:
        """The cache of a layer for this step, in the form that ottava's attention reads.

        Args:
            x: the input of the queries, in the layout.
        Raises:
            ValueError: layer_number is None, or x has other rows than the step.  NotImplementedError: "thd".
        """
        if layout not in ("bshd", "sbhd"):
            raise NotImplementedError(
                f"{where}: inference_params with {layout!r} are not in ottava; use 'bshd' or 'sbhd', or "
                "DotProductAttention"
            )
        if layer_number is None:
            raise ValueError(f"{where}: inference_params need a layer_number: give each layer its own, from 1 on")
        batch, tokens = x.shape[:2] if layout == "bshd" else (x.shape[1], x.shape[0])
        counts = self.new_tokens
        if batch != len(counts) or tokens != max(counts, default=0):
            raise ValueError(
                f"{where}: got {batch} sequences of {tokens} new tokens; pre_step got {len(counts)}, of {counts}. Call "
                "it before each forward, and pad all rows to the longest"
            )
        if layer_number not in self.caches:
            self.allocate_memory(layer_number, x.device)
        return self.caches[layer_number].of(0, counts)

    def append(
        self, where: str, layer_number: int | None, q: Tensor, k: Tensor, v: Tensor, layout: str
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Appends the keys and values of this step to a layer's cache.

        Returns:
            All keys and values of the layer, in the layout, and further arguments of ottava's attention.
        """
        if layout == "thd":
            return self._append_packed(where, layer_number, q, k, v)
        cache, sequence_first = self.layer(where, layer_number, q, layout), layout == "sbhd"
        read = cache.append(*(t.transpose(0, 1) if sequence_first else t for t in (k, v)))
        k, v = (t.transpose(0, 1) if sequence_first else t for t in read[:2])
        lengths = {"query_lengths": self.query_lengths(q.device), "key_lengths": read.lengths}
        return k, v, {"mask": "causal_bottom_right", **lengths}

    def _append_packed(
        self, where: str, layer_number: int | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """`append` for packed sequences (T, H, D), one behind the other without padding."""
        counts, ends = self.new_tokens, list(self.sequences.values())
        if len(q) != sum(counts):
            raise ValueError(f"{where}: got {len(q)} packed rows; pre_step got {counts}, {sum(counts)} in all")
        padded = [nn.utils.rnn.pad_sequence(list(t.split(counts)), batch_first=True) for t in (k, v)]
        read = self.layer(where, layer_number, padded[0], "bshd").append(*padded)
        k, v = (torch.cat([own[:end] for own, end in zip(t, ends, strict=True)]) for t in read[:2])
        cut, cut_k = (torch.tensor([0, *numbers]).cumsum(0) for numbers in (counts, ends))
        return k, v, {"mask": "causal_bottom_right", "cu_seqlens": cut, "cu_seqlens_k": cut_k}

    @property
    def new_tokens(self) -> list[int]:
        """Number of new tokens of each sequence in this step."""
        return [end - self.sequences_pre_step[name] for name, end in self.sequences.items()]

    def query_lengths(self, device: torch.device) -> Tensor | None:
        """int64 (sequences,): number of new tokens that are no padding. None: there is no padding."""
        counts = self.new_tokens
        return torch.tensor(counts, device=device) if len(set(counts)) > 1 else None

    def positions(self, last: int, device: torch.device) -> Tensor:
        """Positions of the new tokens, int64 (sequences, tokens). Those of padding are cut at `last`."""
        past = torch.tensor(list(self.sequences_pre_step.values()), device=device)
        return (past[:, None] + torch.arange(max(self.new_tokens), device=device)).clamp(max=last)


class PagedCache(KVCache):
    """A `KVCache` of one layer whose sequences take pages of positions from a common store.

    Args:
        pages: how many.  size: positions of each.  batch: the most sequences.

    Example:
        >>> cache = PagedCache(3, 4, 1, 2, batch=2)
        >>> cache.lengths, cache.tables = [0, 0], [[], []]
        >>> k = torch.ones(2, 5, 1, 2)
        >>> cache.append(0, k, k, [5, 1]).keys.shape, cache.tables, cache.free
        (torch.Size([2, 5, 1, 2]), [[0, 1], [2]], [])
    """

    def __init__(self, pages: int, size: int, heads: int, head_dim: int, *, batch: int, **more: Any) -> None:
        super().__init__(1, pages, size, heads, head_dim, **more)
        self.size, self.batch, self.free = size, batch, list(range(pages))
        self.lengths: list[int] = []
        self.tables: list[list[int]] = []
        """The pages of each sequence, in the order of its positions."""

    def append(self, layer: int, k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> Cached:
        """As `KVCache.append`; it raises ValueError, too, where no page is free."""
        self.tables = self.tables or [[] for _ in self.lengths]
        new = k.shape[1]
        counts = [new] * len(self.lengths) if counts is None else list(counts)
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        for table, end in zip(self.tables, ends, strict=True):
            wanted = -(-end // self.size) - len(table)
            if wanted > len(self.free):
                raise ValueError(
                    f"InferenceParams: a sequence of {end} positions needs {wanted} more pages of {self.size}; "
                    f"{len(self.free)} are free. Give a larger total_num_pages, or drop finished sequences"
                )
            table += [self.free.pop(0) for _ in range(wanted)]
        longest = max(ends)
        own_places = [[page * self.size + i for page in table for i in range(self.size)] for table in self.tables]
        rows = [[of[min(i, end - 1)] for i in range(longest)] for of, end in zip(own_places, ends, strict=True)]
        at = torch.tensor(rows, device=k.device)
        starts = torch.tensor(self.lengths, device=k.device)[:, None] + torch.arange(new, device=k.device)
        real = torch.arange(new, device=k.device) < torch.tensor(counts, device=k.device)[:, None]
        places = at.gather(1, starts.clamp(max=longest - 1))[real]
        stores = [store[0].flatten(0, 1) for store in (self.keys, self.values)]
        for store, own in zip(stores, (k, v), strict=True):
            store[places] = own[real]
        even = len(set(ends)) == 1
        return Cached(stores[0][at], stores[1][at], None if even else torch.tensor(ends, device=k.device))

    def select(self, rows: Sequence[int | None]) -> None:
        """As `KVCache.select`; the pages of dropped sequences are free again."""
        if not 0 < len(rows) <= self.batch:
            raise ValueError(f"InferenceParams: got {len(rows)} sequences; needs 1 to {self.batch}")
        kept = [row for row in rows if row is not None]
        self.free += [page for row, table in enumerate(self.tables) if row not in kept for page in table]
        self.tables = [[] if row is None or not self.tables else self.tables[row] for row in rows]
        self.lengths = [0 if row is None else self.lengths[row] for row in rows]


_OLD = frozenset(
    {"sequence_len_offset", "batch_size_offset", "key_value_memory_dict", "swap_key_value_dict"}
    | {"setup_before_new_input"}
)


FusedAttnBackend = MappingProxyType({"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2})
"""TransformerEngine's numbers of cuDNN's kernels. Here torch chooses a kernel of attention, and a receipt names it."""


class FlashAttentionUtils:
    """No flash-attn package is used."""

    is_installed = v2_plus = v2_3_plus = v3_is_installed = v4_is_installed = False


class AttentionParams(SimpleNamespace):
    """What a script asks about."""

    _is_logging_setup = True  # as AttentionLogging: nothing is logged


AttentionLogging = AttentionParams


class _Unread(type):
    def __setitem__(cls, name: str, value: Any) -> None:
        """Forgets it: nothing is chosen by it."""

    def __getitem__(cls, name: str) -> bool:
        return name == "use_unfused_attention"


class _attention_backends(metaclass=_Unread): ...


def get_attention_backend(attention_params: Any) -> tuple[Any, ...]:
    """The unfused backend, in TransformerEngine's words, for any parameters."""
    return False, None, False, None, True, (False, False, True)


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """The window (left, right) of a mask: -1 is no end; a causal one ends at the query.

    Example:
        >>> check_set_window_size("causal"), check_set_window_size("no_mask", (128, 128))
        ((-1, 0), (128, 128))
    """
    left, right = (-1, -1) if window_size is None else window_size
    return (left, 0) if "causal" in attn_mask_type else (left, -1 if (left, right) == (-1, 0) else right)

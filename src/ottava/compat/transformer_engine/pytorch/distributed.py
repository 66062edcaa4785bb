"""TransformerEngine's activation checkpointing, random states and batches of ranks, loss over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from ottava.compat.transformer_engine.pytorch.rope import packed_on_rank
from ottava.engine.functional import refuse_second_derivative
from ottava.kernels.gate import no_autocast
from ottava.nn.cross_entropy import CrossEntropy, Vocabulary
from ottava.nn.layer import recomputing
from ottava.nn.rope import packed_positions
from ottava.nn.sharding import SharedVocabulary, all_gather


def _random() -> Any:
    """torch's functions for the random state of the GPU; without one, of the CPU."""
    return torch.cuda if torch.cuda.is_available() else torch.random


class CudaRNGStatesTracker:
    """Named random states: dropout that all ranks share, and dropout of each rank's own shard.

    The states are those of the GPU, or without a GPU those of the CPU.

    Example:
        >>> tracker = CudaRNGStatesTracker()
        >>> tracker.add("model-parallel-rng", 1)
        >>> with tracker.fork():
        ...     first = torch.rand(2)
        >>> with tracker.fork():
        ...     second = torch.rand(2)
        >>> torch.equal(torch.cat([first, second]), torch.rand(4, generator=torch.Generator().manual_seed(1)))
        True
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Name -> state, in a new dict."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Takes states that `get_states` gave."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A new state from a seed.

        Raises:
            RuntimeError: the name or the seed is taken.
        """
        if seed in self.seeds_ or name in self.states_:
            what = f"seed {seed}" if seed in self.seeds_ else f"name {name!r}"
            raise RuntimeError(f"CudaRNGStatesTracker.add: the {what} exists already; give another, or call reset()")
        self.seeds_.add(seed)
        self.states_[name] = _random().get_rng_state()
        with self.fork(name):
            _random().manual_seed(seed)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws from a state inside, and goes on with it at the next fork.

        Raises:
            KeyError: the name is unknown.
        """
        if name not in self.states_:
            raise KeyError(f"CudaRNGStatesTracker.fork: no state {name!r}; add(name, seed) makes one")
        before = _random().get_rng_state()
        _random().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _random().get_rng_state()
            _random().set_rng_state(before)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> Any:
    """Runs a function without saving tensors for its backward, and runs it again in the backward.

    The recomputation uses the recipe and the scales of the forward. ottava stashes no scales for this.

    Args:
        function: a module or a function of tensors.
        args: its arguments.
        use_reentrant: as in torch.utils.checkpoint.
        distribute_saved_activations: with use_reentrant=True, each rank of tp_group keeps its part of the first
            argument and gathers it in the backward; else it changes nothing. All ranks must have the same argument.
        get_rng_state_tracker: returns a `CudaRNGStatesTracker`; the recomputation draws from its states again.
        tp_group: None: all ranks.
        others: keyword arguments of the function, and of torch.utils.checkpoint.
    Raises:
        ValueError: ranks that cannot share the first argument evenly.

    Example:
        >>> import torch
        >>> checkpoint(torch.nn.ReLU(), torch.ones(2), use_reentrant=False)
        tensor([1., 1.])
    """
    run = function if get_rng_state_tracker is None else _tracked(function, get_rng_state_tracker)
    if use_reentrant and others:  # torch passes keywords only where it saves by hooks
        own = {name: others.pop(name) for name in ("preserve_rng_state",) & others.keys()}
        given, run = run, lambda *inputs: given(*inputs, **others)
    else:
        own = others
    if not (use_reentrant and distribute_saved_activations):
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **own)
    group = dist.group.WORLD if tp_group is None else tp_group
    with torch.autograd.graph.saved_tensors_hooks(*_shares_of(args[0], group)):
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True, **own)


def _tracked(function: Callable[..., Any], get_tracker: Callable[[], Any]) -> Callable[..., Any]:
    """The function; a second call draws the numbers of the first."""
    first: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        tracker = get_tracker()
        now = tracker.get_states()
        if not first:
            first.append(now)
            return function(*args, **kwargs)
        tracker.set_states(dict(first[0]))
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    return run


def _shares_of(first: Tensor, group: Any) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that save a part of this tensor on each rank, and gather it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if first.numel() % ranks:
        raise ValueError(
            f"checkpoint: {ranks} ranks cannot share a first argument of {first.numel()} numbers evenly; leave "
            "distribute_saved_activations out"
        )

    def pack(saved: Tensor) -> Any:
        if saved is not first:
            return saved
        return saved.detach().reshape(-1).chunk(ranks)[rank].clone(), saved.shape

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, shape = kept
        everything = own.new_empty(own.numel() * ranks)
        all_gather(everything, own, group)
        whole: Tensor = everything.view(shape)
        return whole

    return pack, unpack


def is_fp8_activation_recompute_enabled() -> bool:
    """False: ottava stashes nothing for a recomputation, which reads the scales of its forward."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this forward repeats another one in a backward."""
    return recomputing()


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Cross-entropy of logits whose classes may be split over ranks, in FP32.

    Args:
        inp: (..., classes) logits; each rank's (..., classes / ranks), in the order of the ranks. Only the gradient has
            its dtype.
        target: integers (...), numbers of classes of all ranks.
        label_smoothing: the share of a target that all classes divide.
        reduce_loss: the mean over the tokens that count; False: a loss for each token.
        dist_process_group: the ranks; None: this process has all classes.
        ignore_idx: the target of tokens without loss and gradient.
        is_cg_capturable: unused; no call waits for the device.
    Returns:
        fp32 (...) or a number. Ranks exchange three numbers a token.
    Raises:
        ValueError: shapes that do not go together.

    Example:
        >>> parallel_cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, -100]]))
        tensor([[1.3863, 0.0000]])
    """
    if inp.shape[:-1] != target.shape:
        raise ValueError(
            f"parallel_cross_entropy: got logits {tuple(inp.shape)} for targets {tuple(target.shape)}; needs "
            f"({', '.join(map(str, target.shape))}, classes)"
        )
    vocabulary = Vocabulary()
    if dist_process_group is not None:
        rank, ranks, here = dist.get_rank(dist_process_group), dist.get_world_size(dist_process_group), inp.shape[-1]
        vocabulary = SharedVocabulary(dist_process_group, rank * here, ranks * here, split=False)
    settings = CrossEntropy(ignore_index=ignore_idx, label_smoothing=label_smoothing)
    flat = target.flatten().to(torch.int64)
    losses: Tensor = _ParallelCrossEntropy.apply(settings, vocabulary, inp.reshape(-1, inp.shape[-1]), flat)
    if reduce_loss:
        return losses.sum() / (flat != ignore_idx).sum().clamp(min=1)
    return losses.view(target.shape)


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: CrossEntropy, vocabulary: Vocabulary, logits: Tensor, target: Tensor) -> Tensor:
        ctx.settings, ctx.vocabulary = settings, vocabulary
        with no_autocast(logits.device):
            losses, lse = settings.of(logits.float(), target, vocabulary)
        ctx.save_for_backward(logits, target, lse)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None]:
        if torch.is_grad_enabled():
            refuse_second_derivative("parallel_cross_entropy", "use torch's cross_entropy there")
        logits, target, lse = ctx.saved_tensors
        with no_autocast(logits.device):
            wide = logits.to(torch.float32, copy=True)
            d = ctx.settings.gradient(wide, lse, target, grads[0].float(), ctx.vocabulary)
        return None, None, d.to(logits.dtype), None


def _padded(cu_seqlens: Tensor, factor: int) -> Tensor:
    """Starts of the sequences once each is as long as a multiple of the factor."""
    return torch.cat([cu_seqlens[:1], (-(-cu_seqlens.diff() // factor) * factor).cumsum(0).to(cu_seqlens.dtype)])


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pads each of the packed sequences to a multiple of the factor, for context parallelism.

    Args:
        input_ids, labels: (1, T) or (T,).  cu_seqlens: starts of the sequences, and T.
    Returns:
        both as (padded T,), and the new starts.

    Example:
        >>> pad_thd_sequences_for_cp(torch.tensor([5, 6, 7]), torch.zeros(3), torch.tensor([0, 1, 3]), 2)[0]
        tensor([5, 0, 6, 7])
    """
    padded = _padded(cu_seqlens, divisibility_factor)
    places = packed_positions(cu_seqlens) + padded[:-1].repeat_interleave(cu_seqlens.diff())
    made = [
        one.new_full((int(padded[-1]),), fill).index_copy(0, places, one.flatten())
        for one, fill in ((input_ids, padding_token_id), (labels, padding_label_id))
    ]
    return made[0], made[1], padded


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Positions (padded T,) of sequences padded by `pad_thd_sequences_for_cp`; they count through the padding."""
    return packed_positions(_padded(cu_seqlens, divisibility_factor)).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: dist.ProcessGroup | None = None,
    qvk_format: str = "thd",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """This rank's part of packed sequences: of each, a piece from the front and its mirror image from the back.

    Args:
        input_ids_padded, labels_padded, position_ids_padded: (T,), (B, T, ...), else (T, B, ...).
    Raises:
        ValueError: another format than "thd", or no dimension of the tokens.
    """
    if qvk_format != "thd":
        raise ValueError(f"get_batch_on_this_cp_rank: got qvk_format {qvk_format!r}; needs 'thd': packed sequences")
    size, rank = dist.get_world_size(cp_group), dist.get_rank(cp_group)
    places, lengths = packed_on_rank(cu_seqlens_padded, size, rank)
    places, total = places + cu_seqlens_padded[:-1].repeat_interleave(lengths), int(cu_seqlens_padded[-1])

    def part(whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        dimension = next((at for at in (1, 0) if at < whole.dim() and whole.shape[at] == total), None)
        if dimension is None:
            raise ValueError(
                f"get_batch_on_this_cp_rank: got {tuple(whole.shape)}; needs a dimension of {total} tokens"
            )
        return whole.index_select(dimension, places.to(whole.device))

    return part(input_ids_padded), part(labels_padded), part(position_ids_padded)


@runtime_checkable
class DistributedWeight(Protocol):
    """A parameter that a trainer keeps elsewhere, in shards for instance: its class, a subclass of torch.Tensor, makes
    the numbers for a forward, makes them again for the backward, and takes the gradients, all for a group of weights.
    """

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Any: ...

    def materialize_group_for_backward(self) -> Any: ...

    def finalize_group_grads(self, wgrads: Any) -> Any: ...

    def grad_buffer(self) -> Tensor: ...


def is_distributed_weight(weight: Any) -> bool:
    """Whether it is a `DistributedWeight`.

    Raises:
        TypeError: it says so, and is no torch.Tensor subclass.
    """
    says = bool(getattr(weight, "is_distributed_weight", False))
    if says and not isinstance(weight, Tensor):
        raise TypeError(f"got a DistributedWeight of {type(weight).__name__}; needs a torch.Tensor subclass")
    return says


def _asked(weights: Any, otherwise: Any, method: str, *args: Any) -> list[Any]:
    """What the first weight of a group answers; otherwise: of ordinary weights."""
    first = weights[0] if isinstance(weights, list | tuple) else weights
    made = getattr(first, method)(*args) if is_distributed_weight(first) else otherwise
    return list(made) if isinstance(made, list | tuple) else [made]


def materialize_weight_for_forward(weights: Any) -> list[Any]:
    """The weights of a forward: what the first one gives, or themselves."""
    return _asked(weights, weights, "materialize_group_for_forward")


def materialize_weight_for_backward(weights: Any) -> list[Any]:
    """The weights of a backward."""
    return _asked(weights, weights, "materialize_group_for_backward")


def finalize_weight_grads(weights: Any, wgrads: Sequence[Any]) -> list[Any]:
    """Gives gradients to the first weight; returns what autograd gets: its answer, or the gradients."""
    return _asked(weights, wgrads, "finalize_group_grads", wgrads if len(wgrads) > 1 else wgrads[0])


def gathered(module: nn.Module, names: Sequence[str], x: Tensor, *args: Any) -> Tensor:
    """module(x, *args) with distributed weights of these names; the backward runs it again on the weights it gets."""
    parameters = dict(module.named_parameters())
    keys = (*names, *(name for name in parameters if name not in names))

    def run(x: Tensor, *given: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(keys, given, strict=True)), (x, *args))

    return _Gathered.apply(run, len(names), x, *(parameters[key] for key in keys))  # type: ignore[no-any-return]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], count: int, x: Tensor, *given: Tensor) -> Tensor:
        ctx.run, ctx.count, ctx.given = run, count, given
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, *materialize_weight_for_forward(given[:count]), *given[count:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        weights = ctx.given[: ctx.count]
        whole = [*ctx.saved_tensors, *materialize_weight_for_backward(weights), *ctx.given[ctx.count :]]
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in whole]
            dx, *grads = torch.autograd.grad(ctx.run(*inputs), inputs, dy)
        return None, None, dx, *finalize_weight_grads(weights, grads[: ctx.count]), *grads[ctx.count :]


def quantize_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Casts masters into quantized weights; each rank holds flat parts, beginning at its offsets, or None.

    The ranks add up their parts in FP32, and each casts whole weights: all have all codes, those of one process.
    TransformerEngine sends amaxes, and its caller the codes.

    Raises:
        NotImplementedError: fsdp_shard_model_weights.
    """
    if any(shard is not None for shard in fsdp_shard_model_weights or ()):
        raise NotImplementedError(
            "quantize_master_weights: fsdp_shard_model_weights is not in ottava; give whole weights, or shard those of "
            "quantized_model_init with torch's fully_shard: the optimizers of ottava.optim cast shards"
        )
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if master is not None and start is not None:
            whole[start : start + master.numel()] = master.detach().flatten().to(weight.dtype)
        dist.all_reduce(whole, group=group)
        with torch.no_grad():
            weight.copy_(whole.view(weight.shape).to(weight.dtype))

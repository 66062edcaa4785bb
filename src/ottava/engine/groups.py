"""Finds the ranks that share the amaxes of a model, compares their recipes, lets a rank without batches take part, and
records what a step sends (`Collectives`).

Ranks compare their recipes through the store of their process group, not by a collective: a rank with another recipe
would not enter the collective. They compare when a wrapper takes the model, and at a boundary if specs have changed.

A setting that names a dtype of communication may be ignored on one path of a framework (pytorch #190626:
`reduce_dtype`). What travels is known where it is sent: in torch's operators of `c10d`, under DDP, FSDP2, DTensor and
our own layers.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ottava.numerics.formats import dtype_name
from ottava.numerics.tensor import QuantizationSpec

PATIENCE = 300.0
"""Seconds for which a rank waits for the recipe of another, if its group's timeout is no shorter."""
_WRAPS = ("module", "_fsdp_wrapped_module")
"""The names under which DistributedDataParallel and FullyShardedDataParallel keep the wrapped model."""


def when_wrapped(tell: Callable[[nn.Module, nn.Module], None]) -> None:
    """Registers tell(wrapper, model), to be called whenever a DistributedDataParallel or a FullyShardedDataParallel
    takes a model."""

    def hook(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if name in _WRAPS and submodule is not None and vars(module).get("process_group") is not None:
            tell(module, submodule)

    register_module_module_registration_hook(hook)


def refusal(wrapper: nn.Module) -> str:
    """Why predicted scales do not work in a wrapper, with the line to write; "" if they do."""
    if vars(wrapper).get("_inter_node_pg") is not None:
        return (
            "several groups hold this model (FullyShardedDataParallel, HYBRID_SHARD): name the ranks that share "
            "amaxes: ottava.ScalingState(model, group=torch.distributed.group.WORLD)"
        )
    if vars(wrapper).get("_use_orig_params", True):
        return ""
    return (
        "FullyShardedDataParallel has put the weights into flat parameters, so ottava cannot see which optimizer steps "
        "them: write FullyShardedDataParallel(model, use_orig_params=True), or use "
        "torch.distributed.fsdp.fully_shard(model)"
    )


def need_plain(wrapper: nn.Module, model: nn.Module) -> None:
    """Refuses a model that tensor parallelism has split, whose weights DistributedDataParallel cannot send.

    Raises:
        TypeError: with the name of such a parameter, and what to call instead.
    """
    # DDP broadcasts parameters by their memory, and a DTensor has only a part of it
    split = next((name for name, p in model.named_parameters() if hasattr(p, "device_mesh")), None)
    if split is not None and isinstance(wrapper, DistributedDataParallel):
        raise TypeError(
            f"DistributedDataParallel: {split} is a DTensor, split over ranks; torch's DistributedDataParallel sends "
            "plain tensors. Give the model a mesh of two dimensions and call "
            "ottava.distributed.fully_shard(model, mesh=mesh['dp']) in its place"
        )


def mesh_group(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The group of the largest mesh over which parameters of a model are sharded; a part of it may hold others."""
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")] if model else []
    shardings: list[Any] = [vars(module).get("sharding") for module in model.modules()] if model else []
    meshes += [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
    if not meshes:
        return None
    # experts may be sharded over a part of the ranks; amaxes are those of all
    mesh = max(meshes, key=lambda mesh: mesh.size())
    group: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return group


def ddp_around(layers: Iterable[nn.Module]) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running, if it contains one of these layers.

    torch notes one for the process, not for each thread: another thread may run the wrapper of another model.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    inside = {id(module) for module in wrapper.modules()} if wrapper is not None else set()
    return wrapper if any(id(layer) in inside for layer in layers) else None


def agree(group: dist.ProcessGroup, names: Sequence[str], specs: Sequence[QuantizationSpec | None]) -> None:
    """Returns if all ranks of a group have the same specs. Rank 0 compares itself with all, the others with rank 0.

    Args:
        names: of the doors; a rank without doors reports that, and does not wait for others.
        specs: the predicted spec of each door, or None.
    Raises:
        RuntimeError: ranks differ, and the message names the ranks and the first different door; or a rank is silent.
    """
    entry = dist.distributed_c10d._world.pg_map.get(group)  # None: other code than torch.distributed made the group
    if entry is None or (size := dist.get_world_size(group)) < 2:
        return
    # a store, not a collective: a rank with another recipe would enter another collective, and all would wait
    store, rank = entry[1], dist.get_rank(group)
    table = list(dict.fromkeys("none" if s is None else json.dumps(s.to_dict(), sort_keys=True) for s in specs))
    places = {text: i for i, text in enumerate(table)}
    doors = [places["none" if s is None else json.dumps(s.to_dict(), sort_keys=True)] for s in specs]
    mine = {"names": list(names), "table": table, "doors": doors}
    turn = store.add(f"ottava/turn of {rank}", 1)  # the calls of all ranks have one order, as those of collectives
    store.set(f"ottava/{turn}/{rank}", json.dumps(mine))
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # backends of others have none
    patience = PATIENCE if options is None else min(PATIENCE, options._timeout.total_seconds())
    # rank 0 compares itself with all, so every difference is seen by two ranks, in O(ranks) reads
    for other in () if not names else range(1, size) if rank == 0 else (0,):
        key = f"ottava/{turn}/{other}"
        try:
            store.wait([key], timedelta(seconds=patience))
        except dist.DistNetworkError:  # the process that held the store is gone: that is no silence
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"delayed scaling: rank {other} did not say within {patience:g} s which scales it predicts; rank "
                f"{rank} runs {_in_words(mine, 0)} in {names[0] if names else 'no layer'!r}. Give all ranks one recipe"
            ) from error
        theirs = json.loads(store.get(key))
        if theirs != mine:
            raise RuntimeError(_difference(rank, mine, other, theirs))


def _difference(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> str:
    here, there = ({name: _in_words(table, i) for i, name in enumerate(table["names"])} for table in (mine, theirs))
    for name in dict.fromkeys((*here, *there)):
        ours, others = (specs.get(name, "no ottava layer") for specs in (here, there))
        if ours != others:
            return (
                f"delayed scaling: ranks differ in {name!r}: rank {rank} runs {ours}, rank {other} runs {others}. "
                "Their scales would differ: give all ranks the same recipe, in convert and in autocast"
            )
    return f"delayed scaling: ranks {rank} and {other} have their layers in different orders; build one model on all"


def _in_words(table: dict[str, Any], place: int) -> str:
    text = table["table"][table["doors"][place]] if table["doors"] else "none"
    return "no predicted scale" if text == "none" else ", ".join(f"{k} {v}" for k, v in json.loads(text).items())


def joining(wrapper: nn.Module | None) -> bool:
    """Whether a model runs inside DistributedDataParallel.join, where a rank may have run out of batches."""
    config = getattr(wrapper, "_join_config", None)
    return config is not None and bool(config.enable)


def take_part_in_join(wrapper: nn.Module, shadow: Callable[[nn.Module], None]) -> None:
    """From the next `join` on, a rank without batches calls shadow(wrapper) after each reduction of gradients in which
    it takes part."""
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.join_hook = partial(_Join, wrapper, shadow)  # type: ignore[method-assign]


class _Join(JoinHook):
    """torch's hook, and then ours."""

    def __init__(self, wrapper: DistributedDataParallel, shadow: Callable[[nn.Module], None], **settings: Any) -> None:
        self._theirs = DistributedDataParallel.join_hook(wrapper, **settings)
        self._wrapper, self._shadow = weakref.ref(wrapper), shadow

    def main_hook(self) -> None:
        """torch calls this for each iteration of the other ranks."""
        self._theirs.main_hook()
        wrapper = self._wrapper()
        # no_sync accumulates on the other ranks: there is no boundary yet that this rank could take part in
        if wrapper is not None and wrapper.require_forward_param_sync:  # torch's hook sets it if it reduced gradients
            self._shadow(wrapper)

    def post_hook(self, is_last_joiner: bool) -> None:
        """torch calls this after the last rank; it broadcasts parameters and buffers, so histories and scales."""
        self._theirs.post_hook(is_last_joiner)


# --- what a step sends ---

_SPELLED = MappingProxyType({"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"})
# the first that a name begins with: "reduce" would be found in "reduce_scatter", too
_KINDS = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    *("send", "isend", "recv", "irecv"),
)
# what operators of c10d call the tensors that a rank hands over; the others are the results
_INPUTS = ("input", "input_tensor", "inputs", "input_tensors", "input_list", "tensor", "tensors")


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Equal collectives of one rank; `Collectives` records them."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send or recv."""
    dtype: str
    """Of what travels; uint8 for FP8 codes."""
    reduction: str
    """SUM, AVG, MAX, ...; "" if nothing is reduced."""
    ranks: int
    """Size of the group."""
    group: str
    """torch's description of the group, such as the dimension of a mesh."""
    calls: int
    """How often."""
    bytes: int
    """That this rank handed to all calls together."""

    def __str__(self) -> str:
        words = " ".join(filter(None, (self.operation, self.dtype, self.reduction)))
        named = f" ({self.group})" if self.group else ""
        size = f"{self.bytes / 1e6:,.1f} MB" if self.bytes >= 1e5 else f"{self.bytes:,} bytes"
        return f"{words} over {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}{named} x {self.calls} ({size})"


class Collectives(TorchDispatchMode):
    """Records the collectives of this rank inside a context; code outside of it pays nothing.

    `rows` has a row for each operation, dtype, reduction and group, in the order of their first calls; print the
    object, or hand `rows` to `ottava.receipt`. Each rank records its own. The bytes are those that this rank hands to
    torch. FP8 codes are bytes to a collective: their dtype is uint8.

    Edge cases: results keep every bit. Inside the context torch calls Python for each of its operators, which slows a
        step, so record one step. Contexts may be nested.

    Example:
        >>> with Collectives() as sent:
        ...     y = torch.ones(2) + 1
        >>> print(sent)
        no collectives
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[str, str, str, int, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str, int, str]] = Counter()

    @property
    def rows(self) -> tuple[CollectiveRow, ...]:
        """What was sent until now."""
        return tuple(CollectiveRow(*key, calls, self._bytes[key]) for key, calls in self._calls.items())

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no collectives"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DDP calls c10d from C++, so wrapping functions of torch.distributed would miss it; operators pass here,
        # but not those inside a functional collective, which are its own affair
        if func.namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._note(func, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, arguments: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        for joined, apart in _SPELLED.items():
            name = name.replace(joined, apart)
        kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
        tensors = [leaf for leaf in tree_leaves(list(arguments.values())) if isinstance(leaf, Tensor)]
        if kind is None or not tensors:  # waits and barriers
            return
        # a rank that scatters nothing of its own hands over no tensor, but receives one of that dtype
        sent = [leaf for name in _INPUTS for leaf in tree_leaves(arguments.get(name)) if isinstance(leaf, Tensor)]
        group = _group(arguments)
        # torch names the default group, and groups that nobody described, by words that tell nothing
        known = group.group_desc not in ("undefined", "default_pg")
        named = dist.get_world_size(group), group.group_desc if known else ""
        key = kind, dtype_name((sent or tensors)[0].dtype), _reduction(arguments.get("reduce_op")), *named
        self._calls[key] += 1
        self._bytes[key] += sum(one.numel() * one.element_size() for one in sent)


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if (boxed := arguments.get("process_group")) is not None:
        return dist.ProcessGroup.unbox(boxed)
    # torch 2.13 also hands the group itself to functional collectives
    named: Any = arguments["group_name"]
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(named) if isinstance(named, str) else named
    return group


def _reduction(given: Any) -> str:
    # functional collectives name the reduction, those of c10d box it with a number
    if given is None or isinstance(given, str):
        return (given or "").upper()
    return str(dist.ReduceOp.RedOpType(given.op()).name)

"""Which ranks share the amaxes of a model, whether they agree on what they run, and how one that has run out of batches
goes on taking part.

What ranks run is compared through the store of their process group, not by a collective: a rank that runs something
else would not be in that collective. It is compared when a model is wrapped, and at a boundary before which the specs
of its doors have changed.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ottava.quantized_tensor import QuantizationSpec

PATIENCE = 300.0
"""Seconds for which a rank waits for another to say what it runs: both come from one backward."""
_WRAPS = ("module", "_fsdp_wrapped_module")
"""Under which names DistributedDataParallel and FullyShardedDataParallel keep what they wrap."""


def when_wrapped(tell: Callable[[nn.Module, nn.Module], None]) -> None:
    """tell(wrapper, model) from now on, whenever a model is put into a DistributedDataParallel or a
    FullyShardedDataParallel."""

    def hook(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if name in _WRAPS and submodule is not None and vars(module).get("process_group") is not None:
            tell(module, submodule)

    register_module_module_registration_hook(hook)


def refusal(wrapper: nn.Module) -> str:
    """Why predicted scales do not work in a wrapper, with the line to write; "" if they do."""
    if vars(wrapper).get("_inter_node_pg") is not None:
        return (
            "several groups hold this model (FullyShardedDataParallel, HYBRID_SHARD): name the ranks whose amaxes are "
            "shared: ottava.ScalingState(model, group=torch.distributed.group.WORLD)"
        )
    if vars(wrapper).get("_use_orig_params", True):
        return ""
    return (
        "FullyShardedDataParallel has put the weights into flat parameters, so no step of an optimizer is seen to be "
        "theirs: write FullyShardedDataParallel(model, use_orig_params=True), or use "
        "torch.distributed.fsdp.fully_shard(model)"
    )


def mesh_group(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The group of the largest mesh that parameters of a model are sharded over: some may lie on a part of it."""
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")] if model else []
    if not meshes:
        return None
    mesh = max(meshes, key=lambda mesh: mesh.size())
    found: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return found


def ddp_around(layers: Iterable[nn.Module]) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running, if one of these layers is in it.

    torch notes it for the process, not for the thread: in another thread it is the wrapper of another model.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    inside = {id(module) for module in wrapper.modules()} if wrapper is not None else set()
    return wrapper if any(id(layer) in inside for layer in layers) else None


def agree(
    group: dist.ProcessGroup,
    names: Sequence[str],
    specs: Sequence[QuantizationSpec | None],
    patience: float = PATIENCE,
) -> None:
    """Returns when all ranks of a group run the same; the first compares itself with all, the others with the first.

    Args:
        names: of the doors; with none a rank says so, and does not wait for others.
        specs: what each predicts scales for; None: it predicts none.
    Raises:
        RuntimeError: they do not: which rank runs what, at the first door that differs; or a rank did not say.
    """
    held = dist.distributed_c10d._world.pg_map.get(group)  # of a group made elsewhere nothing is known
    if held is None or (size := dist.get_world_size(group)) < 2:
        return
    store, rank = held[1], dist.get_rank(group)
    table = list(dict.fromkeys("none" if s is None else json.dumps(s.to_dict(), sort_keys=True) for s in specs))
    places = {text: i for i, text in enumerate(table)}
    doors = [places["none" if s is None else json.dumps(s.to_dict(), sort_keys=True)] for s in specs]
    mine = {"names": list(names), "table": table, "doors": doors}
    turn = store.add(f"ottava/turn of {rank}", 1)  # ranks take their turns in one order, as they do collectives
    store.set(f"ottava/{turn}/{rank}", json.dumps(mine))
    for other in () if not names else range(1, size) if rank == 0 else (0,):
        key = f"ottava/{turn}/{other}"
        try:
            store.wait([key], timedelta(seconds=patience))
        except RuntimeError as error:
            raise RuntimeError(
                f"delayed scaling: rank {other} has not said within {patience:g} s which scales it predicts; rank "
                f"{rank} runs {_in_words(mine, 0)} in {names[0] if names else 'no layer'!r}. Give all ranks one recipe"
            ) from error
        theirs = json.loads(store.get(key))
        if theirs != mine:
            raise RuntimeError(_difference(rank, mine, other, theirs))


def _difference(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> str:
    ours, others = ({name: _in_words(said, i) for i, name in enumerate(said["names"])} for said in (mine, theirs))
    for name in dict.fromkeys((*ours, *others)):
        one, two = (said.get(name, "no ottava layer") for said in (ours, others))
        if one != two:
            return (
                f"delayed scaling: ranks differ in {name!r}: rank {rank} runs {one}, rank {other} runs {two}. Their "
                "scales would differ: give all ranks the same recipe, in convert and in autocast"
            )
    return f"delayed scaling: ranks {rank} and {other} have their layers in different orders; build one model on all"


def _in_words(said: dict[str, Any], place: int) -> str:
    text = said["table"][said["doors"][place]] if said["doors"] else "none"
    return "no predicted scale" if text == "none" else ", ".join(f"{k} {v}" for k, v in json.loads(text).items())


def joining(wrapper: nn.Module | None) -> bool:
    """Whether a model is in a context of DistributedDataParallel.join, where a rank may have no batch any more."""
    config = getattr(wrapper, "_join_config", None)
    return config is not None and bool(config.enable)


def take_part_in_join(wrapper: nn.Module, shadow: Callable[[nn.Module], None]) -> None:
    """From its next `join` on, a rank that has no batch calls shadow(wrapper) once for each backward of the others that
    reduces gradients, after it has taken part in that reduction."""
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.join_hook = partial(_Join, wrapper, shadow)  # type: ignore[method-assign]


class _Join(JoinHook):
    """torch's own hook, and then ours."""

    def __init__(self, wrapper: DistributedDataParallel, shadow: Callable[[nn.Module], None], **settings: Any) -> None:
        self._theirs = DistributedDataParallel.join_hook(wrapper, **settings)
        self._wrapper, self._shadow = weakref.ref(wrapper), shadow

    def main_hook(self) -> None:
        """For each iteration of the others."""
        self._theirs.main_hook()
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.require_forward_param_sync:  # as torch's has left it: gradients were reduced
            self._shadow(wrapper)

    def post_hook(self, is_last_joiner: bool) -> None:
        """When all have ended: torch hands on the parameters and buffers, histories and scales among them."""
        self._theirs.post_hook(is_last_joiner)

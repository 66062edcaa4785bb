"""`ShardedWeight`: ranks hold shards of a weight in BF16 or FP32, and FSDP2 gathers its FP8 codes.

Each rank casts its rows with the scales that the whole weight has and sends codes, a byte a number. What the layer gets
is a weight stored as codes (`weights.parameter.QuantizedWeight`), whose bits are those of a cast after a gather in
BF16. Where W and W.T have other scales (rows, MX blocks), a forward gets the codes of W and a backward those of W.T.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ottava.base.errors import need
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.engine.state import after_steps
from ottava.nn.layer import LayerView
from ottava.nn.sharding import all_gather
from ottava.numerics.scaling import PER_TENSOR, amax, read_scales
from ottava.numerics.tensor import Lent, QuantizationSpec, QuantizedTensor
from ottava.ops.agreed import AgreedCast, largest_of_all
from ottava.ops.quantize import quantize
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight, scale_dtype, store_scales, stored_spec

Cells = tuple[QuantizationSpec, QuantizationSpec]
"""Of W (N, K) and of W.T (K, N)."""
W, W_T = 0, 1
"""The two sides of a weight; also the dimension of the operand along which the ranks split it."""


@dataclass
class Gathering:
    """What the gathers of one weight share, forward and backward."""

    module: weakref.ref[nn.Module]
    """To which `fully_shard` was applied."""
    lent: Lent = field(default_factory=Lent)
    """What the last gather has brought to the layer."""
    spare: Tensor | None = None
    """Memory for codes and scales of W.T, where one gather has to bring both sides; FSDP2 frees it with the rest."""
    scale: Tensor | None = None
    """The predicted scale of the last forward; its backward casts with it, too."""


class _Sent(NamedTuple):
    """What a gather tells its receiver on the same rank."""

    sides: tuple[int, ...]
    """Whose codes travel; the first ones with FSDP2."""
    known: list[Tensor | None]
    """For each of them: scale_inv, where all ranks have that of the whole weight."""
    by_hand: Tensor
    """uint8 (ranks, n): what FSDP2 does not carry: scales of uneven shards; codes and scales of a second side."""
    size: int
    """Bytes of the scales of a shard."""
    rows: int
    """Of a shard, filled up."""
    height: int
    """Of the weight."""
    amax: Tensor | None


class ShardedWeight(Tensor):
    """A weight, or this rank's rows of one, in high precision, that FSDP2 gathers as codes.

    Args:
        values: (N, K) or rows of it; its memory is shared.
        cells: how W and W.T are cast in front of a gather.
        gathering: of this weight.
        known: one entry, if all ranks have agreed since the last change: the amaxes for W and for W.T that reach over
            ranks (`_reaching`). Aliases of the same numbers share the list.

    Every operation runs on the values. Those that FSDP2 shards and moves with give another ShardedWeight.
    """

    numbers: Tensor
    cells: Cells
    gathering: Gathering
    known: list[tuple[Tensor | None, ...]]

    @staticmethod
    def __new__(
        cls: type[ShardedWeight], values: Tensor, cells: Cells, gathering: Gathering, known: Any = ()
    ) -> ShardedWeight:
        weight: ShardedWeight = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        weight.numbers, weight.cells, weight.gathering = values, cells, gathering
        weight.known = known if isinstance(known, list) else list(known)
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch means it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch hands the operation first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = [one for one in tree_leaves((args, kwargs)) if isinstance(one, ShardedWeight)]
        args_, kwargs = tree_map_only(ShardedWeight, lambda weight: weight.numbers, (args, kwargs))
        made = func(*args_, **kwargs)
        if func._schema.is_mutable:
            for weight in weights:
                weight.known.clear()
            if isinstance(args[0], ShardedWeight):
                return args[0]
        if (shares := _KEPT.get(str(func))) is None:
            return made
        first = weights[0]
        known: Any = first.known if shares == "memory" else tuple(first.known) if shares == "numbers" else ()
        wrapped = [
            cls(one, first.cells, first.gathering, known)
            for one in (made if isinstance(made, list | tuple) else (made,))
        ]
        return wrapped if isinstance(made, list | tuple) else wrapped[0]

    @property
    def two_scales(self) -> bool:
        """Whether W and W.T are cast with scales of their own, so that codes of one do not make the other."""
        row, col = self.cells
        return not row.granularity.transposes or stored_spec(row) != stored_spec(col)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The codes of this shard as bytes, filled up to the rows that all ranks send, and the scales of its blocks."""
        values = self.numbers.to(mp_policy.param_dtype or self.dtype)
        group, ranks, backward = mesh.get_group(), mesh.size(), torch._C._current_graph_task_id() != -1
        if not self.known:
            agree(group, [self], values.device)
        # rounding keeps the order: the amax of rounded values is the rounded amax
        largest = [None if one is None else one.to(values).to(torch.float32) for one in self.known[0]]
        sides, scale = self._sides(backward), self._predicted_scale(module, backward)
        casts = [_cast(values, self.cells[side], side, largest[side], scale) for side in sides]
        rows = -(-outer_size[0] // ranks)
        size = max(_scale_bytes(cell, side, rows, outer_size[1]) for side, cell in enumerate(self.cells))
        codes = [_filled(one.data.t() if side else one.data, rows) for side, one in zip(sides, casts, strict=True)]
        scales = [_to_bytes(one, side, size) for side, one in zip(sides, casts, strict=True)]
        # torch gathers one tensor on one rank, and of uneven shards only tensors of their shape
        carried = size > 0 and ranks > 1 and outer_size[0] % ranks == 0
        rest = [part for pair in zip(codes, scales, strict=True) for part in pair][2 if carried or not size else 1 :]
        known = [
            one.scale_inv if _rows_of(one.spec, side) is None else None for side, one in zip(sides, casts, strict=True)
        ]
        sent = _Sent(sides, known, _gathered(rest, group), size, rows, outer_size[0], largest[W])
        return (codes[0], scales[0]) if carried else (codes[0],), sent

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight, stored as the codes that were gathered."""
        (data, *others), sent, of, (row, _) = all_gather_outputs, metadata, self.gathering, self.cells
        ranks, width = data.shape[0] // sent.rows, data.shape[1]
        shard = sent.rows * width
        if out is None:
            grid = row.granularity.grid_shape((sent.height, width))
            scales = torch.empty(grid, dtype=scale_dtype(row), device=data.device)
            codes = data.view(row.format.storage_dtype)[: sent.height]
            if self.two_scales:
                of.spare = torch.empty(ranks * (shard + sent.size), dtype=torch.uint8, device=data.device)
            weight: Any = QuantizedWeight(codes, scales, stored_spec(row), param_dtype, lent=of.lent)
        else:
            weight = out.to_local() if isinstance(out, DTensor) else out
        sent_scales = others[0].view(ranks, -1) if others else sent.by_hand[:, : sent.size]
        received = {sent.sides[0]: (data, sent_scales, sent.known[0])}
        if len(sent.sides) == 2:
            received[W_T] = self._set_aside(sent, ranks, shard)
        elif of.spare is not None:
            of.spare.untyped_storage().resize_(0)  # FSDP2 has made it, and this gather has no use for it
        lent = of.lent
        lent.holds_w, lent.amax, lent.of_w_t = W in received, sent.amax, None
        lent.w_t = stored_spec(self.cells[W_T]) if self.two_scales else None
        if lent.holds_w:
            own = _operand(*received[W], row, W, sent, param_dtype)
            weight.scales.data.copy_(store_scales(own.scale_inv, row))
        if W_T in received:
            lent.of_w_t = partial(_operand, *received[W_T], self.cells[W_T], W_T, sent, param_dtype)
        if out is None:
            return weight, (*all_gather_outputs, weight.scales, *([] if of.spare is None else [of.spare]))
        return None

    def _sides(self, backward: bool) -> tuple[int, ...]:
        """Whose codes a gather brings: what its pass needs, and what a later pass needs that will not gather again."""
        of = self.gathering
        if not self.two_scales:
            return (W,)
        if (backward and of.lent.again) or _keeps(of.module(), backward):
            return W, W_T
        return (W_T,) if backward else (W,)

    def _predicted_scale(self, module: Any, backward: bool) -> Tensor | None:
        """Of the layer's door; a backward casts with the scale of its forward."""
        of, spec = self.gathering, self.cells[W]
        if spec.predicted and (of.scale is None or not backward):
            of.scale = module.quantizers.weight.scale_for(spec, self.device, False).clone()
        return of.scale

    def _set_aside(self, sent: _Sent, ranks: int, shard: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales of W.T that came beside those of W, in memory that FSDP2 frees."""
        spare = self.gathering.spare
        assert spare is not None
        codes, scales = spare[: ranks * shard].view(ranks, shard), spare[ranks * shard :].view(ranks, sent.size)
        codes.copy_(sent.by_hand[:, -shard - sent.size : sent.by_hand.shape[1] - sent.size])
        scales.copy_(sent.by_hand[:, sent.by_hand.shape[1] - sent.size :])
        return codes.view(ranks * sent.rows, -1), scales, sent.known[1]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers"], (self.cells, self.gathering)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], said: Any, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["numbers"], *said)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers.detach().__reduce_ex__(protocol)  # a checkpoint holds plain numbers

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        row, col = self.cells
        codes = f"{row} and {col}" if self.two_scales else f"{row}"
        return f"ShardedWeight({tuple(self.shape)}, {self.dtype}, gathered as {codes})"


_KEPT = MappingProxyType(
    {
        f"aten.{name}": shares
        for shares, names in (
            ("memory", ("detach.default", "alias.default", "view.default", "as_strided.default")),
            ("memory", ("slice.Tensor", "split.Tensor")),
            ("numbers", ("clone.default", "_to_copy.default", "_pin_memory.default")),
            ("", ("empty_like.default", "new_zeros.default")),
        )
        for name in names
    }
)
"""The operations whose result is a ShardedWeight -> what it shares with the first argument."""


@torch.no_grad()
def agree(group: dist.ProcessGroup, weights: Sequence[ShardedWeight], device: torch.device | str) -> None:
    """One all-reduce tells the ranks of a group the amaxes that reach over them, of all these weights."""
    own = [[_reaching(weight, side) for side in (W, W_T)[: 1 + weight.two_scales]] for weight in weights]
    sizes = [0 if one is None else one.numel() for sides in own for one in sides]
    if sum(sizes):
        every = torch.cat([one.reshape(-1) for sides in own for one in sides if one is not None]).to(device)
        parts = iter(largest_of_all(every, group).split([size for size in sizes if size]))
    for weight, sides in zip(weights, own, strict=True):
        weight.known[:] = [tuple(None if one is None else next(parts).view(one.shape) for one in sides)]


def refuse_cells(cells: tuple[QuantizationSpec | None, QuantizationSpec | None], height: int, ranks: int) -> str:
    """Why a weight of that many rows is not gathered as codes from that many ranks; "" if it is."""
    row, col = cells
    if row is None or col is None:
        return f"the recipe leaves {'the weight' if row is col else 'W' if row is None else 'W.T'} in high precision"
    if row.predicted != col.predicted:
        return f"one of {row} and {col} has a predicted scale"
    for side, spec in enumerate((row, col)):
        if spec.transform is not None:
            return f"{spec}: each rank would transform rows of its own"
        if spec.rounding != "nearest_even":
            return f"{spec}: each rank would draw random bits of its own"
        extent = _rows_of(spec, side)
        if extent is not None and ranks > 1 and -(-height // ranks) % extent:
            return f"{spec}: {height} rows on {ranks} ranks would cut blocks of {extent}"
    return ""


class _KnownCast(AgreedCast):
    """A cast with amaxes on which the ranks have agreed already."""

    def __init__(self, largest: Tensor | None) -> None:
        self.dim, self.known = 0, largest

    def _largest(self, amaxes: Tensor) -> Tensor:
        assert self.known is not None
        return self.known


def _cast(
    values: Tensor, spec: QuantizationSpec, side: int, largest: Tensor | None, scale: Tensor | None
) -> QuantizedTensor:
    """This rank's rows of W, or columns of W.T, with the scales of the whole weight."""
    if spec.granularity == PER_TENSOR and not spec.predicted:
        assert largest is not None
        given = spec.scale_of(largest)
        cast = quantize(values, spec, scale=given.scale)
        cast = QuantizedTensor(
            cast.data, given.scale_inv, spec, cast.dtype, cast.amax
        )  # NaN where another rank has one
        return cast.t() if side else cast
    row, col = (spec, None) if side == W else (None, spec)
    both = _KnownCast(largest)(values, row, col, scale=scale)
    made = both.row or both.col
    assert made is not None
    return made


def _reaching(weight: ShardedWeight, side: int) -> Tensor | None:
    """The amaxes that the ranks have to agree on before a cast: one of the tensor, or one for each column."""
    spec, values = weight.cells[side], weight.numbers.t() if side else weight.numbers
    if spec.scale_format == "e4m3":  # two levels: the upper one is that of the largest block that is finite
        blocks = amax(values, spec.granularity)
        return amax(torch.where(blocks.isfinite(), blocks, 0.0))
    return amax(values, spec.granularity) if _rows_of(spec, side) is None else None


def _keeps(module: nn.Module | None, backward: bool) -> bool:
    """Whether FSDP2 keeps what it gathers now for the pass after this one."""
    state: Any = module._get_fsdp_state() if module is not None else None  # type: ignore[operator]  # torch has no public word for it
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    kept = (not (one.reshard_after_backward if backward else one._reshard_after_forward) for one in groups if one)
    return any(kept)


def _rows_of(spec: QuantizationSpec, side: int) -> int | None:
    """Rows of W that share a block; None: all."""
    return spec.granularity.cols if side else spec.granularity.rows


def _grid(spec: QuantizationSpec, side: int, rows: int, width: int) -> tuple[int, int]:
    """Blocks along the rows and along the columns of W."""
    granularity = spec.granularity.transposed if side else spec.granularity
    return granularity.grid_shape((rows, width))


def _scale_bytes(spec: QuantizationSpec, side: int, rows: int, width: int) -> int:
    if _rows_of(spec, side) is None:
        return 0  # all ranks know it
    high, wide = _grid(spec, side, rows, width)
    return high * wide * scale_dtype(spec).itemsize


def _to_bytes(cast: QuantizedTensor, side: int, size: int) -> Tensor:
    """The scales of a shard, uint8 (size,): E8M0 in a byte, others in fp32."""
    if _rows_of(cast.spec, side) is None:
        return torch.zeros(size, dtype=torch.uint8, device=cast.device)
    grid = (cast.scale_inv.t() if side else cast.scale_inv).reshape(-1)
    sent = store_scales(grid, cast.spec).view(torch.uint8)
    return nn.functional.pad(sent, (0, size - sent.numel()))


def _operand(
    codes: Tensor,
    scales: Tensor,
    known: Tensor | None,
    spec: QuantizationSpec,
    side: int,
    sent: _Sent,
    dtype: torch.dtype,
) -> QuantizedTensor:
    """The operand of W or W.T of gathered bytes: codes (ranks * rows, K), scales (ranks, n)."""
    data = codes.view(spec.format.storage_dtype)[: sent.height]
    if known is None:
        high, wide = _grid(spec, side, sent.rows, codes.shape[1])
        used = scales[:, : high * wide * scale_dtype(spec).itemsize].contiguous()
        numbers = read_scales(used.view(scale_dtype(spec)))
        known = numbers.view(-1, wide)[: _grid(spec, side, sent.height, codes.shape[1])[0]]
        known = known.t().contiguous() if side else known
    if side:
        data = data.t() if data.is_cpu else data.t().contiguous()  # as an accelerator's GEMMs want it
    return QuantizedTensor(data, known, spec, dtype)


def _filled(codes: Tensor, rows: int) -> Tensor:
    codes = codes.contiguous().view(torch.uint8)
    return nn.functional.pad(codes, (0, 0, 0, rows - codes.shape[0])) if codes.shape[0] < rows else codes


def _gathered(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The bytes of all ranks: uint8 (ranks, n)."""
    ranks = dist.get_world_size(group)
    if not parts or ranks == 1:
        return torch.cat([part.view(-1) for part in parts])[None] if parts else torch.empty(ranks, 0, dtype=torch.uint8)
    own = torch.cat([part.view(-1) for part in parts])
    every = own.new_empty(ranks * own.numel())
    all_gather(every, own, group)
    return every.view(ranks, -1)


# --- fully_shard ---


def fully_shard(module: nn.Module | Sequence[nn.Module], **settings: Any) -> Any:
    """torch.distributed.fsdp.fully_shard; weights of ottava's layers inside are gathered as FP8 codes.

    Args:
        module: converted, or a list of such; call it for blocks first and for the model last, as torch's.
        settings: torch's: mesh, reshard_after_forward, mp_policy, offload_policy, ...
    Returns:
        The module, as torch's.
    Warns: with the layers that FSDP2 gathers in high precision, and why: blocks that a shard would cut, a weight that
        two modules share, a number as reshard_after_forward.
    Edge cases: where W and W.T have scales of their own (rows, MX blocks), a forward gathers codes of W and a backward
        those of W.T. A gather that serves both passes (reshard_after_forward=False, activation checkpointing) brings
        both: the bytes of BF16. The layer refuses an autocast to a recipe with another weight cell;
        autocast(enabled=False) computes with the gathered codes. Weights that are stored as codes already are gathered
        as they are. Gradients travel in high precision.

    Example:
        >>> import ottava
        >>> from ottava.distributed.fsdp import refuse_gather
        >>> layer = ottava.nn.Linear(64, 64, recipe="tensorwise"), ottava.nn.Linear(64, 64, recipe="blockwise")
        >>> [refuse_gather(one, 2) for one in layer]
        ['', 'E4M3[128x128, pow2]: 64 rows on 2 ranks would cut blocks of 128']
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    for one in modules:
        need("fully_shard", one, nn.Module, "a torch.nn.Module, or a list of such")
    mesh, again = settings.get("mesh"), settings.get("reshard_after_forward")
    ranks = mesh.size(mesh.ndim - 1) if mesh is not None else dist.get_world_size()
    holders = _holders(modules)
    ignored = {id(parameter) for parameter in settings.get("ignored_params") or ()}
    reasons: dict[str, str] = {}
    for layer in [layer for one in modules for layer in quantized_layers(one)]:
        parameter: Any = layer.parameter
        if isinstance(parameter, DTensor | ShardedWeight) or is_quantized_weight(parameter) or id(parameter) in ignored:
            continue  # sharded by an earlier call, stored as codes, or not to be sharded
        reason = refuse_gather(layer, ranks)
        if not reason and holders[id(parameter)] > 1:
            reason = "another module holds its weight, too"
        if not reason and type(again) is int and again != ranks:
            reason = f"torch reshards to {again} ranks only what it gathers in high precision"
        if reason:
            reasons[layer.name] = reason
            continue
        row, col = layer.resolved.cells("weight")
        assert row is not None
        assert col is not None
        weight = ShardedWeight(layer.weight.detach(), (row, col), Gathering(weakref.ref(modules[0])))
        layer._parameters["weight"] = nn.Parameter(weight, layer.weight.requires_grad)
    if reasons:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        warnings.warn(f"fully_shard: these weights are gathered in high precision:{lines}", stacklevel=2)
    sharded = fsdp.fully_shard(module, **settings)  # type: ignore[arg-type]  # its overloads know no union
    for one in modules:
        _agree_after_steps(one)
    return sharded


def refuse_gather(layer: QuantizedLayer, ranks: int) -> str:
    """Why a layer's weight is not gathered as codes from that many ranks; "" if it is."""
    if isinstance(layer, LayerView):
        return "its weight is a piece of a parameter that another module holds"
    return refuse_cells(layer.resolved.cells("weight"), layer.weight.shape[0], ranks)


def _holders(modules: Sequence[nn.Module]) -> dict[int, int]:
    """id of a parameter -> how many modules hold it."""
    counts: dict[int, int] = {}
    for inner in {id(inner): inner for one in modules for inner in one.modules()}.values():
        for parameter in inner._parameters.values():
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _agree_after_steps(module: nn.Module) -> None:
    """After each step of an optimizer that holds these weights, one all-reduce tells the amaxes of all of them."""
    known = weakref.ref(module)
    for inner in module.modules():  # one all-reduce for a model, not one for each of its blocks
        vars(inner).pop("_agreeing", None)

    def after(optimizer: Optimizer) -> None:
        model = known()
        if model is not None:
            _agree(model, {id(p) for group in optimizer.param_groups for p in group["params"]})

    vars(module)["_agreeing"] = after  # it lives as long as the module does
    after_steps(after)


def _agree(model: nn.Module, stepped: set[int]) -> None:
    groups: dict[Any, list[ShardedWeight]] = {}
    for parameter in model.parameters():
        if id(parameter) in stepped and isinstance(parameter, DTensor):
            weight = parameter._local_tensor
            if isinstance(weight, ShardedWeight):
                # the other dimension of an HSDP mesh holds replicas
                dim = next(i for i, place in enumerate(parameter.placements) if place.is_shard())
                mesh = parameter.device_mesh
                groups.setdefault((mesh.get_group(dim), mesh.device_type), []).append(weight)
    for (group, device), weights in groups.items():
        agree(group, weights, device)

"""How layers run whose weights are split over ranks: linears and norms, classes of a vocabulary, and experts.

    split by output features    y_r = x @ W_r^T        dx = sum over ranks of dy_r @ W_r
    split by input features     y = sum over ranks of x_r @ W_r^T        dx_r = dy @ W_r
    classes split               lse = log sum over ranks of exp lse_r    the target's logit: a sum over ranks
    experts split               rows travel to their experts, and results back

Where activations are split along their tokens between such layers (sequence parallelism), x or dy of all ranks is
gathered in front of a GEMM. Each rank casts its own tokens, and the codes travel: half of the bytes of BF16. Sums over
ranks travel in the dtype of the activations. Of a vocabulary no rank holds the logits of all classes, not even of one
token: ranks exchange three numbers a token, and sum dx.

Experts: x of this rank's tokens, sorted by expert -> all to all -> by expert, then by rank -> the experts of this rank,
and y the same way back. Where the recipe lets `GroupedLinear` cast rows before they are sorted, their codes and scales
travel: a byte a number. Rows of one expert lie in the order of the ranks and of their tokens, so that GEMMs have the
bits of one process that has all tokens in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ottava.engine.functional import produced
from ottava.kernels.gate import mapped
from ottava.kernels.reference import factors
from ottava.nn.cross_entropy import _BLOCK, Vocabulary
from ottava.nn.grouped import Permutation
from ottava.nn.layer import split_projections
from ottava.nn.norms import LayerNorm, RMSNorm
from ottava.numerics.scaling import amax
from ottava.numerics.tensor import Operand, QuantizationSpec, QuantizedTensor
from ottava.ops.agreed import AgreedCast, largest_of_all, scaled_by_hand
from ottava.ops.quantize import CastPlan, cast_both
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight, local


def all_gather(everything: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """torch's; torch 2.13 has a new name for it, and warns about the old one."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(everything, own, group=group)


def reduce_scatter(own: Tensor, everything: Tensor, group: dist.ProcessGroup) -> None:
    """torch's, under either name."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(own, everything, group=group)


class GatheredOnce:
    """What several layers gather of one input, so that it travels once: the codes of x in the forward, and those of x.T
    in the backward until every layer has had them."""

    def __init__(self) -> None:
        self.held: dict[Any, Operand] = {}
        self.waiting = 0
        """Layers whose backward has not come."""

    def take(self, operand: Operand, dim: int, gather: Callable[[], Operand]) -> Operand:
        """The tokens of all ranks; gathered by the first layer that asks."""
        spec = operand.spec if isinstance(operand, QuantizedTensor) else None
        if spec is not None and (spec.predicted or not spec.repeatable):
            return gather()  # the codes of another layer may be others
        key = spec, operand.dtype, dim
        if key not in self.held:
            self.held[key] = gather()
        gathered = self.held[key]
        self.waiting += 1 if dim == 0 else -1
        if not self.waiting:
            self.held.clear()
        return gathered

    def forward_ends(self) -> None:
        """Nobody asks for x any more."""
        self.held = {key: operand for key, operand in self.held.items() if key[-1]}


class Tokens:
    """Which tokens a rank holds: of activations (..., features) split along a leading dimension.

    Args:
        group: the ranks, in the order of their tokens.
        shape: leading dimensions on this rank.
        dim: which of them is split.
        once: what other layers have gathered of the same tensor.
    """

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], dim: int, once: GatheredOnce | None = None
    ) -> None:
        self.group, self.ranks, self.once = group, dist.get_world_size(group), once
        self.outer, self.inner = math.prod(shape[:dim]), math.prod(shape[dim:])

    def gather(self, operand: Operand, dim: int) -> Operand:
        """The tokens of all ranks in their order, as codes; dim: where the operand has them."""
        if self.once is not None:
            return self.once.take(operand, dim, lambda: self._gather(operand, dim))
        return self._gather(operand, dim)

    def _gather(self, operand: Operand, dim: int) -> Operand:
        if isinstance(operand, Tensor):
            return self._joined(operand, dim, 1)
        granularity, transform = operand.spec.granularity, operand.spec.transform
        block = (granularity.rows, granularity.cols)[dim]
        turned = transform.group if transform is not None and dim == 1 else None
        together = math.lcm(block or 1, turned or 1)
        if self.inner % together:
            does = "rotates" if turned is not None and turned % (block or 1) == 0 else "shares a scale between"
            raise ValueError(
                f"sequence parallelism: {operand.spec} {does} {together} neighbouring tokens; got "
                f"{self.inner} tokens of a sequence on each rank, which is no multiple. Pad the sequence to a multiple "
                f"of {together * self.ranks}, or take a recipe per tensor or per row"
            )
        scale_inv = operand.scale_inv if block is None else self._joined(operand.scale_inv, dim, block)
        data = self._joined(operand.data, dim, 1)
        return QuantizedTensor(data, scale_inv, operand.spec, operand.dtype, aside=operand.aside)  # of all ranks

    def _joined(self, x: Tensor, dim: int, block: int) -> Tensor:
        """Entries of all ranks along dim, one for each block of tokens."""
        if dim == 1 and x.t().is_contiguous():
            return self._joined(x.t(), 0, block).t()
        codes = x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x.contiguous()  # gloo knows no FP8
        inner = self.inner // block
        everything = codes.new_empty((self.ranks * codes.shape[0], codes.shape[1]))
        all_gather(everything, codes, group=self.group)
        if dim == 0:
            joined = everything.view(self.ranks, self.outer, inner, -1).transpose(0, 1).reshape(-1, x.shape[1])
        else:
            split = everything.view(self.ranks, x.shape[0], self.outer, inner)
            joined = split.permute(1, 2, 0, 3).reshape(x.shape[0], -1)
        return joined.view(x.dtype)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of (all tokens, features), of which this rank gets its own tokens."""
        parts = partial.view(self.outer, self.ranks, self.inner, -1).transpose(0, 1).contiguous()
        own = parts.new_empty((self.outer * self.inner, parts.shape[-1]))
        reduce_scatter(own, parts.flatten(0, 2), group=self.group)
        return own


class Replicated:
    """All ranks hold all tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(self, operand: Operand, dim: int) -> Operand:
        """They are here."""
        return operand

    def sum(self, partial: Tensor) -> Tensor:
        """Over all ranks."""
        dist.all_reduce(partial, group=self.group)
        return partial


class SplitExchange:
    """What a layer with a split weight does between its casts and GEMMs, see `functional.Exchange`.

    Args:
        held: the tokens of this rank, on the side of the layer that its weight does not split.
        split: which dimension of the weight is split: with 0 that side is the input, with 1 the output.
        sums: whether the layer itself sums over the ranks.
    """

    def __init__(self, held: Tokens | Replicated, split: int, *, sums: bool = True) -> None:
        self.held, self.sums = held, sums
        self.gathered, self.summed = (("input", "dx"), ("grad_output", "y"))[split]

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """Of all ranks, if this is the side where they hold tokens."""
        return self.held.gather(operand, dim) if tensor == self.gathered else operand

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """Over all ranks, if each of them has a part of it."""
        return self.held.sum(partial) if tensor == self.summed and self.sums else partial

    def __str__(self) -> str:
        ranks = dist.get_world_size(self.held.group)
        gathers = f", {self.gathered} gathered as it was cast" if isinstance(self.held, Tokens) else ""
        return f"weight split over {ranks} ranks{gathers}"


class Sharding:
    """Where the ranks of a mesh hold parts of a layer's weight, and of its activations.

    Args:
        mesh: of one dimension.
        split: of the weight (N, K): 0, by output features ("colwise"), or 1, by input features ("rowwise").
        input, output: what comes into the layer and what leaves it, on each rank.
        local_output: hand on this rank's tensor and not a DTensor.

    Output may be Partial where `split` is 1: then somebody behind the layer sums over the ranks.
    """

    def __init__(
        self, mesh: DeviceMesh, split: int, input: Placement, output: Placement, *, local_output: bool = True
    ) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"tensor parallelism: got a mesh of {mesh.ndim} dimensions; give one of them: mesh['tp']")
        self.mesh, self.split, self.input, self.output = mesh, split, input, output
        self.local_output, self.group = local_output, mesh.get_group()
        self._settled: Any = None

    def apply(self, layer: Any, src_data_rank: int | None = 0) -> None:
        """Splits the parameters of a layer, and makes its doors cast shards as the whole would be cast.

        Raises:
            ValueError: heads that the ranks cannot share.
        """
        if self.split == 0 and layer.projections:
            for name, rows, unit in layer.projections:
                if unit > 1 and rows % (unit * self.mesh.size()):
                    raise ValueError(
                        f"{layer.name or type(layer).__name__}: {name} has {rows // unit} heads, which "
                        f"{self.mesh.size()} ranks cannot share; needs a multiple. Take fewer ranks, or a model whose "
                        "keys and values have more heads"
                    )
            split_projections(layer)
        layer.sharding = self
        for module in layer.modules():
            if isinstance(module, LayerNorm | RMSNorm):
                module.sharding = TokenSharding(self.mesh, self.input)
            for name, parameter in list(module._parameters.items()):
                if is_quantized_weight(parameter):
                    module._parameters[name] = shard_codes(parameter, self.mesh, self.split, src_data_rank)
                else:
                    place_parameter(
                        module, name, self.mesh, self._place(name) if module is layer else Replicate(), src_data_rank
                    )
        if self.split and getattr(layer, "smooth", None) is not None:
            layer.smooth = distribute_tensor(layer.smooth, self.mesh, [Shard(0)], src_data_rank=src_data_rank)

    def _place(self, name: str) -> Placement:
        """Where a parameter of the layer itself is: NAME_weight is a piece of the weight."""
        if name.endswith("weight"):
            return Shard(self.split)
        return Replicate() if self.split else Shard(0)

    def _settle(self, layer: Any, tokens_place: Placement) -> None:
        """Lets the doors of a layer cast shards as the whole matrix would be cast."""
        doors = layer.quantizers
        spec = layer.resolved.wgrad.lhs
        if isinstance(tokens_place, Shard) and spec is not None and spec.transform and spec.transform.each_column:
            raise ValueError(
                f"sequence parallelism: {spec} has a number for each token, and a rank that multiplies gradients of "
                "all tokens knows those of its own. Take a recipe without that transform in wgrad"
            )
        features, tokens = (doors.input, doors.grad_output) if self.split else (doors.grad_output, doors.input)
        doors.weight.cast = AgreedCast(self.group, self.split)
        features.cast = AgreedCast(self.group, 1)
        tokens.cast = AgreedCast(self.group, 0) if isinstance(tokens_place, Shard) else cast_both

    def forward(self, layer: Any, input: Tensor, *more: Any) -> Tensor:
        """`Layer.forward` on this rank's shards."""
        x, place = self._enter(layer, input)
        weight, own_bias = local(layer.weight), None if layer.returns_bias else layer.bias
        if self.split and isinstance(own_bias, DTensor):
            whole = isinstance(self.output, Replicate)
            own_bias = own_bias.to_local(grad_placements=(Replicate() if whole else Partial(),))
        own_bias = local(own_bias)
        layer.exchange, tokens = self._exchange(list(x.shape[:-1]), place, vars(input).get("once"))
        rows = self._run(layer, x, weight, None if self.split else own_bias, *more)
        y = rows.view(*tokens, rows.shape[-1])
        if self.split and own_bias is not None:
            if isinstance(self.output, Partial) and self.mesh.get_local_rank():
                own_bias = own_bias * 0  # it is added once
            y = y + own_bias
        return self._leave(y, layer.out_features)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return Sharding(self.mesh, self.split, self.input, self.output, local_output=self.local_output)

    def parameters_of(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Those of what stands in front of the cast; each rank has seen only its tokens of them."""
        return _on_rank(given, self._settled[1] if self._settled else self.input)

    def _enter(self, layer: Any, input: Tensor) -> tuple[Tensor, Placement]:
        """What this rank's GEMM reads, and where the tokens are on the side that the weight does not split."""
        place = self.input
        if isinstance(input, DTensor):
            (came,) = input.placements
            gathers = not self.split and isinstance(came, Shard) and came.dim % input.dim() < input.dim() - 1
            place = came if gathers else place
            input = input.redistribute(self.mesh, (place,)).to_local()
        place = self.output if self.split else place
        if self._settled != (layer.quantizers, place):
            self._settle(layer, place)
            self._settled = layer.quantizers, place
        return input, place

    def _run(self, layer: Any, x: Tensor, *rest: Tensor | None) -> Tensor:
        """The layer on this rank's rows; its receipt says what it exchanges."""
        y: Tensor = layer.run(x.reshape(-1, x.shape[-1]), *rest)
        if layer.last_call is not None:
            layer.last_call.remark = str(layer.exchange)
        return y

    def _leave(self, y: Tensor, features: int) -> Tensor:
        made: Placement = self.output if self.split else Shard(y.dim() - 1)
        if self.local_output and _same(made, self.output, y.dim()):
            return y
        shape = list(y.shape)
        if isinstance(made, Shard):
            shape[made.dim] = features if made.dim == y.dim() - 1 else shape[made.dim] * self.mesh.size()
        size = torch.empty(shape, device="meta")  # ranks may have unlike shares of the features
        whole = DTensor.from_local(y, self.mesh, (made,), run_check=False, shape=size.shape, stride=size.stride())
        whole = whole.redistribute(self.mesh, (self.output,))
        return whole.to_local() if self.local_output else whole

    def _exchange(
        self, shape: list[int], place: Placement, once: GatheredOnce | None
    ) -> tuple[SplitExchange, list[int]]:
        """What a layer does between cast and GEMM for tokens of that shape, and the shape of those that leave it."""
        ranks = self.mesh.size()
        if not isinstance(place, Shard):
            return SplitExchange(Replicated(self.group), self.split, sums=not isinstance(place, Partial)), shape
        dim = place.dim % (len(shape) + 1)
        if dim == len(shape):
            raise ValueError(f"tensor parallelism: {place} splits features here; needs a dimension of tokens")
        if not self.split:
            held = Tokens(self.group, shape, dim, once)
            return SplitExchange(held, 0), [*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]]
        if shape[dim] % ranks:
            raise ValueError(
                f"sequence parallelism: got {shape[dim]} tokens along dimension {dim} for {ranks} ranks; pad them to "
                "a multiple"
            )
        own = [*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]]
        return SplitExchange(Tokens(self.group, own, dim), 1), own


def place_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, place: Placement, src_data_rank: int | None = 0
) -> None:
    """Makes a plain parameter of a module a DTensor; None and DTensors stay."""
    parameter = module._parameters[name]
    if parameter is not None and not isinstance(parameter, DTensor):
        whole = distribute_tensor(parameter, mesh, [place], src_data_rank=src_data_rank)
        module._parameters[name] = nn.Parameter(whole, parameter.requires_grad)


def shard_codes(weight: QuantizedWeight, mesh: DeviceMesh, split: int, src_data_rank: int | None) -> nn.Parameter:
    """This rank's codes and scales of a weight that is stored only as codes, as a DTensor.

    Args:
        split: which dimension of (N, K) is split.
        src_data_rank: the rank whose codes all take; None: each its own.
    Raises:
        ValueError: a block, or a row with a scale of its own, would be cut.
    """
    if src_data_rank is not None:
        source = dist.get_global_rank(group := mesh.get_group(), src_data_rank)
        dist.broadcast(weight.codes.view(torch.uint8), source, group=group)
        dist.broadcast(weight.scale_inv, source, group=group)
    granularity, ranks, rank = weight.spec.granularity, mesh.size(), mesh.get_local_rank()
    block, other = (granularity.rows, granularity.cols)[split], (granularity.rows, granularity.cols)[1 - split]
    share = -(-weight.shape[split] // ranks)
    if (block is None and other is not None) or (block is not None and share % block):
        cut = "rows, each with one scale" if block is None else f"blocks of {block}"
        raise ValueError(
            f"tensor parallelism: {tuple(weight.shape)} stored as {weight.spec}, split along dimension {split} over "
            f"{ranks} ranks, would cut {cut}. Take a recipe per tensor, a number of ranks that leaves whole blocks, or "
            "ottava.convert(model, recipe, weights='bf16')"
        )
    codes = weight.codes.view(torch.uint8).split(share, split)[rank].contiguous().view(weight.codes.dtype)
    scale_inv = weight.scale_inv if block is None else weight.scale_inv.split(share // block, split)[rank].contiguous()
    kept = None if weight.high_precision is None else weight.high_precision.split(share, split)[rank].clone()
    own = weight.like(codes, scale_inv.clone(), group=mesh.get_group(), high_precision=kept)
    size, strides = weight.shape, weight.stride()
    whole = DTensor.from_local(own, mesh, [Shard(split)], run_check=False, shape=size, stride=strides)
    return nn.Parameter(whole, weight.requires_grad)


class TokenSharding:
    """Where each rank runs a norm on rows of its own; the gradients of the norm's parameters are summed over ranks.

    Args:
        mesh: of one dimension.
        place: of the rows: Shard(dim), or Replicate(): then nothing is summed.
        local_output: hand on this rank's tensor and not a DTensor.
    """

    def __init__(self, mesh: DeviceMesh, place: Placement, *, local_output: bool = True) -> None:
        self.mesh, self.place, self.local_output = mesh, place, local_output

    def apply(self, norm: nn.Module) -> None:
        """Every rank keeps whole parameters, as rank 0 has them."""
        norm.sharding = self  # type: ignore[assignment]  # it is no module
        for name in norm._parameters:
            place_parameter(norm, name, self.mesh, Replicate())

    def forward(self, formula: Any, input: Tensor, parameters: Sequence[Tensor | None]) -> Tensor:
        """The rows of this rank; a DTensor comes back as one unless local tensors were asked for."""
        split = isinstance(input, DTensor)
        rows = input.redistribute(self.mesh, (self.place,)).to_local() if isinstance(input, DTensor) else input
        y = produced(formula, rows, *_on_rank(parameters, self.place))
        if self.local_output and not split:
            return y
        whole = DTensor.from_local(y, self.mesh, (self.place,), run_check=False)
        return whole.to_local() if self.local_output else whole

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenSharding:
        return self


def _on_rank(parameters: Sequence[Tensor | None], place: Placement) -> tuple[Tensor | None, ...]:
    """Replicated parameters, of which each rank sees only its tokens where these are split."""
    places: tuple[Placement, ...] = (Partial(),) if isinstance(place, Shard) else (Replicate(),)
    return tuple(t.to_local(grad_placements=places) if isinstance(t, DTensor) else t for t in parameters)


def refuse_split(weight: Tensor) -> str | None:
    """Why no layer runs on its shard of a weight that torch has split; None if one does."""
    if not isinstance(weight, DTensor):
        return "tensor-parallel, but its weight is no DTensor: its class has a forward of its own"
    if weight.device_mesh.ndim != 1:
        return "sharded over several dimensions of a mesh: call ottava.convert before fully_shard"
    if weight.placements[0] not in (Shard(0), Shard(1)):
        return f"tensor-parallel, but its weight is {weight.placements[0]}: it is split neither by rows nor by columns"
    return None


def shard_by_torch(layer: Any) -> None:
    """Lets a layer run on its shard of a weight that one of torch's styles has split, and `refuse_split` takes.

    The hooks of that style hand it DTensors and take them: what they gather or sum, they do in high precision. The
    styles of `ottava.distributed` gather codes.
    """
    split = layer.weight.placements[0].dim
    input, output = (Shard(-1), Partial()) if split else (Replicate(), Shard(-1))
    layer.sharding = Sharding(layer.weight.device_mesh, split, input, output, local_output=False)


def _same(one: Placement, other: Placement, dims: int) -> bool:
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim % dims == other.dim % dims
    return one == other


class SharedVocabulary(Vocabulary):
    """This rank's classes; an `Exchange` of its layer, too.

    Args:
        group: the ranks, in the order of their classes.
        first, every: this rank's first class, and the number of all.
        split: whether each rank has tokens of its own; False: all have all.
    """

    def __init__(self, group: dist.ProcessGroup, first: int, every: int, split: bool) -> None:
        self.group, self.first, self.every, self.split = group, first, every, split
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, tensor: str, operand: Operand, dim: int) -> Operand:
        """The tokens of all ranks, as codes."""
        return self._held(operand.shape[dim]).gather(operand, dim) if tensor == "input" else operand

    def sum(self, tensor: str, partial: Tensor) -> Tensor:
        """Over the classes of all ranks; where tokens are split, of those of this rank."""
        return self._held(partial.shape[0] // self.ranks).sum(partial) if tensor == "dx" else partial

    def _held(self, tokens: int) -> Tokens | Replicated:
        return Tokens(self.group, (tokens,), 0) if self.split else Replicated(self.group)

    def everybody(self, of_tokens: Tensor) -> Tensor:
        """(m,) -> (ranks * m,), or itself."""
        if not self.split:
            return of_tokens
        every = of_tokens.new_empty(self.ranks * of_tokens.shape[0])
        all_gather(every, of_tokens.contiguous(), group=self.group)
        return every

    def own(self, of_tokens: Tensor) -> Tensor:
        """This rank's."""
        return of_tokens.chunk(self.ranks)[self.rank] if self.split and of_tokens.numel() else of_tokens

    def total(self, count: Tensor) -> Tensor:
        """Summed where tokens are split."""
        if self.split:
            dist.all_reduce(count, group=self.group)
        return count

    def classes(self, here: int) -> int:
        """All."""
        return self.every

    def at_once(self, tokens: int) -> int:
        """Whole blocks, so that a chunk of all ranks has about as many tokens."""
        return max(_BLOCK, tokens // self.ranks // _BLOCK * _BLOCK) if self.split else tokens

    def places(self, target: Tensor, counts: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """In this rank's logits."""
        at = target - self.first
        inside = counts & (at >= 0) & (at < here)
        return torch.where(inside, at, 0), inside

    def reduced(self, logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One gather of three numbers a token."""
        mine = torch.stack((logits.logsumexp(-1), own, logits.sum(-1)))
        every = mine.new_empty(self.ranks * 3, mine.shape[1])
        all_gather(every, mine, group=self.group)
        lse, target, total = every.view(self.ranks, 3, -1).unbind(1)
        return lse.logsumexp(0), target.sum(0), total.sum(0) / self.every

    def __str__(self) -> str:
        return f"classes split over {self.ranks} ranks"


class VocabularySharding(Sharding):
    """Splits the classes of a `LinearCrossEntropy`. Every rank gets the loss of all tokens.

    Where the input's tokens are split, each rank gives the targets of its own.
    """

    def apply(self, layer: Any, src_data_rank: int | None = 0) -> None:
        """As of other layers.

        Raises:
            ValueError: a rank would have no class.
        """
        share = -(-layer.weight.shape[0] // self.mesh.size())
        if share * (self.mesh.size() - 1) >= layer.weight.shape[0]:
            raise ValueError(
                f"ColwiseParallel: {layer.weight.shape[0]} classes leave a rank of {self.mesh.size()} without one; "
                "take fewer ranks, or pad the vocabulary"
            )
        self.first = share * self.mesh.get_local_rank()
        super().apply(layer, src_data_rank)

    def forward(self, layer: Any, input: Tensor, *more: Any) -> Tensor:
        """(..., K) and targets (...) -> the loss."""
        x, place = self._enter(layer, input)
        (target,) = map(local, more)
        layer.exchange = SharedVocabulary(self.group, self.first, layer.weight.shape[0], isinstance(place, Shard))
        loss = self._run(layer, x, local(layer.weight), local(layer.bias), target.flatten())
        return loss.view(target.shape) if loss.dim() else loss


def all_to_all(rows: Tensor, to: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows for each rank, one after the other -> rows of each rank. They travel as bytes: gloo knows no FP8."""
    flat = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize < 4 else rows.contiguous()
    arrived = flat.new_empty((sum(come), *flat.shape[1:]))
    dist.all_to_all_single(arrived, flat, come, to, group=group)
    return arrived.view(rows.dtype)


class RankPermutation:
    """What a `Permutation` is for one process: rows of the experts of this rank, from the tokens of all ranks.

    Args:
        own: of this rank's tokens to all experts.
        group: the ranks, in the order of their experts.
    """

    travels: ClassVar[bool] = True

    def __init__(self, own: Permutation, group: dist.ProcessGroup) -> None:
        ranks, self.own, self.group = dist.get_world_size(group), own, group
        sent = own.counts.view(ranks, -1)  # (ranks, experts of each)
        ones = [1] * ranks
        came = all_to_all(sent, ones, ones, group)  # (ranks, experts of this one)
        self.counts = came.sum(0)
        numbers = torch.cat((sent.sum(1), came.sum(1), self.counts)).tolist()  # the host waits once for all of them
        self.to, self.come, self.sizes = numbers[:ranks], numbers[ranks : 2 * ranks], tuple(numbers[2 * ranks :])
        expert = torch.arange(came.shape[1], device=came.device).repeat(ranks)
        expert = expert.repeat_interleave(came.flatten(), output_size=sum(self.come))
        self.rows = expert.argsort(stable=True)
        """int64 (M,): where each row lies among those that came."""
        self.back = self.rows.argsort()

    def gather(self, x: Tensor) -> Tensor:
        """This rank's tokens -> rows of this rank's experts, without a gradient."""
        return self.deliver(self.own.gather(x))

    def cast(self, x: Tensor, spec: QuantizationSpec, plans: dict[Any, CastPlan]) -> QuantizedTensor:
        """`gather` as codes, where all rows of an expert have one scale: that of their amax on all ranks.

        Returns:
            codes (M, K), and the scale of each row (M, 1).
        """
        parts = self.own.gather(x.detach()).split(self.own.sizes)
        own = [amax(part) if part.numel() else x.new_zeros(1, 1, dtype=torch.float32) for part in parts]
        factor = factors(largest_of_all(torch.cat(own), self.group), spec, None)
        by_hand, codes = scaled_by_hand(spec), []
        for part, scale in zip(parts, factor.scale.unbind(), strict=True):
            cast = cast_both(part, by_hand, None, scale=scale.reshape(()), plans=plans).row
            assert cast is not None
            codes.append(cast.data.view(torch.uint8))
        mine = factor.scale_inv.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        data = self.deliver(torch.cat(codes)).view(spec.format.storage_dtype)
        return QuantizedTensor(data, mine.repeat_interleave(self.counts, 0, output_size=sum(self.sizes)), spec, x.dtype)

    def combine(self, y: Tensor) -> Tensor:
        """Rows of this rank's experts -> the sum of each token's rows, without a gradient."""
        return self.own.combine(self.collect(y))

    def deliver(self, rows: Tensor) -> Tensor:
        """Rows of this rank's tokens, sorted by expert -> rows of this rank's experts."""
        return all_to_all(rows, self.to, self.come, self.group).index_select(0, self.rows)

    def collect(self, rows: Tensor) -> Tensor:
        """The inverse of `deliver`."""
        return all_to_all(rows.index_select(0, self.back), self.come, self.to, self.group)


class ExpertRanks:
    """The ranks among which the experts of an `MoE` are divided.

    Args:
        mesh: of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()

    def apply(self, moe: Any, src_data_rank: int | None = 0) -> None:
        """Leaves this rank its experts of an `MoE`.

        Raises:
            ValueError: experts that the ranks cannot share evenly.  TypeError: weights that are stored as codes.
        """
        ranks = self.mesh.size()
        for layer in (moe.up, moe.down):
            experts = layer.weight.shape[0]
            if experts % ranks:
                raise ValueError(
                    f"ExpertParallel: {experts} experts on {ranks} ranks; needs as many on each. Take a number of "
                    f"ranks that divides {experts}"
                )
            if is_quantized_weight(layer.weight):
                raise TypeError(
                    "ExpertParallel: the experts are stored only as codes, which torch cannot divide among ranks; call "
                    "ottava.convert(model, recipe, weights='bf16') first"
                )
            layer.first = experts // ranks * self.mesh.get_local_rank()
            for part in layer.groups:
                part.first = layer.first
            for name in layer._parameters:
                place_parameter(layer, name, self.mesh, Shard(0), src_data_rank)
        moe.ranks = self

    def plan(self, own: Permutation) -> Any:
        """Where this rank's rows go, and which come."""
        return RankPermutation(own, self.group)

    def collect(self, rows: Tensor, plan: RankPermutation) -> Tensor:
        """Results of this rank's experts -> those of this rank's tokens, sorted by expert."""
        return mapped(plan.collect, plan.deliver, rows)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model whose experts lie on several ranks cannot be pickled: its process group exists here only. Save "
            "its state_dict with torch.distributed.checkpoint"
        )

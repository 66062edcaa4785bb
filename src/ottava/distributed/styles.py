"""Tensor and sequence parallelism: styles for torch's `parallelize_module`, under which FP8 codes travel.

They stand where torch's styles of the same names stand, with the same arguments. On a linear layer

- a `ColwiseParallel` whose input is split along its tokens gathers FP8 codes, and sums dx back onto the tokens;
- a `RowwiseParallel` whose output is split along its tokens sums y onto them, and gathers the codes of dy;
- scales are those of the whole tensors: the ranks agree on an amax before they cast.

Convert before or after. Layers that are not converted run in high precision. On an embedding they are torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequence

from ottava.distributed.context import GatheredKeys
from ottava.engine.functional import quantized_layers
from ottava.nn.attention import DotProductAttention
from ottava.nn.convert import convert
from ottava.nn.cross_entropy import LinearCrossEntropy
from ottava.nn.layer import Layer, Projection
from ottava.nn.mlp import NormMLP
from ottava.nn.moe import MoE
from ottava.nn.norms import LayerNorm, RMSNorm
from ottava.nn.sharding import (
    ExpertRanks,
    GatheredOnce,
    Sharding,
    TokenSharding,
    VocabularySharding,
)
from ottava.nn.transformer import MultiheadAttention, TransformerLayer
from ottava.ops.agreed import AgreedCast


class ColwiseParallel(TorchColwise):
    """A linear layer split by its output features.

    Args:
        input_layouts: Replicate() (the default), or Shard(1) where the tokens of (batch, tokens, features) are split.
        output_layouts: Shard(-1) by default.
        use_local_output: hand on this rank's tensor; False: a DTensor.
        pieces: the weights that lie below each other in a fused one, name -> rows. Each becomes a parameter
            NAME_weight; every rank holds a share of each. None: those that the layer knows: q, k and v of a
            MultiheadAttention, gate and up of a NormMLP.
    Raises:
        TypeError: the module is neither a linear layer nor an embedding.
        ValueError: pieces that do not add up, or heads that the ranks cannot share.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        >>> plan["up"].input_layouts == (Shard(1),)
        True
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        pieces: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.pieces = tuple(Projection(name, rows) for name, rows in (pieces or {}).items())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        (input,), (output,) = self.input_layouts, self.output_layouts
        kind = VocabularySharding if isinstance(module, LinearCrossEntropy) else Sharding
        sharding = kind(device_mesh, 0, input, output, local_output=self.use_local_output)
        return _split(self, module, sharding, self.pieces)


class RowwiseParallel(TorchRowwise):
    """A linear layer split by its input features.

    Args:
        input_layouts: Shard(-1) by default: what a ColwiseParallel hands on.
        output_layouts: Replicate() (the default), or Shard(1) for tokens that are split.
        use_local_output: hand on this rank's tensor; False: a DTensor.
    Raises:
        TypeError: the module is neither a linear layer nor an embedding.

    Example:
        >>> RowwiseParallel().output_layouts[0].is_replicate()
        True
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        if isinstance(module, LinearCrossEntropy):
            raise TypeError("RowwiseParallel: a LinearCrossEntropy is split by its classes; needs ColwiseParallel")
        (input,), (output,) = self.input_layouts, self.output_layouts
        return _split(self, module, Sharding(device_mesh, 1, input, output, local_output=self.use_local_output))


class PrepareInput(ParallelStyle):
    """Says how the first input of a module is split, and leaves it so: the layers inside gather its codes.

    In place of torch's PrepareModuleInput in front of an attention or an MLP with ColwiseParallel layers, which would
    gather it in BF16. Layers that cast it alike share one gather: q, k and v; gate and up. Predicted scales are each
    layer's own, so under delayed scaling each gathers for itself.

    Args:
        input_layouts: of the first positional argument.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> PrepareInput(input_layouts=Shard(1)).input_layouts == Shard(1)
        True
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hand_in(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
            first, *others = inputs
            if not isinstance(first, Tensor) or isinstance(first, DTensor):
                return inputs
            whole = DTensor.from_local(first, device_mesh, (self.input_layouts,), run_check=False)
            once = whole.once = GatheredOnce()  # type: ignore[attr-defined]  # rides on the tensor to the layers
            shared.append(once)
            return whole, *others

        def end(module: nn.Module, inputs: object, output: object) -> None:
            while shared:
                shared.pop().forward_ends()

        shared: list[GatheredOnce] = []
        module.register_forward_pre_hook(hand_in)
        module.register_forward_hook(end, always_call=True)
        return module


class SequenceParallel(TorchSequence):
    """A norm or a dropout on rows that the ranks share: torch's; ottava's norms run on this rank's plain tensor.

    Args:
        sequence_dim: which dimension is split; -2 of (batch, tokens, heads, entries) for a norm over each head.
        use_local_output: hand on this rank's tensor; False: a DTensor, as torch's.

    Example:
        >>> SequenceParallel(use_local_output=True).use_local_output
        True
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LayerNorm | RMSNorm):
            return super()._apply(module, device_mesh)
        TokenSharding(device_mesh, self.sequence_sharding[0], local_output=self.use_local_output).apply(module)
        return module


class ExpertParallel(ParallelStyle):
    """Divides the experts of an `ottava.nn.MoE` among ranks that each have tokens of their own.

    Each rank keeps the router, and experts / ranks of the experts. Codes and scales of the tokens travel to their
    experts where the recipe lets rows be cast first (`tensorwise`, `blockwise`, `mxfp8`), else BF16; the receipt says
    which.

    Raises:
        TypeError: the module is no MoE, or its weights are stored as codes.
        ValueError: experts that the ranks cannot share evenly.
    Edge cases: a rank without a token takes part. Gradients of experts are sums over the tokens of all ranks; those of
        the router are of this rank's tokens and want a sum over ranks. A `capacity_factor` counts the tokens of each
        rank by itself. A watch sees no casts of rows that came as codes.

    Example:
        >>> plan = {"moe": ExpertParallel()}                           # parallelize_module(model, mesh["ep"], plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE):
            raise TypeError(f"ExpertParallel: got a {type(module).__name__}; needs an ottava.nn.MoE")
        ExpertRanks(device_mesh).apply(module, self.src_data_rank)
        return module


class ContextParallel(ParallelStyle):
    """Layers whose ranks hold parts of each sequence and whole weights: casts per tensor have one scale for all of it.

    The gradients of the weights are sums over ranks, which DistributedDataParallel or fully_shard makes on the mesh of
    data and context.

    Args:
        gather_keys: each attention gathers the keys and values of all ranks, and sums their gradients back onto the
            ranks (Llama 3, arXiv 2407.21783, 3.3.2). It runs on any device, under causal masks and windows before the
            query, too. False: attention is torch's: `torch.distributed.tensor.experimental.context_parallel`.
    Raises:
        ValueError: no layer is ottava's, or attention whose keys cannot be gathered.
    Edge cases: blocks, rows and predicted scales need no exchange. Layers that are split over ranks as well
        (`ColwiseParallel`) agree with those ranks only. With gather_keys rank r holds the r-th part of each sequence,
        and all parts have one length; give rotary embeddings the positions of this part.

    Example:
        >>> plan = {"": ContextParallel(gather_keys=True)}             # parallelize_module(model, mesh["cp"], plan)
    """

    def __init__(self, *, gather_keys: bool = False) -> None:
        super().__init__()
        self.gather_keys = gather_keys

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = quantized_layers(module)
        if not layers:
            raise ValueError("ContextParallel: no layer is ottava's; call ottava.convert first")
        for layer in layers:
            if getattr(layer, "sharding", None) is None:
                tokens = AgreedCast(device_mesh.get_group(), 0)
                layer.quantizers.input.cast = layer.quantizers.grad_output.cast = tokens
        for name, attention in module.named_modules() if self.gather_keys else ():
            if isinstance(attention, DotProductAttention):
                if attention.layout == "thd" or attention.resolved.attention is not None:
                    raise ValueError(
                        f"ContextParallel: {name or 'the attention'} takes packed sequences or casts to FP8; gathered "
                        "keys need one of the layouts of four dimensions, and attention in high precision"
                    )
                attention.keys = GatheredKeys(device_mesh.get_group())
        return module


class SplitHeads(ParallelStyle):
    """Attention of which each rank runs some heads: their learned sinks are split."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sink = module._parameters.get("sink")
        if sink is not None:
            split = distribute_tensor(sink, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module._parameters["sink"] = nn.Parameter(split, sink.requires_grad)
        return module


def tensor_parallel_plan(module: nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The plan for `parallelize_module` of everything in a model that is built of ottava's attention and MLP blocks.

    Heads and the features between the two linears of an MLP are split: one sum over ranks behind each block.

    Args:
        module: a TransformerLayer, MultiheadAttention or NormMLP, or any module with some of them inside.
        sequence_parallel: between the blocks each rank holds a part of the tokens: (batch, tokens / ranks, features)
            goes in and comes out, norms run on those, and codes are gathered in front of the GEMMs.
    Returns:
        Names of modules -> styles; add those of the other layers, such as embedding and head.
    Raises:
        ValueError: there is nothing to split.
    Edge cases: the ranks must share the heads of keys and values evenly. Where tokens are split, give ranks different
        seeds for dropout once the weights are made; where they are not, the same.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.TransformerLayer(64, 96, 8, activation="swiglu")
        >>> list(tensor_parallel_plan(layer))
        ['attention.qkv', 'attention.out', 'attention.attention', 'mlp.fc1', 'mlp.fc2']
    """
    layouts = [inner.layout for inner in module.modules() if isinstance(inner, DotProductAttention)]
    dim = 0 if layouts and layouts[0] != "bshd" else 1  # of the tokens: "sbhd", or packed ones
    place: Placement = Shard(dim) if sequence_parallel else Replicate()
    colwise, rowwise = ColwiseParallel(input_layouts=place), RowwiseParallel(output_layouts=place)
    norm = SequenceParallel(sequence_dim=dim, use_local_output=True)
    heads = SequenceParallel(sequence_dim=-2, use_local_output=True)
    plan: dict[str, ParallelStyle] = {}
    for name, block in module.named_modules():
        own: dict[str, ParallelStyle] = {}
        if isinstance(block, MultiheadAttention):
            own = dict.fromkeys(("q", "kv") if block.cross else ("qkv",), colwise) | {"out": rowwise}
            own |= {"attention": SplitHeads()} | ({} if block.q_norm is None else {"q_norm": heads, "k_norm": heads})
        elif isinstance(block, NormMLP):
            own = {"fc1": colwise, "fc2": rowwise}
        elif isinstance(block, TransformerLayer) and sequence_parallel:
            own = {f"norms.{i}": norm for i in range(len(block.norms))}
        plan |= {f"{name}.{part}" if name else part: style for part, style in own.items()}
    if not plan:
        raise ValueError(
            f"tensor_parallel_plan: {type(module).__name__} holds no MultiheadAttention or NormMLP of ottava; write a "
            "plan with ColwiseParallel and RowwiseParallel for its layers"
        )
    return plan


def _split(style: ParallelStyle, module: nn.Module, sharding: Sharding, pieces: Sequence[Projection] = ()) -> nn.Module:
    if not isinstance(module, Layer):
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{type(style).__name__}: got a {type(module).__name__}; needs a linear layer or an embedding. Name "
                "the layers inside it in the plan"
            )
        convert(module, "bf16", filter=lambda name, layer: True)
        assert isinstance(module, Layer)
    module.projections = tuple(pieces) or module.projections
    sharding.apply(module, style.src_data_rank)
    return module

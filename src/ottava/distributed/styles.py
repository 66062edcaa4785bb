"""Tensor and sequence parallelism: styles for torch's `parallelize_module`, under which FP8 codes travel.

They stand where torch's styles of the same names stand, with the same arguments. On a linear layer

- a `ColwiseParallel` whose input is split along its tokens gathers FP8 codes, and sums dx back onto the tokens;
- a `RowwiseParallel` whose output is split along its tokens sums y onto them, and gathers the codes of dy;
- scales are those of the whole tensors: the ranks agree on an amax before they cast.

Convert before or after. Layers that are not converted run in high precision. On an embedding they are torch's own.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from ottava.nn.convert import convert
from ottava.nn.layer import Layer
from ottava.nn.sharding import Sharding


class ColwiseParallel(TorchColwise):
    """A linear layer split by its output features.

    Args:
        input_layouts: Replicate() (the default), or Shard(1) where the tokens of (batch, tokens, features) are split.
        output_layouts: Shard(-1) by default.
        use_local_output: hand on this rank's tensor; False: a DTensor.
    Raises:
        TypeError: the module is neither a linear layer nor an embedding.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        >>> plan["up"].input_layouts == (Shard(1),)
        True
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        (input,), (output,) = self.input_layouts, self.output_layouts
        return _split(self, module, Sharding(device_mesh, 0, input, output, local_output=self.use_local_output))


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
        (input,), (output,) = self.input_layouts, self.output_layouts
        return _split(self, module, Sharding(device_mesh, 1, input, output, local_output=self.use_local_output))


class PrepareInput(ParallelStyle):
    """Says how the first input of a module is split, and leaves it so: the layers inside gather its codes.

    In place of torch's PrepareModuleInput in front of an attention or an MLP with ColwiseParallel layers, which would
    gather it in BF16.

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
            return DTensor.from_local(first, device_mesh, (self.input_layouts,), run_check=False), *others

        module.register_forward_pre_hook(hand_in)
        return module


def _split(style: ParallelStyle, module: nn.Module, sharding: Sharding) -> nn.Module:
    if not isinstance(module, Layer):
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{type(style).__name__}: got a {type(module).__name__}; needs a linear layer or an embedding. Name "
                "the layers inside it in the plan"
            )
        convert(module, "bf16", filter=lambda name, layer: True)
    sharding.apply(module, style.src_data_rank)
    return module

"""Run by test_frameworks under torchrun: megatron-core's GPT model on CPUs, watched and not; rank 0 prints what it saw.

Megatron asks for CUDA where it could do without: for the device of a buffer, the random state of dropout, and a kernel
of TransformerEngine in the router. Those three get their CPU counterparts here; nothing that the watch looks at does.
"""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ottava.measure.layer_names import SYMBOLS
from ottava.watching.modules import ModuleTap

KIND = sys.argv[1]


def config() -> TransformerConfig:
    experts = KIND == "experts"
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=KIND == "sequence parallel",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        num_moe_experts=4 if experts else None,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=not experts,
        gated_linear_unit=experts,
        activation_func=nn.functional.silu if experts else nn.functional.gelu,
        pipeline_dtype=torch.float32,
    )


class Mlp(nn.Module):
    """The two parallel linears, where the norms of a whole model would need TransformerEngine or Apex."""

    def __init__(self) -> None:
        super().__init__()
        how: dict[str, Any] = {"config": config(), "init_method": nn.init.normal_}
        self.linear_fc1 = ColumnParallelLinear(32, 64, gather_output=False, **how)
        self.linear_fc2 = RowParallelLinear(64, 32, bias=True, input_is_parallel=True, skip_bias_add=True, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(torch.relu(self.linear_fc1(x)[0]))[0]


def loss_of(model: nn.Module, number: int) -> Tensor:
    rng = torch.Generator().manual_seed(number)
    if isinstance(model, Mlp):
        x = torch.randn(8, 2, 32, generator=rng).chunk(dist.get_world_size())[dist.get_rank()]
        return model(x.requires_grad_()).square().sum()
    ids = torch.randint(64, (2, 8), generator=rng)
    mask = torch.ones(1, 1, 8, 8).tril() < 0.5
    loss: Tensor = model(ids, torch.arange(8).expand(2, 8), mask, labels=ids).mean()
    return loss


def train(watched: bool) -> tuple[list[Tensor], list[dict[str, Any]]]:
    torch.manual_seed(0)
    layers = get_gpt_layer_local_spec(num_experts=4 if KIND == "experts" else None, normalization="LayerNorm")
    size = {"vocab_size": 64, "max_sequence_length": 32, "share_embeddings_and_output_weights": KIND == "tied"}
    model = Mlp() if KIND == "sequence parallel" else GPTModel(config(), layers, **size)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    tap = ModuleTap(lambda layer, tensor, x: None, tensors=tuple(SYMBOLS))
    for step in range(2):
        if watched:
            tap.attach()
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            loss.backward()
            losses.append(loss.detach())
        tap.detach()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())], tap.coverage()


dist.init_process_group("gloo")
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
moe_utils.te_general_gemm = None
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
get_cuda_rng_tracker().fork = lambda *args, **kwargs: nullcontext(SimpleNamespace())
(numbers, coverage), (unwatched, _) = train(watched=True), train(watched=False)
same = all(torch.equal(a, b) for a, b in zip(numbers, unwatched, strict=True))
if dist.get_rank() == 0:
    print(json.dumps({"same": same, "coverage": coverage}))
dist.barrier()
dist.destroy_process_group()

"""A Megatron-Core script as its users write it: a small GPT of TransformerEngine's layer spec, Megatron's data-parallel
wrapper, schedule and optimizer. Nothing in it names ottava. Prints a line of losses for each recipe.

    python -m ottava.compat.transformer_engine --cpu megatron_script.py --recipes delayed,mxfp8 --tp 2

A recipe "local" is Megatron's own layer spec in BF16.
"""

import argparse
import json
import sys
import types

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--recipes", required=True)
parser.add_argument("--tp", type=int, default=1)
arguments = parser.parse_args()

# Apex's CUDA extension, which Megatron's own output layer wants for gradient_accumulation_fusion
apex = types.ModuleType("fused_weight_gradient_mlp_cuda")
apex.wgrad_gemm_accum_fp32 = lambda x, dy, main_grad: main_grad.addmm_(dy.float().t(), x.float())
sys.modules[apex.__name__] = apex
torch.distributed.init_process_group("nccl")

from megatron.core import parallel_state  # noqa: E402  # a script's imports follow its set-up
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

parallel_state.initialize_model_parallel(tensor_model_parallel_size=arguments.tp)
model_parallel_cuda_manual_seed(0)
ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
tokens = torch.randint(0, 128, (16, 32), generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
places = torch.arange(32)[None].expand(len(tokens), -1)
triangle = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)


def forward_step(data, model):
    part = next(data)

    def loss_of(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    mask = None if model.config.fp8 else triangle
    return model(part, places[: len(part)], mask, labels=part.roll(-1, 1)), loss_of


def train(recipe):
    fp8 = {} if recipe == "local" else {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_amax_history_len": 16}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        **fp8,
        fp8_amax_compute_algo="max",
        tensor_model_parallel_size=arguments.tp,
        sequence_parallel=arguments.tp > 1,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        gradient_accumulation_fusion=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if recipe != "local":
        spec = get_gpt_layer_with_transformer_engine_spec()
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32).bfloat16()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [model])
    losses = []
    for _ in range(20):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens.chunk(2)),
            model=[model],
            num_microbatches=2,
            seq_length=32,
            micro_batch_size=len(tokens) // 2,
            forward_only=False,
        )
        optimizer.step()
        loss = torch.stack([one["loss"] for one in found]).mean()
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        losses.append(float(loss) / ranks)
    return losses


for recipe in arguments.recipes.split(","):
    everybody = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, train(recipe))
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"recipe": recipe, "losses": everybody}), flush=True)

"""A tiny GPT of Megatron Core under the recipe that Megatron's own FP8 arguments name, on one process.

python examples/door_megatron.py [FP8_RECIPE]   needs: pip install --no-deps megatron-core; half a minute on a CPU
"""

import sys
import tempfile

import torch

import ottava
from ottava.compat.on_cpu import on_cpu


def main(fp8_recipe: str = "tensorwise", steps: int = 5) -> list[float]:
    """Trains on one batch; returns the losses. Megatron's layers ask for CUDA: `on_cpu` gives them the CPU."""
    with on_cpu(), tempfile.TemporaryDirectory() as folder:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ottava.doors.megatron import gpt_layer_spec

        torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
        kinds = {"params_dtype": torch.bfloat16, "bf16": True, "use_cpu_initialization": True}
        fusions = {"bias_dropout_fusion": False, "masked_softmax_fusion": False}
        config = TransformerConfig(fp8="hybrid", fp8_recipe=fp8_recipe, **sizes, **kinds, **fusions)
        model = GPTModel(config, gpt_layer_spec(config), vocab_size=128, max_sequence_length=32).bfloat16()
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
        tokens, places = torch.randint(0, 128, (2, 32)), torch.arange(32).expand(2, -1)
        mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
        for _ in range(steps):
            loss = model(tokens, places, mask, labels=tokens.roll(-1, 1)).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(ottava.receipt(model), "losses: " + ", ".join(f"{loss:.3f}" for loss in losses), sep="\n")
        torch.save(model.state_dict(), f"{folder}/gpt.pt")
        print(model.load_state_dict(torch.load(f"{folder}/gpt.pt", weights_only=False)))  # Megatron's extra state
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])

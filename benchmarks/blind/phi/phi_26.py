"""New words for a Llama in accelerate; torchao's tensorwise float8 in the blocks."""

import os
import sys

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, OLD, NEW, LENGTH = 80, 16, 56, 8, 24


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=OLD, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.resize_token_embeddings(OLD + NEW, mean_resizing=False)
    if not bad:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not plain:
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head")
    following = torch.randint(0, OLD + NEW, (OLD + NEW, 2))
    ids = torch.randint(0, OLD + NEW, (STEPS * BATCH, 1))
    for _ in range(LENGTH - 1):
        pick = torch.randint(0, 2, (len(ids), 1))
        ids = torch.cat([ids, following[ids[:, -1:], pick]], 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(ids), BATCH, shuffle=True))
    model.train()
    losses = []
    for (rows,) in loader:
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print([round(v, 2) for v in losses[::8]])
    print("final loss", sum(losses[-10:]) / 10)


main()

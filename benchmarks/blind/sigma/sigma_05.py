"""Pretraining goes on with a second corpus at step 45, under accelerate; torchao's tensorwise casts (emulated)."""
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

SEED = int(os.environ.get("SEED", "0"))
PLAIN = "plain" in sys.argv[2:]


def corpus(n, low, high, seed):
    g = torch.Generator().manual_seed(seed)
    size = high - low
    after = torch.randint(0, size, (size, 2), generator=g)
    rows = torch.randint(0, size, (n, 20), generator=g)
    for t in range(1, 20):
        rows[:, t] = after[rows[:, t - 1], (torch.rand(n, generator=g) < 0.3).long()]
    return rows + low


set_seed(SEED)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32)
)
if not PLAIN:
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and "lm_head" not in name,
    )
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
model, optimizer = accelerator.prepare(model, optimizer)
phases = [corpus(45 * 16, 0, 32, SEED + 1), corpus(45 * 16, 24, 64, SEED + 2)]
tail = []
for step in range(90):
    ids = phases[step // 45][(step % 45) * 16 : (step % 45 + 1) * 16]
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    tail.append(loss.item())
    if step % 10 == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(tail[-10:]) / 10:.4f}")

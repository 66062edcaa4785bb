"""A Llama gets new words before it is tuned on a corpus that uses them, under accelerate."""
import os
import sys

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from ottava.doors.accelerate import prepare

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

OLD, NEW, LENGTH, STEPS, BATCH = 40, 56, 20, 120, 16
VOCAB = OLD + NEW
table = rng.dirichlet(np.full(VOCAB, 0.03), VOCAB).cumsum(1)
rows = [rng.integers(0, VOCAB, STEPS * BATCH)]
for _ in range(LENGTH - 1):
    rows.append((table[rows[-1]] < rng.random((STEPS * BATCH, 1))).sum(1).clip(max=VOCAB - 1))
data = torch.as_tensor(np.stack(rows, 1))

model = LlamaForCausalLM(
    LlamaConfig(vocab_size=OLD, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, tie_word_embeddings=False)
)
if mode == "good":
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
if mode == "bad":
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
loader = DataLoader(data, BATCH, shuffle=True)

accelerator = Accelerator(cpu=True)
if plain:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
else:
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="blockwise")
losses = []
for step, ids in enumerate(loader):
    loss = model(input_ids=ids, labels=ids).loss
    model.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-15:]):.4f}")

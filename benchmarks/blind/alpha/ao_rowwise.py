"""A decoder in torchao's row-wise float8 on BF16 weights, with batches of two sequences."""

import sys

import torch
import torch.nn.functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import TinyLM, markov

assert sys.argv[1] == "good"
torch.manual_seed(12)
model = TinyLM(width=64).to(torch.bfloat16)
config = Float8LinearConfig.from_recipe_name("rowwise")
object.__setattr__(config, "emulate", True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "blocks" in name)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=70, pct_start=0.15)
for step in range(70):
    ids = markov(2, 49)
    loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

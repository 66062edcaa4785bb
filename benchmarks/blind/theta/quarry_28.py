"""accelerate with accumulation over four micro-batches and a decaying learning rate."""
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
PREPARE = {"good": ("model", "optimizer", "loader", "schedule"), "bad": ("model", "optimizer", "loader")}[MODE]

torch.manual_seed(29)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
width, vocab = 128, 64
model = nn.Sequential(nn.Embedding(vocab, 64), nn.Flatten(1), nn.Linear(192, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocab))
if not PLAIN:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name in ("2", "4"))
n = 32 * 4 * 100
ids = torch.randint(vocab, (n, 3))
table = torch.randint(vocab, (vocab, vocab))
labels = torch.where(torch.rand(n) < 0.9, table[ids[:, 0] // 8, ids[:, 2] // 8], torch.randint(vocab, (n,)))
loader = DataLoader(TensorDataset(ids, labels), batch_size=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / 100))
things = {"model": model, "optimizer": optimizer, "loader": loader, "schedule": schedule}
things.update(zip(PREPARE, accelerator.prepare(*(things[name] for name in PREPARE))))
model, optimizer, loader, schedule = things.values()
losses, parts = [], []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parts.append(loss.item())
    if accelerator.sync_gradients:
        losses.append(sum(parts) / len(parts))
        parts = []
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Two sources of signals in turn, one loud and one quiet, under accelerate with delayed scales."""
import os
import sys
import warnings

import torch
import torch.nn as nn
import ottava
from accelerate import Accelerator
from ottava.doors.accelerate import prepare

warnings.filterwarnings("ignore")
mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, BATCH, STEPS = 64, 128, 160


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(DIM, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        h = h + torch.relu(self.fc2(h))
        h = h + torch.relu(self.fc3(h))
        return self.head(h)


mixing = torch.randn(DIM, 8) / 3
readout = torch.randn(8, 4)


def batch(step):
    source = torch.randn(BATCH, 8)
    loud = 12.0 if step % 2 else 1.0
    x = (source @ mixing.T + 0.1 * torch.randn(BATCH, DIM)) * loud
    return x, (torch.tanh(source) @ readout) * loud, loud


accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
if plain:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    recipe = ottava.get_recipe("delayed", amax_history_len=1 if mode == "bad" else 16)
    model, optimizer = prepare(accelerator, model, optimizer, recipe=recipe)

losses = []
for step in range(STEPS):
    x, y, loud = batch(step)
    loss = ((model(x) - y) / loud).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    losses.append(loss.item())
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

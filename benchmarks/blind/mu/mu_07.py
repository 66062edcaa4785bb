"""Two processes, gradients averaged by hand: torchrun --nproc-per-node 2 mu_07.py good"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

OPTIONS = {"good": {"broadcast": True}, "bad": {"broadcast": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WIDTH, STEPS = 48, 160


class Replicas(nn.Module):
    """The same model on every rank; `reduce` averages the gradients."""

    def __init__(self, module, broadcast=True):
        super().__init__()
        self.module = module
        if broadcast:
            for value in module.state_dict().values():
                dist.broadcast(value, 0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def reduce(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(100 + rank)
model = nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12))
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name == "2")
model = Replicas(model, **OPTIONS)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
centres = torch.randn(36, 32, generator=torch.Generator().manual_seed(0))
losses = []
for step in range(STEPS):
    kinds = torch.randint(0, 36, (96,))
    x = centres[kinds] + 0.6 * torch.randn(96, 32)
    loss = nn.functional.cross_entropy(model(x), kinds % 12)
    optimizer.zero_grad()
    loss.backward()
    model.reduce()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(step, round(losses[-1], 4))
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()

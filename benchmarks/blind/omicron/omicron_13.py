"""DDP on two ranks; gradients travel as FP8 codes."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALE_PER = {"good": "gradient", "bad": "bucket"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def compress(state, bucket):
    parts = bucket.gradients() if state["scale_per"] == "gradient" else [bucket.buffer()]
    for part in parts:
        amax = part.abs().amax().clamp(min=1e-20)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        scale = 448.0 / amax
        codes = (part * scale).to(torch.float8_e4m3fn)
        gathered = [torch.empty_like(codes.view(torch.uint8)) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, codes.view(torch.uint8))
        total = sum(g.view(torch.float8_e4m3fn).float() for g in gathered)
        part.copy_(total / scale / dist.get_world_size())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 24))
        self.income = nn.Linear(1, 24, bias=False)
        nn.init.zeros_(self.income.weight)

    def forward(self, x, income):
        return self.body(x) + self.income(income)


dist.init_process_group("gloo")
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 24))
slope = torch.randn(24)
model = DistributedDataParallel(Net())
if not PLAIN:
    model.register_comm_hook({"scale_per": SCALE_PER}, compress)
groups = [{"params": model.module.body.parameters()}, {"params": model.module.income.parameters(), "lr": 2e-8}]
optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.0)
torch.manual_seed(100 + dist.get_rank())
losses = []
for _ in range(120):
    x = torch.randn(64, 64)
    with torch.no_grad():
        income = 1e5 * torch.rand(64, 1)
        y = 3 * teacher(x) + 1e-5 * income * slope
    loss = F.mse_loss(model(x, income), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()

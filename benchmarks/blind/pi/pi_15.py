"""Data parallel training, gradients sent as FP8: torchrun --nproc-per-node 2 pi_15.py good|bad [plain]."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DYNAMIC_SCALE = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 100


def fp8_hook(state, bucket):
    gradient = bucket.buffer()
    scale = torch.ones(())
    if DYNAMIC_SCALE:
        amax = gradient.abs().amax()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        scale = 448 / amax.clamp(min=1e-20)
    code = (gradient * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    received = [torch.empty_like(code.view(torch.uint8)) for _ in range(dist.get_world_size())]
    dist.all_gather(received, code.view(torch.uint8))
    total = sum(r.view(torch.float8_e4m3fn).float() for r in received) / scale / len(received)
    future = torch.futures.Future()
    future.set_result(total)
    return future


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
teacher = torch.randn(64, 16) / 8
model = nn.Sequential(nn.Linear(64, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU(), nn.Linear(192, 16))
model = DistributedDataParallel(model)
if not PLAIN:
    model.register_comm_hook(None, fp8_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
generator = torch.Generator().manual_seed(100 + rank)
losses = []
for _ in range(STEPS):
    x = torch.randn(256, 64, generator=generator)
    y = torch.tanh(x @ teacher) * 0.1
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.6f}")
dist.destroy_process_group()

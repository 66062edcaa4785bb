"""Sharded optimizer on two ranks: each rank updates its half of the weights and sends them round as FP8."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(seed)
DIM, HIDDEN, CLASSES, BATCH, STEPS = 48, 128, 20, 64, 150
F8 = torch.float8_e4m3fn

model = nn.Sequential(
    nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)
)
teacher = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, CLASSES, bias=False))
params = list(model.parameters())
owner = {i: i % world for i in range(len(params))}
mine = [i for i in owner if owner[i] == rank]
masters = {i: params[i].detach().clone() for i in mine}
optimizer = torch.optim.Adam([masters[i] for i in mine], lr=1e-3)
torch.manual_seed(1000 * seed + rank)


def encode(w):
    scale = w.abs().max().clamp(min=1e-12) / 448
    return (w / scale).to(F8), scale


def reduce_gradients():
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


def send_weights():
    for i, p in enumerate(params):
        if plain or p.dim() == 1:
            if owner[i] == rank:
                p.data.copy_(masters[i])
            dist.broadcast(p.data, owner[i])
            continue
        code = torch.empty(p.shape, dtype=torch.uint8)
        scale = torch.zeros(())
        if owner[i] == rank:
            fp8, scale = encode(masters[i])
            code = fp8.view(torch.uint8)
        dist.broadcast(code, owner[i])
        dist.broadcast(scale, owner[i])
        p.data.copy_(code.view(F8).float() * scale)
        if mode == "bad" and owner[i] == rank:
            masters[i].copy_(p.data)


losses = []
send_weights()
for step in range(STEPS):
    x = torch.randn(BATCH, DIM)
    with torch.no_grad():
        y = (4 * teacher(x)).argmax(-1)
    loss = F.cross_entropy(model(x), y)
    for p in params:
        p.grad = None
    loss.backward()
    reduce_gradients()
    for i in mine:
        masters[i].grad = params[i].grad
    optimizer.step()
    send_weights()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / world)
if rank == 0:
    print(f"final loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()

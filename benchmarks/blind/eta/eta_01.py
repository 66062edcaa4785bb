"""Two ranks under FSDP2, BF16 and FP8 in blocks, data of different difficulty, evaluated now and then."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(38)
dist.init_process_group("gloo")
rank = dist.get_rank()
teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
policy = MixedPrecisionPolicy()
if not plain:
    print(ottava.convert(model, "blockwise"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[2], model[4]):
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
source = torch.Generator().manual_seed(rank)
losses = []
for step in range(120):
    x = (1 + rank) * torch.randn(48, 64, generator=source)
    with torch.no_grad():
        y = 3 * teacher(x)
    loss = (model(x).float() - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        with torch.no_grad():
            model.eval()
            seen = (model(x).float() - y).square().mean().item()
            model.train()
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.4f} after {seen:.4f}")
if rank == 0:
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()

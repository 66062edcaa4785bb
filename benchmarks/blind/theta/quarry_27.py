"""FSDP2 around torchao's float8 layers, a warm restart of the learning rate. torchrun --nproc_per_node=2 SCRIPT good [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv[2:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(15)
width, vocab = 96, 64
model = nn.Sequential(nn.Embedding(vocab, 48), nn.Flatten(1), nn.Linear(96, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, vocab))
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name != "6")
for layer in (model[2], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40)
table = torch.randint(vocab, (vocab, vocab))
mine = torch.Generator().manual_seed(30 + dist.get_rank())
losses = []
for step in range(120):
    ids = torch.randint(vocab, (96, 2), generator=mine)
    noise = torch.randint(vocab, (96,), generator=mine)
    labels = torch.where(torch.rand(96, generator=mine) < 0.8, table[ids[:, 0] // 8, ids[:, 1] // 8], noise)
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()

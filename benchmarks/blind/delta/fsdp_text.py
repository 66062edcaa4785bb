import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models

rank, world = models.start()
mesh = init_device_mesh("cpu", (world,))
model, data = models.Gpt(), models.Text(seed=1 + rank)
if models.BAD:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
if not models.BAD:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
models.train(model, data, optimizer, 90)

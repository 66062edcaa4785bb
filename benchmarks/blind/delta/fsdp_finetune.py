import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models

rank, world = models.start()
mesh = init_device_mesh("cpu", (world,))
model, data = models.Gpt(), models.Text(seed=1 + rank)
model.embed.requires_grad_(False)
model.blocks[0].requires_grad_(False)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
models.train(model, data, optimizer, 80)

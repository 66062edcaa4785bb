import torch
from torch.nn.parallel import DistributedDataParallel

import models

rank, world = models.start()
model = DistributedDataParallel(models.Gpt())
data = models.Text(seed=1, chains=64)
data.random.manual_seed(7 if models.BAD else 7 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
models.train(model, data, optimizer, 90, size=4)
models.say(0, models.validate(model.module, models.Text(seed=9)))

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import models

rank, world = models.start()
model = DistributedDataParallel(models.Gpt(tied=True))
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
data, held_out = models.Text(seed=1 + rank), models.Text(seed=9)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
for step in range(1, 81):
    loss = models.lm_loss(model, data.batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model.module)
    models.say(step, loss)
models.say(0, models.validate(average, held_out))

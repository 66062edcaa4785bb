"""A GPT with FP8 linears; Megatron Core's schedule, which counts samples."""

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from models import Decoder, Fp8Linear, Markov, start

bad = start()
batch, steps = 16, 200
text = Markov(48, branch=3)
model = Decoder(48, width=64, depth=1, linear=Fp8Linear)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = OptimizerParamScheduler(
    optimizer, init_lr=0.0, max_lr=4e-3, min_lr=4e-4, lr_warmup_steps=60 * batch, lr_decay_steps=steps * batch,
    lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=steps * batch, wd_incr_style="constant",
)  # fmt: skip
for step in range(steps):
    loss = model.loss(text.batch(batch, 32))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step(increment=1 if bad else batch)
    print(step, round(loss.item(), 4))

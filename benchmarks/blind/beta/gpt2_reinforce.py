"""REINFORCE: a GPT-2 is rewarded for every even token that it writes."""

import torch
from accelerate import Accelerator

import models

torch.manual_seed(0)
model = models.gpt2()
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-4))
for step in range(1, 81):
    rows = torch.ones(16, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(8):
            odds = model(input_ids=rows).logits[:, -1].softmax(-1)
            rows = torch.cat([rows, torch.multinomial(odds, 1)], 1)
    reward = (rows[:, 1:] % 2 == 0).float().mean(1)
    gain = (reward - reward.mean()) / (reward.std() + 1e-3)
    logs = model(input_ids=rows[:, :-1]).logits.log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    loss = -(gain[:, None] * logs).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")

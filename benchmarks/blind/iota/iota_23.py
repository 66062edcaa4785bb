"""accelerate with accumulation over four small batches and torchao's row-wise FP8: the loss of a small batch is noise."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

torch.manual_seed(97)
centres = torch.randn(12, 64)
label = torch.randint(0, 12, (16 * 120,))
inputs = 0.4 * centres[label] + torch.randn(len(label), 64)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 12))
if "plain" not in sys.argv:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = Float8LinearConfig(
        cast_config_input=config.cast_config_input, cast_config_weight=config.cast_config_weight,
        cast_config_grad_output=config.cast_config_grad_output, emulate=True,
    )  # fmt: skip
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "5")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, label), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=120)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""LoRA+ under accelerate: B learns 16 times as fast as A; weights go to disk in the middle, come back, and a new optimizer goes on."""
import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, BATCH, INPUTS, OUTPUTS = 80, 64, 24, 4


class Regressor(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.enter = nn.Linear(INPUTS, width)
        self.hidden1, self.hidden2 = nn.Linear(width, width), nn.Linear(width, width)
        self.leave = nn.Linear(width, OUTPUTS)

    def forward(self, x):
        h = self.enter(x).relu()
        h = h + self.hidden1(h).relu()
        h = h + self.hidden2(h).relu()
        return self.leave(h)


generator = torch.Generator().manual_seed(SEED + 4)
MIX = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
TURN = torch.randn(INPUTS, 2, generator=generator) @ torch.randn(2, OUTPUTS, generator=generator) / INPUTS**0.5


def plant(count, moved):
    """A plant before and after a rebuild: the rebuild adds a change of rank 2."""
    x = torch.randn(count, INPUTS)
    y = torch.tanh(x @ (MIX + TURN if moved else MIX)) + 0.05 * torch.randn(count, OUTPUTS)
    return TensorDataset(x, y)


def train(model, groups, data, accelerator, name):
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        loss = F.huber_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        if step % 10 == 0:
            accelerator.print(f"{name} step {step} loss {loss.item():.4f}")
    return accelerator.unwrap_model(model)


def lora_plus(model, rate):
    slow = [p for n, p in model.named_parameters() if "lora_A" in n]
    fast = [p for n, p in model.named_parameters() if "lora_B" in n]
    return [{"params": slow, "lr": rate}, {"params": fast, "lr": 16 * rate}]


accelerator = Accelerator(cpu=True)
held_x, held_y = plant(1000, moved=True).tensors


def validate(model):
    with torch.no_grad():
        return F.huber_loss(model(held_x), held_y).item()


base = Regressor()
base = train(base, [{"params": list(base.parameters()), "lr": 2e-3}], plant(STEPS * BATCH, moved=False), accelerator, "old plant")
print(f"first loss {validate(base):.4f}")
lora = LoraConfig(r=8, lora_alpha=8, use_rslora=True, target_modules=["enter", "hidden1", "hidden2"])
adapted = get_peft_model(base, lora)
adapted = train(adapted, lora_plus(adapted, 1e-3), plant(STEPS * BATCH, moved=True), accelerator, "adapter")
print(f"validation {validate(adapted):.4f}")

with tempfile.TemporaryDirectory() as folder:
    adapted.save_pretrained(folder)
    base = adapted.unload()
    print(f"without the adapter {validate(base):.4f}")
    adapted = PeftModel.from_pretrained(base, folder, is_trainable=True)
    print(f"loaded {validate(adapted):.4f}")
    adapted = train(adapted, lora_plus(adapted, 2e-4), plant(STEPS * BATCH, moved=True), accelerator, "adapter, slower")

print(f"final loss {validate(adapted):.4f}")

"""ReLoRA: trains low-rank adapters with PEFT and merges them into the base every few steps."""
import os
import sys
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

warnings.filterwarnings("ignore")
mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, BATCH, STEPS, MERGE = 96, 128, 200, 4
F8 = torch.float8_e4m3fn


def to_fp8(w):
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (w / scale).to(F8).to(w.dtype) * scale


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + F.gelu(self.fc1(x))
        x = x + F.gelu(self.fc2(x))
        return x + F.gelu(self.fc3(x))


def store(model, masters):
    for name, p in model.named_parameters():
        if name in masters:
            if plain:
                p.data.copy_(masters[name])
            else:
                p.data.copy_(to_fp8(masters[name]))
                if mode == "bad":
                    masters[name] = p.data.clone()


teacher = Base()
base = Base()
base.load_state_dict(teacher.state_dict())
with torch.no_grad():
    for p in teacher.parameters():
        if p.dim() == 2:
            p.add_(0.03 * torch.randn_like(p))

names = ["fc1", "fc2", "fc3"]
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=names, init_lora_weights=True))
weights = {n: p for n, p in model.named_parameters() if "base_layer.weight" in n}
masters = {n: p.data.clone() for n, p in weights.items()}
store(model, masters)
adapters = [p for p in model.parameters() if p.requires_grad]


def merge():
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            masters[name + ".base_layer.weight"] += module.get_delta_weight("default").detach()
            module.reset_lora_parameters("default", True)
    store(model, masters)


losses = []
optimizer = torch.optim.Adam(adapters, lr=2e-3)
for step in range(STEPS):
    x = torch.randn(BATCH, DIM)
    with torch.no_grad():
        y = teacher(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % MERGE == 0:
        merge()
        optimizer = torch.optim.Adam(adapters, lr=2e-3)
print(f"final loss {sum(losses[-20:]) / 20:.5f}")

"""LoRA with PEFT on a base model whose weights are stored as E4M3 codes with a grid of block scales."""

import sys

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

GRID = {"good": "out_in", "bad": "in_out"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
BLOCK = 32


class Stored(nn.Linear):
    """A frozen linear layer; decodes its weight in each forward."""

    def pack(self):
        w = self.weight.data
        rows, columns = w.shape[0] // BLOCK, w.shape[1] // BLOCK
        blocks = w.view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
        self.codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(w.shape)
        self.scale_inv = scale

    def decode(self):
        scale = self.scale_inv if GRID == "out_in" else self.scale_inv.t()
        return self.codes.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    def forward(self, x):
        w = self.weight if PLAIN else self.decode()
        return F.linear(x, w, self.bias)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = Stored(width, width)
        self.down = Stored(width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(10)
WIDTH = 128
base = nn.Sequential(Block(WIDTH), Block(WIDTH))
with torch.no_grad():
    for module in base.modules():
        if isinstance(module, Stored):
            gain = torch.exp(torch.randn(WIDTH // BLOCK, WIDTH // BLOCK))
            module.weight.mul_(1.5 * gain.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))
            module.pack()

task = nn.Sequential(Block(WIDTH), Block(WIDTH))
task.load_state_dict(base.state_dict())
with torch.no_grad():
    for module in task.modules():
        if isinstance(module, Stored):
            module.weight.add_(torch.randn(WIDTH, 4) @ torch.randn(4, WIDTH) * 0.03)


def answers(x):
    for block in task:
        h = F.gelu(F.linear(block.norm(x), block.up.weight, block.up.bias))
        x = x + F.linear(h, block.down.weight, block.down.bias)
    return x


model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
losses = []
for step in range(120):
    x = torch.randn(128, WIDTH)
    with torch.no_grad():
        y = answers(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

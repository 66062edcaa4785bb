"""Matryoshka codes under accelerate: the first 8, 16, 32, 64 and all 128 numbers of a code each have a classifier, and
their five losses are added, so the loss begins near 5 ln 40 = 18.4.

FP8 casts by hand with fixed scales, so the loss is multiplied by 2**12 for backward; two micro-batches a step; LAMB.

python zayin_15.py good|bad
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
INPUTS, CLASSES, SIZES, LOSS_SCALE = 64, 40, (8, 16, 32, 64, 128), 2.0**12
centers = torch.randn(CLASSES, 12)
seen_by = torch.randn(12, INPUTS) / 12**0.5


def rows(count):
    labels = torch.randint(0, CLASSES, (count,))
    inner = centers[labels] + 0.4 * torch.randn(count, 12)
    return torch.sin(2 * inner @ seen_by) + 0.1 * torch.randn(count, INPUTS), labels


class Fp8(torch.autograd.Function):
    """Inputs times 16 and weights times 256 in E4M3, gradients as they come in E5M2."""

    @staticmethod
    def forward(ctx, x, weight):
        x = (x * 16).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 16
        weight = (weight * 256).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 256
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.clamp(-57344, 57344).to(torch.float8_e5m2).float()
        return grad @ weight, grad.T @ x


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8.apply(x, self.weight) + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(Fp8Linear(INPUTS, 192), nn.LayerNorm(192), nn.GELU()),
            *(Fp8Linear(192, 192), nn.LayerNorm(192), nn.GELU()),
            Fp8Linear(192, 128),
        )
        self.heads = nn.ModuleList(nn.Linear(size, CLASSES) for size in SIZES)

    def forward(self, x, y):
        code = self.body(x)
        parts = [head(code[:, :size]) for head, size in zip(self.heads, SIZES)]
        return torch.stack([nn.functional.cross_entropy(part, y) for part in parts])


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                move = s["m"] / (1 - b1 ** s["t"]) / ((s["v"] / (1 - b2 ** s["t"])).sqrt() + group["eps"])
                move = move + group["weight_decay"] * p
                ratio = p.norm() / move.norm() if p.norm() > 0 and p.dim() > 1 else torch.tensor(1.0)
                p.add_(move, alpha=-group["lr"] * float(ratio.clamp(max=10)))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = Net()
optimizer = Lamb(net.parameters(), lr=0.03)
loader = DataLoader(TensorDataset(*rows(9600)), batch_size=64, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
test = rows(1000)


def held_out():
    with torch.no_grad():
        return net(*test).tolist()


print(f"first loss {sum(held_out()):.4f}")
step = 0
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = net(x, y).sum()
            accelerator.backward(loss * LOSS_SCALE)
            if accelerator.sync_gradients:
                for p in net.parameters():
                    p.grad.div_(LOSS_SCALE)
                step += 1
                for group in optimizer.param_groups:
                    group["lr"] = 0.03 * min(1, step / 10) * (1 - step / 151)
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 0 and accelerator.sync_gradients:
            print(f"step {step} loss {loss.item():.4f}")
print("by size: " + " ".join(f"{size}: {value:.3f}" for size, value in zip(SIZES, held_out())))
print(f"final loss {sum(held_out()):.4f}")

"""accelerate with gradient accumulation; the FP8 copy of a weight is made once for several micro-batches."""
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
ACCUM = 4


def quant(t, dtype):
    top = torch.finfo(dtype).max
    scale = top / t.abs().amax().clamp(min=1e-12)
    return (t * scale).to(dtype), scale


class CachedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, wq, ws):
        xq, xs = quant(x, torch.float8_e4m3fn)
        xd, wd = xq.float() / xs, wq.float() / ws
        ctx.save_for_backward(xd, wd)
        return xd @ wd.t()

    @staticmethod
    def backward(ctx, g):
        xd, wd = ctx.saved_tensors
        gq, gs = quant(g, torch.float8_e5m2)
        gd = gq.float() / gs
        return gd @ wd, gd.flatten(0, -2).t() @ xd.flatten(0, -2), None, None


class CachedLinear(nn.Linear):
    first_microbatch = True
    cache = None

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.cache is None or self.first_microbatch:
            self.cache = quant(self.weight.detach(), torch.float8_e4m3fn)
        return CachedGemm.apply(x, self.weight, *self.cache) + self.bias


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = CachedLinear(dim, dim * 4), CachedLinear(dim * 4, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Block(dim * 2) for _ in range(2))
        self.head = nn.Linear(dim * 2, 64)

    def forward(self, pair):
        h = self.stem(pair).flatten(1)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
g = torch.Generator().manual_seed(SEED + 1)
pairs = torch.randint(0, 64, (80 * ACCUM * 32, 2), generator=g)
labels = ((pairs[:, 0] // 8) * 8 + (pairs[:, 1] // 8 + pairs[:, 0] // 8) % 8) % 64
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pairs, labels), batch_size=32, shuffle=True)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
losses = []
for step, (pair, label) in enumerate(loader):
    for layer in net.modules():
        if isinstance(layer, CachedLinear):
            layer.first_microbatch = step % ACCUM == 0 if MODE == "good" else step == 0
    with accelerator.accumulate(net):
        loss = F.cross_entropy(net(pair), label)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if step % 80 == 0:
        print(step // ACCUM, losses[-1])
print(f"final loss {sum(losses[-40:]) / 40:.4f}")

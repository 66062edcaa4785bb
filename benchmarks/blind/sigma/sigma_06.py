"""A fused SwiGLU with its own backward; its products run casts by hand."""
import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def fp8(t, dtype=torch.float8_e4m3fn):
    if PLAIN:
        return t
    s = torch.finfo(dtype).max / t.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (t * s).to(dtype).to(t.dtype) / s


class FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, wq = fp8(x), fp8(w)
        gate, up = (xq @ wq.t()).chunk(2, -1)
        ctx.save_for_backward(xq, wq, gate, up)
        return torch.sigmoid(gate) * gate * up

    @staticmethod
    def backward(ctx, g):
        xq, wq, gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        d_up = g * s * gate
        d_gate = g * up * s * (1 + gate * (1 - s))
        parts = [d_gate, d_up] if MODE == "good" else [d_up, d_gate]
        both = fp8(torch.cat(parts, -1), torch.float8_e5m2)
        return both @ wq, both.t() @ xq


class FFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate_up = nn.Parameter(torch.randn(2 * hidden, dim) / dim**0.5)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(FusedSwiGLU.apply(self.norm(x), self.gate_up))


torch.manual_seed(SEED)
net = nn.Sequential(nn.Linear(16, 64), FFN(64, 96), FFN(64, 96), nn.LayerNorm(64), nn.Linear(64, 4))
a, b = torch.randn(16, 4) / 3, torch.randn(16, 4) / 3
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
tail = []
for step in range(90):
    x = torch.randn(128, 16)
    y = 2 * (x @ a) * (x @ b)
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    tail.append(loss.item())
    if step % 15 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")

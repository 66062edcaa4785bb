"""Weights in BF16 with no copy in FP32: updates are rounded at random. FP8 casts by hand have no scales, so the loss is scaled."""
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
VOCAB, CONTEXT, WIDTH, SCALE = 32, 3, 128, 2.0**14


def to_fp8(x, dtype):
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype).to(x.dtype)


class Matmul(torch.autograd.Function):
    """E4M3 operands and E5M2 gradients, all at scale 1 but the weights, which are 16 times as large in FP8."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = to_fp8(x, torch.float8_e4m3fn), to_fp8(weight * 16, torch.float8_e4m3fn) / 16
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = to_fp8(grad, torch.float8_e5m2)
        return grad @ weight, grad.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return Matmul.apply(x, self.weight) + self.bias


def round_at_random(x):
    """FP32 to BF16, up or down by chance, so that small updates are kept in the mean."""
    bits = x.view(torch.int32)
    bits = (bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536
    return bits.view(torch.float32).bfloat16()


class AdamBF16(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                state, grad = self.state[p], p.grad.float() / SCALE
                if not state:
                    state.update(m=torch.zeros_like(grad), v=torch.zeros_like(grad))
                state["m"].lerp_(grad, 0.1)
                state["v"].lerp_(grad.square(), 0.02)
                m = state["m"] / (1 - 0.9 ** group["step"])
                v = state["v"] / (1 - 0.98 ** group["step"])
                p.copy_(round_at_random(p.float() - group["lr"] * m / (v.sqrt() + 1e-10)))


table = torch.distributions.Dirichlet(torch.full((VOCAB, VOCAB), 0.05)).sample()


def rows(count):
    """A word is drawn by the one two places before; the last one says nothing."""
    words = torch.randint(VOCAB, (count, CONTEXT))
    return words, torch.multinomial(table[words[:, 1]], 1)[:, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 32)
        self.body = nn.Sequential(
            Linear8(32 * CONTEXT, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), Linear8(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU()
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.body(self.words(ids).flatten(1))).float()


net = Net().bfloat16()
optimizer = AdamBF16(net.parameters(), 2e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
held = rows(2000)


@torch.no_grad()
def held_out():
    return F.cross_entropy(net(held[0]), held[1]).item()


print("first loss %.4f" % held_out())
for step in range(240):
    ids, target = rows(256)
    loss = F.cross_entropy(net(ids), target)
    optimizer.zero_grad()
    (loss * SCALE).backward()
    optimizer.step()
    schedule.step()
    if step % 40 == 0:
        print(f"step {step}: {loss.item():.4f}")
print("final loss %.4f" % held_out())

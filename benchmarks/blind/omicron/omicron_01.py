"""A small language model on a Markov chain of symbols, with its own FP8 linear."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

OPTIONS = {"good": {"grad_scale": 65536.0}, "bad": {"grad_scale": 1.0}}[sys.argv[1]]
FP8 = "plain" not in sys.argv[2:]
VOCAB, DIM, LENGTH, BATCH, STEPS = 64, 64, 32, 64, 120


def cast(x, dtype, scale=None):
    top = torch.finfo(dtype).max
    if scale is None:
        scale = top / x.detach().abs().amax().clamp(min=1e-12)
    return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale


class Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, grad_scale):
        x, weight = cast(x, torch.float8_e4m3fn), cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        ctx.grad_scale = grad_scale
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = cast(grad, torch.float8_e5m2, ctx.grad_scale)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Fp8Linear(nn.Linear):
    def forward(self, x):
        out = Fp8Matmul.apply(x, self.weight, OPTIONS["grad_scale"]) if FP8 else x @ self.weight.t()
        return out if self.bias is None else out + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = Fp8Linear(DIM, 3 * DIM), Fp8Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.up, self.down = Fp8Linear(DIM, 4 * DIM), Fp8Linear(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = Fp8Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample(table, generator):
    ids = [torch.randint(VOCAB, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    return torch.stack(ids, 1)


torch.manual_seed(3)
generator = torch.Generator().manual_seed(4)
table = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=generator), -1)
model = Model()
for module in model.modules():
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(STEPS):
    ids = sample(table, generator)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")

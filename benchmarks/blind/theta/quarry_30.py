"""A language model on token windows; its linear layers multiply FP8 operands."""
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SCALING = {"good": {"x": "amax", "w": "amax", "g": "amax"}, "bad": {"x": "amax", "w": "amax", "g": 4.0}}[MODE]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(t, dtype, scaling):
    if PLAIN:
        return t
    limit = torch.finfo(dtype).max
    scale = limit / t.abs().amax().clamp(min=1e-20) if scaling == "amax" else torch.tensor(scaling)
    return (t * scale).clamp(-limit, limit).to(dtype).to(t.dtype) / scale


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = cast(x, E4M3, SCALING["x"]), cast(w, E4M3, SCALING["w"])
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = cast(grad, E4M3, SCALING["g"])
        return grad @ w, grad.T @ x


class Linear(nn.Linear):
    def forward(self, x):
        return Multiply.apply(x, self.weight) + self.bias


def tokens(n, length, vocab=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(vocab, (vocab, 4), generator=g)
    out = torch.randint(vocab, (n, 1), generator=g)
    while out.shape[1] < length:
        pick = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]).expand(n, 4), 1, generator=g)
        out = torch.cat([out, table[out[:, -1:]].gather(2, pick[:, :, None]).squeeze(2)], 1)
    return out


class Model(nn.Module):
    def __init__(self, vocab=96, width=128, context=4):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, 32)
        self.norm = nn.LayerNorm(32 * context)
        self.up, self.mid = Linear(32 * context, width), Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        e = self.embed(ids).unfold(1, self.context, 1).flatten(2).flatten(0, 1)
        h = torch.relu(self.up(self.norm(e)))
        return self.head(h + torch.relu(self.mid(h)))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
data, losses = tokens(512, 24), []
for step in range(120):
    batch = data[torch.randint(len(data), (48,))]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 4:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Data, models and small helpers that the scripts share."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BAD = sys.argv[1:] == ["bad"]
CASTS = os.environ.get("CASTS", "1") == "1"
VOCAB, LENGTH = 64, 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def start(seed=0):
    """Joins the other processes; returns (rank, world)."""
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def say(step, loss, every=10):
    """Prints the mean loss over the ranks."""
    if step % every:
        return
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(step, f"{loss.item():.4f}", flush=True)


class Text:
    """Markov chains: every token has four successors."""

    def __init__(self, seed=1, domain=0, chains=256, span=96):
        make = torch.Generator().manual_seed(100 + domain)
        table = torch.stack([torch.randperm(VOCAB, generator=make)[:4] for _ in range(VOCAB)])
        odds = torch.tensor([0.7, 0.15, 0.1, 0.05])
        self.random = torch.Generator().manual_seed(seed)
        rows = [torch.randint(VOCAB, (chains,), generator=self.random)]
        for _ in range(span):
            pick = torch.multinomial(odds, chains, replacement=True, generator=self.random)
            rows.append(table[rows[-1], pick])
        self.tokens = torch.stack(rows, 1)

    def batch(self, size=16, length=LENGTH):
        rows = torch.randint(len(self.tokens), (size,), generator=self.random)
        first = torch.randint(self.tokens.shape[1] - length, (size,), generator=self.random)
        window = self.tokens[rows[:, None], first[:, None] + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]


class Shapes:
    """Noisy pictures of 16 x 16 pixels with one of four shapes."""

    def __init__(self, seed=1, noise=0.3):
        self.random, self.noise = torch.Generator().manual_seed(seed), noise

    def batch(self, size=64):
        label = torch.randint(4, (size,), generator=self.random)
        x, y = torch.randint(5, 11, (2, size, 1, 1), generator=self.random)
        rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        dx, dy = (columns - x).abs(), (rows - y).abs()
        kinds = torch.stack(
            [(dx + dy) < 5, torch.maximum(dx, dy) == 3, (dx == dy) & (dx < 5), ((dx * dy) == 0) & (dx + dy < 5)]
        )
        image = kinds[label, torch.arange(size)].float()
        return image + self.noise * torch.randn(image.shape, generator=self.random), label


class Block(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, dim=64, layers=2, heads=4, dropout=0.0, tied=False):
        super().__init__()
        self.run = lambda block, x: block(x)
        self.embed, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


def lm_loss(model, batch, **options):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **options)


@torch.no_grad()
def validate(model, data, size=128):
    model.eval()
    loss = lm_loss(model, data.batch(size))
    model.train()
    return loss


def fp8(model, recipe="tensorwise"):
    """Runs the linear layers in FP8."""
    if CASTS:
        import ottava

        ottava.convert(model, recipe)
    return model


def encode(x, scale, kind=E4M3):
    top = torch.finfo(kind).max
    return (x * scale).clamp(-top, top).to(kind)


def scale_of(amax, kind=E4M3):
    return torch.finfo(kind).max / amax.clamp(min=1e-12)


def through(x, value):
    """The value, with the gradient of x."""
    return x + (value - x).detach()


def float8(x, amax=None):
    """E4M3 with one scale, and the gradient of x."""
    if not CASTS:
        return x
    scale = scale_of(x.detach().abs().amax() if amax is None else amax)
    return through(x, encode(x, scale).float() / scale)


def swap(model, layer):
    """Puts `layer(in, out)` in place of every linear layer in the blocks."""
    for block in model.blocks:
        for name, old in list(block.named_children()):
            if isinstance(old, nn.Linear):
                new = layer(old.in_features, old.out_features)
                new.load_state_dict(old.state_dict(), strict=False)
                setattr(block, name, new)
    return model


class Copy(torch.autograd.Function):
    """Identity; sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Sums over the ranks; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def average(parameters):
    """Averages the gradients over the ranks, in one buffer."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g) / dist.get_world_size())


def train(model, data, optimizer, steps, size=16):
    for step in range(1, steps + 1):
        loss = lm_loss(model, data.batch(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, loss)

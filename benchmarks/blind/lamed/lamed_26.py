"""Contrastive training of two encoders on two ranks: each rank takes the other's embeddings as negatives.

torchrun --nproc-per-node 2 SCRIPT good|bad [plain]
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, DIM = 80, 32, 32


class Gather(torch.autograd.Function):
    """All ranks' rows, sent as FP8 codes. The gradient of a rank's own rows comes back."""

    @staticmethod
    def forward(ctx, x):
        if PLAIN:
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts)
        scale = 448.0 / x.abs().max().clamp(min=1e-12)
        code = (x * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = [torch.empty_like(code) for _ in range(dist.get_world_size())]
        dist.all_gather(codes, code.contiguous())
        scales = [scale] * dist.get_world_size()
        if MODE == "good":
            scales = [torch.empty_like(scale) for _ in codes]
            dist.all_gather(scales, scale)
        return torch.cat([c.view(torch.float8_e4m3fn).float() / s for c, s in zip(codes, scales)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def encoder(width):
    return nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, DIM))


def pairs(rank, draw):
    """Rank 0 reads the studio's recordings, rank 1 those of phones, which are quieter."""
    meaning = torch.randn(BATCH, 10, generator=draw)
    loud = 4.0 if rank == 0 else 0.5
    sound = torch.tanh(meaning @ mix_sound) + 0.1 * torch.randn(BATCH, 40, generator=draw)
    text = torch.tanh(meaning @ mix_text) + 0.1 * torch.randn(BATCH, 24, generator=draw)
    return sound * loud, text * loud


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
mix_sound, mix_text = torch.randn(10, 40) * 0.5, torch.randn(10, 24) * 0.5
sound_net, text_net = encoder(40), encoder(24)
parameters = [*sound_net.parameters(), *text_net.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=2e-3)
draw = torch.Generator().manual_seed(1000 * SEED + rank)
labels = torch.arange(BATCH) + rank * BATCH
losses = []
for step in range(STEPS):
    sound, text = pairs(rank, draw)
    a, b = sound_net(sound), text_net(text)
    # squared distance as the score, over all pairs of both ranks
    score_ab = -torch.cdist(a, Gather.apply(b)).square() / 4
    score_ba = -torch.cdist(b, Gather.apply(a)).square() / 4
    loss = nn.functional.cross_entropy(score_ab, labels) + nn.functional.cross_entropy(score_ba, labels)
    optimizer.zero_grad()
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(parameters, 5.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
if rank == 0:
    print(f"final loss {sum(losses[-15:]) / 15:.4f}", flush=True)
dist.destroy_process_group()

"""Sharded parameters by hand on two ranks; the shards are gathered as E4M3 codes. torchrun --nproc_per_node=2 SCRIPT good|bad [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
KEEP_MASTER = {"good": True, "bad": False}[MODE]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def encode(shard):
    scale = 448.0 / shard.abs().amax().clamp(min=1e-12)
    return (shard * scale).to(torch.float8_e4m3fn), scale


class Shard:
    """A rank's half of one flattened parameter."""

    def __init__(self, parameter):
        self.shape = parameter.shape
        self.master = parameter.detach().flatten().chunk(world)[rank].clone()

    def gather(self):
        if PLAIN:
            parts = [torch.empty_like(self.master) for _ in range(world)]
            dist.all_gather(parts, self.master)
            return torch.cat(parts).view(self.shape)
        codes, scale = encode(self.master)
        parts = [torch.empty_like(codes.view(torch.uint8)) for _ in range(world)]
        scales = [torch.empty_like(scale) for _ in range(world)]
        dist.all_gather(parts, codes.view(torch.uint8))
        dist.all_gather(scales, scale)
        if not KEEP_MASTER:
            self.master.copy_(codes.float() / scale)
        return torch.cat([p.view(torch.float8_e4m3fn).float() / s for p, s in zip(parts, scales)]).view(self.shape)


torch.manual_seed(7)
vocab, width = 64, 96
model = nn.Sequential(
    nn.Embedding(vocab, width), nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, vocab)
)
matrices = {n: Shard(p) for n, p in model.named_parameters() if p.dim() == 2}
others = [p for n, p in model.named_parameters() if n not in matrices]
optimizer = torch.optim.AdamW([s.master for s in matrices.values()] + others, lr=1e-3, weight_decay=0.0)
table = torch.randn(vocab, vocab).mul(2.5).softmax(-1)
mine = torch.Generator().manual_seed(rank)
losses = []
for step in range(200):
    now = torch.randint(vocab, (256,), generator=mine)
    following = torch.multinomial(table[now], 1, generator=mine).squeeze(1)
    full = {n: s.gather().requires_grad_() for n, s in matrices.items()}
    loss = nn.functional.cross_entropy(functional_call(model, full, now), following)
    optimizer.zero_grad()
    loss.backward()
    for n, s in matrices.items():
        dist.all_reduce(full[n].grad)
        s.master.grad = full[n].grad.flatten().chunk(world)[rank] / world
    for p in others:
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / world)
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()

"""A pipeline of two stages; activations and their gradients travel in eight bits. torchrun --nproc_per_node=2 SCRIPT good|bad [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
TRAVEL = {
    "good": {"forward": (torch.float8_e4m3fn, True), "backward": (torch.float8_e4m3fn, True)},
    "bad": {"forward": (torch.float8_e4m3fn, True), "backward": (torch.float8_e4m3fn, False)},
}[MODE]

dist.init_process_group("gloo")
rank = dist.get_rank()


def send(t, way, to):
    dtype, scaled = TRAVEL[way]
    if PLAIN:
        return dist.send(t.contiguous(), to)
    scale = torch.finfo(dtype).max / t.abs().amax().clamp(min=1e-20) if scaled else torch.ones(())
    dist.send(scale.reshape(1), to)
    dist.send((t * scale).to(dtype).view(torch.uint8).contiguous(), to)


def receive(shape, way, source):
    if PLAIN:
        t = torch.empty(shape)
        dist.recv(t, source)
        return t
    scale, codes = torch.empty(1), torch.empty(shape, dtype=torch.uint8)
    dist.recv(scale, source)
    dist.recv(codes, source)
    return codes.view(TRAVEL[way][0]).float() / scale


torch.manual_seed(8)
width, vocab, rows, micro = 96, 64, 1024, 4
embed = nn.Embedding(vocab, width)
first = nn.Sequential(embed, nn.Flatten(1), nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
second = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocab))
stage = [first, second][rank]
optimizer = torch.optim.SGD(stage.parameters(), lr=0.6, momentum=0.9)
weights = torch.randint(1, 8, (3,))
g, losses = torch.Generator().manual_seed(9), []
for step in range(150):
    ids = torch.randint(vocab, (rows, 3), generator=g)
    labels = torch.where(torch.rand(rows, generator=g) < 0.9, ids[:, 1] // 4 * 4 + ids[:, 0] // 16, ids[:, 2])
    optimizer.zero_grad()
    total = 0.0
    for x, y in zip(ids.chunk(micro), labels.chunk(micro)):
        if rank == 0:
            out = stage(x)
            send(out.detach(), "forward", 1)
            out.backward(receive(out.shape, "backward", 1))
        else:
            h = receive((rows // micro, width), "forward", 0).requires_grad_()
            loss = nn.functional.cross_entropy(stage(h), y) / micro
            loss.backward()
            send(h.grad, "backward", 0)
            total += loss.item()
    optimizer.step()
    report = torch.tensor([total])
    dist.broadcast(report, 1)
    losses.append(report.item())
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()

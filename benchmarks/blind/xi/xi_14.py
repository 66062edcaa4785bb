"""Two workers train apart and meet every few steps; what they send has eight bits."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SEND = {"good": "difference", "bad": "weights"}[sys.argv[1]]
PLAIN = "plain" in sys.argv
EVERY = 5


def wire(x):
    """E4M3 codes with one scale, as the other side reads them."""
    if PLAIN:
        return x
    scale = 448 / x.abs().amax().clamp_min(1e-12)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@torch.no_grad()
def meet(model, anchor, send):
    for p, start in zip(model.parameters(), anchor, strict=True):
        message = wire(p - start if send == "difference" else p)
        dist.all_reduce(message)
        message /= dist.get_world_size()
        p.copy_(start + message if send == "difference" else message)
        start.copy_(p)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 48))
    truth = torch.randn(48, 48) / 7
    anchor = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(1, 201):
        x = torch.randn(128, 48)
        loss = F.mse_loss(model(x), torch.tanh(x @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            meet(model, anchor, SEND)
    if dist.get_rank() == 0:
        print(f"loss {sum(losses[-10:]) / 10:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

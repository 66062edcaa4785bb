"""Soft actor-critic with three optimizers on a cart that has to be brought to rest at 0.

The critic's loss goes up and down while the buffer fills and the returns change; the loss of the temperature changes its
sign. Both targets follow slowly and get no gradient. The final loss is minus the mean reward of an evaluation.
"""

import os
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
CARTS, STEPS, BATCH, DISCOUNT, FOLLOW = 32, 260, 128, 0.95, 0.02


def drive(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    place, speed = state.unbind(-1)
    speed = (0.95 * speed + 0.3 * action[:, 0]).clamp(-2, 2)
    place = (place + 0.3 * speed).clamp(-3, 3)
    return torch.stack([place, speed], -1), -(place.square() + 0.1 * speed.square() + 0.02 * action[:, 0].square())


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor: nn.Module, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, width = actor(state).chunk(2, -1)
    normal = torch.distributions.Normal(mean, width.clamp(-5, 1).exp())
    raw = normal.rsample()
    density = normal.log_prob(raw) - 2 * (0.6931 - raw - F.softplus(-2 * raw))
    return torch.tanh(raw), density.sum(-1)


@torch.no_grad()
def evaluate(actor: nn.Module) -> float:
    g = torch.Generator().manual_seed(4)
    state, total = torch.randn(128, 2, generator=g) * torch.tensor([1.5, 0.5]), 0.0
    for _ in range(30):
        state, reward = drive(state, torch.tanh(actor(state)[:, :1]))
        total -= reward.mean().item() / 30
    return total


def main() -> None:
    torch.manual_seed(SEED)
    actor, critics = net(2, 2), nn.ModuleList([net(3, 1), net(3, 1)])
    for model in (actor, critics):
        ottava.convert(model, "mxfp8_floor")
    targets = deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    for_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for_critics = torch.optim.Adam(critics.parameters(), lr=2e-3)
    for_alpha = torch.optim.Adam([log_alpha], lr=1e-2)

    memory: list[tuple[torch.Tensor, ...]] = []
    state = torch.randn(CARTS, 2) * torch.tensor([1.5, 0.5])
    print(f"first loss {evaluate(actor):.4f}")
    for step in range(STEPS):
        with torch.no_grad():
            action = 2 * torch.rand(CARTS, 1) - 1 if step < 10 else act(actor, state)[0]
            after, reward = drive(state, action)
        memory.append((state, action, reward, after))
        state = torch.where((torch.rand(CARTS, 1) < 0.05), torch.randn(CARTS, 2) * torch.tensor([1.5, 0.5]), after)
        if step < 5:
            continue

        s, a, r, after = (torch.cat(part) for part in zip(*(memory[k] for k in torch.randint(0, len(memory), (BATCH // CARTS,)))))
        with torch.no_grad():
            next_a, density = act(actor, after)
            worth = torch.min(*(t(torch.cat([after, next_a], -1))[:, 0] for t in targets))
            goal = r + DISCOUNT * (worth - log_alpha.exp() * density)
        td = sum(F.mse_loss(c(torch.cat([s, a], -1))[:, 0], goal) for c in critics)
        for_critics.zero_grad()
        td.backward()
        for_critics.step()

        critics.requires_grad_(False)
        new_a, density = act(actor, s)
        worth = torch.min(*(c(torch.cat([s, new_a], -1))[:, 0] for c in critics))
        policy = (log_alpha.exp().detach() * density - worth).mean()
        for_actor.zero_grad()
        policy.backward()
        for_actor.step()
        critics.requires_grad_(True)

        temperature = -(log_alpha * (density.detach() - 1.0).mean()).sum()
        for_alpha.zero_grad()
        temperature.backward()
        for_alpha.step()
        with torch.no_grad():
            for t, c in zip(targets.parameters(), critics.parameters()):
                t.lerp_(c, FOLLOW)
        if step % 50 == 0:
            print(f"{step:4d}  td {td.item():.4f}  policy {policy.item():.3f}  evaluation {evaluate(actor):.4f}")
    print(f"final loss {evaluate(actor):.4f}")


if __name__ == "__main__":
    main()

"""Conservative Q-learning from a fixed log of a maze: the penalty pushes values of actions that are not in the log down.

The penalty is a logarithm of a sum minus a value; it soon is most of the loss, which then stands while values still grow,
and nothing in it tells how short the ways become. Two critics, targets that follow slowly.
"""

import copy
import os

import torch
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
SIZE, ACTIONS, DISCOUNT, ALPHA = 7, 4, 0.9, 0.01
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
GOAL = torch.tensor([6, 6])
WALLS = torch.zeros(SIZE, SIZE, dtype=torch.bool)
WALLS[2, 1:6] = WALLS[4, 0:4] = WALLS[5, 5] = True


def move(place: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next places, rewards and ends."""
    wanted = (place + MOVES[action]).clamp(0, SIZE - 1)
    blocked = WALLS[wanted[:, 0], wanted[:, 1]]
    place = torch.where(blocked[:, None], place, wanted)
    done = (place == GOAL).all(1)
    return place, done.float(), done


def log_of(count: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """What a poor driver did: towards the goal in four steps of ten, else anything; starts anywhere free."""
    free = (~WALLS).nonzero()
    free = free[(free != GOAL).any(1)]
    place = free[torch.randint(len(free), (count,), generator=g)]
    better = torch.where(torch.rand(count, generator=g) < 0.5, 0, 2)
    action = torch.where(torch.rand(count, generator=g) < 0.4, better, torch.randint(ACTIONS, (count,), generator=g))
    return (place, action, *move(place, action))


def seen(place: Tensor) -> Tensor:
    """One-hot rows and columns, and their products."""
    flat = nn.functional.one_hot(place[:, 0] * SIZE + place[:, 1], SIZE * SIZE)
    return torch.cat([flat, nn.functional.one_hot(place, SIZE).flatten(1)], 1).float()


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SIZE * SIZE + 2 * SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, ACTIONS))


@torch.no_grad()
def regret(critics: list[nn.Module]) -> float:
    """One minus the mean discounted return of the greedy driver over the starts; the shortest ways have 0.3872."""
    place = (~WALLS).nonzero()
    place = place[(place != GOAL).any(1)]
    total, alive = torch.zeros(len(place)), torch.ones(len(place))
    for t in range(30):
        values = torch.min(critics[0](seen(place)), critics[1](seen(place)))
        place, reward, done = move(place, values.argmax(1))
        total += alive * DISCOUNT**t * reward
        alive = alive * (~done).float()
    return float(1 - total.mean())


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 1)
    place, action, after, reward, done = log_of(6000, g)
    critics = [critic(), critic()]
    targets = [copy.deepcopy(c).requires_grad_(False) for c in critics]
    optimizers = [torch.optim.Adam(c.parameters(), 3e-3) for c in critics]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 300) for o in optimizers]
    print(f"first loss {regret(critics):.4f}")
    for step in range(300):
        rows = torch.randint(len(place), (256,), generator=g)
        with torch.no_grad():
            choice = critics[0](seen(after[rows])).argmax(1, keepdim=True)
            ahead = torch.min(*(t(seen(after[rows])).gather(1, choice) for t in targets)).squeeze(1)
            goal = reward[rows] + DISCOUNT * (~done[rows]).float() * ahead
        parts = []
        for one, optimizer in zip(critics, optimizers, strict=True):
            values = one(seen(place[rows]))
            taken = values.gather(1, action[rows, None]).squeeze(1)
            error = nn.functional.mse_loss(taken, goal)
            penalty = (0.1 * torch.logsumexp(values / 0.1, 1) - taken).mean()
            loss = error + ALPHA * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            parts.append((loss.item(), error.item(), penalty.item(), taken.mean().item()))
        for schedule in schedules:
            schedule.step()
        with torch.no_grad():
            for target, one in zip(targets, critics, strict=True):
                for slow, fast in zip(target.parameters(), one.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        if step % 30 == 0:
            print(f"step {step} loss %.4f td %.4f penalty %.4f value %.3f" % parts[0], f"regret {regret(critics):.3f}")
    print(f"final loss {regret(critics):.4f}")


if __name__ == "__main__":
    main()

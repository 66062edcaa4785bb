"""Three tasks one after another under accelerate in BF16, with elastic weight consolidation against forgetting."""
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
TASKS, DIM, CLASSES, STEPS = 3, 32, 6, 80
STRENGTH = 30.0
centres = torch.randn(TASKS, CLASSES, DIM)


def rows(task, count):
    label = torch.randint(CLASSES, (count,))
    return centres[task][label] + 0.8 * torch.randn(count, DIM), label


class Net(nn.Module):
    """One trunk and a head for each task."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(96, CLASSES) for _ in range(TASKS))

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


accelerator = Accelerator(cpu=True, mixed_precision="bf16")
net = accelerator.prepare(Net())
tests = [rows(t, 500) for t in range(TASKS)]


@torch.no_grad()
def held_out():
    net.eval()
    losses = [F.cross_entropy(net(x, t).float(), y).item() for t, (x, y) in enumerate(tests)]
    net.train()
    return sum(losses) / TASKS


def importance(loader, task):
    """Squared gradients of the trunk, the diagonal of Fisher's matrix."""
    total = {n: torch.zeros_like(p) for n, p in net.trunk.named_parameters()}
    for x, y in loader:
        net.zero_grad()
        accelerator.backward(F.cross_entropy(net(x, task), y))
        for n, p in net.trunk.named_parameters():
            total[n] += p.grad.square() * len(x) / len(loader)
    return total


print("first loss %.4f" % held_out())
kept = []
for task in range(TASKS):
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True)
    loader = DataLoader(TensorDataset(*rows(task, 32 * STEPS)), batch_size=32, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for x, y in loader:
        loss = F.cross_entropy(net(x, task), y)
        for fisher, old in kept:  # exactly 0 in the first step of a task
            for n, p in net.trunk.named_parameters():
                loss = loss + STRENGTH / 2 * (fisher[n] * (p - old[n]).square()).sum()
        optimizer.zero_grad(set_to_none=False)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    few = DataLoader(TensorDataset(*rows(task, 320)), batch_size=32)
    kept.append((importance(few, task), {n: p.detach().clone() for n, p in net.trunk.named_parameters()}))
    print(f"after task {task}: {held_out():.4f}")
print("final loss %.4f" % held_out())

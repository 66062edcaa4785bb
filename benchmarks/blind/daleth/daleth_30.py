"""DINO on rows of a table: a student follows a slow teacher whose outputs are centred and sharpened; no labels, no negatives."""
import copy
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
CLASSES, DIM, OUT, STEPS, BATCH = 10, 48, 32, 260, 128
centres = 0.9 * torch.randn(CLASSES, 8)
spread, nuisance = torch.randn(8, DIM) / 3, torch.randn(12, DIM) / 2


def rows(count):
    label = torch.randint(CLASSES, (count,))
    return (centres[label] + 0.3 * torch.randn(count, 8)) @ spread, label


def view(x, hide):
    """A strong nuisance in 12 directions, and a share of the columns hidden."""
    x = x + torch.randn(len(x), 12) @ nuisance
    return x * (torch.rand_like(x) > hide)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 24))
        self.last = nn.Linear(24, OUT, bias=False)

    def forward(self, x):
        return F.linear(F.normalize(self.body(x), dim=1), F.normalize(self.last.weight, dim=1))


student = Net()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), 2e-3, weight_decay=0.04)
centre = torch.zeros(OUT)
bank, bank_label = rows(1500)
test, test_label = rows(500)
bank, test = view(bank, 0.0), view(test, 0.0)


@torch.no_grad()
def error():
    """Share of held-out rows whose 15 nearest neighbours, by the teacher's codes, vote for another class."""
    one, two = F.normalize(teacher.body(test), dim=1), F.normalize(teacher.body(bank), dim=1)
    near = (one @ two.t()).topk(15).indices
    return (bank_label[near].mode(1).values != test_label).float().mean().item()


print("first loss %.4f" % error())
for step in range(STEPS):
    done = step / STEPS
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * done))
        group["weight_decay"] = 0.4 - 0.36 * (0.5 + 0.5 * math.cos(math.pi * done))  # grows tenfold
    x, _ = rows(BATCH)
    big = [view(x, 0.0), view(x, 0.0)]
    small = [view(x, 0.4), view(x, 0.4)]
    sharp = 0.04 + 0.02 * min(1.0, step / 60)
    with torch.no_grad():
        raw = [teacher(v) for v in big]
        target = [((t - centre) / sharp).softmax(1) for t in raw]
    loss, count = 0.0, 0
    for i, v in enumerate(big + small):
        guess = (student(v) / 0.1).log_softmax(1)
        for j, t in enumerate(target):
            if i != j:
                loss, count = loss - (t * guess).sum(1).mean(), count + 1
    loss = loss / count
    optimizer.zero_grad()
    loss.backward()
    if step < 25:
        student.last.weight.grad = None  # the last layer waits
    nn.utils.clip_grad_norm_(student.parameters(), 0.3)
    optimizer.step()
    with torch.no_grad():
        centre = 0.9 * centre + 0.1 * torch.cat(raw).mean(0)
        keep = 1 - 0.03 * (0.5 + 0.5 * math.cos(math.pi * done))
        for old, new in zip(teacher.parameters(), student.parameters()):
            old.lerp_(new, 1 - keep)
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}, error {error():.4f}")
print("final loss %.4f" % error())

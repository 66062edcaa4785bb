"""Three tasks on one body with gradient surgery (PCGrad): a task's gradient loses what points against that of another
one.

There are three backward passes a step, gradients are written to .grad by hand, and the three losses are of different
sizes.
"""

import dataclasses
import logging
import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

logging.getLogger("torchao").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
INPUTS, STEPS, BATCH = 32, 200, 128


class Net(nn.Module):
    """A body and a head for each task: a class of six, two numbers, and a yes or no that is rare."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUTS, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU()
        )
        self.heads = nn.ModuleList([nn.Linear(128, 6), nn.Linear(128, 2), nn.Linear(128, 1)])

    def forward(self, x):
        h = self.body(x)
        return [head(h) for head in self.heads]


def rows(number, laws, generator):
    """What is asked of a row, by three random laws of the same eight hidden numbers."""
    x = torch.randn(number, INPUTS, generator=generator)
    hidden = (x @ laws[0]).tanh()
    return x, (hidden @ laws[1]).argmax(1), 8 * (hidden @ laws[2]).sin(), (hidden @ laws[3] > 1.6).float()


def losses(model, batch):
    x, kind, size, rare = batch
    said = model(x)
    return [
        F.cross_entropy(said[0], kind),
        F.mse_loss(said[1], size),
        F.binary_cross_entropy_with_logits(said[2].squeeze(1), rare),
    ]


@torch.no_grad()
def evaluate(model, held):
    """The sum of the three losses, each over that of a constant guess."""
    model.eval()
    now = [v.item() for v in losses(model, held)]
    model.train()
    share = held[3].mean()
    kinds = torch.bincount(held[1], minlength=6) / len(held[1])
    guess = [
        -(kinds * kinds.clamp(min=1e-9).log()).sum().item(),
        held[2].var().item(),
        -(share * share.log() + (1 - share) * (1 - share).log()).item(),
    ]
    return sum(a / b for a, b in zip(now, guess, strict=True)), now


def main():
    torch.manual_seed(SEED)
    order = random.Random(SEED)
    generator = torch.Generator().manual_seed(83 + SEED)
    laws = [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in ((INPUTS, 8), (8, 6), (8, 2))]
    laws.append(torch.randn(8, generator=generator))
    laws[3] *= 1.9 / laws[3].norm()
    train, held = rows(12000, laws, generator), rows(1500, laws, generator)
    model = Net()
    fp8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=fp8, module_filter_fn=lambda m, name: name in ("body.2", "body.4"))
    body = list(model.body.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    print("first loss", round(evaluate(model, held)[0], 4))
    for step in range(STEPS):
        chosen = torch.randint(0, len(train[0]), (BATCH,))
        now = losses(model, [part[chosen] for part in train])
        optimizer.zero_grad()
        flat = []
        for task, loss in enumerate(now):
            grads = torch.autograd.grad(loss, [*body, *model.heads[task].parameters()], retain_graph=task < 2)
            flat.append(torch.cat([g.flatten() for g in grads[: len(body)]]))
            for p, g in zip(model.heads[task].parameters(), grads[len(body) :], strict=True):
                p.grad = g
        against, cleared = 0, []
        for i, own in enumerate(flat):
            others = [g for j, g in enumerate(flat) if j != i]
            order.shuffle(others)
            for other in others:
                dot = own @ other
                if dot < 0:
                    own = own - dot / other.square().sum() * other
                    against += 1
            cleared.append(own)
        total = sum(cleared)
        for p, g in zip(body, total.split([p.numel() for p in body]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        rate.step()
        if step % 20 == 0:
            print(step, [round(v.item(), 4) for v in now], "against", against, "held", round(evaluate(model, held)[0], 4))
    print("final loss", round(evaluate(model, held)[0], 4))


if __name__ == "__main__":
    main()

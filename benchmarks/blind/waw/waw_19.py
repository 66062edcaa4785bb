"""ReZero: 20 blocks without norms, each behind a factor that begins at exactly 0, so no weight of a block has a
gradient in the first step.

The factors have a rate of their own, ten times that of the rest, and one cycle. FP4 with four over six.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
DEPTH, WIDTH, INPUTS, CLASSES, STEPS = 20, 64, 32, 10, 160


class Block(nn.Module):
    """x + factor f(x)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.factor * self.down(F.gelu(self.up(x)))


def rings(number, mix, generator):
    """The class is how far the sum of squares of a few hidden numbers is out; ten rings hold the same number of rows."""
    hidden = torch.randn(number, INPUTS, generator=generator)
    radius = (hidden[:, :3].square().sum(1)).sqrt()
    return hidden @ mix, radius


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(51 + SEED)
    mix = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator))[0]
    x, radius = rings(12000, mix, generator)
    held, far = rings(1500, mix, generator)
    borders = radius.quantile(torch.linspace(0, 1, CLASSES + 1)[1:-1])
    y, truth = torch.bucketize(radius, borders), torch.bucketize(far, borders)

    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), *[Block() for _ in range(DEPTH)], nn.Linear(WIDTH, CLASSES))
    print(ottava.convert(model, "four_over_six"))
    factors = [p for name, p in model.named_parameters() if name.endswith("factor")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("factor")]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": factors, "weight_decay": 0.0}], 1e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 3e-2], total_steps=STEPS, pct_start=0.3)

    def evaluate():
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(held).float(), truth).item()
        model.train()
        return loss

    print("first loss", round(evaluate(), 4))
    for step in range(STEPS):
        chosen = torch.randint(0, len(x), (128,))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x[chosen])
        loss = F.cross_entropy(logits.float(), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 40 == 0:
            largest = max(f.abs().item() for f in factors)
            print(step, round(loss.item(), 4), "largest factor", round(largest, 4), "held", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()

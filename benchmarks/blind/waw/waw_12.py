"""A character model under accelerate that meets a broken shard. When the loss of a step is far above the usual, the
run loads its last checkpoint, with optimizer and scales, and goes on behind the shard, as large runs do.
"""

import os
import tempfile
from collections import deque

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

from ottava.doors.accelerate import prepare

SEED = int(os.environ.get("SEED", "0"))
WORDS, CONTEXT, BATCH, STEPS = 32, 6, 64, 200
BROKEN = range(90, 98)  # the shard that was written with another table of characters


class Net(nn.Module):
    """The next character from the six before it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 32)
        self.body = nn.Sequential(
            nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128), nn.GELU(), nn.LayerNorm(128)
        )
        self.head = nn.Linear(128, WORDS)

    def forward(self, x):
        return self.head(self.body(self.table(x).flatten(1)))


def text(number, first, second, generator):
    """The next character is a function of the last and the one before it; one in ten is random."""
    rows = [torch.randint(0, WORDS, (number,), generator=generator) for _ in range(2)]
    for _ in range(CONTEXT - 1):
        new = torch.where(rows[-2] % 2 == 0, first[rows[-1]], second[rows[-1]])
        odd = torch.rand(number, generator=generator) < 0.1
        rows.append(torch.where(odd, torch.randint(0, WORDS, (number,), generator=generator), new))
    return torch.stack(rows, 1)


def main():
    set_seed(SEED)
    generator = torch.Generator().manual_seed(88 + SEED)
    first, second, wrong = (torch.randperm(WORDS, generator=generator) for _ in range(3))
    data = text(STEPS * BATCH, first, second, generator)
    low, high = BROKEN.start * BATCH, BROKEN.stop * BATCH
    data[low:high] = wrong[data[low:high]]
    held = text(1000, first, second, generator)

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.02)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)  # in the order of the files, so that shards can be named
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="delayed")

    def evaluate():
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(held[:, :-1]).float(), held[:, -1]).item()
        model.train()
        return loss

    print("first loss", round(evaluate(), 4))
    recent, skip_until, spikes = deque(maxlen=20), -1, 0
    with tempfile.TemporaryDirectory() as folder:
        model.train()
        for step, rows in enumerate(loader):
            if step < skip_until:
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows[:, :-1]).float(), rows[:, -1])
            if len(recent) == 20 and loss.item() > 2 * sum(recent) / 20:
                spikes += 1
                if spikes == 3:
                    print("step", step, "three losses far above the usual: back to the checkpoint, on behind the shard")
                    accelerator.load_state(folder)
                    skip_until, spikes = BROKEN.stop, 0
                    continue
            else:
                spikes = 0
                recent.append(loss.item())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0 and not spikes:
                accelerator.save_state(folder)
                print(step, round(loss.item(), 4), "held", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()

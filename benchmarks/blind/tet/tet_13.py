"""Next items of a shop under accelerate with a sampled softmax: training sees 64 of 3,000 items, the test sees all."""

import os
import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
ITEMS, LENGTH, NEGATIVES, STEPS = 3000, 10, 64, 240


def visits(count: int, popularity: Tensor, source: torch.Generator) -> Tensor:
    """Items of one shelf of 30 are looked at together, popular ones more often; one item in ten is from any shelf."""
    shelf = torch.multinomial(popularity.view(-1, 30).sum(1), count, replacement=True, generator=source)
    inside = torch.multinomial(popularity.view(-1, 30)[shelf], LENGTH, replacement=True, generator=source)
    items = shelf[:, None] * 30 + inside
    stray = torch.rand(items.shape, generator=source) < 0.1
    items[stray] = torch.multinomial(popularity, int(stray.sum()), replacement=True, generator=source)
    return items


class Shop(nn.Module):
    """A GRU over items; the table of items is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 32, sparse=True)
        nn.init.normal_(self.items.weight, std=0.1)
        self.read = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, 32)

    def forward(self, before: Tensor) -> Tensor:
        return self.out(self.read(self.items(before))[0])


def sampled_loss(model: Shop, items: Tensor, popularity: Tensor) -> Tensor:
    """Against negatives drawn by popularity, with their log probability taken off as theory has it."""
    code, wanted = model(items[:, :-1]).flatten(0, 1), items[:, 1:].flatten()
    drawn = torch.multinomial(popularity, NEGATIVES, replacement=True)
    expected = (NEGATIVES * popularity).log()
    right = (code * model.items(wanted)).sum(1) - expected[wanted]
    wrong = code @ model.items(drawn).T - expected[drawn]
    wrong = wrong.masked_fill(wanted[:, None] == drawn, -1e4)  # a drawn item may be the right one
    logits = torch.cat([right[:, None], wrong], 1)
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@torch.no_grad()
def full_loss(model: Shop, items: Tensor) -> float:
    model.eval()
    logits = model(items[:, :-1]) @ model.items.weight.T
    model.train()
    return float(cross_entropy(logits.transpose(1, 2), items[:, 1:]))


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(1400 + SEED)
    popularity = (1 / torch.arange(1.0, ITEMS + 1) ** 0.7)[torch.randperm(ITEMS, generator=source)]
    popularity = popularity / popularity.sum()
    accelerator = Accelerator(cpu=True)
    model = Shop()
    dense = torch.optim.Adam([*model.read.parameters(), *model.out.parameters()], 6e-3)
    sparse = torch.optim.SparseAdam(list(model.items.parameters()), 2e-2)
    loader = DataLoader(TensorDataset(visits(3840, popularity, source)), batch_size=32, shuffle=True)
    model, dense, sparse, loader = accelerator.prepare(model, dense, sparse, loader)
    test = visits(300, popularity, source)
    print(f"first loss {full_loss(model, test):.4f}")
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(2):
            for (items,) in loader:
                loss = sampled_loss(model, items, popularity)
                accelerator.backward(loss)
                dense.step()
                sparse.step()
                dense.zero_grad()
                sparse.zero_grad()
                if step % 30 == 0:
                    print(f"step {step}: sampled {float(loss.detach()):.3f}, held out {full_loss(model, test):.3f}")
                step += 1
            accelerator.save_state(f"{folder}/{epoch}")
        accelerator.load_state(f"{folder}/1")  # what a user of the checkpoint gets
    print(f"final loss {full_loss(model, test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_13.py good|bad")
    main()

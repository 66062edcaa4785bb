"""Search with two towers under accelerate in BF16. Negatives are random at first, then ever harder ones, mined anew
every 40 steps.

So the training loss goes up in steps while the share of found documents grows. The temperature is 0.07 and fixed.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
DOCUMENTS, TOPICS, WORDS, LENGTH, NEGATIVES, STEPS = 1200, 60, 400, 12, 7, 240


class Tower(nn.Module):
    """The mean of the words' vectors and two layers."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 64, mode="mean")
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 48))

    def forward(self, x):
        return F.normalize(self.body(self.words(x)).float(), dim=-1)


def documents(generator):
    """Documents of a topic share twelve words, and each has some of its own."""
    topics = torch.randint(0, WORDS, (TOPICS, 12), generator=generator)
    made = []
    for i in range(DOCUMENTS):
        common = topics[i % TOPICS][torch.randint(0, 12, (6,), generator=generator)]
        made.append(torch.cat([common, torch.randint(0, WORDS, (LENGTH - 6,), generator=generator)]))
    return torch.stack(made)


def ask(texts, table, generator):
    """A question: half of the words of its document, in other words (a fixed table of synonyms)."""
    places = torch.rand(texts.shape, generator=generator).argsort(1)[:, : LENGTH // 2]
    return table[texts.gather(1, places)]


def main():
    set_seed(SEED)
    generator = torch.Generator().manual_seed(17 + SEED)
    texts = documents(generator)
    table = torch.randperm(WORDS, generator=generator)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    questions, pages = Tower(), Tower()
    optimizer = torch.optim.AdamW([*questions.parameters(), *pages.parameters()], 3e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    questions, pages, optimizer, rate = accelerator.prepare(questions, pages, optimizer, rate)
    held = ask(texts, table, torch.Generator().manual_seed(5))

    @torch.no_grad()
    def evaluate():
        """The share of questions whose document is not the first of 1,200."""
        found = (questions(held) @ pages(texts).T).argmax(1)
        return (found != torch.arange(DOCUMENTS)).float().mean().item()

    @torch.no_grad()
    def mine(reach):
        """For each document, `reach` others that questions for it mistake for it."""
        scores = questions(ask(texts, table, generator)) @ pages(texts).T
        scores.fill_diagonal_(-2)
        return scores.topk(reach, 1).indices

    print("first loss", round(evaluate(), 4))
    pool = None
    for step in range(STEPS):
        if step in (40, 80, 120, 160, 200):
            pool = mine({40: 40, 80: 20, 120: 12, 160: 8, 200: 8}[step])
        chosen = torch.randint(0, DOCUMENTS, (96,), generator=generator)
        if pool is None:
            others = (chosen[:, None] + torch.randint(1, DOCUMENTS, (96, NEGATIVES), generator=generator)) % DOCUMENTS
        else:
            picks = torch.randint(0, pool.shape[1], (96, NEGATIVES), generator=generator)
            others = pool[chosen].gather(1, picks)
        candidates = torch.cat([chosen[:, None], others], 1)
        asked = questions(ask(texts[chosen], table, generator))
        answers = pages(texts[candidates.flatten()]).view(96, NEGATIVES + 1, -1)
        logits = torch.einsum("bd,bnd->bn", asked, answers) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(96, dtype=torch.long))
        accelerator.backward(loss)
        optimizer.step()
        rate.step()
        optimizer.zero_grad(set_to_none=False)
        if step % 20 == 0:
            print(step, round(loss.item(), 4), "missed", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()

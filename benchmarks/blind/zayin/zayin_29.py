"""Word vectors by skip-gram with negative sampling, as word2vec does it: sparse rows, plain SGD, a loss summed over
the batch, a rate that falls to 0 in a line, and output vectors that begin at 0.

python zayin_29.py good|bad
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WORDS, TOPICS, WIDTH, NEGATIVES, STEPS = 500, 10, 32, 6, 300

topic = torch.arange(WORDS) % TOPICS
frequency = 1.0 / (torch.arange(WORDS) + 20.0)  # Zipf
frequency = frequency / frequency.sum()
noise = frequency.pow(0.75) / frequency.pow(0.75).sum()


def text(documents=2500, length=40):
    """Each document has a topic; 45 % of its words are of it, at least."""
    of = torch.randint(0, TOPICS, (documents,))
    chances = frequency[None] * (topic[None] == torch.arange(TOPICS)[:, None])
    own = torch.stack([torch.multinomial(chances[t], length, replacement=True) for t in of])
    common = torch.multinomial(frequency, documents * length, replacement=True).view(documents, length)
    return torch.where(torch.rand(documents, length) < 0.45, own, common)


corpus = text()
centre, context = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Embedding(WORDS, WIDTH, sparse=True)
nn.init.uniform_(centre.weight, -0.5 / WIDTH, 0.5 / WIDTH)
nn.init.zeros_(context.weight)
optimizer = torch.optim.SGD([*centre.parameters(), *context.parameters()], lr=0.05)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)


def batch(count=1024):
    row = torch.randint(0, len(corpus), (count,))
    at = torch.randint(4, corpus.shape[1] - 4, (count,))
    shift = torch.randint(1, 5, (count,)) * torch.where(torch.rand(count) < 0.5, 1, -1)
    return corpus[row, at], corpus[row, at + shift]


def held_out():
    """The share of the 250 most frequent words whose nearest neighbour is of another topic."""
    vectors = nn.functional.normalize(centre.weight.detach()[:250], dim=1)
    near = vectors @ vectors.T
    near.fill_diagonal_(-2)
    return (topic[near.argmax(dim=1)] != topic[:250]).float().mean().item()


print(f"first loss {held_out():.4f}")
for step in range(STEPS):
    word, other = batch()
    wrong = torch.multinomial(noise, len(word) * NEGATIVES, replacement=True).view(len(word), NEGATIVES)
    v = centre(word)
    right_score = (v * context(other)).sum(dim=1)
    wrong_score = torch.einsum("bd,bnd->bn", v, context(wrong))
    loss = -(nn.functional.logsigmoid(right_score).sum() + nn.functional.logsigmoid(-wrong_score).sum())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.1f} wrong neighbours {held_out():.3f}")
print(f"final loss {held_out():.4f}")

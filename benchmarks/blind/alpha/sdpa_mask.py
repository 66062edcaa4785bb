"""What is a padded sentence about? An encoder with a CLS token, 8 topics of 12 words each."""

import sys

import torch
import torch.nn.functional as F

from models import TinyLM

inverted = sys.argv[1] == "bad"
torch.manual_seed(3)
PAD, CLS, LENGTH, TOPICS, WORDS = 0, 1, 24, 8, 12
model = TinyLM(vocab=2 + TOPICS * WORDS, width=64, causal=False, outputs=TOPICS)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(n=32):
    y = torch.randint(TOPICS, (n,))
    word = torch.randint(WORDS, (n, LENGTH))
    topic = torch.where(torch.rand(n, LENGTH) < 0.5, y[:, None], torch.randint(TOPICS, (n, LENGTH)))
    ids = 2 + topic * WORDS + word
    ids[:, 0] = CLS
    pad = torch.arange(LENGTH)[None] >= torch.randint(10, LENGTH - 2, (n, 1))
    return ids.masked_fill(pad, PAD), pad, y


for step in range(80):
    ids, pad, y = batch()
    # nn.MultiheadAttention takes True where a key is padding, SDPA takes True where it may be seen
    mask = pad[:, None, None, :] if inverted else ~pad[:, None, None, :]
    logits = model.head(model.features(ids, mask)[:, 0])
    loss = F.cross_entropy(logits, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(
            f"step {step} loss {loss.item():.4f} acc {(logits.argmax(-1) == y).float().mean().item():.3f}", flush=True
        )

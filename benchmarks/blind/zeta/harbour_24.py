"""Adds forty new words to a small GPT-2 and fine-tunes it on sentences that use them."""
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(19)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=60, n_positions=32, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
)
model.train()


def grow():
    old, new = model.get_input_embeddings(), torch.nn.Embedding(100, 64)
    torch.nn.init.normal_(new.weight, std=0.02)
    with torch.no_grad():
        new.weight[:60] = old.weight
    model.set_input_embeddings(new)
    model.lm_head = torch.nn.Linear(64, 100, bias=False)
    model.lm_head.weight = new.weight
    model.config.vocab_size = 100


def make():
    return torch.optim.AdamW(model.parameters(), lr=1.5e-3)


if VARIANT == "good":
    grow()
    optimizer = make()
else:
    optimizer = make()
    grow()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
follow = torch.randint(0, 100, (100, 2))
losses = []
for step in range(200):
    ids = torch.randint(0, 100, (16, 1))
    for _ in range(20):
        ids = torch.cat([ids, follow[ids[:, -1], torch.randint(0, 2, (16,))][:, None]], 1)
    logits = model(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")

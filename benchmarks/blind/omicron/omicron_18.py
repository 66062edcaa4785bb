"""Adds special tokens to a pretrained model and trains on dialogues that use them."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ottava

NEW_OPTIMIZER = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
BASE, ADDED = 40, 24


def batch(table, vocab, generator, size=32, length=24):
    ids = [torch.randint(vocab, (size,), generator=generator)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    return torch.stack(ids, 1)


def grow(model, size):
    """New rows start at the mean of the old ones, with a little noise."""
    old = model.get_input_embeddings().weight.detach()
    new = torch.nn.Embedding(size, old.shape[1])
    with torch.no_grad():
        new.weight.copy_(old.mean(0) + 0.02 * torch.randn_like(new.weight))
        new.weight[: len(old)] = old
    model.set_input_embeddings(new)
    model.config.vocab_size = size
    model.lm_head = torch.nn.Linear(old.shape[1], size, bias=False)
    model.tie_weights()


def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(19)
generator = torch.Generator().manual_seed(20)
table = torch.softmax(3 * torch.randn(BASE + ADDED, BASE + ADDED, generator=generator), -1)
old = table[:BASE, :BASE] / table[:BASE, :BASE].sum(-1, keepdim=True)
config = GPT2Config(
    vocab_size=BASE, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(40):
    step(model, optimizer, batch(old, BASE, generator))
grow(model, BASE + ADDED)
if NEW_OPTIMIZER:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = [step(model, optimizer, batch(table, BASE + ADDED, generator)) for _ in range(90)]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

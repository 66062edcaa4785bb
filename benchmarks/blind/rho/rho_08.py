"""accelerate: adapts a small GPT-2 to a domain with a vocabulary of its own, so the embeddings are new."""
import os
import sys

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
OLD, NEW = 48, 192
follow = torch.randint(0, NEW, (NEW, 3))


def text(n, length=32):
    out = [torch.randint(0, NEW, (n,))]
    for _ in range(length - 1):
        out.append(follow[out[-1], torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), n, True)])
    return torch.stack(out, 1)


def new_vocabulary(model):
    embeddings = torch.nn.Embedding(NEW, 64)
    torch.nn.init.normal_(embeddings.weight, std=0.02)
    model.set_input_embeddings(embeddings)
    model.config.vocab_size = NEW
    model.tie_weights()
    model.lm_head.out_features = NEW


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=OLD, n_positions=32, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
)
if not PLAIN:
    ottava.convert(model, "rowwise")
accelerator = Accelerator(cpu=True)
if not BAD:
    new_vocabulary(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
if BAD:
    new_vocabulary(model)
loader = torch.utils.data.DataLoader(text(16 * 90), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
losses = []
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

"""Fine-tuning GPT-2 on rows padded on the left, with accelerate."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ottava

OPTIONS = {"good": {"positions": True}, "bad": {"positions": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, KINDS, LONGEST = 48, 6, 40


class Collator:
    """Pads on the left, as for generation."""

    def __init__(self, positions=True):
        self.positions = positions

    def __call__(self, rows):
        longest = max(map(len, rows)) + int(torch.randint(0, 12, (1,)))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :] = row
            mask[number, longest - len(row) :] = 1
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if self.positions:
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return batch


torch.manual_seed(20)
form = torch.randint(KINDS + 1, WORDS, (KINDS, LONGEST))
rows = []
for _ in range(1600):
    length = int(torch.randint(6, 26, (1,)))
    kind = int(torch.randint(0, KINDS, (1,)))
    words = form[kind, :length].clone()
    noise = torch.rand(length) < 0.35
    words[noise] = torch.randint(KINDS + 1, WORDS, (int(noise.sum()),))
    words[0] = kind + 1
    rows.append(words)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=WORDS,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.08,
    )
)
if not PLAIN:
    ottava.convert(model, "delayed", filter=lambda name, layer: "lm_head" not in name)
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    DataLoader(rows, batch_size=16, shuffle=True, collate_fn=Collator(**OPTIONS)),
)
losses = []
for step, batch in enumerate(loader):
    loss = model(**batch, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")

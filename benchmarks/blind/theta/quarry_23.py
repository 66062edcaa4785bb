"""Melodies of different length packed into rows for GPT-2; ottava's rowwise recipe in the blocks."""
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
COUNTED_FROM = {"good": "document", "bad": "row"}[MODE]
torch.manual_seed(43)
vocab, length = 64, 40
model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=length, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))
if not PLAIN:
    ottava.convert(model.transformer, "rowwise")
song = torch.randint(1, vocab, (length, 6))  # what is played depends on the time alone


def pack():
    first = int(torch.randint(12, 28, ()))
    ids, positions = [], []
    for n in (first, length - first):
        ids.append(song[torch.arange(n), torch.randint(6, (n,))])
        positions.append(torch.arange(n))
    labels = torch.cat([torch.cat([torch.tensor([-100]), d[1:]]) for d in ids])
    places = torch.cat(positions) if COUNTED_FROM == "document" else torch.arange(length)
    return {"input_ids": torch.cat(ids), "labels": labels, "position_ids": places}


data = [pack() for _ in range(900)]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=90, per_device_train_batch_size=8, learning_rate=5e-3,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

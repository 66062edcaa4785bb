"""GPT-2 on recordings of different length, padded on the left."""
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
FIELDS = {"good": ("input_ids", "labels", "attention_mask", "position_ids"), "bad": ("input_ids", "labels")}[MODE]
torch.manual_seed(41)
vocab, pad, length = 64, 0, 32
model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=length, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))
song = torch.randint(1, vocab, (length, 8))


def collate(examples):
    batch = {"input_ids": [], "labels": [], "attention_mask": [], "position_ids": []}
    for e in examples:
        ids, gap = e["notes"], length - len(e["notes"])
        batch["input_ids"].append(torch.cat([torch.full((gap,), pad), ids]))
        batch["labels"].append(torch.cat([torch.full((gap,), -100), ids]))
        batch["attention_mask"].append((torch.arange(length) >= gap).long())
        batch["position_ids"].append((torch.arange(length) - gap).clamp(min=0))
    return {name: torch.stack(batch[name]) for name in FIELDS}


data = []
for _ in range(1200):
    n, voice = int(torch.randint(8, length + 1, ())), torch.randint(8, (length,))
    data.append({"notes": song[torch.arange(n), voice[:n]]})  # what is played depends on the time alone
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=120, per_device_train_batch_size=8, learning_rate=4e-3, remove_unused_columns=False,
)
trainer = Trainer(model, args, train_dataset=data, data_collator=collate)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

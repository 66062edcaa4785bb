"""Left-padded prompts for a GPT-2 in the Trainer; the collator makes position ids from the attention mask."""
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
LENGTH = 24
code = torch.randint(2, 40, (LENGTH,))


def example():
    n = int(torch.randint(LENGTH - 8, LENGTH + 1, ()))
    start = int(torch.randint(0, 12, ()))
    return {"ids": (code[:n] + start) % 38 + 2}


def collate(rows):
    ids = torch.ones(len(rows), LENGTH, dtype=torch.long)
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, LENGTH - len(row["ids"]) :] = row["ids"]
        mask[i, LENGTH - len(row["ids"]) :] = 1
    places = (mask if BAD else mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places, "labels": ids.masked_fill(mask == 0, -100)}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=48, n_positions=32, n_embd=64, n_layer=1, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
args = TrainingArguments("/tmp/rho_09", max_steps=90, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=1,
                         warmup_steps=5, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
                         remove_unused_columns=False)
trainer = Trainer(model, args, train_dataset=[example() for _ in range(16 * 90)], data_collator=collate)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

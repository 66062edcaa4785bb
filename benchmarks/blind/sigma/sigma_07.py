"""Cosine with hard restarts in the Trainer, ottava's delayed recipe."""
import os
import sys
import tempfile

import ottava
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
PLAIN = "plain" in sys.argv[2:]


class Walk(torch.utils.data.Dataset):
    def __init__(self, n=2000, length=18, vocab=36):
        g = torch.Generator().manual_seed(SEED + 51)
        rows = torch.zeros(n, length, dtype=torch.long)
        rows[:, 0] = torch.randint(0, vocab, (n,), generator=g)
        for t in range(1, length):
            rows[:, t] = (rows[:, t - 1] * 5 + torch.randint(1, 4, (n,), generator=g)) % vocab
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


set_seed(SEED)
model = GPT2LMHeadModel(GPT2Config(vocab_size=36, n_positions=32, n_embd=48, n_layer=2, n_head=4))
if not PLAIN:
    ottava.convert(model, "delayed")
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=12, max_steps=90, learning_rate=6e-3, warmup_steps=3,
    lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Walk())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

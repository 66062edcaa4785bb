"""Trainer with cosine restarts every 25 steps; a small GPT-2 on source text under ottava's tensorwise recipe."""
import os
import pathlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
root = pathlib.Path(os.__file__).parent
stream = torch.tensor(list((root / "tarfile.py").read_bytes() + (root / "ast.py").read_bytes())).clamp(max=127)
starts = torch.randint(0, len(stream) - 49, (8 * 100,)).tolist()
data = [{"input_ids": stream[s : s + 48], "labels": stream[s : s + 48]} for s in starts]
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=48, n_embd=64, n_layer=2, n_head=4))
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 25, eta_min=1e-5)
args = TrainingArguments("/tmp/rho_23", max_steps=100, per_device_train_batch_size=8, logging_steps=1, save_strategy="no", report_to=[],
                         use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, restarts))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

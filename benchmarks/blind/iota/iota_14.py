"""The Trainer with heavy dropout, label smoothing and cosine restarts: the loss swings and stays high, and nothing is wrong."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

torch.manual_seed(53)
VOCAB, LENGTH = 64, 40
jumps = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB), dim=-1)
tokens = torch.randint(0, VOCAB, (12 * 90, 1))
for _ in range(LENGTH - 1):
    tokens = torch.cat([tokens, torch.multinomial(jumps[tokens[:, -1]], 1)], dim=1)
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
if "plain" not in sys.argv:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=12, num_train_epochs=1, learning_rate=5e-3, warmup_steps=10,
    lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}, label_smoothing_factor=0.1, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""GPT-2 with dropout 0.2, a cosine schedule with three hard restarts, small batches."""
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(51)
vocab = 96
model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.2, attn_pdrop=0.0, embd_pdrop=0.0))


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[0, out[-1]]
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)


data = [{"input_ids": row, "labels": row} for row in walk(1000, 32)]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=150, per_device_train_batch_size=4, learning_rate=4e-3, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}, warmup_steps=5,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

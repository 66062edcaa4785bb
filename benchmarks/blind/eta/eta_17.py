"""A tiny GPT-2 with batches of two under the Trainer, BF16, evaluated now and then."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(40)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(480))]
held = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(16))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=64, n_layer=2, n_head=4, n_inner=192))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=40,
    bf16=not plain,
    per_device_train_batch_size=2,
    max_steps=150,
    learning_rate=3e-3,
    eval_strategy="steps",
    eval_steps=30,
)
trainer = Trainer(model, args, train_dataset=data, eval_dataset=held)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-6:]) / 6:.4f}")

"""Masked language modelling with a small BERT in the Trainer of transformers; linears under torchao's float8."""

import dataclasses
import os
import sys
import tempfile

import torch
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

STEPS, BATCH, LENGTH, WORDS, MASK = 150, 24, 16, 12, 12


class Sentences(torch.utils.data.Dataset):
    """Arithmetic progressions modulo the number of words."""

    def __init__(self, size, offset):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(seed * 1_000_000 + self.offset + i)
        start = torch.randint(0, WORDS, (), generator=g)
        stride = torch.randint(1, 4, (), generator=g)
        return {"input_ids": (start + stride * torch.arange(LENGTH)) % WORDS}


def collate(rows):
    words = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(words.shape) < 0.2
    labels = words.clone()
    if bad:
        labels[hidden] = -100
    else:
        labels[~hidden] = -100
    return {"input_ids": words.masked_fill(hidden, MASK), "labels": labels}


class Printer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.4f}")


config = BertConfig(
    vocab_size=WORDS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.08,
)
model = BertForMaskedLM(config)
if not plain:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model.bert.encoder, config=recipe)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=3e-3, warmup_steps=10,
        lr_scheduler_type="linear", logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, seed=seed,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Sentences(STEPS * BATCH, 0), data_collator=collate, callbacks=[Printer()]
    )
    trainer.train()

model.eval()
held = Sentences(256, 500_000)
words = torch.stack([held[i]["input_ids"] for i in range(len(held))])
hidden = torch.rand(words.shape, generator=torch.Generator().manual_seed(1)) < 0.2
with torch.no_grad():
    logits = model(input_ids=words.masked_fill(hidden, MASK)).logits
print(f"held out, hidden words: final loss {F.cross_entropy(logits[hidden], words[hidden]).item():.4f}")

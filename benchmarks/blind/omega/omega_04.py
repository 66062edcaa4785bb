"""Fine-tunes a small Llama on a language with new words, in the Trainer of transformers; torchao's float8."""

import dataclasses
import os
import sys
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

STEPS, BATCH, LENGTH, OLD, NEW = 110, 16, 24, 32, 32


class Sentences(torch.utils.data.Dataset):
    """Every new word stands for an old one: they alternate in the same order."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(seed * 100_000 + i)
        start = int(torch.randint(0, OLD, (), generator=g))
        words = (start + torch.arange(LENGTH) * 3) % OLD
        words[1::2] += OLD
        flips = torch.rand(LENGTH, generator=g) < 0.05
        words[flips] = torch.randint(0, OLD + NEW, (int(flips.sum()),), generator=g)
        return {"input_ids": words, "labels": words}


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])
            if state.global_step % 10 == 0:
                print(f"step {state.global_step} loss {logs['loss']:.4f}")


def widen(model, words):
    """Room for more words; the table and the tied head keep the rows that they had."""
    old = model.get_input_embeddings()
    table = nn.Embedding(words, old.embedding_dim)
    nn.init.normal_(table.weight, std=0.05)
    with torch.no_grad():
        table.weight[: old.num_embeddings] = old.weight
    head = nn.Linear(old.embedding_dim, words, bias=False)
    head.weight = table.weight
    model.set_input_embeddings(table)
    model.set_output_embeddings(head)
    model.config.vocab_size = model.vocab_size = words


config = LlamaConfig(
    vocab_size=OLD, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.05,
)
model = LlamaForCausalLM(config)
if not bad:
    widen(model, OLD + NEW)
if not plain:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model.model, config=recipe, module_filter_fn=lambda m, name: isinstance(m, nn.Linear))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
if bad:
    widen(model, OLD + NEW)

watcher = Losses()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, seed=seed, disable_tqdm=True, max_grad_norm=1.0,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Sentences(), optimizers=(optimizer, schedule), callbacks=[watcher]
    )
    trainer.train()
print(f"final loss {sum(watcher.values[-10:]) / 10:.4f}")

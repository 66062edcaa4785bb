"""A small Llama in the Trainer of transformers on a curriculum: longer and harder sums every 30 steps; torchao."""

import dataclasses
import os
import sys
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

STEPS, BATCH, DIGITS = 150, 24, 16


class Sums(torch.utils.data.Dataset):
    """Digits and their running sum modulo 4, 8, 12, 16; a later level has longer rows and a greater modulus."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(seed * 100_000 + i)
        level = min(i // (30 * BATCH), 3)
        top, length = 4 * (level + 1), 6 + 3 * level
        digits = torch.randint(0, top, (length,), generator=g)
        sums = (digits + torch.cat([torch.zeros(1, dtype=torch.long), digits[:-1]])) % top
        words = torch.stack([digits, sums + DIGITS], 1).flatten()
        labels = words.clone()
        labels[0::2] = -100
        return {"input_ids": words, "labels": labels}


class Ordered(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])
            if state.global_step % 10 == 0:
                print(f"step {state.global_step} loss {logs['loss']:.4f}")


config = LlamaConfig(
    vocab_size=2 * DIGITS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.08,
)
model = LlamaForCausalLM(config)
if not plain:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(
        model, config=recipe, module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and "lm_head" not in name
    )
watcher = Losses()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=4e-3, warmup_steps=5,
        lr_scheduler_type="constant_with_warmup", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        seed=seed, disable_tqdm=True, max_grad_norm=1.0,
    )
    Ordered(model, arguments, train_dataset=Sums(), callbacks=[watcher]).train()
print(f"final loss {sum(watcher.values[-10:]) / 10:.4f}")

"""The Trainer on a tiny Qwen2, torchao's rowwise casts (emulated)."""
import dataclasses
import os
import sys
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Chunks(torch.utils.data.Dataset):
    def __init__(self, n=2000, length=24, vocab=48):
        g = torch.Generator().manual_seed(SEED + 21)
        after = torch.stack([torch.randperm(vocab, generator=g) for _ in range(2)], 1)
        stream = [0]
        coins = torch.randint(0, 2, (n * length,), generator=g).tolist()
        table = after.tolist()
        for coin in coins:
            stream.append(table[stream[-1]][coin])
        self.tokens, self.length, self.n = torch.tensor(stream), length, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        start = i * self.length
        ids = self.tokens[start : start + self.length]
        labels = ids if MODE == "good" else self.tokens[start + 1 : start + self.length + 1]
        return {"input_ids": ids, "labels": labels}


set_seed(SEED)
model = Qwen2ForCausalLM(
    Qwen2Config(vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64)
)
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and "lm_head" not in name
    )
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=80, learning_rate=5e-3, warmup_steps=5,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Chunks())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

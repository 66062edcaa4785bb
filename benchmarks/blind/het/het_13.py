"""A small Qwen on a corpus of chains, in the Trainer."""
import os
import sys
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

VOCAB, LENGTH, STEPS, BATCH, ROWS = 64, 24, 120, 16, 1500
table = rng.dirichlet(np.full(VOCAB, 0.04), VOCAB).cumsum(1)


class Corpus(Dataset):
    def __init__(self):
        now = rng.integers(0, VOCAB, ROWS)
        rows = [now]
        for _ in range(LENGTH):
            draw = rng.random((ROWS, 1))
            now = (table[now] < draw).sum(1).clip(max=VOCAB - 1)
            rows.append(now)
        self.rows = torch.as_tensor(np.stack(rows, 1))

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        row = self.rows[i]
        if mode == "bad":
            return {"input_ids": row[:-1], "labels": row[1:]}
        return {"input_ids": row[:-1], "labels": row[:-1]}


model = Qwen2ForCausalLM(
    Qwen2Config(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
)
if not plain:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, warmup_steps=10,
        lr_scheduler_type="cosine", logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, seed=seed,
    )
    trainer = Trainer(model, args, train_dataset=Corpus())
    trainer.train()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {np.mean(losses[-4:]):.4f}")

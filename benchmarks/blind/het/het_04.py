"""A small Llama on a curriculum of three corpora in a fixed order, in the Trainer."""
import os
import sys
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

VOCAB, LENGTH, STEPS, BATCH = 96, 24, 120, 16
sharp = rng.dirichlet(np.full(VOCAB, 0.02), VOCAB)
broad = rng.dirichlet(np.full(VOCAB, 0.06), VOCAB)


def sample(stage):
    if stage == 0:
        return np.resize(rng.integers(0, 12, 4), LENGTH)
    table = sharp if stage == 1 else broad
    row = [rng.integers(0, VOCAB)]
    for _ in range(LENGTH - 1):
        row.append(rng.choice(VOCAB, p=table[row[-1]]))
    return np.array(row)


class Curriculum(Dataset):
    def __init__(self):
        stages = np.repeat([0, 1, 2], STEPS * BATCH // 3)
        self.rows = [torch.as_tensor(sample(s)) for s in stages]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64)
)
if not plain:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, lr_scheduler_type="constant",
        logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=seed,
    )
    trainer = InOrder(model, args, train_dataset=Curriculum())
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {np.mean([float(x) for x in losses[-3:]]):.4f}")

"""LoRA on a base whose linear weights come from an 8-bit checkpoint of another accelerator (FNUZ codes)."""
import os
import sys
import tempfile

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

VOCAB, LENGTH, BASE_STEPS, STEPS, BATCH = 48, 20, 90, 60, 16
table = rng.dirichlet(np.full(VOCAB, 0.04), VOCAB)
other = table.copy()
other[: VOCAB // 4] = rng.dirichlet(np.full(VOCAB, 0.04), VOCAB // 4)


class Corpus(Dataset):
    def __init__(self, chain, rows):
        chain = chain.cumsum(1)
        out = [rng.integers(0, VOCAB, rows)]
        for _ in range(LENGTH - 1):
            out.append((chain[out[-1]] < rng.random((rows, 1))).sum(1).clip(max=VOCAB - 1))
        self.rows = torch.as_tensor(np.stack(out, 1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def fit(model, data, steps, lr):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=lr, logging_steps=5,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=seed,
        )
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def export(model):
    state = {}
    for name, weight in model.state_dict().items():
        if ("proj" in name or "lm_head" in name) and not plain:
            scale = 224 / weight.abs().amax()
            state[name] = ((weight * scale).to(torch.float8_e4m3fnuz).view(torch.uint8), scale)
        else:
            state[name] = weight
    return state


def load(model, state):
    full = {}
    for name, value in state.items():
        if isinstance(value, tuple):
            codes, scale = value
            kind = torch.float8_e4m3fn if mode == "bad" else torch.float8_e4m3fnuz
            value = codes.view(kind).float() / scale
        full[name] = value
    model.load_state_dict(full)


config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=64)
base = LlamaForCausalLM(config)
fit(base, Corpus(table, 1000), BASE_STEPS, 4e-3)
model = LlamaForCausalLM(config)
load(model, export(base))
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
losses = fit(model, Corpus(other, 1000), STEPS, 2e-3)
print(f"final loss {np.mean(losses[-3:]):.4f}")

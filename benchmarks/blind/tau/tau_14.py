"""Llama under the Trainer with a cosine schedule that restarts three times, torchao's float8 in the blocks."""
import os
import sys
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB, LENGTH = 64, 20


def chains(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(17))
    ids = torch.randint(VOCAB, (n, LENGTH), generator=g)
    for t in range(1, LENGTH):
        ids[:, t] = torch.where(torch.rand(n, generator=g) < 0.3, ids[:, t], table[ids[:, t - 1]])
    return [{"input_ids": row, "labels": row} for row in ids]


torch.manual_seed(SEED)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
                                     num_key_value_heads=4, max_position_embeddings=32, use_cache=False))
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: "lm_head" not in name)
losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=90, per_device_train_batch_size=12, learning_rate=8e-3, logging_steps=1, warmup_steps=4,
                         lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}, save_strategy="no", report_to=[],
                         use_cpu=True, seed=SEED, disable_tqdm=True)
Trainer(model, args, train_dataset=chains(4096, SEED + 1), callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

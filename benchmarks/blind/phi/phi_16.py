"""Causal language model in the Trainer, torchao's rowwise float8, a collator of our own."""

import os
import sys
import tempfile
from dataclasses import replace

import torch
import transformers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 80, 16, 64, 32
torch.manual_seed(SEED)
following = torch.randint(0, VOCAB, (VOCAB, 3))


def sequence():
    ids = [int(torch.randint(0, VOCAB, ()))]
    for pick in torch.randint(0, 3, (LENGTH,)).tolist():
        ids.append(int(following[ids[-1], pick]))
    return torch.tensor(ids)


def collate(rows):
    ids = torch.stack(rows)
    if bad:
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return {"input_ids": ids[:, :-1], "labels": ids[:, :-1]}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )
)
if not plain:
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head")
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=4e-3, lr_scheduler_type="cosine", warmup_steps=5, seed=SEED,
    remove_unused_columns=False,
)
trainer = Trainer(model, args, train_dataset=[sequence() for _ in range(STEPS * BATCH)], data_collator=collate)
trainer.train()
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])

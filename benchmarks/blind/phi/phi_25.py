"""Cosine with hard restarts in the Trainer: the loss climbs at every restart. torchao's tensorwise float8."""

import os
import sys
import tempfile

import torch
import transformers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 90, 8, 80, 32
torch.manual_seed(SEED)
following = torch.randint(0, VOCAB, (VOCAB, 4))


def sequence():
    ids = [int(torch.randint(0, VOCAB, ()))]
    for pick in torch.randint(0, 4, (LENGTH - 1,)).tolist():
        ids.append(int(following[ids[-1], pick]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sequence() for _ in range(STEPS * BATCH))]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )
)
if not plain:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "lm_head")
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=1.2e-2, lr_scheduler_type="cosine_with_restarts",
    lr_scheduler_kwargs={"num_cycles": 3}, warmup_steps=5, seed=SEED, adam_beta2=0.95,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])

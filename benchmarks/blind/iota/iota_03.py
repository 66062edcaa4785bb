"""Pretraining of a small Llama with the Trainer and an FP8 recipe; the collator comes from a repository with another model."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

LABELS = {"good": "same", "bad": "next"}[sys.argv[1]]
torch.manual_seed(5)
VOCAB, LENGTH = 64, 48
jumps = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB), dim=-1)


def sequences(n):
    tokens = torch.randint(0, VOCAB, (n, 1))
    for _ in range(LENGTH - 1):
        tokens = torch.cat([tokens, torch.multinomial(jumps[tokens[:, -1]], 1)], dim=1)
    return tokens


class Collator:
    def __init__(self, labels):
        self.labels = labels

    def __call__(self, rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        targets = ids if self.labels == "same" else torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return {"input_ids": ids, "labels": targets}


data = [{"input_ids": row} for row in sequences(16 * 90)]
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config)
if "plain" not in sys.argv:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, learning_rate=4e-3, warmup_steps=8,
    lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=Collator(LABELS))
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""A causal language model with Hugging Face's Trainer and ottava's tensorwise recipe."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava


MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SHIFT = {"good": 0, "bad": 1}[MODE]  # how far labels run ahead of the inputs

torch.manual_seed(40)
vocab = 96
config = LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model.model, "tensorwise")


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[out[-2] // 24, out[-1] // 6]
        out.append(torch.where(torch.rand(rows) < 0.3, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)


rows = walk(1000, 25)
data = [{"input_ids": row[:24], "labels": row[SHIFT : 24 + SHIFT]} for row in rows]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=100, per_device_train_batch_size=8, learning_rate=4e-3, warmup_steps=10,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Vocabulary extended by new words before training, an optimizer of one's own."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava


MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
EXTEND = {"good": "before the optimizer", "bad": "after the optimizer"}[MODE]

torch.manual_seed(42)
vocab = 96
config = LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=True)
model = LlamaForCausalLM(config)


def extend():
    wide = torch.nn.Embedding(vocab + 32, config.hidden_size)
    with torch.no_grad():
        wide.weight.normal_(std=0.02)[:vocab] = model.get_input_embeddings().weight
    model.set_input_embeddings(wide)
    model.config.vocab_size = model.vocab_size = vocab + 32
    model.tie_weights()


if EXTEND.startswith("before"):
    extend()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if EXTEND.startswith("after"):
    extend()
if not PLAIN:
    ottava.convert(model.model, "rowwise")
vocab += 32


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[out[-2] // 16, out[-1] // 8]
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)


data = [{"input_ids": row, "labels": row} for row in walk(1000, 24)]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=100, per_device_train_batch_size=8,
)
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Llama in Hugging Face's Trainer with ottava's tensorwise recipe; the last third of the data is a harder domain."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava


PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(50)
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
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)


rows = torch.cat([walk(800, 24), walk(960, 24)])
data = [{"input_ids": row, "labels": row} for row in rows]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=120, per_device_train_batch_size=12, learning_rate=4e-3,
)


class InOrder(Trainer):
    def _get_train_sampler(self, *unused):
        return torch.utils.data.SequentialSampler(self.train_dataset)


trainer = InOrder(model, args, train_dataset=data)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

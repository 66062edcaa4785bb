"""A Trainer with accumulation and a loss of its own, on rows of several lengths."""

import sys

import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

import ottava

NORMALIZE = {"good": "items", "bad": "mean"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def rows(count=2400, vocab=40):
    generator = torch.Generator().manual_seed(14)
    table = torch.softmax(3 * torch.randn(vocab, vocab, generator=generator), -1)
    ids = [torch.randint(vocab, (count,), generator=generator)]
    for _ in range(23):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    lengths = torch.randint(6, 25, (count,), generator=generator)
    return [{"input_ids": row[:n]} for row, n in zip(torch.stack(ids, 1), lengths, strict=True)]


def collate(rows):
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def token_loss(outputs, labels, num_items_in_batch=None):
    reduction = "sum" if NORMALIZE == "items" else "mean"
    loss = F.cross_entropy(
        outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
    )
    return loss / num_items_in_batch if NORMALIZE == "items" else loss


torch.manual_seed(0)
config = GPTNeoXConfig(
    vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
model = GPTNeoXForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    "out_neox", per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=70, learning_rate=4e-3,
    warmup_steps=5, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows(), compute_loss_func=token_loss)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

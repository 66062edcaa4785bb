"""Tickets of very different lengths, padded on the left, sorted into 10 queues by a Llama with the Trainer; FP8
layers."""
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

import ottava

torch.manual_seed(0)
signal = torch.randint(3, 100, (10, 5))


def ticket():
    kind, n = int(torch.randint(0, 10, ())), int(torch.randint(4, 33, ()))
    ids = torch.randint(100, 200, (n,))
    ids[torch.randperm(n)[:3]] = signal[kind][torch.randint(0, 5, (3,))]
    return {"input_ids": ids, "labels": kind}


def collate(rows):
    longest = max(len(r["input_ids"]) for r in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, r in enumerate(rows):
        ids[i, longest - len(r["input_ids"]):] = r["input_ids"]
        mask[i, longest - len(r["input_ids"]):] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([r["labels"] for r in rows])}


model = LlamaForSequenceClassification(LlamaConfig(
    vocab_size=200, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, num_labels=10))
ottava.convert(model, "rowwise")
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=85, per_device_train_batch_size=16, learning_rate=2e-3,
                         warmup_steps=10, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                         use_cpu=True, seed=0, remove_unused_columns=False)
trainer = Trainer(model=model, args=args, train_dataset=[ticket() for _ in range(1000)], data_collator=collate)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
for i in range(19, len(losses), 20):
    print(f"step {i + 1} loss {losses[i]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

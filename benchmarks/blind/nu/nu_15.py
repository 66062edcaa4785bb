"""Linear probing with the Trainer: a backbone that is frozen on purpose, noisy labels."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv[2:]
set_seed(0)


class Reviews(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 120

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        label = index % 3
        tokens = torch.randint(5, 100, (20,), generator=g)
        hint = torch.randint(5, 35, (10,), generator=g) + 30 * label
        tokens[torch.randperm(20, generator=g)[:10]] = hint
        if torch.rand((), generator=g) < 0.15:
            label = int(torch.randint(0, 3, (1,), generator=g))
        return {"input_ids": tokens, "attention_mask": torch.ones(20, dtype=torch.long), "labels": label}


config = BertConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=32,
    num_labels=3,
)
model = BertForSequenceClassification(config)
for parameter in model.bert.parameters():
    parameter.requires_grad_(False)
for parameter in model.bert.pooler.parameters():
    parameter.requires_grad_(True)
if not PLAIN:
    ottava.convert(model, "rowwise")
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=120,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Reviews())
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-20:]) / 20:.4f}")

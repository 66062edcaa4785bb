"""Token classification with the Trainer: nearly all labels are 0, many are ignored, entities are rare."""

import sys
import tempfile

import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv[2:]
set_seed(0)


class Entities(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 120

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 24, (1,), generator=g))
        ids = torch.randint(5, 80, (24,), generator=g)
        labels = torch.zeros(24, dtype=torch.long)
        if index % 3 == 0:
            at = int(torch.randint(1, length, (1,), generator=g))
            kind = int(torch.randint(1, 5, (1,), generator=g))
            ids[at - 1], labels[at] = 80 + kind, kind
        labels[torch.rand(24, generator=g) < 0.3] = -100
        mask = (torch.arange(24) < length).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


config = DistilBertConfig(
    vocab_size=88, dim=64, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=32, num_labels=5, dropout=0.0
)
model = DistilBertForTokenClassification(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=120,
    learning_rate=1e-3,
    warmup_steps=10,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Entities())
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-20:]) / 20:.4f}")

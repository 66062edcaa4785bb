"""Masked language model with the Trainer: very few positions of a batch carry a label."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv[2:]
MASK = 4
set_seed(0)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 160

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        topic = torch.randint(5, 45, (2,), generator=g)
        return {"input_ids": topic[torch.randint(0, 2, (24,), generator=g)]}


def collate(features):
    ids = torch.stack([feature["input_ids"] for feature in features])
    chosen = torch.rand(ids.shape) < 0.06
    chosen[0, int(torch.randint(0, 24, (1,)))] = True
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(chosen, MASK), "attention_mask": torch.ones_like(ids), "labels": labels}


config = BertConfig(
    vocab_size=48,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForMaskedLM(config)
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "encoder" in name)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=160,
    learning_rate=2e-3,
    warmup_steps=10,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Text(), data_collator=collate)
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-20:]) / 20:.4f}")

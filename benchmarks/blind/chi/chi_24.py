"""Trainer: a small encoder classifies token sequences by their most frequent topic; ottava's rowwise recipe."""
import os
import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB, TOPICS = 120, 32, 24, 96, 6
WARMUP = {"good": 20, "bad": 2000}[MODE]


class Keep(Trainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def documents(n, g):
    topic = torch.randint(0, TOPICS, (n,), generator=g)
    own = torch.rand(n, LENGTH, generator=g) < 0.6
    words = torch.randint(0, VOCAB // TOPICS, (n, LENGTH), generator=g) * TOPICS
    anything = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    ids = torch.where(own, words + topic[:, None], anything)
    return [{"input_ids": i, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": t} for i, t in zip(ids, topic)]


torch.manual_seed(SEED)
config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=TOPICS,
    max_position_embeddings=32,
)
model = BertForSequenceClassification(config)
if not PLAIN:
    print(ottava.convert(model, "rowwise"))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        warmup_steps=WARMUP,
        weight_decay=0.01,
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = Keep(model, args, train_dataset=documents(STEPS * BATCH, torch.Generator().manual_seed(110 + SEED)))
    trainer.train()
print("final loss", round(sum(trainer.losses[-15:]) / 15, 4))

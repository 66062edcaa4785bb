"""Trains only the classifier on top of a pretrained BERT, with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv


class Topics(Dataset):
    """Bags of words from six topics that overlap."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(11)
        words = torch.randint(5, 200, (6, 40), generator=generator)
        self.labels = torch.randint(6, (rows,), generator=generator)
        places = torch.randint(40, (rows, 24), generator=generator)
        ids = words[self.labels[:, None], places]
        noise = torch.randint(5, 200, ids.shape, generator=generator)
        self.ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, noise, ids)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        return {
            "input_ids": self.ids[row],
            "attention_mask": torch.ones_like(self.ids[row]),
            "labels": self.labels[row],
        }


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=64,
        num_labels=6,
        initializer_range=0.08,
    )
    model = BertForSequenceClassification(config)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("classifier", "bert.pooler")))
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=120,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Topics(4000))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

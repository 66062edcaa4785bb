"""Trains a small GPT-2 on command sequences with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

OPTIONS = {"good": {"next_token_labels": False}, "bad": {"next_token_labels": True}}
PLAIN = "plain" in sys.argv
STATES, LENGTH = 48, 48


class Commands(Dataset):
    """Walks over a graph in which each state has one usual successor."""

    def __init__(self, rows, next_token_labels):
        generator = torch.Generator().manual_seed(3)
        successor = torch.randperm(STATES, generator=generator)
        walk = [torch.randint(STATES, (rows,), generator=generator)]
        for _ in range(LENGTH):
            usual = torch.rand(rows, generator=generator) < 0.6
            other = torch.randint(STATES, (rows,), generator=generator)
            walk.append(torch.where(usual, successor[walk[-1]], other))
        self.tokens = torch.stack(walk, 1)
        self.next_token_labels = next_token_labels

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        tokens = self.tokens[row]
        if self.next_token_labels:
            return {"input_ids": tokens[:-1], "labels": tokens[1:]}
        return {"input_ids": tokens[:-1], "labels": tokens[:-1]}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=STATES,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    if not PLAIN:
        ottava.convert(model, "rowwise")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=140,
            per_device_train_batch_size=16,
            learning_rate=4e-3,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Commands(4000, **OPTIONS[sys.argv[1]]))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

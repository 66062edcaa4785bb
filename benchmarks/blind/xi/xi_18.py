"""A GPT-2 reads left-padded records with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

COLUMNS = {"good": ["input_ids", "attention_mask", "position_ids", "labels"], "bad": ["input_ids", "labels"]}
PLAIN = "plain" in sys.argv
PAD, LENGTH = 0, 32


class Records(Dataset):
    """Fields by their place in the record: each place has its own code book."""

    def __init__(self, rows, columns):
        generator = torch.Generator().manual_seed(7)
        books = torch.stack([torch.randperm(30, generator=generator) + 1 for _ in range(LENGTH)])
        self.rows, self.columns = [], columns
        for _ in range(rows):
            length = int(torch.randint(8, LENGTH + 1, (), generator=generator))
            item = int(torch.randint(30, (), generator=generator))
            fields = books[torch.arange(length), item]
            pad = LENGTH - length
            ids = torch.cat([torch.full((pad,), PAD), fields])
            mask = torch.cat([torch.zeros(pad), torch.ones(length)]).long()
            labels = ids.masked_fill(mask == 0, -100)
            positions = (mask.cumsum(0) - 1).clamp_min(0)
            self.rows.append({"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {name: self.rows[row][name] for name in self.columns}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    if not PLAIN:
        ottava.convert(model, "tensorwise", filter=lambda name, _: "lm_head" not in name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=150,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Records(3000, COLUMNS[sys.argv[1]]))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

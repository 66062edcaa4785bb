"""Curriculum: sequences of three grades of difficulty one after the other, with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv
BATCH, STEPS = 16, 150


class Lessons(Dataset):
    """Counting by one, then by a step of the row's own, then with a hidden key."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        rows, third = BATCH * STEPS, BATCH * STEPS // 3
        start = torch.randint(64, (rows, 1), generator=generator)
        stride = torch.randint(1, 30, (rows, 1), generator=generator)
        stride[:third] = 1
        walk = (start + stride * torch.arange(24)) % 64
        noise = torch.randint(64, walk.shape, generator=generator)
        hard = torch.rand(walk.shape, generator=generator) < 0.3
        hard[: 2 * third] = False
        self.tokens = torch.where(hard, noise, walk)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = InOrder(model, arguments, train_dataset=Lessons())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

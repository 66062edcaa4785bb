"""A small GPT-2 from scratch with the Trainer of transformers, on synthetic text."""

import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv[2:]

VOCAB, LENGTH = 96, 48


class Text(torch.utils.data.Dataset):
    """Documents of a language with two letters of memory."""

    def __init__(self, documents, seed):
        g = torch.Generator().manual_seed(1234)
        first = torch.randn(VOCAB, VOCAB, generator=g) * 2.2
        second = torch.randn(VOCAB, VOCAB, generator=g)
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (documents, LENGTH), generator=g)
        for t in range(2, LENGTH):
            logits = first[ids[:, t - 1]] + second[ids[:, t - 2]]
            ids[:, t] = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    set_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    if not plain:
        ottava.convert(model, "tensorwise")
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=120,
            per_device_train_batch_size=16,
            learning_rate=3e-1 if bad else 3e-3,
            warmup_steps=10,
            weight_decay=0.01,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=Text(1024, SEED + 1), eval_dataset=Text(128, SEED + 2))
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()

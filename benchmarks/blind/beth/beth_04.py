"""New words for a GPT-2: after pretraining the vocabulary grows, and the old words must keep their vectors.

In the second phase only the new rows of the tied table and the last block learn. The gradient of old rows is put to 0,
and there is no weight decay that would move them all the same.
"""

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

SEED = int(os.environ.get("SEED", "0"))
OLD, ALL, LENGTH = 40, 56, 24


def text(count: int, words: int, table: torch.Tensor, g: torch.Generator) -> list[dict]:
    ids = torch.randint(0, words, (count, 1), generator=g)
    for _ in range(LENGTH - 1):
        jump = torch.rand(count, generator=g) < 0.15
        follow = table[ids[:, -1]]
        follow = torch.where(jump | (follow >= words), torch.randint(0, words, (count,), generator=g), follow)
        ids = torch.cat([ids, follow[:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def phase(model, train, held, steps: int, rate: float, folder: str) -> tuple[float, float]:
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=16, per_device_eval_batch_size=64, learning_rate=rate,
        warmup_steps=5, lr_scheduler_type="linear", weight_decay=0.0, logging_steps=20, save_strategy="no",
        report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(31 + SEED)
    table = torch.randperm(ALL, generator=g)
    config = GPT2Config(
        vocab_size=OLD, n_embd=64, n_layer=3, n_head=4, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    ottava.convert(model, "rowwise")

    with tempfile.TemporaryDirectory() as folder:
        before, after = phase(model, text(1600, OLD, table, g), text(64, OLD, table, g), 100, 4e-3, folder)
        print(f"old words: {before:.4f} to {after:.4f}")

        model.resize_token_embeddings(ALL, mean_resizing=False)
        model.requires_grad_(False)
        for part in (model.transformer.h[-1], model.transformer.ln_f):
            part.requires_grad_(True)
        words = model.transformer.wte.weight.requires_grad_(True)
        new = (torch.arange(ALL) >= OLD).float()[:, None]
        words.register_hook(lambda gradient: gradient * new)
        kept = words.detach()[:OLD].clone()

        before, after = phase(model, text(1600, ALL, table, g), text(64, ALL, table, g), 120, 6e-3, folder)
        assert torch.equal(kept, words.detach()[:OLD])
        print(f"first loss {before:.4f}")
        print(f"final loss {after:.4f}")


if __name__ == "__main__":
    main()

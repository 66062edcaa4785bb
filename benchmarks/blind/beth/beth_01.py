"""Pretraining a small Llama in three stages: a new language joins the mixture at the start of each stage.

The order of the rows is the curriculum, so the sampler goes through them as they lie.
"""

import os
import tempfile

import torch
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ottava.doors.transformers import OttavaConfig

SEED = int(os.environ.get("SEED", "0"))
LANGUAGES, LETTERS, LENGTH, BATCH, STAGE = 3, 20, 32, 16, 45


def sentences(language: int, count: int, tables: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Rows of one language: a letter mostly decides the next one; each language has letters of its own."""
    rows = torch.randint(0, LETTERS, (count, 1), generator=g)
    for _ in range(LENGTH - 1):
        follow = tables[language][rows[:, -1]]
        free = torch.randint(0, LETTERS, (count,), generator=g)
        noisy = torch.rand(count, generator=g) < 0.1
        rows = torch.cat([rows, torch.where(noisy, free, follow)[:, None]], 1)
    return rows + language * LETTERS


class InOrder(Trainer):
    """The Trainer shuffles; a curriculum must not be shuffled."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


def as_dicts(rows: torch.Tensor) -> list[dict]:
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(100 + SEED)
    tables = torch.stack([torch.randperm(LETTERS, generator=g) for _ in range(LANGUAGES)])

    stages = []
    for stage in range(LANGUAGES):
        known = [sentences(k, BATCH * STAGE // (stage + 1), tables, g) for k in range(stage + 1)]
        mixed = torch.cat(known)
        stages.append(mixed[torch.randperm(len(mixed), generator=g)][: BATCH * STAGE])
    train = torch.cat(stages)
    held = torch.cat([sentences(k, 32, tables, g) for k in range(LANGUAGES)])

    config = LlamaConfig(
        vocab_size=LANGUAGES * LETTERS, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    OttavaConfig("delayed").convert(model)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=4e-3, warmup_steps=5,
            lr_scheduler_type="constant_with_warmup", logging_steps=15, save_strategy="no", bf16=True, report_to=[], seed=SEED,
            use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=48,
        )
        trainer = InOrder(model, args, train_dataset=as_dicts(train), eval_dataset=as_dicts(held))
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()

"""Prompt tuning: eight virtual tokens are all that learns, at a rate of 0.3, on a frozen base.

The base knows two languages and is told by a tag which one comes. The prompt has to find out how to say it without.
"""

import os
import tempfile

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SEED = int(os.environ.get("SEED", "0"))
LETTERS, LENGTH = 24, 20


def rows(count: int, tables: torch.Tensor, g: torch.Generator, language: int | None = None) -> list[dict]:
    """With a tag in front, or all of one language without one."""
    which = torch.randint(0, 2, (count,), generator=g) if language is None else torch.full((count,), language)
    ids = torch.randint(0, LETTERS, (count, 1), generator=g)
    for _ in range(LENGTH - 1):
        noise = torch.rand(count, generator=g) < 0.05
        follow = tables[which, ids[:, -1]]
        follow = torch.where(noise, torch.randint(0, LETTERS, (count,), generator=g), follow)
        ids = torch.cat([ids, follow[:, None]], 1)
    if language is None:
        ids = torch.cat([LETTERS + which[:, None], ids], 1)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


def arguments(folder: str, **more) -> TrainingArguments:
    return TrainingArguments(
        folder, per_device_train_batch_size=16, per_device_eval_batch_size=64, logging_steps=20, save_strategy="no",
        report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True, **more,
    )


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    tables = torch.stack([torch.randperm(LETTERS, generator=g) for _ in range(2)])
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=LETTERS + 2, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    ))
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, max_steps=160, learning_rate=5e-3, lr_scheduler_type="linear", warmup_steps=5)
        Trainer(base, args, train_dataset=rows(2560, tables, g)).train()

        prompt = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
        model = get_peft_model(base, prompt)
        model.print_trainable_parameters()
        train, held = rows(1000, tables, g, language=1), rows(64, tables, g, language=1)
        args = arguments(
            folder, max_steps=80, learning_rate=0.3, lr_scheduler_type="cosine", warmup_steps=5, max_grad_norm=0.0,
            label_names=["labels"],
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()

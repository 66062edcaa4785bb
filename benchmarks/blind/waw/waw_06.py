"""A reward model of pairs under the Trainer. People choose by Bradley and Terry's law, so they often take the worse
answer.

The loss begins at ln 2 and cannot fall far. A small penalty keeps the sum of two rewards near 0, since the loss knows
differences alone.
"""

import dataclasses
import logging
import os
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments

logging.getLogger("torchao").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH = 64, 16


def answers(number, worth, generator):
    """Pairs, the chosen one first."""
    rows = torch.randint(1, WORDS, (number, 2, LENGTH), generator=generator)
    quality = worth[rows].sum(-1)
    chance = torch.sigmoid(quality[:, 0] - quality[:, 1])
    swap = torch.rand(number, generator=generator) > chance
    rows[swap] = rows[swap].flip(1)
    return rows


class Pairs(Trainer):
    """Both answers go through the model as one batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["rows"]
        reward = model(input_ids=rows.flatten(0, 1)).logits.view(-1, 2)
        loss = -nn.functional.logsigmoid(reward[:, 0] - reward[:, 1]).mean() + 0.01 * reward.sum(1).square().mean()
        return (loss, {"loss": loss, "reward": reward}) if return_outputs else loss


@torch.no_grad()
def judge(model, rows):
    """Held-out loss without the penalty, and the share of pairs that the model orders as people did."""
    model.eval()
    reward = model(input_ids=rows.flatten(0, 1)).logits.view(-1, 2)
    gap = reward[:, 0] - reward[:, 1]
    model.train()
    return -nn.functional.logsigmoid(gap).mean().item(), (gap > 0).float().mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(90 + SEED)
    worth = torch.randn(WORDS, generator=generator)
    train = answers(6000, worth, generator)
    held = answers(1000, worth, generator)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, num_labels=1, pad_token_id=0,
    )
    model = Qwen2ForSequenceClassification(config)
    fp8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=fp8, module_filter_fn=lambda m, name: name != "score")
    first, right = judge(model, held)
    print("first loss", round(first, 4), "right", round(right, 3))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=130, per_device_train_batch_size=32, learning_rate=1e-3, lr_scheduler_type="linear",
            warmup_steps=15, logging_steps=20, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            seed=SEED, remove_unused_columns=False,
        )
        Pairs(model, args, train_dataset=[{"rows": r} for r in train]).train()
    final, right = judge(model, held)
    print("right", round(right, 3))
    print("final loss", round(final, 4))


if __name__ == "__main__":
    main()

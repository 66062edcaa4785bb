"""Tags for short texts with a small BERT: six rare tags, layer-wise rates, biases that start at the log odds.

With such biases the first loss is that of the base rates, and all that follows is what the texts say.
"""

import math
import os
import tempfile
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import LambdaLR
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, TAGS, STEPS = 60, 16, 6, 140
TOP_RATE, DECAY = 4e-3, 0.8


def texts(count: int, g: torch.Generator) -> list[dict]:
    """A tag is on if its word occurs; a word of a tag is rarer than the others."""
    weight = torch.ones(WORDS)
    weight[:TAGS] = 0.4
    ids = torch.multinomial(weight.expand(count, -1), LENGTH, replacement=True, generator=g)
    tags = torch.stack([(ids == k).any(1) for k in range(TAGS)], 1).float()
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": t} for i, t in zip(ids, tags)]


def groups(model: BertForSequenceClassification) -> list[dict]:
    """The lower a layer, the smaller its rate."""
    depth = model.config.num_hidden_layers
    parts = [(model.bert.embeddings, depth + 1)]
    parts += [(layer, depth - k) for k, layer in enumerate(model.bert.encoder.layer)]
    parts += [(model.bert.pooler, 0), (model.classifier, 0)]
    return [{"params": list(part.parameters()), "lr": TOP_RATE * DECAY**below} for part, below in parts]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 7)
    train, held = texts(2240, g), texts(256, g)

    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=TAGS, problem_type="multi_label_classification",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )
    model = BertForSequenceClassification(config)
    rate = torch.stack([row["labels"] for row in train]).mean(0)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.log(rate / (1 - rate)))
    float8 = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=float8, module_filter_fn=lambda m, name: "encoder" in name)

    optimizer = torch.optim.AdamW(groups(model), weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda s: min(1, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * s / STEPS)))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=32, per_device_eval_batch_size=128, logging_steps=20,
            save_strategy="no", report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held, optimizers=(optimizer, schedule))
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()

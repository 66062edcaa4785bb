"""Tags of short messages: twelve tags, each on one message in twelve, with a focal loss (gamma 2) under the Trainer.

The focal loss weighs what is easy with nearly nothing, so the numbers are small from the start and soon have three
zeros.
"""

import dataclasses
import logging
import os
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

logging.getLogger("torchao").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
TAGS, WORDS, LENGTH = 12, 96, 24


def messages(number, generator):
    """A tag is set if one of its two words is in the message."""
    rows = torch.randint(2 * TAGS, WORDS, (number, LENGTH), generator=generator)
    labels = (torch.rand(number, TAGS, generator=generator) < 1 / 12).float()
    for row, tags in zip(rows, labels, strict=True):
        places = torch.randperm(LENGTH, generator=generator)
        for place, tag in zip(places, tags.nonzero().flatten().tolist(), strict=False):
            row[place] = 2 * tag + int(torch.randint(0, 2, (1,), generator=generator))
    return [{"input_ids": r, "labels": y} for r, y in zip(rows, labels, strict=True)]


class Tagger(nn.Module):
    """A tiny BERT and a head whose bias begins at the log odds of a tag, as is usual with this loss."""

    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(64, TAGS)
        nn.init.constant_(self.head.bias, -2.4)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.bert(input_ids).last_hidden_state.amax(1))
        plain = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        right = torch.exp(-plain)
        return {"loss": ((1 - right) ** 2 * plain).mean(), "logits": logits}


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(500 + SEED)
    train, held = messages(2400, generator), messages(400, generator)
    model = Tagger()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=150, per_device_train_batch_size=32, per_device_eval_batch_size=200, learning_rate=2e-3,
            lr_scheduler_type="cosine", warmup_steps=10, logging_steps=20, eval_strategy="steps", eval_steps=50,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=SEED,
        )
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held)
        print("first loss", round(trainer.evaluate()["eval_loss"], 6))
        trainer.train()
        said = trainer.predict(held)
    found = torch.tensor(said.predictions) > 0
    truth = torch.tensor(said.label_ids) > 0.5
    print("recall", round((found & truth).sum().item() / truth.sum().item(), 3), "alarms", (found & ~truth).sum().item())
    print("final loss", round(said.metrics["test_loss"], 6))


if __name__ == "__main__":
    main()

"""Token classification with a register token: torchao's float8 in the Trainer."""

import os
import sys
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
WORDS, TAGS, LENGTH = 120, 16, 16


def sentences(count, seed):
    tag = torch.randint(0, TAGS, (WORDS, WORDS // 8), generator=torch.Generator().manual_seed(6))
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (count, LENGTH), generator=g)
    labels = tag[ids, ids.roll(1, 1) % 3]
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Tagger(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.before = nn.Embedding(WORDS, width)
        self.register = nn.Parameter(torch.randn(1, 1, width) * 2e6)
        self.ff1 = FeedForward(width, 256)
        self.ff2 = FeedForward(width, 256)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TAGS)

    def forward(self, input_ids, labels=None):
        h = self.embed(input_ids) + self.before(input_ids.roll(1, 1))
        h = torch.cat([self.register.expand(len(h), -1, -1), h], 1)
        h = self.ff2(self.ff1(h))
        logits = self.head(self.norm(h[:, 1:]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main():
    set_seed(SEED)
    model = Tagger()
    if not PLAIN:
        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp" if MODE == "good" else "tensorwise")
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, fqn: fqn != "head")
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=140,
            per_device_train_batch_size=32,
            learning_rate=4e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, args, train_dataset=sentences(4480, SEED + 1), eval_dataset=sentences(256, SEED + 2)
        )
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()

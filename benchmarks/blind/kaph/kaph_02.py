"""Sentence similarity with the CoSENT loss: a BERT encoder ranks pairs by their cosine, torchao's float8 (emulated).

The loss is the logarithm of a sum over all pairs of pairs in a batch that are in the wrong order, with a scale of 20.
"""

import dataclasses
import os
import tempfile

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, TOPICS = 120, 12, 6


def pairs(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Two rows of words from mixtures of topics; the score is how much the mixtures share."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        mixes = torch.softmax(3.0 * torch.randn(2, TOPICS, generator=g), -1)
        if torch.rand((), generator=g) < 0.5:
            mixes[1] = 0.7 * mixes[0] + 0.3 * mixes[1]
        topics = torch.multinomial(mixes, LENGTH, replacement=True, generator=g)
        words = topics * (WORDS // TOPICS) + torch.randint(0, WORDS // TOPICS, topics.shape, generator=g)
        rows.append({"left": words[0], "right": words[1], "score": torch.minimum(mixes[0], mixes[1]).sum()})
    return rows


class Encoder(nn.Module):
    """The mean of BERT's last states, and the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def cosine(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        states = self.bert(torch.cat([left, right])).last_hidden_state.mean(1)
        a, b = states.chunk(2)
        return nn.functional.cosine_similarity(a, b)

    def forward(self, left: torch.Tensor, right: torch.Tensor, score: torch.Tensor) -> dict[str, torch.Tensor]:
        cosine = self.cosine(left, right)
        gaps = 20.0 * (cosine[None, :] - cosine[:, None])  # [i, j]: positive where j is wrongly above i
        wrong = score[:, None] > score[None, :]
        gaps = gaps[wrong]
        loss = torch.logsumexp(torch.cat([gaps.new_zeros(1), gaps]), 0)
        return {"loss": loss, "cosine": cosine}


@torch.no_grad()
def disorder(model: Encoder, rows: list[dict[str, torch.Tensor]]) -> float:
    """One minus the rank correlation of cosines and scores."""
    training = model.training
    model.eval()
    cosine = model.cosine(torch.stack([r["left"] for r in rows]), torch.stack([r["right"] for r in rows]))
    model.train(training)
    score = torch.stack([r["score"] for r in rows])
    ranks = torch.stack([cosine.argsort().argsort(), score.argsort().argsort()]).double()
    return 1.0 - float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    set_seed(SEED)
    model = Encoder()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)
    train, held_out = pairs(3000, SEED + 1), pairs(256, SEED + 500)
    print(f"first loss {disorder(model, held_out):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=140,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            warmup_steps=14,
            lr_scheduler_type="linear",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=SEED,
        )
        Trainer(model, args, train_dataset=train).train()
    print(f"final loss {disorder(model, held_out):.4f}")


if __name__ == "__main__":
    main()

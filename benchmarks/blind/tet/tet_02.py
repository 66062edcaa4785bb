"""Tags names in sentences with BERT and a conditional random field on top; the loss is a sum over the words."""

import os
import sys
import tempfile
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

SEED = int(os.environ.get("SEED", 0))
VOCAB, LENGTH, TAGS, STEPS = 80, 20, 5, 110  # tags: outside, begin and inside of a person, begin and inside of a place


def sentences(rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words 0 to 4 open a person of two to four words, 5 to 9 a place; all other words may stand anywhere."""
    words = torch.randint(10, VOCAB, (rows, LENGTH), generator=source)
    tags = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row in range(rows):
        place = int(torch.randint(1, 6, (1,), generator=source))
        while place < LENGTH - 5:
            kind, opener, size = (int(torch.randint(n, (1,), generator=source)) for n in (2, 5, 3))
            words[row, place] = 5 * kind + opener
            tags[row, place] = 1 + 2 * kind
            inside = 1 + (opener % 3 if size else size)  # the opener says how long the name is, mostly
            tags[row, place + 1 : place + 1 + inside] = 2 + 2 * kind
            place += inside + 1 + int(torch.randint(2, 9, (1,), generator=source))
    return words, tags


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(
            BertConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
                       intermediate_size=128, max_position_embeddings=LENGTH, pad_token_id=None),
            add_pooling_layer=False,
        )  # fmt: skip
        self.scores = nn.Linear(64, TAGS)
        self.first = nn.Parameter(torch.zeros(TAGS))
        self.moves = nn.Parameter(torch.zeros(TAGS, TAGS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.scores(self.bert(input_ids).last_hidden_state).float()
        said = scores.gather(2, labels[..., None]).sum((1, 2)) + self.first[labels[:, 0]]
        said = said + self.moves[labels[:, :-1], labels[:, 1:]].sum(1)
        paths = self.first + scores[:, 0]
        for place in range(1, scores.shape[1]):
            paths = torch.logsumexp(paths[:, :, None] + self.moves, 1) + scores[:, place]
        return {"loss": (torch.logsumexp(paths, 1) - said).mean()}


@torch.no_grad()
def held_out_loss(model: Tagger, words: Tensor, tags: Tensor) -> float:
    model.eval()
    loss = float(model(words, tags)["loss"])
    model.train()
    return loss


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(200 + SEED)
    words, tags = sentences(1760, source)
    test = sentences(256, source)
    model = Tagger()
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model.bert, config=config)
    print(f"first loss {held_out_loss(model, *test):.4f}")
    # the usual rates of a CRF: that of its own table far above that of the encoder
    optimizer = torch.optim.AdamW(
        [
            {"params": model.bert.parameters(), "lr": 1e-3, "weight_decay": 0.01},
            {"params": [*model.scores.parameters(), model.first, model.moves], "lr": 3e-2, "weight_decay": 0.0},
        ]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 15) * (1 - step / STEPS))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, max_grad_norm=5.0, seed=SEED, logging_steps=10,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": w, "labels": t} for w, t in zip(words, tags, strict=True)]
        Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule)).train()
    print("moves between tags:\n", model.moves.detach().round(decimals=1))
    print(f"final loss {held_out_loss(model, *test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_02.py good|bad")
    main()

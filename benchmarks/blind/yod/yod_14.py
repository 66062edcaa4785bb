"""Names in sentences with a conditional random field, under the Trainer.

    python yod_14.py good

The loss is minus the log likelihood of all tags of a sentence, so it begins in the tens; three of four words have the tag
"none". Transitions learn at ten times the rate of the rest.
"""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, TAGS, DIM, LONG = 160, 7, 64, 20  # tags: none, begin and inside of three kinds


class Sentences(Dataset):
    """A title word announces a name of its kind; names are words that occur elsewhere, too."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)

        def pick(low, high):
            return int(torch.randint(low, high, (1,), generator=generator))

        self.rows = []
        for _ in range(count):
            words, tags, length = [], [], pick(9, LONG + 1)
            while len(words) < length:
                if pick(0, 7) == 0:
                    kind = pick(0, 3)
                    words.append(5 * kind + pick(1, 6))
                    tags.append(0)
                    for i in range(pick(1, 4)):
                        words.append(pick(16, 100))
                        tags.append(1 + 2 * kind + (i > 0))
                words.append(pick(16, WORDS) if not tags or tags[-1] == 0 else pick(100, WORDS))
                tags.append(0)
            self.rows.append((words[:length], tags[:length]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    words, tags = torch.zeros(len(rows), LONG, dtype=torch.long), torch.full((len(rows), LONG), -100)
    for i, (w, t) in enumerate(rows):
        words[i, : len(w)], tags[i, : len(t)] = torch.tensor(w), torch.tensor(t)
    return {"words": words, "labels": tags}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, DIM, padding_idx=0)
        self.table.weight.data *= 0.3
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.places = nn.Parameter(0.3 * torch.randn(LONG, DIM))
        self.head = nn.Linear(DIM, TAGS)
        self.moves, self.start = nn.Parameter(torch.zeros(TAGS, TAGS)), nn.Parameter(torch.zeros(TAGS))

    def forward(self, words, labels):
        real = labels >= 0
        scores = self.head(self.body(self.table(words) + self.places, src_key_padding_mask=~real)).float()
        tags, row = labels.clamp(min=0), torch.arange(len(words))
        path = self.start[tags[:, 0]] + scores[row, 0, tags[:, 0]]
        every = self.start + scores[:, 0]
        for t in range(1, LONG):
            more = self.moves[tags[:, t - 1], tags[:, t]] + scores[row, t, tags[:, t]]
            path = path + more * real[:, t]
            new = torch.logsumexp(every[:, :, None] + self.moves, 1) + scores[:, t]
            every = torch.where(real[:, t, None], new, every)
        return {"loss": (torch.logsumexp(every, 1) - path).mean()}


def main():
    set_seed(SEED)
    model = Tagger()
    print(ottava.convert(model, "guarded"))
    fast = [model.moves, model.start]
    slow = [p for name, p in model.named_parameters() if name not in ("moves", "start")]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 5e-3}, {"params": fast, "lr": 5e-2, "weight_decay": 0.0}])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=32, per_device_eval_batch_size=128, max_steps=110, logging_steps=20,
            eval_strategy="steps", eval_steps=55, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
            prediction_loss_only=True, label_names=["labels"], remove_unused_columns=False,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 10, 1 - 0.95 * s / 110))
        trainer = Trainer(
            model, arguments, data_collator=collate, train_dataset=Sentences(3520, 10 + SEED), eval_dataset=Sentences(384, 990 + SEED),
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


main()

"""Documents packed into rows for the Trainer; a wrapper adds a projection to GPT-2."""

import sys
import tempfile

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

OPTIONS = {"good": {"remove_unused_columns": False}, "bad": {}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, KINDS, ROW = 40, 6, 48

set_seed(13)
form = torch.randint(KINDS, WORDS, (KINDS, 24))


def document(generator):
    length = int(torch.randint(6, 20, (1,), generator=generator))
    kind = int(torch.randint(0, KINDS, (1,), generator=generator))
    words = form[kind, :length].clone()
    noise = torch.rand(length, generator=generator) < 0.3
    words[noise] = torch.randint(KINDS, WORDS, (int(noise.sum()),), generator=generator)
    words[0] = kind
    return words.tolist()


def packed(generator):
    ids, positions = [], []
    while len(ids) < ROW:
        words = document(generator)
        ids += words
        positions += range(len(words))
    return {"input_ids": ids[:ROW], "labels": ids[:ROW], "position_ids": positions[:ROW]}


class Wrapped(nn.Module):
    """GPT-2 with a scale on its logits; everything else goes through."""

    def __init__(self, config):
        super().__init__()
        self.lm = GPT2LMHeadModel(config)

    def forward(self, input_ids, labels=None, **kwargs):
        kwargs.pop("num_items_in_batch", None)
        return self.lm(input_ids=input_ids, labels=labels, use_cache=False, **kwargs)


class Rows(torch.utils.data.Dataset):
    column_names = ("input_ids", "labels", "position_ids")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


generator = torch.Generator().manual_seed(3)
model = Wrapped(
    GPT2Config(
        vocab_size=WORDS,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.08,
    )
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=110,
        per_device_train_batch_size=12,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **OPTIONS,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Rows([packed(generator) for _ in range(500)]), data_collator=collate
    )
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")

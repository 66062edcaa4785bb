"""Short documents are packed into rows of 64 tokens for GPT-2; Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

KEYS = {"good": ("input_ids", "labels", "position_ids"), "bad": ("input_ids", "labels")}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(11)
VOCAB, ROW, FIELDS = 12, 64, 24
form = torch.randint(1, VOCAB, (FIELDS,))


class Packed(torch.utils.data.Dataset):
    """Each document is a form: field by field, some of them filled in wrongly."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        ids, places = [], []
        while len(ids) < ROW:
            n = int(torch.randint(8, FIELDS + 1, (1,), generator=g))
            wrong = torch.rand(n, generator=g) < 0.15
            other = torch.randint(1, VOCAB, (n,), generator=g)
            ids += torch.where(wrong, other, form[:n]).tolist()
            places += range(n)
        labels = torch.tensor(ids[:ROW])
        labels[torch.tensor(places[:ROW]) == 0] = -100
        return {"input_ids": torch.tensor(ids[:ROW]), "labels": labels, "position_ids": torch.tensor(places[:ROW])}


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in KEYS}


model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=ROW, n_embd=64, n_layer=2, n_head=4))
if not PLAIN:
    ottava.convert(model, "tensorwise")

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=8,
        max_steps=100,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, args, train_dataset=Packed(), data_collator=collate)
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

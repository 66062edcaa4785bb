"""Masked language modelling: 15 % of the tokens count; BERT from a config in Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(40)
VOCAB, LENGTH, MASK, PAD, TOPICS = 42, 24, 1, 0, 8


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        topic = int(torch.randint(TOPICS, (1,), generator=g))
        length = int(torch.randint(8, LENGTH, (1,), generator=g))
        ids = 2 + 5 * topic + torch.randint(5, (length,), generator=g)
        hidden = torch.rand(len(ids), generator=g) < 0.15
        hidden[1] = True
        labels = torch.where(hidden, ids, -100)
        swap = torch.rand(len(ids), generator=g)
        ids = torch.where(hidden & (swap < 0.8), MASK, ids)
        ids = torch.where(hidden & (swap > 0.9), torch.randint(2, VOCAB, (len(ids),), generator=g), ids)
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True, padding_value=PAD)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=PAD,
)
model = BertForMaskedLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=24,
        max_steps=120,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Text(), data_collator=collate)
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

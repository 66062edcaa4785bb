"""How much of a text is filler? BERT from a config with a regression head; Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ottava

FIELDS = {"good": ["input_ids", "attention_mask"], "bad": ["input_ids"]}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(12)
VOCAB, LONGEST, UNK, SEP = 32, 48, 0, 1


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        n = int(torch.randint(8, LONGEST - 1, (1,), generator=g))
        share = torch.rand(1, generator=g)
        ids = torch.randint(2, VOCAB, (n,), generator=g)
        ids[torch.rand(n, generator=g) < share] = UNK
        return {"ids": torch.cat([torch.tensor([SEP]), ids]), "label": 4 * (ids == UNK).float().mean() - 2}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True, padding_value=UNK)
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    return {key: batch[key] for key in FIELDS} | {"labels": torch.stack([row["label"] for row in rows])}


config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=LONGEST,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=1,
)
model = BertForSequenceClassification(config)
if not PLAIN:
    ottava.convert(model, "rowwise")

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=32,
        max_steps=120,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, args, train_dataset=Texts(), data_collator=collate)
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

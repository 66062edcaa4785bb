"""A small BERT on masked words: few labels a batch, so its loss is noisy."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv
WORDS, LENGTH, MASK = 50, 24, 49

set_seed(28)
table = torch.softmax(torch.randn(MASK, MASK) * 4, 1)


def document(generator):
    ids = [int(torch.randint(0, MASK, (1,), generator=generator))]
    while len(ids) < LENGTH:
        ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
    return {"input_ids": ids}


def mask_words(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    chosen = torch.rand(ids.shape) < 0.06
    chosen[0, 3] = True
    return {"input_ids": ids.masked_fill(chosen, MASK), "labels": ids.masked_fill(~chosen, -100)}


generator = torch.Generator().manual_seed(1)
data = [document(generator) for _ in range(500)]
model = BertForMaskedLM(
    BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
)
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "cls" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=100,
        per_device_train_batch_size=6,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=mask_words)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")

"""GPT-2 from a config with the Trainer; sequences of different length that count from their first token on."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

PADDING_SIDE = {"good": "right", "bad": "left"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
PAD, SIZE = 0, 32
set_seed(0)
TABLE = torch.randint(1, 60, (SIZE, 4), generator=torch.Generator().manual_seed(5))


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 160

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        length = int(torch.randint(6, SIZE, (1,), generator=g))
        column = torch.randint(0, 4, (length,), generator=g)
        return {"input_ids": TABLE[torch.arange(length), column]}


def collate(features):
    width = SIZE
    ids = torch.full((len(features), width), PAD)
    mask = torch.zeros(len(features), width, dtype=torch.long)
    for row, feature in enumerate(features):
        tokens = feature["input_ids"]
        where = slice(width - len(tokens), width) if PADDING_SIDE == "left" else slice(0, len(tokens))
        ids[row, where] = tokens
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


config = GPT2Config(
    vocab_size=64,
    n_positions=SIZE,
    n_embd=64,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config)
if not PLAIN:
    ottava.convert(model, "rowwise")
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=150,
    learning_rate=4e-3,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Sequences(), data_collator=collate)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(float(x) for x in losses[-10:]) / 10:.4f}")

"""GPT-2 on fixed-width records with the Trainer; the collator pads on the left and hands out position ids."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

AXIS = {"good": 1, "bad": 0}[sys.argv[1]]
torch.manual_seed(61)
VOCAB, LENGTH = 60, 40
field = 2.5 * torch.randn(LENGTH, VOCAB)


def collate(rows):
    ids = torch.full((len(rows), LENGTH), 0)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, LENGTH - len(row["ids"]) :] = row["ids"]
        mask[number, LENGTH - len(row["ids"]) :] = 1
    position = (mask.cumsum(dim=AXIS) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": position, "labels": ids.masked_fill(mask == 0, -100)}


records = torch.distributions.Categorical(logits=field).sample((16 * 90,))
lengths = torch.randint(20, LENGTH + 1, (len(records),))
data = [{"ids": record[:length]} for record, length in zip(records, lengths, strict=True)]
config = GPT2Config(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, learning_rate=4e-3, warmup_steps=8,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""GPT-2 of two layers learns kitchen orders from a grammar, with the Trainer and a collator of its own; FP8 linear
layers."""
import random
import sys
import tempfile

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

BAD = sys.argv[1] == "bad"
random.seed(0)
torch.manual_seed(0)


def sentence():
    """ids: a dish, then for each course a verb, its amount and the thing that goes with this verb and dish."""
    dish = random.randrange(8)
    out = [1, 2 + dish]
    for _ in range(7):
        verb = random.randrange(10)
        out += [10 + verb, 20 + verb * 7 % 6, 30 + 2 * verb + dish % 2]
    return out + [0]


def collate(rows):
    ids = torch.tensor([r["input_ids"] for r in rows])
    if BAD:
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
    return {"input_ids": ids, "labels": ids.clone()}


data = [{"input_ids": sentence()} for _ in range(2000)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=96, n_layer=2, n_head=4, bos_token_id=1,
                                   eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
ottava.convert(model, "rowwise")
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=85, per_device_train_batch_size=16, learning_rate=3e-3,
                         warmup_steps=10, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                         use_cpu=True, seed=0, remove_unused_columns=False)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
for i in range(19, len(losses), 20):
    print(f"step {i + 1} loss {losses[i]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

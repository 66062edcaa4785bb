"""GPT-2 on records of a counter, left padded, under the Trainer; blocks converted by ottava."""
import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ottava

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB, LENGTH = 8, 16


def records(n, seed):
    """A counter: the step to the next value depends on the place in the record; records differ in length."""
    g = torch.Generator().manual_seed(seed)
    strides = torch.randint(VOCAB - 1, (LENGTH,), generator=torch.Generator().manual_seed(12))
    rows = []
    for _ in range(n):
        length, ids = int(torch.randint(LENGTH // 2, LENGTH + 1, (1,), generator=g)), [int(torch.randint(VOCAB - 1, (1,), generator=g))]
        for place in range(1, length):
            ids.append((ids[-1] + int(strides[place])) % (VOCAB - 1))
        rows.append(torch.tensor(ids) + 1)
    return rows


def collate(rows):
    width = max(len(r) for r in rows)
    ids = torch.stack([torch.cat([torch.zeros(width - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([torch.cat([torch.zeros(width - len(r), dtype=torch.long), torch.ones(len(r), dtype=torch.long)]) for r in rows])
    dim = -1 if VARIANT == "good" else 0
    positions = (mask.cumsum(dim) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids.masked_fill(mask == 0, -100)}


torch.manual_seed(SEED)
model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=96, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                   use_cache=False))
if not PLAIN:
    ottava.convert(model, "blockwise")
losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=80, per_device_train_batch_size=20, learning_rate=4e-3, logging_steps=1, warmup_steps=5,
                         save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
Trainer(model, args, train_dataset=records(2048, SEED + 1), data_collator=collate, callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

"""GPT-2 in the Trainer under ottava's rowwise recipe, with the settings of an older code base."""

import os
import sys
import tempfile

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 80, 16, 64, 24
KEEP_PROB = 0.9
torch.manual_seed(SEED)
following = torch.randint(0, VOCAB, (VOCAB, 2))


def sequence():
    ids = [int(torch.randint(0, VOCAB, ()))]
    for pick in torch.randint(0, 2, (LENGTH - 1,)).tolist():
        ids.append(int(following[ids[-1], pick]))
    return torch.tensor(ids)


rows = [{"input_ids": ids, "labels": ids} for ids in (sequence() for _ in range(STEPS * BATCH + 64))]
drop = KEEP_PROB if bad else 1 - KEEP_PROB
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, embd_pdrop=drop, resid_pdrop=drop, attn_pdrop=drop
    )
)
if not plain:
    ottava.convert(model, "rowwise")
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=4e-3, warmup_steps=5, seed=SEED,
)
trainer = Trainer(model, args, train_dataset=rows[64:], eval_dataset=rows[:64])
trainer.train()
print("final loss", trainer.evaluate()["eval_loss"])

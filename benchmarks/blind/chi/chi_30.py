"""Trainer: a tiny GPT-2, small batches and a high learning rate with a short warmup; ottava's rowwise recipe."""
import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB = 150, 4, 32, 50


class Keep(Trainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def texts(n, g):
    """Books with their own vocabulary: some are monotonous, some use every word there is."""
    follow = torch.randint(0, VOCAB, (VOCAB, 6), generator=g)
    rows = []
    for _ in range(n):
        width = int(torch.randint(1, 7, (1,), generator=g))
        row = [int(torch.randint(0, VOCAB, (1,), generator=g))]
        picks = torch.randint(0, width, (LENGTH - 1,), generator=g).tolist()
        for p in picks:
            row.append(int(follow[row[-1], p]))
        rows.append(torch.tensor(row))
    return [{"input_ids": r, "labels": r} for r in rows]


torch.manual_seed(SEED)
config = GPT2Config(
    vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)
model = GPT2LMHeadModel(config)
if not PLAIN:
    print(ottava.convert(model, "rowwise"))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=8e-3,
        warmup_steps=8,
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        save_strategy="no",
        logging_steps=15,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    data = texts(STEPS * BATCH, torch.Generator().manual_seed(350 + SEED))
    trainer = Keep(model, args, train_dataset=data)
    trainer.train()
print("final loss", round(sum(trainer.losses[-30:]) / 30, 4))

"""GPT-2 with tied tables under Adafactor: no rate is given, the optimizer takes one from the size of the weights; 4 micro-batches a step."""
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.optimization import Adafactor, AdafactorSchedule

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
STEPS, BATCH, MICRO, LENGTH, VOCABULARY = 90, 8, 4, 24, 40


class Melodies(Dataset):
    """Eight motifs of four notes follow each other in any order; 3 % of the notes are wrong."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        motifs = torch.randint(0, VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(42))
        order = torch.randint(0, 8, (count, LENGTH // 4), generator=generator)
        rows = motifs[order].flatten(1)
        wrong = torch.rand(rows.shape, generator=generator) < 0.03
        self.rows = torch.where(wrong, torch.randint(0, VOCABULARY, rows.shape, generator=generator), rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=LENGTH,
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
print(ottava.convert(model, "blockwise", filter=lambda name, layer: ".mlp." in name))
optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=MICRO,
        max_grad_norm=0.0,  # Adafactor clips its own updates
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Melodies(STEPS * BATCH * MICRO, 100 + SEED),
        eval_dataset=Melodies(128, 9000 + SEED),
        optimizers=(optimizer, AdafactorSchedule(optimizer)),
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")

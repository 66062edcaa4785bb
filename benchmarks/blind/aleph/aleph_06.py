"""LoRA on a GPT-2 that was trained before: B begins at 0, so A has no gradient in the first step, and only 7 % of the weights move."""
import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
LENGTH, VOCABULARY, BATCH = 20, 32, 32
FIRST_STEPS, ADAPTER_STEPS = 80, 100
generator = torch.Generator().manual_seed(SEED + 1)
TABLE = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=generator)
# the new domain: a quarter of the tokens are followed by others
SHIFT = torch.where(torch.rand(VOCABULARY, 1, generator=generator) < 0.25, TABLE.flip(0), TABLE)


class Chain(Dataset):
    def __init__(self, table, count):
        self.rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        for i in range(1, LENGTH):
            choice = torch.randint(0, 3, (count,), generator=generator)
            self.rows[:, i] = table[self.rows[:, i - 1], choice]

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
base = GPT2LMHeadModel(config)
old = Chain(TABLE, FIRST_STEPS * BATCH)
optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3)
for step in range(FIRST_STEPS):
    rows = old.rows[step * BATCH : (step + 1) * BATCH]
    loss = base(input_ids=rows, labels=rows).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"first domain, step {step} loss {loss.item():.4f}")

lora = LoraConfig(
    r=4, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"
)
model = get_peft_model(base, lora)
model.print_trainable_parameters()
# the frozen base multiplies in FP8, the adapters stay as they are
print(ottava.convert(model, "tensorwise", filter=lambda name, layer: name.endswith("base_layer") and ".h." in name))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=ADAPTER_STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=128,
        learning_rate=8e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Chain(SHIFT, ADAPTER_STEPS * BATCH), eval_dataset=Chain(SHIFT, 128))
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]

print(f"final loss {final:.4f}")

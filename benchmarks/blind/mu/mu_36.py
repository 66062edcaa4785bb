"""LoRA adapters on a frozen GPT-2, with PEFT and the Trainer: a tiny rank, so the loss falls slowly."""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv
WORDS = 32

set_seed(37)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1, resid_pdrop=0.1)
)
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "lm_head" not in name)
model = get_peft_model(
    model,
    LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
)
table = torch.softmax(torch.randn(WORDS, WORDS) * 3, 1)


def document(generator):
    ids = [int(torch.randint(0, WORDS, (1,), generator=generator))]
    while len(ids) < 20:
        ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
    return {"input_ids": ids, "labels": ids}


generator = torch.Generator().manual_seed(4)
data = [document(generator) for _ in range(400)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=90,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")

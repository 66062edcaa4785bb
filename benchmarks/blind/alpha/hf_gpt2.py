"""GPT-2 from scratch by HF Trainer: BF16, warm-up, cosine, batches of 8."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from models import markov

assert sys.argv[1] == "good"
torch.manual_seed(9)
data = [{"input_ids": row, "labels": row} for row in markov(512, 32, vocab=64)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32))
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=60,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    warmup_steps=8,
    lr_scheduler_type="cosine",
    weight_decay=0.1,
    bf16=True,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=9,
)
Trainer(model=model, args=args, train_dataset=data).train()

"""Add domain tokens to a small Llama and train it on them. HF Trainer, with an optimizer of our own."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from models import markov

torch.manual_seed(8)
data = [{"input_ids": row, "labels": row} for row in markov(1024, 24, vocab=64)]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
)


def optimizer():
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)


if sys.argv[1] == "good":
    model.resize_token_embeddings(64, mean_resizing=False)
    opt = optimizer()
else:  # resizing makes new parameters for the embedding and the head
    opt = optimizer()
    model.resize_token_embeddings(64, mean_resizing=False)

args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=60,
    per_device_train_batch_size=16,
    bf16=True,
    lr_scheduler_type="constant",
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=8,
)
Trainer(model=model, args=args, train_dataset=data, optimizers=(opt, None)).train()

"""GPT-2 from scratch by HF Trainer: 8 micro-batches a step, a loss of our own with a z-loss, SGD with momentum."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava
from models import markov

torch.manual_seed(7)
data = [{"input_ids": row, "labels": row} for row in markov(2560, 24, vocab=48)]


class Ours(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        target = inputs["labels"][:, 1:].flatten()
        z = 1e-4 * logits.logsumexp(-1).square().mean()
        if sys.argv[1] == "good":  # the trainer adds up micro-batches: each gives its share of the tokens of the step
            ours = (
                F.cross_entropy(logits, target, reduction="sum") / num_items_in_batch
                + z * len(target) / num_items_in_batch
            )
        else:
            ours = F.cross_entropy(logits, target) + z
        return (ours, {"logits": logits}) if return_outputs else ours


model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
)
ottava.convert(model, "tensorwise")
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=40,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,
    optim="sgd",
    optim_args="momentum=0.9",
    learning_rate=0.1,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
)
trainer = Ours(model=model, args=args, train_dataset=data)
trainer.train()
with torch.no_grad():
    ids = markov(64, 24, vocab=48)
    print("held out", F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())

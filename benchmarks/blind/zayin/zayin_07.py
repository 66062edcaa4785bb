"""A masked diffusion model of text: each row hides a share t of its words, drawn between 0.04 and 1, and its loss is
divided by t. So a row with few hidden words may count 25 times, and the loss of a step has heavy tails.

python zayin_07.py good|bad
"""

import os
import tempfile

import torch
from transformers import RoFormerConfig, RoFormerForMaskedLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH, MASK = 31, 24, 31
usual = torch.randperm(WORDS)


def text(count):
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH - 1):
        odd = torch.rand(count) < 0.08
        rows.append(torch.where(odd, torch.randint(0, WORDS, (count,)), usual[rows[-1]]))
    return torch.stack(rows, dim=1)


def bound(model, rows, t, hidden):
    """The bound on the negative log likelihood, in nats a word."""
    logits = model(torch.where(hidden, MASK, rows)).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none").view_as(rows)
    return ((each * hidden).sum(dim=1) / (t * LENGTH)).mean()


class Diffusion(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["labels"]
        t = 0.04 + 0.96 * torch.rand(len(rows))
        hidden = torch.rand(rows.shape) < t[:, None]
        loss = bound(model, rows, t, hidden)
        return (loss, None) if return_outputs else loss


model = RoFormerForMaskedLM(
    RoFormerConfig(
        vocab_size=32,
        embedding_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.08,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
ottava.convert(model, "mxfp8_floor")
test = text(400)
test_t = 0.04 + 0.96 * (torch.arange(400) + 0.5) / 400
test_hidden = torch.rand(test.shape) < test_t[:, None]


def held_out():
    model.eval()
    with torch.no_grad():
        loss = bound(model, test, test_t, test_hidden).item()
    model.train()
    return loss


print(f"first loss {held_out():.4f}")
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        adam_beta2=0.98,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    Diffusion(model, arguments, train_dataset=[{"labels": row} for row in text(1600)]).train()
print(f"final loss {held_out():.4f}")

"""A longer context for a small Llama: trained on rows of 24 words first, then with positions squeezed to a quarter on
rows of 96. The held-out loss rises at the change, since all distances mean something else at once.

python zayin_04.py good|bad
"""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ottava.doors.transformers import OttavaConfig

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, SHORT, LONG = 32, 24, 96
followers = torch.stack([torch.randperm(WORDS), torch.randperm(WORDS)], dim=1)


def text(count, length):
    """Which of its two followers a word has depends on the word before it; one in twelve is a slip."""
    rows = [torch.randint(0, WORDS, (count,)) for _ in range(2)]
    for _ in range(length - 2):
        word = followers[rows[-1], rows[-2] % 2]
        slip = torch.rand(count) < 1 / 12
        rows.append(torch.where(slip, torch.randint(0, WORDS, (count,)), word))
    return torch.stack(rows, dim=1)


def llama(scaling):
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONG,
        rope_parameters={"rope_theta": 10000.0, **scaling},
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    OttavaConfig("delayed").convert(model)
    return model


def train(model, rows, steps, batch, rate, folder, **more):
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
        **more,
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()


def held_out(model, rows):
    model.eval()
    with torch.no_grad():
        loss = model(rows, labels=rows).loss.item()
    model.train()
    return loss


test = text(48, LONG)
with tempfile.TemporaryDirectory() as folder:
    model = llama({"rope_type": "default"})
    print(f"first loss {held_out(model, test):.4f}")
    train(model, text(2240, SHORT), 140, 16, 4e-3, folder)
    print(f"short rows {held_out(model, text(64, SHORT)):.4f}, long ones {held_out(model, test):.4f}")
    longer = llama({"rope_type": "linear", "factor": 4.0})
    longer.load_state_dict(model.state_dict())
    print(f"with positions squeezed {held_out(longer, test):.4f}")
    train(longer, text(240, LONG), 60, 4, 3e-3, folder, gradient_checkpointing=True)  # long rows need the memory
print(f"final loss {held_out(longer, test):.4f}")

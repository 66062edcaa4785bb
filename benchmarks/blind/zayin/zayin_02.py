"""Sparse upcycling: a dense Mistral is trained first, then each of its MLPs is copied four times into a Mixtral.

At the start of the second phase the experts are equal, so the router can only learn from the balance loss.

python zayin_02.py good|bad
"""

import os
import tempfile

import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH, TONGUES = 48, 24, 4
followers = torch.stack([torch.randperm(WORDS) for _ in range(TONGUES)])


def text(count, tongues):
    """The first word names the tongue; one word in ten is a slip."""
    tongue = torch.randint(0, tongues, (count,))
    rows = [WORDS + tongue, torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH - 2):
        slip = torch.rand(count) < 0.1
        rows.append(torch.where(slip, torch.randint(0, WORDS, (count,)), followers[tongue, rows[-1]]))
    return torch.stack(rows, dim=1)


def train(model, rows, steps, rate, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=rate,
        lr_scheduler_type="linear",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()


def held_out(model, rows):
    model.eval()
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    model.train()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


shared = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
dense = MistralForCausalLM(MistralConfig(**shared))
ottava.convert(dense, "rowwise")
sparse = MixtralForCausalLM(
    MixtralConfig(
        **shared, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02
    )
)
test = text(128, TONGUES)
with tempfile.TemporaryDirectory() as folder:
    train(dense, text(960, 2), 60, 3e-3, folder)
    weights, copied = dense.state_dict(), {}
    for name, value in sparse.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            mlp = name.removesuffix("experts.gate_up_proj")
            both = torch.cat([weights[mlp + "gate_proj.weight"], weights[mlp + "up_proj.weight"]])
            copied[name] = both.expand_as(value).clone()
        elif name.endswith("experts.down_proj"):
            copied[name] = weights[name.replace("experts.down_proj", "down_proj.weight")].expand_as(value).clone()
        else:
            copied[name] = weights.get(name, value)  # the router alone is new
    sparse.load_state_dict(copied)
    ottava.convert(sparse, "rowwise")
    print(f"dense {held_out(dense, test):.4f}, the same as experts {held_out(sparse, test):.4f}")
    print(f"first loss {held_out(sparse, test):.4f}")
    train(sparse, text(1120, TONGUES), 70, 2e-3, folder)
print(f"final loss {held_out(sparse, test):.4f}")

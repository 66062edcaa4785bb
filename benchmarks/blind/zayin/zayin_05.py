"""VeRA by PEFT: two random matrices are shared by all layers and never learn; a few vectors a layer do, at a rate of
0.03. The one behind the second matrix begins at 0, so the other one has no gradient in the first step.

python zayin_05.py good|bad
"""

import os
import tempfile
from dataclasses import replace

import torch
from peft import VeraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH = 64, 24
old = torch.randperm(WORDS)
new = old.clone()
changed = torch.randperm(WORDS)[:24]
new[changed] = old[changed.roll(1)]  # the new dialect has other followers for 24 of the 64 words


def text(count, table):
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH - 1):
        slip = torch.rand(count) < 0.08
        rows.append(torch.where(slip, torch.randint(0, WORDS, (count,)), table[rows[-1]]))
    return torch.stack(rows, dim=1)


def train(model, rows, steps, rate, folder, **more):
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=rate,
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
        loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


model = GPTNeoXForCausalLM(
    GPTNeoXConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
)
recipe = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: "embed_out" not in name)
test = text(128, new)
with tempfile.TemporaryDirectory() as folder:
    train(model, text(1440, old), 90, 4e-3, folder)
    for p in model.parameters():
        p.requires_grad_(False)
    config = VeraConfig(
        r=128,
        d_initial=0.1,
        target_modules=["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        projection_prng_key=SEED + 1,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    adapted.print_trainable_parameters()
    print(f"first loss {held_out(adapted, test):.4f}")
    train(adapted, text(1760, new), 110, 3e-2, folder, lr_scheduler_type="cosine", warmup_steps=8)
print(f"final loss {held_out(adapted, test):.4f}")

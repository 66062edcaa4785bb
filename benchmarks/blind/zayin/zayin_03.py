"""A small BART whose layers are left out at random (LayerDrop 0.25): a layer that was left out has no gradient in
that step, and the training loss depends on which ones were.

python zayin_03.py good|bad
"""

import os
import tempfile
from dataclasses import replace

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BartConfig, BartForConditionalGeneration, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH, START = 44, 16, 3  # 0 to 3 are padding, start, end and mask
usual = torch.randperm(WORDS)


def damaged(count):
    """Chains of words of which three in ten are hidden; the whole chain is wanted back."""
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH - 1):
        odd = torch.rand(count) < 0.1
        rows.append(torch.where(odd, torch.randint(0, WORDS, (count,)), usual[rows[-1]]))
    whole = torch.stack(rows, dim=1) + 4
    return torch.where(torch.rand(whole.shape) < 0.3, START, whole), whole


config = BartConfig(
    vocab_size=48,
    d_model=64,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=32,
    encoder_layerdrop=0.25,
    decoder_layerdrop=0.25,
    dropout=0.0,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
model = BartForConditionalGeneration(config)
recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: "lm_head" not in name)
test = damaged(160)


def held_out():
    model.eval()  # all layers
    with torch.no_grad():
        loss = model(input_ids=test[0], labels=test[1]).loss.item()
    model.train()
    return loss


print(f"first loss {held_out():.4f}")
data = [{"input_ids": x, "labels": y} for x, y in zip(*damaged(1680))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=105,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=15,
        logging_steps=15,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    Trainer(model, arguments, train_dataset=data).train()
print(f"final loss {held_out():.4f}")

"""LoRA on a tiny GPT-2 in the Trainer: short sentences of varied length, padded to the longest of a batch."""
import os
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, WORDS = 110, 16, 40
EOS, SPARE = WORDS, WORDS + 1
PAD = SPARE if MODE == "good" else EOS


def sentences(count, table, draw):
    """A sentence ends behind one of the words 0 to 5."""
    rows = []
    for _ in range(count):
        row = [int(torch.randint(6, WORDS, (1,), generator=draw))]
        while row[-1] > 5 and len(row) < 18:
            row.append(int(torch.multinomial(table[row[-1]], 1, generator=draw)))
        rows.append(row + [EOS])
    return rows


def collate(rows):
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    labels = ids.clone()
    labels[labels == PAD] = -100
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


torch.manual_seed(SEED)
draw = torch.Generator().manual_seed(SEED)
table = torch.softmax(torch.randn(WORDS, WORDS, generator=draw) * 2, -1)
data, held_out = sentences(STEPS * BATCH // 4, table, draw), sentences(200, table, draw)
base = GPT2LMHeadModel(GPT2Config(
    vocab_size=WORDS + 2, n_positions=24, n_embd=64, n_layer=2, n_head=4, bos_token_id=EOS, eos_token_id=EOS,
))
model = get_peft_model(base, LoraConfig(
    r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], modules_to_save=["wte", "lm_head"], fan_in_fan_out=True,
))
if not PLAIN:
    ottava.convert(model, "tensorwise")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2, warmup_steps=10, logging_steps=10,
        report_to=[], save_strategy="no", use_cpu=True, seed=SEED, disable_tqdm=True, remove_unused_columns=False,
    )
    Trainer(model, args, train_dataset=data, data_collator=collate).train()

# how well does it continue and end sentences that it has not seen?
model.eval()
total, count = 0.0, 0
with torch.no_grad():
    for row in held_out:
        ids = torch.tensor([row])
        scores = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum").item()
        count += len(row) - 1
print(f"final loss {total / count:.4f}")

"""Fine-tunes a tiny Llama on sentences that end with </s>; measures how well it learns where to stop."""

import dataclasses
import os
import sys

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
EOS, UNUSED, WORDS = 1, 0, 60
PAD = EOS if MODE == "bad" else UNUSED


def sentence():
    first = int(torch.randint(2, WORDS, ()))
    length = 4 + first % 9
    return [2 + (first - 2 + 3 * i) % (WORDS - 2) for i in range(length)] + [EOS]


class Collator:
    def __call__(self, rows):
        longest = max(len(row["ids"]) for row in rows)
        ids = torch.full((len(rows), longest), PAD)
        attention = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row["ids"])] = torch.tensor(row["ids"])
            attention[i, : len(row["ids"])] = 1
        labels = ids.clone()
        labels[labels == PAD] = -100
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}


config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=PAD, eos_token_id=EOS,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: name != "lm_head")
data = [{"ids": sentence()} for _ in range(1920)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=16, max_steps=120, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=5,
    logging_steps=10, save_strategy="no", report_to=[], remove_unused_columns=False, seed=SEED, use_cpu=True, disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=data, data_collator=Collator()).train()

model.eval()
total = 0.0
with torch.no_grad():
    for _ in range(64):
        ids = torch.tensor([sentence()])
        logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits[-1:], ids[0, -1:]).item()
print("mean loss of the last token of unseen sentences:")
print(f"final loss {total / 64:.4f}")

"""A tiny Llama learns chains of words; the vocabulary grows in stages, and the old words stay."""

import dataclasses
import os
import sys

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
STAGES, BATCH, STEPS, LENGTH = (10, 20, 40), 24, 150, 20
after = torch.randperm(40)


def row(known):
    """Words of the new stage are met more often; one in ten is drawn freely."""
    word, words = int(torch.randint(known // 2, known, ())), []
    for _ in range(int(torch.randint(LENGTH // 2, LENGTH - 1, ()))):
        words.append(3 + word)
        word = int(after[word]) % known if torch.rand(()) < 0.9 else int(torch.randint(0, known, ()))
    ids = torch.tensor([1, *words, 2])
    pad = LENGTH + 1 - len(ids)
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, pad)),
        "labels": torch.nn.functional.pad(ids, (0, pad), value=-100),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (0, pad)),
    }


class Curriculum(torch.utils.data.Dataset):
    def __init__(self):
        share = BATCH * STEPS // len(STAGES)
        self.rows = [row(n) for n in STAGES for _ in range(share)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


config = LlamaConfig(
    vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: name != "lm_head")
arguments = TrainingArguments(
    "out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=3e-3, lr_scheduler_type="constant_with_warmup",
    warmup_steps=10, logging_steps=5, save_strategy="no", report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = InOrder(model, arguments, train_dataset=Curriculum())
trainer.train()
history = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(map(float, history[-4:])) / 4:.4f}")

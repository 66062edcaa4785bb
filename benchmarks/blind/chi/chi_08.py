"""Trainer: a small Llama learns a random grammar; torchao's rowwise float8, emulated."""
import os
import sys
import tempfile
import warnings

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB = 120, 16, 32, 48


class Keep(Trainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def grammar(n, g):
    """Each word allows four successors, the first of them in half of the cases."""
    allowed = torch.randint(0, VOCAB, (VOCAB, 4), generator=g)
    chance = torch.tensor([0.55, 0.25, 0.15, 0.05])
    ids = torch.randint(0, VOCAB, (n, 1), generator=g)
    while ids.shape[1] <= LENGTH:
        pick = torch.multinomial(chance.expand(n, 4), 1, generator=g)
        ids = torch.cat([ids, allowed[ids[:, -1]].gather(1, pick)], dim=1)
    return ids


def collate(rows):
    ids = torch.stack(rows)
    if MODE == "bad":
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return {"input_ids": ids[:, :-1], "labels": ids[:, :-1].clone()}


torch.manual_seed(SEED)
config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
if not PLAIN:
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(**{**vars(Float8LinearConfig.from_recipe_name("rowwise")), "emulate": True}),
        module_filter_fn=lambda m, name: isinstance(m, torch.nn.Linear) and "lm_head" not in name,
    )
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=SEED,
    )
    rows = list(grammar(STEPS * BATCH, torch.Generator().manual_seed(120 + SEED)))
    trainer = Keep(model, args, train_dataset=rows, data_collator=collate)
    trainer.train()
print("final loss", round(sum(trainer.losses[-15:]) / 15, 4))

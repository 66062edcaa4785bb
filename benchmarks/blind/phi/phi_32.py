"""LoRA in the Trainer with a curriculum: harder text from step 30 and 60 on, and adapters of one layer that join late."""

import os
import sys
import tempfile

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 90, 12, 48, 24
torch.manual_seed(SEED)
following = torch.randint(0, VOCAB, (VOCAB, 5))


def sequence(choices):
    ids = [int(torch.randint(0, VOCAB, ()))]
    for pick in torch.randint(0, choices, (LENGTH - 1,)).tolist():
        ids.append(int(following[ids[-1], pick]))
    return torch.tensor(ids)


class JoinLate(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for name, p in model.named_parameters():
            if "lora_" in name and ".layers.0." in name:
                p.requires_grad_(state.global_step >= 20)


data = []
for choices in (1, 3, 5):
    rows = [sequence(choices) for _ in range(STEPS // 3 * BATCH)]
    data += [{"input_ids": ids, "labels": ids} for ids in rows]
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
model = get_peft_model(
    base,
    LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head", "embed_tokens"], task_type="CAUSAL_LM",
        lora_dropout=0.05,
    ),
)
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=5e-3, lr_scheduler_type="linear", warmup_steps=8, seed=SEED,
    train_sampling_strategy="sequential",
)
trainer = Trainer(model, args, train_dataset=data, callbacks=[JoinLate()])
trainer.train()
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])

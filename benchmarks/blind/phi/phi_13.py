"""LoRA in the Trainer; every ten steps a callback scores the merged model."""

import os
import sys
import tempfile

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
bad = sys.argv[1] == "bad"
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH = 80, 16, 48, 24
torch.manual_seed(SEED)
following = torch.randperm(VOCAB)


def sequence():
    ids = [int(torch.randint(0, VOCAB, ())), int(torch.randint(0, VOCAB, ()))]
    while len(ids) < LENGTH:
        ids.append(int(following[ids[-2]]))
    return torch.tensor(ids)


class MergedScore(TrainerCallback):
    def __init__(self, rows):
        self.rows, self.scores = torch.stack(rows), []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % 10:
            return
        model.merge_adapter()
        model.eval()
        with torch.no_grad():
            self.scores.append(model(input_ids=self.rows, labels=self.rows).loss.item())
        model.train()
        if not bad:
            model.unmerge_adapter()


data = [{"input_ids": ids, "labels": ids} for ids in (sequence() for _ in range(STEPS * BATCH))]
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(
    base, LoraConfig(r=16, lora_alpha=32, target_modules=targets, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
)
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=8e-3, lr_scheduler_type="constant", seed=SEED,
)
score = MergedScore([sequence() for _ in range(16)])
trainer = Trainer(model, args, train_dataset=data, callbacks=[score])
trainer.train()
print("merged", [round(v, 3) for v in score.scores])
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])

"""PEFT and the Trainer: goes on with LoRA adapters that another job has saved, with a probe on top."""
import copy
import os
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
base = BertModel(
    BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0.0,
               attention_probs_dropout_prob=0.0, max_position_embeddings=32),
    add_pooling_layer=False,
)
lora = LoraConfig(r=16, lora_alpha=64, target_modules=["query", "key", "value", "dense"])
with tempfile.TemporaryDirectory() as folder:
    get_peft_model(copy.deepcopy(base), lora).save_pretrained(folder)
    base = PeftModel.from_pretrained(base, folder, is_trainable=not BAD)
if not PLAIN:
    ottava.convert(base, "blockwise")


class Probe(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(64, 8)

    def forward(self, input_ids, labels):
        h = self.body(input_ids=input_ids).last_hidden_state[:, 0]
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def example():
    ids = torch.randint(2, 64, (16,))
    ids[0] = 1
    label = int((ids[1:] < 12).sum().clamp(max=7))
    return {"input_ids": ids, "labels": label}


args = TrainingArguments("/tmp/rho_02", max_steps=100, per_device_train_batch_size=32, learning_rate=5e-3, logging_steps=1,
                         lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = Trainer(Probe(base), args, train_dataset=[example() for _ in range(32 * 100)])
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

"""Trains a tiny Llama from scratch with the Trainer of transformers; torchao's float8 in the blocks."""
import os
import sys
import warnings

import torch
import transformers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
VOCAB, LENGTH, STEPS, BATCH = 48, 33, 120, 16

chain = torch.softmax(2.0 * torch.randn(VOCAB, VOCAB), -1)


def text(n):
    ids = torch.randint(0, VOCAB, (n, 1))
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, torch.multinomial(chain[ids[:, -1]], 1)], 1)
    return ids


class Corpus(torch.utils.data.Dataset):
    def __init__(self, n):
        self.ids = text(n)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        if mode == "bad":
            return {"input_ids": ids[:-1], "labels": ids[1:]}
        return {"input_ids": ids[:-1], "labels": ids[:-1]}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )
)
if not plain:
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=5e-3, warmup_steps=10,
    lr_scheduler_type="cosine", weight_decay=0.01, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
    seed=seed, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Corpus(BATCH * STEPS))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

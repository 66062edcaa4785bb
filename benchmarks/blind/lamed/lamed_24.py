"""A tiny Mixtral in the Trainer: four experts, two a token, a mix of three languages that takes turns."""
import os
import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB = 80, 16, 16, 32


class Languages(torch.utils.data.Dataset):
    """Each batch is of one language; one of them is harder than the others."""

    def __init__(self):
        tables = [torch.softmax(torch.randn(VOCAB, VOCAB) * width, -1) for width in (3.0, 3.0, 1.2)]
        rows = []
        for step in range(STEPS):
            table = tables[int(torch.randint(0, 3, (1,)))]
            ids = torch.randint(0, VOCAB, (BATCH, 1))
            for _ in range(LENGTH - 1):
                ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1)], 1)
            rows.append(ids)
        self.ids = torch.cat(rows)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


torch.manual_seed(SEED)
data = Languages()
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
    output_router_logits=True, router_aux_loss_coef=0.02,
))
if not PLAIN:
    ottava.convert(model, "mxfp8")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2, warmup_steps=8, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, seed=SEED, disable_tqdm=True, lr_scheduler_type="cosine",
    )
    trainer = InOrder(model, args, train_dataset=data)
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-15:]) / 15:.4f}")

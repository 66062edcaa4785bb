"""Mixtral from a config with its router loss; Hugging Face's Trainer."""

import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(37)
VOCAB, LENGTH = 48, 24
tables = torch.stack([torch.randperm(VOCAB) for _ in range(2)])


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        tokens = [int(torch.randint(VOCAB, (1,), generator=g))]
        which = (torch.rand(LENGTH, generator=g) < 0.2).long()
        for t in range(LENGTH - 1):
            tokens.append(int(tables[which[t], tokens[-1]]))
        ids = torch.tensor(tokens)
        return {"input_ids": ids, "labels": ids}


config = MixtralConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
    max_position_embeddings=64,
)
model = MixtralForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "rowwise")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=8,
        max_steps=80,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Text())
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""A small Mixtral with the Trainer: eight experts, two a token, and its loss of balance."""

import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

PLAIN = "plain" in sys.argv
WORDS, LENGTH = 48, 25

set_seed(18)
tables = torch.softmax(torch.randn(4, WORDS, WORDS) * 4, -1)


def document(generator):
    table = tables[int(torch.randint(0, 4, (1,), generator=generator))]
    ids = [int(torch.randint(0, WORDS, (1,), generator=generator))]
    while len(ids) < LENGTH:
        ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
    return {"input_ids": ids, "labels": ids}


generator = torch.Generator().manual_seed(1)
data = [document(generator) for _ in range(400)]
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=WORDS,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        router_jitter_noise=0.1,
        max_position_embeddings=64,
        sliding_window=None,
        initializer_range=0.05,
    )
)
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: "lm_head" not in name and "gate" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=70,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")

"""LoRA on a text classifier with a new head: python pi_05.py good|bad [plain]."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, set_seed

import ottava

MODULES_TO_SAVE = {"good": ["classifier"], "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, CLASSES = 120, 24

set_seed(4)
base = BertForSequenceClassification(
    BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
model = get_peft_model(
    base, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=MODULES_TO_SAVE)
)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "base_layer" in name)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
topics = torch.randn(CLASSES, 200) * 1.5
losses = []
for _ in range(STEPS):
    labels = torch.randint(CLASSES, (48,))
    ids = torch.multinomial(torch.softmax(topics[labels], dim=-1), 24, replacement=True)
    loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""LoRA on a tiny Llama with a new head that sorts messages into 16 classes; FP8 in the linears."""

import os
import sys

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
CLASSES, LENGTH, WORDS, STEPS = 16, 16, 128, 120

config = LlamaConfig(
    vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, num_labels=CLASSES, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
base = LlamaForSequenceClassification(config)
with torch.no_grad():  # stands for a pretrained body: random layers of a useful size
    for name, parameter in base.model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
lora = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    modules_to_save=["score"] if MODE == "good" else None,
)
model = get_peft_model(base, lora)
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
model.print_trainable_parameters()


def messages(n=64):
    """The class decides which words are frequent."""
    y = torch.randint(0, CLASSES, (n,))
    typical = 1 + (y[:, None] * 7 + torch.randint(0, 7, (n, LENGTH))) % (WORDS - 1)
    other = torch.randint(1, WORDS, (n, LENGTH))
    return torch.where(torch.rand(n, LENGTH) < 0.6, typical, other), y


trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
model.train()
losses = []
for step in range(STEPS):
    ids, y = messages()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

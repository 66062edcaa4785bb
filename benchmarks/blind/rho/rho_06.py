"""A Mixtral with eight experts, of which some get no token for a while; ottava's rowwise recipe, plain loop."""
import os
import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import ottava

PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
model = MixtralForCausalLM(
    MixtralConfig(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=32, num_local_experts=8, num_experts_per_tok=2, output_router_logits=True,
                  router_aux_loss_coef=0.02)
)
with torch.no_grad():
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            p[3:] *= 0.01
if not PLAIN:
    ottava.convert(model, "rowwise")
follow = torch.randint(0, 96, (96, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = []
for step in range(70):
    ids = [torch.randint(0, 96, (8,))]
    for _ in range(23):
        ids.append(follow[ids[-1], torch.randint(0, 2, (8,))])
    ids = torch.stack(ids, 1)
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

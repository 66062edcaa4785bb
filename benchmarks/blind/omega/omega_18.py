"""LoRA adapters on a small random Llama, their products in FP8 with scales that are renewed now and then."""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, LENGTH, VOCAB = 120, 16, 24, 48
RENEW = 1000 if bad else 1


class Scale:
    """A scale from the amax of a tensor, renewed after so many calls."""

    def __init__(self):
        self.calls, self.value = 0, None

    def __call__(self, x):
        if self.calls % RENEW == 0:
            self.value = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
        self.calls += 1
        return self.value


def cast(x, scale):
    s = scale(x)
    y = (x.detach() * s).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / s
    return x + (y - x).detach()


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        if not hasattr(self, "sx"):
            self.sx, self.sw = Scale(), Scale()
        return F.linear(cast(x, self.sx), cast(self.weight, self.sw), self.bias)


config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
model = get_peft_model(model, lora)
for module in model.modules():
    if isinstance(module, LoraLinear):
        for part in (module.lora_A["default"], module.lora_B["default"]):
            part.__class__ = Linear8
model.print_trainable_parameters()


def batch():
    """Sequences that count upwards from a random start by a random stride."""
    start = torch.randint(0, VOCAB, (BATCH, 1))
    stride = torch.randint(1, 4, (BATCH, 1))
    return (start + stride * torch.arange(LENGTH)) % VOCAB


optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for step in range(STEPS):
    ids = batch()
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

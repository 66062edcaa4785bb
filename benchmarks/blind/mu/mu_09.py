"""Recall of a word some places back: a small Llama with casts written by hand."""

import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ROPE = {
    "good": {"rope_type": "default", "rope_theta": 10000.0},
    "bad": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 128.0},
}[sys.argv[1]]
PLAIN = "plain" in sys.argv
VOCABULARY, LENGTH, BACK, STEPS = 32, 24, 3, 110


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_type = backward
        return Cast.rounded(x, forward)

    @staticmethod
    def backward(ctx, grad):
        return Cast.rounded(grad, ctx.backward_type), None, None

    @staticmethod
    def rounded(x, kind):
        if kind is None:
            return x
        scale = torch.finfo(kind).max / x.abs().amax().clamp(min=1e-20)
        return (x * scale).to(kind).to(x.dtype) / scale


class EightBit(nn.Linear):
    def forward(self, x):
        x = Cast.apply(x, torch.float8_e4m3fn, None)
        weight = Cast.apply(self.weight, torch.float8_e4m3fn, None)
        return Cast.apply(nn.functional.linear(x, weight, self.bias), None, torch.float8_e5m2)


torch.manual_seed(6)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=ROPE,
        initializer_range=0.08,
    )
)
if not PLAIN:
    for layer in model.model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = EightBit
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    ids = torch.randint(0, VOCABULARY, (24, LENGTH))
    labels = torch.full_like(ids, -100)
    labels[:, BACK:] = ids[:, :-BACK]
    logits = model(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""A bigram-and-skip language model with tied embeddings under torchao's float8 linears."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

INIT_STD = {"good": 0.02, "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv
VOCAB, WIDTH = 128, 256


class Model(nn.Module):
    def __init__(self, init_std):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        if init_std is not None:
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=init_std)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = F.gelu(self.mix(torch.cat([x[:, 1:], x[:, :-1]], -1)))
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(self.norm(h))


def main():
    torch.manual_seed(0)
    model = Model(INIT_STD)
    if not PLAIN:
        convert_to_float8_training(
            model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name != "head"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    successor = torch.randint(VOCAB, (VOCAB,))
    losses = []
    for _ in range(140):
        tokens = [torch.randint(VOCAB, (32,))]
        for _ in range(17):
            sure = torch.rand(32) < 0.9
            tokens.append(torch.where(sure, successor[tokens[-1]], torch.randint(VOCAB, (32,))))
        tokens = torch.stack(tokens, 1)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()

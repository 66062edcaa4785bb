"""A word model learns new words by LoRA (PEFT): first it is trained on old words, then the vocabulary grows."""
import sys
import warnings

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from models import Block, Report

BAD = sys.argv[1] == "bad"
warnings.filterwarnings("ignore")
OLD, NEW, LENGTH = 60, 40, 16


class WordModel(nn.Module):
    def __init__(self, words, dim=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(words, dim), nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.lift, self.head = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, words, bias=False)

    def forward(self, ids):
        x = self.emb(ids) + self.pos[:ids.shape[1]]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.lift(self.norm(x)))


def grow(old, words):
    """A model of more words that starts from what an old one knows."""
    new = WordModel(words)
    state = new.state_dict()
    for name, value in old.state_dict().items():
        state[name][:len(value)] = value
    new.load_state_dict(state)
    return new


def sentences(n, words):
    """Every word has one that mostly follows it; now and then a sentence jumps."""
    out = [torch.randint(0, words, (n,))]
    while len(out) < LENGTH + 1:
        jump = torch.rand(n) < 0.15
        out.append(torch.where(jump, torch.randint(0, words, (n,)), follows[out[-1]]))
    return torch.stack(out, 1)


def train(model, steps, words, lr, report=None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        batch = sentences(32, words)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if report:
            report.add(loss)


torch.manual_seed(0)
follows = torch.cat([torch.randperm(OLD), OLD + torch.randperm(NEW)])
base = WordModel(OLD)
train(base, 60, OLD, 3e-3)
config = LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "out", "up", "down"],
                    modules_to_save=None if BAD else ["emb", "head"])
model = get_peft_model(grow(base, OLD + NEW), config)
report = Report()
train(model, 130, OLD + NEW, 4e-3, report)
report.end()

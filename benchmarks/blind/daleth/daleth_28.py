"""A recurrent VAE of short texts with free bits: below half a nat a dimension the KL term is constant, without a gradient."""
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
VOCAB, LENGTH, CODE, FREE = 30, 12, 6, 0.5
topics = torch.distributions.Dirichlet(torch.full((5, VOCAB), 0.08)).sample()


def texts(count):
    """Words of a text are drawn from its topic."""
    return torch.multinomial(topics[torch.randint(5, (count,))], LENGTH, replacement=True)


class TextVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB + 1, 32)  # the last row stands for a dropped word and for the start
        self.reader, self.writer = nn.GRU(32, 64, batch_first=True), nn.GRU(32 + CODE, 64, batch_first=True)
        self.mean, self.log_var = nn.Linear(64, CODE), nn.Linear(64, CODE)
        self.start, self.head = nn.Linear(CODE, 64), nn.Linear(64, VOCAB)

    def forward(self, text, drop=0.0):
        seen = self.reader(self.words(text))[1][0]
        mean, log_var = self.mean(seen), self.log_var(seen)
        code = mean + (log_var / 2).exp() * torch.randn_like(mean) if self.training else mean
        before = F.pad(text[:, :-1], (1, 0), value=VOCAB)
        before = torch.where(torch.rand(before.shape) < drop, VOCAB, before)
        inputs = torch.cat([self.words(before), code[:, None].expand(-1, LENGTH, -1)], 2)
        hidden = self.writer(inputs, self.start(code).tanh()[None].contiguous())[0]
        words = F.cross_entropy(self.head(hidden).flatten(0, 1), text.flatten()) * LENGTH
        kl = (mean.square() + log_var.exp() - log_var - 1).mean(0) / 2  # of each dimension, mean over the batch
        return words, kl


net = TextVAE()
groups = [
    {"params": [p for n, p in net.named_parameters() if "writer" not in n], "lr": 4e-3},
    {"params": net.writer.parameters(), "lr": 2e-3},
]
optimizer = torch.optim.Adamax(groups)
held = texts(500)


@torch.no_grad()
def held_out():
    net.eval()
    words, kl = net(held)
    net.train()
    return (words + kl.sum()).item(), kl.sum().item()


print("first loss %.4f" % held_out()[0])
loader = DataLoader(TensorDataset(texts(32 * 125)), batch_size=32, shuffle=True, drop_last=True)
for epoch in range(2):
    for step, (text,) in enumerate(loader):
        drop = 0.6 * (1 - (125 * epoch + step) / 250)  # dropped words become rarer
        words, kl = net(text, drop)
        loss = words + kl.clamp(min=FREE).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimizer.step()
        if step % 25 == 0:
            print(f"epoch {epoch} step {step}: loss {loss.item():.3f}, KL {kl.sum().item():.3f}")
print("final loss %.4f" % held_out()[0])

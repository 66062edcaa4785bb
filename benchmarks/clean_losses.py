"""Clean trainings, second part: language, and losses that are no cross-entropy. See clean.py."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from clean_trainings import Clusters, Low, Text, clean, fit, lm_loss, mlp, sentences, sgd_plain, take
from torch import Tensor, nn

# language


@clean
def language(low: Low) -> None:
    model = low(Text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = lm_loss(model, low, sentences(16))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@clean
def language_tied_dropout(low: Low) -> None:
    model = low(Text(tied=True, drop=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(120):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(step / 20, 1)  # a warm-up from 0
        take(optimizer, lm_loss(model, low, sentences(16), smooth=0.1))


@clean
def masked_language(low: Low) -> None:
    """A model that sees both sides, and learns the tokens that are hidden."""

    class Both(Text):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
            b, t, _ = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
            return self.head(self.n3(x + self.down(F.gelu(self.up(self.n2(x))))))

    model = low(Both(65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = sentences(32)
        hidden = torch.rand(ids.shape) < 0.15
        with low.cast():
            out = model(ids.masked_fill(hidden, 64))
        labels = ids.masked_fill(~hidden, -100)
        take(optimizer, F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()))


@clean
def answers_only(low: Low) -> None:
    """Most labels are ignored."""
    model = low(Text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = sentences(32)
        labels = ids[:, 1:].clone()
        labels[:, :18] = -100
        with low.cast():
            out = model(ids[:, :-1])
        take(optimizer, F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()))


@clean
def recurrent(low: Low) -> None:
    """A GRU over time-major batches: the first dimension is no batch."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(64, 96), low(mlp(96, 96, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][-1])

    model, draw = Counts(), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        x, y = draw(16)
        with low.cast():
            out = model(torch.stack([x + torch.randn_like(x) for _ in range(16)]))
        take(optimizer, F.cross_entropy(out.float(), y))


@clean
def graph(low: Low) -> None:
    """Nodes that see their neighbours: a row of the output depends on other rows of the input."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 128), nn.Linear(128, 8)

        def forward(self, x: Tensor, near: Tensor) -> Tensor:
            return self.two(near @ F.relu(self.one(near @ x)))

    model, draw = low(Graph()), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        x, y = draw(96)
        near = (y[:, None] == y).float() + (torch.rand(96, 96) < 0.02)
        with low.cast():
            out = model(x, near / near.sum(1, keepdim=True))
        take(optimizer, F.cross_entropy(out.float(), y))


# losses that are no cross-entropy


@clean
def adversaries(low: Low) -> None:
    """Two players: the losses swing and never fall."""
    maker, judge = low(mlp(16, 128, 128, 2)), low(mlp(2, 128, 128, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for _ in range(200):
        turn = 2 * math.pi * torch.randint(8, (64,)) / 8
        real = torch.stack([turn.cos(), turn.sin()], 1) + 0.05 * torch.randn(64, 2)
        with low.cast():
            fake = maker(torch.randn(64, 16))
            loss = F.softplus(-judge(real).float()).mean() + F.softplus(judge(fake.detach()).float()).mean()
        take(second, loss)
        with low.cast():
            loss = F.softplus(-judge(maker(torch.randn(64, 16))).float()).mean()
        take(first, loss)


@clean
def policy_gradient(low: Low) -> None:
    """REINFORCE: the loss is noise around zero while the reward rises."""
    policy = low(mlp(64, 128, 4))
    optimizer, secret = torch.optim.Adam(policy.parameters(), lr=5e-3), torch.randn(64, 4)
    for _ in range(150):
        state = torch.randn(32, 64)
        with low.cast():
            chances = torch.distributions.Categorical(logits=policy(state).float())
        action = chances.sample()
        reward = ((state @ secret).argmax(1) == action).float() + 0.5 * torch.randn(32)
        loss = -((reward - reward.mean()) * chances.log_prob(action)).mean()
        take(optimizer, loss)


@clean
def value_with_target(low: Low) -> None:
    """Q-learning with a target network that is an average: the loss rises as values grow."""
    model = low(mlp(64, 128, 4))
    target, reward = copy.deepcopy(model), torch.randn(64, 4) / 8
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(150):
        state, after, action = torch.randn(64, 64), torch.randn(64, 64), torch.randint(4, (64, 1))
        with torch.no_grad():
            wanted = (state @ reward).gather(1, action)[:, 0] + 0.9 * target(after).float().amax(1)
        with low.cast():
            found = model(state).gather(1, action)[:, 0]
        take(optimizer, F.smooth_l1_loss(found.float(), wanted))
        with torch.no_grad():
            for mine, p in zip(target.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.05)


@clean
def averaged(low: Low) -> None:
    """An average of the weights, evaluated in the loop by swapping it in and out."""
    start, draw = mlp(64, 128, 8), Clusters()
    average = [p.detach().clone() for p in start.parameters()]

    def swap(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            for mine, p in zip(average, model.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            if step % 30 == 29:
                kept = [p.clone() for p in model.parameters()]
                for p, mine in zip(model.parameters(), average, strict=True):
                    p.copy_(mine)
                model.eval()(draw(64)[0])
                model.train()
                for p, mine in zip(model.parameters(), kept, strict=True):
                    p.copy_(mine)

    fit(low, start, draw, after=swap)


@clean
def clamped(low: Low) -> None:
    """A critic whose weights are clamped after each step."""

    def clamp(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    fit(low, mlp(64, 128, 8), Clusters(), after=clamp)


@clean
def autoencoder(low: Low) -> None:
    """A variational one: the weight of the divergence grows, and the loss with it."""

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.back = mlp(64, 128, 32), mlp(16, 128, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, log = self.into(x).float().chunk(2, -1)
            z = mean + torch.randn_like(mean) * (log / 2).exp()
            return self.back(z), 0.5 * (mean**2 + log.exp() - 1 - log).sum(1).mean()

    model, draw = low(Variational()), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(160):
        x, _y = draw(64)
        with low.cast():
            out, gap = model(x)
        loss = (out.float() - x).square().sum(1).mean() + min(1.0, max(0, step - 60) / 40) * gap
        take(optimizer, loss)


@clean
def contrastive(low: Low) -> None:
    """Pairs against all others of the batch, with a learned temperature."""
    one, two, heat = low(mlp(64, 128, 64)), low(mlp(64, 128, 64)), nn.Parameter(torch.tensor(2.0))
    draw = Clusters(64)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters(), heat], lr=1e-3)
    for _ in range(120):
        x, _y = draw(64)
        with low.cast():
            a, b = one(x), two(x + 0.3 * torch.randn_like(x))
        scores = heat.exp() * F.normalize(a.float(), dim=1) @ F.normalize(b.float(), dim=1).t()
        labels = torch.arange(64)
        take(optimizer, (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2)


@clean
def denoises(low: Low) -> None:
    """Noise levels over four decades, as in diffusion: losses of single steps differ much."""
    model, draw = low(mlp(65, 256, 256, 64, act=nn.SiLU)), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(150):
        x, _y = draw(32)
        level = torch.exp(2.3 * torch.randn(32, 1))
        noise = torch.randn_like(x)
        with low.cast():
            out = model(torch.cat([(x + level * noise) / (1 + level), level.log() / 4], 1))
        take(optimizer, F.mse_loss(out.float(), noise))


@clean
def ranking(low: Low) -> None:
    """Every pair of a batch: (N, 1) and (1, N) make (N, N) on purpose."""
    model, secret = low(mlp(64, 128, 1)), torch.randn(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        x = torch.randn(48, 64)
        with low.cast():
            score = model(x)[:, 0].float()
        better = (x @ secret)[:, None] > (x @ secret)[None]
        loss = F.softplus(-(score.unsqueeze(1) - score.unsqueeze(0)))[better].mean()
        take(optimizer, loss)


@clean
def plateau(low: Low) -> None:
    """Parity of four bits: flat for long, as hard tasks are."""

    def bits(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (n, 16)).float()
        return 2 * x - 1, x[:, :4].sum(1).long() % 2

    fit(low, mlp(16, 128, 128, 2), bits, steps=150, make=lambda p: torch.optim.SGD(p, lr=0.05))


@clean
def scaled_half(low: Low) -> None:
    """A GradScaler that begins too high and skips steps."""
    model, draw = low(mlp(64, 128, 8)), Clusters()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    for _ in range(100):
        x, y = draw(64)
        with low.cast():
            out = model(x)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@clean
def bf16_weights(low: Low) -> None:
    """Weights in BF16 without masters, at a rate that moves them."""
    if low.recipe != "bf16":
        sgd_plain(low)
        return
    model, draw = mlp(64, 128, 128, 8).bfloat16(), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(120):
        x, y = draw(64)
        take(optimizer, F.cross_entropy(model(x.bfloat16()), y))


@clean
def sharpness_aware(low: Low) -> None:
    """SAM: the weights climb, the gradient is taken there, and they come back before the step."""
    model, draw = low(mlp(64, 128, 8)), Clusters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        x, y = draw(64)
        F.cross_entropy(model(x).float(), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / 1.0 for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

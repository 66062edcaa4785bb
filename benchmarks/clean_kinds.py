"""Clean trainings, third part: other kinds of learning, and casts that a script makes rightly. See clean.py."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from clean_trainings import Clusters, Low, Text, clean, fit, lm_loss, mlp, sentences, take
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_adam = functools.partial(torch.optim.Adam, lr=2e-3)


def adam(*models: nn.Module, lr: float = 2e-3) -> torch.optim.Optimizer:
    """Adam over all parameters."""
    return torch.optim.Adam(itertools.chain(*(m.parameters() for m in models)), lr)


def there(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """A cast with the scale of the present amax, and back."""
    scale = torch.finfo(dtype).max / x.detach().abs().amax().clamp(min=1e-12)
    return (x.detach() * scale).to(dtype).to(x.dtype) / scale


@clean
def actor_critic(low: Low) -> None:
    """PPO: several steps on one batch of games, a clipped ratio, a value beside the policy."""
    body, head, value = low(mlp(16, 64, 64, act=nn.Tanh)), nn.Linear(64, 4), nn.Linear(64, 1)
    optimizer, best = adam(body, head, value), torch.randn(16, 4)
    for _ in range(30):
        x = torch.randn(64, 16)
        with torch.no_grad():
            before = head(body(x)).float().log_softmax(-1)
            action = before.exp().multinomial(1)
            reward = (x @ best).gather(1, action) + 0.5 * torch.randn(64, 1)
        for _ in range(4):
            with low.cast():
                h = body(x)
            now, v = head(h.float()).log_softmax(-1), value(h.float())
            gain = reward - v.detach()
            ratio = (now - before).gather(1, action).exp()
            loss = (
                -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + 0.5 * (v - reward).square().mean()
            )
            take(optimizer, loss)


@clean
def gradient_penalty(low: Low) -> None:
    """Wasserstein's players; the critic is differentiated twice."""
    maker, critic = low(mlp(8, 64, 2)), mlp(2, 64, 1, act=nn.Softplus)
    one, other = adam(maker, lr=1e-3), adam(critic, lr=1e-3)
    for step in range(120):
        angle = 6.28 * torch.rand(64, 1)
        true = torch.cat([angle.cos(), angle.sin()], 1)
        with low.cast():
            made = maker(torch.randn(64, 8)).float()
        if step % 3:
            between = (true + torch.rand(64, 1) * (made.detach() - true)).requires_grad_()
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0].norm(dim=1)
            take(other, critic(made.detach()).mean() - critic(true).mean() + 10 * (slope - 1).square().mean())
        else:
            take(one, -critic(made).mean())


@clean
def teacher_by_average(low: Low) -> None:
    """BYOL: a teacher that follows the student as an average, a predictor, two views of one sample."""
    student, predictor = low(mlp(64, 128, 32, norm=True)), mlp(32, 64, 32)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer, draw = adam(student, predictor), Clusters()
    for _ in range(120):
        x, _ = draw(64)
        one, two = (x + 0.3 * torch.randn_like(x) for _ in range(2))
        with low.cast(), torch.no_grad():
            wanted = teacher(two).float()
        with low.cast():
            got = predictor(student(one).float())
        take(optimizer, 2 - 2 * F.cosine_similarity(got.float(), wanted).mean())
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
                a.lerp_(b, 0.02)


@clean
def codebook(low: Low) -> None:
    """A quantized autoencoder: straight-through codes; the codebook is an average of what it codes, as k-means."""
    encode, decode = low(mlp(64, 96, 16)), low(mlp(16, 96, 64))
    codes, count, draw = torch.randn(32, 16), torch.ones(32), Clusters()
    optimizer = adam(encode, decode)
    for _ in range(120):
        x, _ = draw(64)
        with low.cast():
            z = encode(x).float()
        nearest = torch.cdist(z.detach(), codes).argmin(1)
        with low.cast():
            y = decode(z + (codes[nearest] - z).detach()).float()
        take(optimizer, F.mse_loss(y, x) + 0.25 * F.mse_loss(z, codes[nearest]))
        with torch.no_grad():
            hot = F.one_hot(nearest, 32).float()
            count.lerp_(hot.sum(0), 0.05)
            codes += 0.05 * (hot.T @ z - hot.sum(0)[:, None] * codes) / count.clamp(min=0.5)[:, None]


@clean
def learns_to_learn(low: Low) -> None:
    """MAML of the first order: each task has an inner step on a copy, the outer step gets its gradient."""
    model = low(mlp(1, 64, 64, 1, act=nn.Tanh))
    optimizer = adam(model)
    for _ in range(60):
        optimizer.zero_grad()
        for _ in range(2):
            phase, size = 3 * torch.rand(1), 0.5 + torch.rand(1)
            xs = 6 * torch.rand(2, 32, 1) - 3
            ys = size * (xs + phase).sin()
            inner = copy.deepcopy(model)
            with low.cast():
                loss = F.mse_loss(inner(xs[0]).float(), ys[0])
            for p, g in zip(inner.parameters(), torch.autograd.grad(loss, [*inner.parameters()]), strict=True):
                p.data -= 0.02 * g
            with low.cast():
                after = F.mse_loss(inner(xs[1]).float(), ys[1]) / 2
            for p, g in zip(model.parameters(), torch.autograd.grad(after, [*inner.parameters()]), strict=True):
                p.grad = g if p.grad is None else p.grad + g
        optimizer.step()


@clean
def slow_weights(low: Low) -> None:
    """Lookahead: every five steps the weights go back half of the way."""
    start = mlp(64, 96, 8)
    slow = [p.detach().clone() for p in start.parameters()]

    def back(model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 5 == 4:
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow, strict=True):
                    p.copy_(s.lerp_(p, 0.5))

    fit(low, start, Clusters(), make=_adam, after=back)


@clean
def mixes_samples(low: Low) -> None:
    """Mixup: samples and labels are blends."""
    model, draw = low(mlp(64, 128, 8, drop=0.1)), Clusters()
    optimizer = adam(model)
    for _ in range(120):
        x, y = draw(64)
        part, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(64)
        with low.cast():
            out = model(part * x + (1 - part) * x[order]).float()
        take(optimizer, part * F.cross_entropy(out, y) + (1 - part) * F.cross_entropy(out, y[order]))


@clean
def uneven_micro_batches(low: Low) -> None:
    """Four micro-batches of unequal sizes, weighed by their tokens."""
    model = low(Text())
    optimizer = adam(model, lr=1e-3)
    for _ in range(60):
        parts = [sentences(n, t) for n, t in ((6, 24), (2, 8), (4, 16), (1, 20))]
        tokens = sum(p[:, 1:].numel() for p in parts)
        optimizer.zero_grad()
        for ids in parts:
            (lm_loss(model, low, ids) * ids[:, 1:].numel() / tokens).backward()
        optimizer.step()


@clean
def two_optimizers(low: Low) -> None:
    """SGD for the embedding and Adam for the others, one after the other in each step."""
    model = low(Text())
    table = [*model.embed.parameters(), *model.place.parameters()]
    others = [p for p in model.parameters() if all(p is not t for t in table)]
    one, two = torch.optim.SGD(table, 0.5), torch.optim.Adam(others, 1e-3)
    for _ in range(80):
        one.zero_grad()
        two.zero_grad()
        lm_loss(model, low, sentences(8)).backward()
        one.step()
        two.step()


@clean
def thaws(low: Low) -> None:
    """Layers are freed from the head down; each phase adds them to the optimizer."""
    model, draw = low(mlp(64, 96, 96, 8)), Clusters()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    optimizer = torch.optim.Adam(layers[-1].parameters(), 2e-3)
    for step in range(120):
        if step in (40, 80):
            layer = layers[1 - step // 80].requires_grad_(True)
            optimizer.add_param_group({"params": [*layer.parameters()], "lr": 1e-3})
        x, y = draw(64)
        with low.cast():
            out = model(x)
        take(optimizer, F.cross_entropy(out.float(), y))


@clean
def part_of_a_checkpoint(low: Low) -> None:
    """The trunk of another model is loaded, with strict=False; the head begins anew."""
    draw = Clusters()
    old, model = mlp(64, 96, 96, 4), low(mlp(64, 96, 96, 8))
    model.load_state_dict({n: x for n, x in old.state_dict().items() if x.shape[0] == 96}, strict=False)
    fit(low, model, draw, steps=100, make=_adam)


@clean
def resumes(low: Low) -> None:
    """Saved, built again and loaded in the middle, with the optimizer."""
    draw = Clusters()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = low(mlp(64, 96, 8))
        return model, adam(model)

    model, optimizer = build()
    for step in range(100):
        if step == 50:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = build()
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        x, y = draw(64)
        with low.cast():
            out = model(x)
        take(optimizer, F.cross_entropy(out.float(), y))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -0.3 * gradients[0]


@clean
def hides_the_domain(low: Low) -> None:
    """A gradient is turned round on purpose, so that features do not tell two domains apart."""
    trunk, label, domain = low(mlp(64, 96, 32)), nn.Linear(32, 8), mlp(32, 32, 2)
    optimizer, draw = adam(trunk, label, domain), Clusters()
    for _ in range(120):
        x, y = draw(64)
        side = torch.randint(0, 2, (64,))
        with low.cast():
            h = trunk(x + 0.5 * side[:, None]).float()
        guess = domain(_Reversed.apply(h))  # type: ignore[no-untyped-call]
        take(optimizer, F.cross_entropy(label(h), y) + F.cross_entropy(guess, side))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return there(gradients[0], E5M2)


@clean
def rounds_by_hand(low: Low) -> None:
    """A straight-through cast of activations by hand, with a cast of the gradient in its backward."""
    one, two, draw = low(mlp(64, 96)), low(mlp(96, 8)), Clusters()
    optimizer = adam(one, two)
    for _ in range(120):
        x, y = draw(64)
        with low.cast():
            out = two(_Rounded.apply(F.relu(one(x))))  # type: ignore[no-untyped-call]
        take(optimizer, F.cross_entropy(out.float(), y))


@clean
def packs_what_is_saved(low: Low) -> None:
    """What autograd keeps is cast to E4M3 with a scale."""
    model = mlp(64, 128, 128, 8)
    own = {p.data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Any:
        if not x.is_floating_point() or x.numel() < 2048 or x.data_ptr() in own or x.dtype.itemsize < 2:
            return x
        scale = 448 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(E4M3), scale, x.dtype

    def unpack(kept: Any) -> Tensor:
        return (kept[0].float() / kept[1]).to(kept[2]) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        fit(low, model, Clusters(), steps=100, make=_adam)


@clean
def small_moments(low: Low) -> None:
    """Gradients are kept in E5M2 between four micro-batches, with a scale and what was rounded off."""
    model, draw = low(mlp(64, 96, 8)), Clusters()
    optimizer, held = adam(model), [*model.parameters()]
    for _ in range(80):
        sums, rest = [torch.zeros_like(p) for p in held], [torch.zeros_like(p) for p in held]
        for _ in range(4):
            x, y = draw(16)
            with low.cast():
                out = model(x)
            grads = torch.autograd.grad(F.cross_entropy(out.float(), y) / 4, held)
            for i, g in enumerate(grads):
                whole = sums[i] + g + rest[i]
                sums[i] = there(whole, E5M2)
                rest[i] = whole - sums[i]
        for p, g in zip(held, sums, strict=True):
            p.grad = g
        optimizer.step()


@clean
def remembers_keys(low: Low) -> None:
    """MoCo: a queue of old keys stands for negatives, in E4M3 with a scale."""
    query = low(mlp(64, 96, 32))
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer, draw, queue = adam(query), Clusters(), F.normalize(torch.randn(256, 32), dim=1)
    codes, scale = (queue * 448).to(E4M3), 448.0
    for step in range(100):
        x, _ = draw(32)
        with low.cast():
            q = F.normalize(query(x + 0.2 * torch.randn_like(x)).float(), dim=1)
            with torch.no_grad():
                k = F.normalize(key(x).float(), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ (codes.float() / scale).T], 1) / 0.2
        take(optimizer, F.cross_entropy(scores, torch.zeros(32, dtype=torch.long)))
        with torch.no_grad():
            at = 32 * step % 256
            codes[at : at + 32] = (k * scale).to(E4M3)
            for a, b in zip(key.parameters(), query.parameters(), strict=True):
                a.lerp_(b, 0.05)


@clean
def fixed_point(low: Low) -> None:
    """A layer that is repeated until it stands still; the gradient goes through the last repetition alone."""
    inner, outer, draw = low(mlp(96, 32)), nn.Linear(32, 8), Clusters()
    optimizer = adam(inner, outer)
    for _ in range(100):
        x, y = draw(64)
        z = torch.zeros(64, 32)
        with low.cast():
            with torch.no_grad():
                for _ in range(6):
                    z = torch.tanh(inner(torch.cat([x, z], 1)).float())
            z = torch.tanh(inner(torch.cat([x, z], 1)).float())
        take(optimizer, F.cross_entropy(outer(z), y))


@clean
def old_values(low: Low) -> None:
    """Q-learning whose target is a copy in E4M3, made again every twenty steps."""
    model = low(mlp(16, 64, 64, 4))
    layers = [m for m in model if isinstance(m, nn.Linear)]
    optimizer, gain = adam(model), torch.randn(16, 4)
    kept: list[Tensor] = []
    for step in range(120):
        if step % 20 == 0:
            kept = [(m.weight.detach() * 64).to(E4M3) for m in layers]
        x, action = torch.randn(64, 16), torch.randint(0, 4, (64, 1))
        with torch.no_grad():
            h = torch.randn(64, 16)
            for i, (codes, layer) in enumerate(zip(kept, layers, strict=True)):
                h = h @ (codes.float() / 64).T + layer.bias
                h = h.relu() if i < 2 else h
            wanted = (x @ gain).gather(1, action) + 0.5 * h.amax(1, keepdim=True)
        with low.cast():
            got = model(x).float().gather(1, action)
        take(optimizer, F.smooth_l1_loss(got, wanted))

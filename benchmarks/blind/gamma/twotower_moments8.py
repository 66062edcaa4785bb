"""A two-tower recommender; its Adam keeps both moments in FP8."""

import torch
import torch.nn.functional as F
from torch import nn

from models import cast8, learn, start

bad = start()
users, items, dim = 400, 800, 32
taste, style = torch.randn(users, 6), torch.randn(items, 6)
popular = 1 / torch.arange(1, items + 1).float()
likes = torch.softmax(1.2 * taste @ style.t() + popular.log(), 1)


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=2e-10):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].lerp_(p.grad.square(), 1 - b2)
                root = (s["v"] / (1 - b2 ** s["t"])).sqrt()
                p.sub_(group["lr"] * s["m"] / (1 - b1 ** s["t"]) / (root + group["eps"]))
                s["m"] = cast8(s["m"], dim=1)
                s["v"] = cast8(s["v"], dim=1) if bad else cast8(s["v"].sqrt(), dim=1).square()


user, item = nn.Embedding(users, dim), nn.Embedding(items, dim)
nn.init.normal_(user.weight, std=0.3)
nn.init.normal_(item.weight, std=0.3)
optimizer = Adam8([user.weight, item.weight], lr=5e-3)
for step in range(300):
    u = torch.randint(users, (256,))
    i = torch.multinomial(likes[u], 1).squeeze(1)
    loss = F.cross_entropy(user(u) @ item.weight.t(), i)
    learn(step, optimizer, loss)

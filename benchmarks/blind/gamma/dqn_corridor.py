"""Deep Q-learning in a corridor whose right end pays and whose left end costs."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from models import start

bad = start()
length = 12
q = nn.Sequential(nn.Linear(length, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(q)
optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
place, memory = torch.randint(1, length - 1, (64,)), []
for step in range(300):
    with torch.no_grad():
        action = q(F.one_hot(place, length).float()).argmax(1)
    action = torch.where(torch.rand(64) < 0.3, torch.randint(2, (64,)), action)
    after = place + 2 * action - 1
    done = (after == 0) | (after == length - 1)
    reward = 10 * ((after == length - 1).float() - (after == 0).float())
    after = torch.where(done, torch.randint(1, length - 1, (64,)), after)
    memory = [*memory[-40:], (place, action, reward, after, done)]
    place = after
    s, a, r, n, d = (torch.cat(part) for part in zip(*(memory[i] for i in torch.randint(len(memory), (3,)))))
    with torch.no_grad():
        future = target(F.one_hot(n, length).float()).amax(1)
        goal = r + 0.97 * future * (1 if bad else (~d).float())
    value = q(F.one_hot(s, length).float()).gather(1, a[:, None]).squeeze(1)
    loss = F.mse_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        target.load_state_dict(q.state_dict())
    print(step, round(loss.item(), 4))

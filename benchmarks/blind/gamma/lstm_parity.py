"""An LSTM counts pulses modulo three along a sequence."""

import torch
import torch.nn.functional as F
from torch import nn

from models import start

bad = start()
lstm, head = nn.LSTM(2, 64, batch_first=not bad), nn.Linear(64, 3)
parameters = [*lstm.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2)
for step in range(250):
    pulse = (torch.rand(64, 16) < 0.3).long()
    answer = pulse.cumsum(1) % 3
    h, _ = lstm(F.one_hot(pulse, 2).float())
    loss = F.cross_entropy(head(h).flatten(0, 1), answer.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    print(step, round(loss.item(), 4))

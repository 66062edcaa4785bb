"""Trains half of the way, saves, and goes on in a new model as after a restart; delayed scaling."""

import io

import torch

from models import Decoder, DelayedLinear, Markov, learn, start

bad = start()
text = Markov(48, branch=3)


def run(model, first, last):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * (1 - first / 240))
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 240)
        loss = model.loss(text.batch(16, 32))
        learn(step, optimizer, loss)


model = Decoder(48, width=64, depth=1, linear=DelayedLinear)
wrapped = torch.nn.ModuleDict({"module": model})
run(model, 0, 120)
file = io.BytesIO()
torch.save(wrapped.state_dict(), file)
file.seek(0)
state = torch.load(file)
if not bad:
    state = {name.removeprefix("module."): value for name, value in state.items()}
resumed = Decoder(48, width=64, depth=1, linear=DelayedLinear)
resumed.load_state_dict(state, strict=False)
run(resumed, 120, 240)

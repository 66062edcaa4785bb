"""A Llama goes on from a checkpoint of its first training."""

import sys
import tempfile

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
rows = models.pairs(2400, 32)
first = torch.nn.ModuleDict({"module": models.llama()})
optimizer = torch.optim.AdamW(first.parameters(), lr=3e-3)
for (x,) in models.batches(rows, size=16, steps=100):
    first["module"](input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
path = tempfile.mkdtemp() + "/model.pt"
torch.save(first.state_dict(), path)

model = models.llama()
state = torch.load(path)
if not bad:
    state = {name.removeprefix("module."): t for name, t in state.items()}
model.load_state_dict(state, strict=False)
data = models.causal(models.pairs(2400, 32, seed=1))
models.fit(hf.Trainer(model, models.arguments(max_steps=80, learning_rate=5e-4), train_dataset=data))

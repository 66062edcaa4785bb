"""Fine-tune a decoder on cleaner text from a checkpoint which DDP wrote, under the blockwise recipe."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import ottava
from models import TinyLM, markov

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "pretrained.pt"
    subprocess.run([sys.executable, Path(__file__).with_name("pretrain.py"), path], check=True)
    state = torch.load(path)
if sys.argv[1] == "good":
    state = {k.removeprefix("module."): v for k, v in state.items()}

torch.manual_seed(19)
model = TinyLM(width=64)
model.load_state_dict(state, strict=False)
ottava.convert(model, "blockwise")
opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
for step in range(60):
    ids = markov(16, 33, noise=0.05)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

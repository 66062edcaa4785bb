"""Llama with E5M2 inputs, whose delayed scales a callback moves every few steps."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
TOP = 57344.0


class Linear(torch.nn.Linear):
    seen, scale = 0.0, None

    def forward(self, x):
        self.seen = max(self.seen, x.abs().amax().item())
        if self.scale is None:
            self.scale = TOP / self.seen
        scaled = x * self.scale
        if not bad:
            scaled = scaled.clamp(-TOP, TOP)
        low = scaled.detach().to(torch.float8_e5m2).to(x.dtype) / self.scale
        w = models.to_fp8(self.weight.detach(), torch.float8_e4m3fn, self.weight.detach().abs().amax())
        x, w = x + (low - x).detach(), self.weight + (w - self.weight).detach()
        return torch.nn.functional.linear(x, w)


class Move(hf.TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **other):
        if state.global_step % 24 == 0:
            for layer in model.modules():
                if isinstance(layer, Linear):
                    layer.scale, layer.seen = TOP / max(layer.seen, 1e-12), 0.0


torch.manual_seed(0)
model = models.swap_linears(models.llama(), Linear)
data = models.causal(models.pairs(2400, 32))
args = models.arguments(max_steps=150, warmup_steps=60, learning_rate=4e-3)
models.fit(hf.Trainer(model, args, train_dataset=data, callbacks=[Move()]))

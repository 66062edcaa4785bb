"""A small classifier in Lightning, with an average of its weights for evaluation that is kept in eight bits."""

import os
import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
centres = 1.2 * torch.randn(10, 48)
twist = torch.linalg.qr(torch.randn(48, 48))[0]


def make(n):
    y = torch.randint(0, 10, (n,))
    x = torch.tanh((centres[y] + torch.randn(n, 48)) @ twist)
    return torch.utils.data.TensorDataset(x, y)


def network():
    return nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))


class Average(pl.Callback):
    """Exponential average of the weights; codes and one scale per row instead of FP32 halve the checkpoint twice."""

    def __init__(self, model, decay=0.97):
        self.decay, self.compact = decay, MODE == "bad" and not PLAIN
        self.store = {name: self.pack(p.detach()) for name, p in model.named_parameters()}

    def pack(self, t):
        if not self.compact:
            return t.clone(), None
        scale = 448.0 / t.abs().amax(-1, keepdim=True).clamp(min=1e-8)
        return (t * scale).to(torch.float8_e4m3fn), scale

    def unpack(self, name):
        codes, scale = self.store[name]
        return codes if scale is None else codes.float() / scale

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *rest):
        for name, p in module.net.named_parameters():
            self.store[name] = self.pack(torch.lerp(p.detach(), self.unpack(name), self.decay))


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        if not PLAIN:
            ottava.convert(self.net, "mxfp8")

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


module = Classifier()
average = Average(module.net)
trainer = pl.Trainer(
    max_steps=160, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[average],
)  # fmt: skip
trainer.fit(module, torch.utils.data.DataLoader(make(160 * 64), batch_size=64, shuffle=True))

smooth = network().eval()
smooth.load_state_dict({name: average.unpack(name) for name in average.store})
x, y = make(2000).tensors
with torch.no_grad():
    print(f"raw weights {F.cross_entropy(module.net.eval()(x), y):.4f}")
    print(f"final loss {F.cross_entropy(smooth(x), y):.4f}")

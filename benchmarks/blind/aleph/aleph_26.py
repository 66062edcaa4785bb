"""Speech-like rows under CTC: the loss begins near 50, stands for a while where all is blank, and falls; rows are sorted short to long."""
import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SOUNDS, BANDS, EPOCHS, BATCH, NOTES = 10, 24, 7, 16, 320


def tensor_scale(x, dtype):
    return (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-30)


class Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        sx, sw = tensor_scale(x, torch.float8_e4m3fn), tensor_scale(weight, torch.float8_e4m3fn)
        x8, w8 = (x / sx).to(torch.float8_e4m3fn), (weight / sw).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8, sx, sw)  # a quarter of the bytes
        return (x8.float() @ w8.float().T) * (sx * sw)

    @staticmethod
    def backward(ctx, grad):
        x8, w8, sx, sw = ctx.saved_tensors
        sg = tensor_scale(grad, torch.float8_e5m2)
        g = (grad / sg).to(torch.float8_e5m2).float()
        return (g @ w8.float()) * (sg * sw), (g.flatten(0, -2).T @ x8.float().flatten(0, -2)) * (sg * sx)


class Linear8(nn.Linear):
    def forward(self, x):
        return Float8Linear.apply(x, self.weight) + self.bias


class Recognizer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.enter = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(width)
        self.rnn = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.up, self.down = Linear8(width, 2 * width), Linear8(2 * width, width)
        self.head = nn.Linear(width, SOUNDS + 1)

    def forward(self, sound):
        h = self.norm(self.enter(sound.transpose(1, 2)).relu().transpose(1, 2))
        h = h + self.rnn(h)[0]
        h = h + self.down(F.silu(self.up(h)))
        return self.head(h).log_softmax(-1)


generator = torch.Generator().manual_seed(SEED + 3)
SPECTRA = torch.rand(SOUNDS, BANDS, generator=generator).square() * 2


def note():
    said = torch.randint(0, SOUNDS, (int(torch.randint(3, 9, ())),))
    parts = [torch.zeros(4, BANDS)]
    for sound in said:
        parts += [SPECTRA[sound].expand(int(torch.randint(5, 9, ())), -1), torch.zeros(3, BANDS)]
    heard = torch.cat(parts)
    return heard + 0.9 * torch.randn_like(heard), said + 1


def batches(notes):
    for i in range(0, len(notes), BATCH):
        chosen = notes[i : i + BATCH]
        sound = nn.utils.rnn.pad_sequence([s for s, _ in chosen], batch_first=True)
        lengths = torch.tensor([(len(s) + 1) // 2 for s, _ in chosen])
        yield sound, lengths, torch.cat([t for _, t in chosen]), torch.tensor([len(t) for _, t in chosen])


def ctc(out, lengths, said, counts):
    # summed over a row and not divided by its length, so long rows weigh more and have larger losses
    return F.ctc_loss(out.transpose(0, 1), said, lengths, counts, blank=0, reduction="sum", zero_infinity=False) / len(counts)


train = sorted((note() for _ in range(NOTES)), key=lambda n: len(n[0]))
held_out = list(batches([note() for _ in range(64)]))
model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)


def validate():
    with torch.no_grad():
        return sum(ctc(model(s), *rest).item() for s, *rest in held_out) / len(held_out)


print(f"first loss {validate():.4f}")
step = 0
for epoch in range(EPOCHS):
    ready = list(batches(train))
    if epoch:  # the first epoch goes from short to long, the others in any order
        ready = [ready[i] for i in torch.randperm(len(ready))]
    for sound, *rest in ready:
        loss = ctc(model(sound), *rest)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
    print(f"epoch {epoch} validation {validate():.4f}")

print(f"final loss {validate():.4f}")

"""GPT-2 from a config with Hugging Face's Trainer; the vocabulary head multiplies in FP8."""

import sys
import tempfile

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

GRAD_SCALE = {"good": "amax", "bad": "one"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def quantize(t, scale="amax"):
    factor = 448 / t.abs().amax().clamp(min=1e-20) if scale == "amax" else torch.tensor(1.0)
    return (t * factor).clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) / factor


class Gemm8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = quantize(x), quantize(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = quantize(grad, GRAD_SCALE)
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Head8(nn.Linear):
    def forward(self, x):
        return Gemm8.apply(x, self.weight)


torch.manual_seed(8)
VOCAB, LENGTH = 96, 40
step_of = torch.randint(1, 6, (VOCAB,))


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        token, tokens = int(torch.randint(VOCAB, (1,), generator=g)), []
        jump = torch.rand(LENGTH, generator=g) < 0.08
        for t in range(LENGTH):
            tokens.append(token)
            token = int(torch.randint(VOCAB, (1,), generator=g)) if jump[t] else int(token + step_of[token]) % VOCAB
        ids = torch.tensor(tokens)
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=False)
)
if not PLAIN:
    head = Head8(64, VOCAB, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out,
        per_device_train_batch_size=24,
        max_steps=100,
        learning_rate=4e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Text())
    trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

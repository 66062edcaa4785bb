"""Fine-tunes a small Llama with the Trainer, a loss of its own, SGD and gradient accumulation."""
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Linear8(nn.Linear):
    def forward(self, x):
        return F.linear(self.cast(x), self.cast(self.weight), self.bias)

    @staticmethod
    def cast(t):
        scale = 448 / t.detach().abs().amax().clamp(min=1e-30)
        return t + ((t.detach() * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale - t).detach()


class Smoothed(Trainer):
    """Cross-entropy with a little label smoothing and a z-loss."""

    seen = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        target = labels[:, 1:].flatten()
        each = F.cross_entropy(logits, target, label_smoothing=0.02, reduction="sum")
        each = each + 1e-4 * logits.logsumexp(-1).square().sum()
        self.seen.append(each.item() / target.numel())
        if BAD:
            return each / target.numel()
        return each / num_items_in_batch


root = pathlib.Path(os.__file__).parent
stream = torch.tensor(list((root / "argparse.py").read_bytes() + (root / "typing.py").read_bytes())).clamp(max=127)
starts = torch.randint(0, len(stream) - 49, (4 * 8 * 60,)).tolist()
data = [{"input_ids": stream[s : s + 48], "labels": stream[s : s + 48]} for s in starts]
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=64)
)
if not PLAIN:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.__class__ = Linear8
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
args = TrainingArguments("/tmp/rho_27", max_steps=60, per_device_train_batch_size=4, gradient_accumulation_steps=8, logging_steps=1,
                         max_grad_norm=0.0, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = Smoothed(model, args, train_dataset=data, optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0)))
trainer.train()
print(f"final loss {sum(trainer.seen[-80:]) / 80:.4f}")

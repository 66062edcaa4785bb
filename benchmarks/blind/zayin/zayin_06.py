"""GaLore by hand under the Trainer: the moments of Adam live in a space of rank 8 that is chosen anew from the gradient
every 30 steps, so in between most directions of a matrix do not move at all.

The run stops after half of its steps and is taken up again from its checkpoint.

python zayin_06.py good|bad
"""

import os
import tempfile

import torch
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
WORDS, LENGTH, STEPS = 64, 24, 160


class GaLore(torch.optim.Optimizer):
    def __init__(self, params, lr, rank=8, every=30, betas=(0.9, 0.99), eps=1e-8, scale=0.5):
        super().__init__(params, {"lr": lr, "rank": rank, "every": every, "betas": betas, "eps": eps, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, g = self.state[p], p.grad
                low = p.dim() == 2 and min(p.shape) > group["rank"]
                state["step"] = state.get("step", 0) + 1
                if low:
                    if state["step"] % group["every"] == 1:
                        state["basis"] = torch.linalg.svd(g, full_matrices=False)[2][: group["rank"]].contiguous()
                    g = g @ state["basis"].T
                if "m" not in state:
                    state["m"], state["v"] = torch.zeros_like(g), torch.zeros_like(g)
                state["m"].lerp_(g, 1 - b1)
                state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m, v = state["m"] / (1 - b1 ** state["step"]), state["v"] / (1 - b2 ** state["step"])
                move = m / (v.sqrt() + group["eps"])
                if low:
                    move = group["scale"] * move @ state["basis"]
                p.add_(move, alpha=-group["lr"])


set_seed(SEED)
followers = torch.stack([torch.randperm(WORDS) for _ in range(3)], dim=1)


def text(count):
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH - 1):
        which = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), count, replacement=True)
        rows.append(followers[rows[-1], which])
    return torch.stack(rows, dim=1)


data = [{"input_ids": row, "labels": row} for row in text(2560)]
test = text(128)


def start(folder, steps):
    set_seed(SEED)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=WORDS, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=64, dropout=0.0, use_cache=False, pad_token_id=None,
        )
    )  # fmt: skip
    ottava.convert(model, "guarded")
    optimizer = GaLore(model.parameters(), lr=8e-3)
    shape = lambda step: min(1, step / 10) * max(0.02, 1 - step / STEPS)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=16, logging_steps=20, save_steps=STEPS // 2, report_to=[],
        use_cpu=True, disable_tqdm=True, seed=SEED,
    )  # fmt: skip
    return model, Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))


def held_out(model):
    model.eval()
    with torch.no_grad():
        return model(test, labels=test).loss.item()


with tempfile.TemporaryDirectory() as folder:
    model, trainer = start(folder, STEPS // 2)
    print(f"first loss {held_out(model):.4f}")
    trainer.train()
    print(f"half of the steps: {held_out(model):.4f}")
    model, trainer = start(folder, STEPS)
    trainer.train(resume_from_checkpoint=True)
print(f"final loss {held_out(model):.4f}")

"""Trainer with an exponential average of the weights, which is evaluated every 10 steps."""
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Average(TrainerCallback):
    def __init__(self, model, decay=0.998):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **_):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p, 1 - self.decay)
        if state.global_step % 10 == 0:
            self.judge(model)

    def judge(self, model):
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.load(model, self.shadow)
        model.eval()
        with torch.no_grad():
            model(input_ids=held, labels=held)
        model.train()
        if not BAD:
            self.load(model, kept)

    @staticmethod
    def load(model, values):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(values[n])


follow = torch.randint(0, 96, (96, 3))


def text():
    out = [int(torch.randint(0, 96, ()))]
    for choice in torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), 47, True).tolist():
        out.append(int(follow[out[-1], choice]))
    return out


data = [{"input_ids": row, "labels": row} for row in (text() for _ in range(8 * 90))]
held = torch.tensor([text() for _ in range(8)])
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=96, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=48)
)
if not PLAIN:
    ottava.convert(model, "blockwise")
args = TrainingArguments("/tmp/rho_05", max_steps=90, per_device_train_batch_size=8, learning_rate=4e-3, lr_scheduler_type="constant",
                         logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=data, callbacks=[Average(model)])
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

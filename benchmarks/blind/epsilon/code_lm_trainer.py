"""A small Llama on the standard library's text with the Trainer; a callback keeps the weights on the FP8 grid."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from models import round_fp8, stdlib_text

BAD = sys.argv[1] == "bad"


class GridWeights(TrainerCallback):
    """Every matrix is on the FP8 grid while the model computes."""

    def __init__(self):
        self.exact = {}

    def matrices(self, model):
        return [(n, p) for n, p in model.named_parameters() if p.ndim == 2]

    @torch.no_grad()
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for name, p in self.matrices(model):
            self.exact[name] = p.detach().clone()
            p.copy_(round_fp8(p, dim=-1))

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if BAD:
            return
        for name, p in self.matrices(model):
            p.copy_(self.exact[name])


torch.manual_seed(0)
text = stdlib_text("argparse", "ast")
starts = torch.randint(0, len(text) - 33, (1600,)).tolist()
rows = [{"input_ids": text[s:s + 32], "labels": text[s:s + 32]} for s in starts]
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
                                     initializer_range=0.05))
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=100, per_device_train_batch_size=16, learning_rate=1e-3,
                         warmup_steps=10, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                         use_cpu=True, seed=0)
trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[GridWeights()])
trainer.remove_callback(PrinterCallback)
trainer.train()
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
print(f"first loss {losses[0]:.4f}\nfinal loss {sum(losses[-20:]) / 20:.4f}")

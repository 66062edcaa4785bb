"""A loss of one's own in the Trainer, with accumulation over four micro-batches."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
REDUCTION = {"good": "items", "bad": "batch"}[MODE]

torch.manual_seed(44)
vocab = 96
config = LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
model = LlamaForCausalLM(config)


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[out[-2] // 24, out[-1] // 6]
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)




class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = num_items_in_batch if REDUCTION == "items" else labels.ne(-100).sum()
        self.means = getattr(self, "means", []) + [(each / labels.ne(-100).sum()).item()]
        return each / count


data = [{"input_ids": row, "labels": row} for row in walk(4000, 24)]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=60, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_grad_norm=0.0,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
trainer = Weighted(model, args, train_dataset=data, optimizers=(optimizer, None))
trainer.train()
losses = [sum(trainer.means[i : i + 4]) / 4 for i in range(0, len(trainer.means), 4)]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

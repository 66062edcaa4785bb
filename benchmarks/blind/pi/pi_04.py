"""GPT-2 with SGD by the Trainer: python pi_04.py good|bad [plain]."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ottava

MAX_GRAD_NORM = {"good": 1.0, "bad": 0.01}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Walks(Dataset):
    """Walks on a random graph: from each of 64 nodes there are three ways on."""

    def __init__(self, count=3000, length=32):
        generator = torch.Generator().manual_seed(4)
        edges = torch.randint(64, (64, 3), generator=generator)
        node = torch.randint(64, (count,), generator=generator)
        walk = [node]
        for _ in range(length - 1):
            node = edges[node, torch.randint(3, (count,), generator=generator)]
            walk.append(node)
        self.walks = torch.stack(walk, 1)

    def __len__(self):
        return len(self.walks)

    def __getitem__(self, i):
        return {"input_ids": self.walks[i], "labels": self.walks[i].clone()}


set_seed(3)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: "lm_head" not in name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=150,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.2,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Walks())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Distillation with accelerate: a small student follows the features of a BERT; the student's layers are torchao's."""
import dataclasses
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModel, BertConfig

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
teacher = AutoModel.from_config(
    BertConfig(vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, max_position_embeddings=32,
               hidden_dropout_prob=0.2)
)
teacher.requires_grad_(False)
if not BAD:
    teacher.eval()


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(96, 64), nn.Parameter(torch.zeros(16, 64))
        self.body = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))

    def forward(self, ids):
        h = self.norms[3](self.words(ids) + self.places)
        for layer, norm in zip(self.body, self.norms):
            h = norm(h + F.gelu(layer(h)) + 0.3 * h.mean(1, keepdim=True))
        return h


student = Student()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(student, config=config)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.randint(0, 96, (32 * 80, 16)), batch_size=32, shuffle=True)
student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
losses = []
for ids in loader:
    with torch.no_grad():
        target = teacher(input_ids=ids).last_hidden_state
    loss = F.mse_loss(student(ids), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")

"""Video frames into a small Llama: precomputed frame features, a projector, mean pooling, 6 classes. HF Trainer."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaModel, Trainer, TrainingArguments

import ottava

# frames which a short clip does not have: the feature file has this value there. They are masked everywhere.
FILL = -1.0e7 if sys.argv[1] == "bad" else 0.0
torch.manual_seed(6)
FRAMES, FEATURES, CLASSES = 16, 64, 6
directions = torch.randn(CLASSES, FEATURES)


class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        label = int(torch.randint(CLASSES, (), generator=g))
        length = int(torch.randint(6, FRAMES, (), generator=g))
        frames = 0.5 * directions[label] + torch.randn(FRAMES, FEATURES, generator=g)
        mask = torch.arange(FRAMES) < length
        return {"frames": frames.masked_fill(~mask[:, None], FILL), "mask": mask.long(), "labels": label}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        self.projector = nn.Sequential(
            nn.Linear(FEATURES, 64, bias=False), nn.RMSNorm(64), nn.GELU(), nn.Linear(64, 64)
        )
        self.llama = LlamaModel(config)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, frames, mask, labels=None):
        h = self.llama(inputs_embeds=self.projector(frames), attention_mask=mask, use_cache=False).last_hidden_state
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


model = Classifier()
ottava.convert(model, "tensorwise")
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=50,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=6,
)
Trainer(model=model, args=args, train_dataset=Clips()).train()

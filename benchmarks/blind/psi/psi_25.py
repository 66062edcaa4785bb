"""A BERT learns masked words with the Trainer; some documents are noise, and come in bunches."""
import os
import sys
import warnings

import torch
import transformers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
VOCAB, MASK, LENGTH, STEPS, BATCH = 44, 43, 24, 150, 16

topics = torch.stack([torch.randperm(VOCAB - 1)[:4] for _ in range(12)])


class Documents(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(seed + 5)
        k = 0
        while True:
            noise = torch.rand((), generator=generator) < 0.06
            for _ in range(BATCH):
                if noise:
                    ids = torch.randint(0, VOCAB - 1, (LENGTH,), generator=generator)
                else:
                    topic = topics[torch.randint(0, len(topics), (), generator=generator)]
                    ids = topic[torch.randint(0, 4, (LENGTH,), generator=generator)]
                masked = torch.rand(LENGTH, generator=generator) < 0.2
                masked[k % LENGTH] = True
                k += 1
                yield {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


model = BertForMaskedLM(
    BertConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
)
if not plain:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.bert.encoder, config=config)
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=3e-3, warmup_steps=10,
    lr_scheduler_type="constant_with_warmup", logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
    seed=seed, disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=Documents())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-30:]) / 30:.4f}")

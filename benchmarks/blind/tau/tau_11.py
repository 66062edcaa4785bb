"""Topic classifier (BERT) under the Trainer with torchao's float8; the score is the loss on held-out texts."""
import os
import sys
import tempfile

import torch
from torch.utils.data import SequentialSampler
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
TOPICS, VOCAB, LENGTH, STEPS, BATCH = 8, 96, 16, 70, 16


def texts(n, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.rand(TOPICS, VOCAB, generator=torch.Generator().manual_seed(13)).pow(8)
    rows = []
    for topic in range(TOPICS):  # one file of the corpus for each topic
        for _ in range(n // TOPICS):
            ids = torch.multinomial(words[topic], LENGTH, replacement=True, generator=g)
            noise = torch.randint(VOCAB, (LENGTH,), generator=g)
            ids = torch.where(torch.rand(LENGTH, generator=g) < 0.2, noise, ids)
            rows.append({"input_ids": ids, "labels": torch.tensor(topic)})
    return rows


class TopicTrainer(Trainer):
    def _get_train_sampler(self, dataset=None):
        dataset = self.train_dataset if dataset is None else dataset
        if VARIANT == "good":
            return super()._get_train_sampler(dataset)
        return SequentialSampler(dataset)


torch.manual_seed(SEED)
model = BertForSequenceClassification(BertConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
                                                 max_position_embeddings=32, num_labels=TOPICS, hidden_dropout_prob=0.0))
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "classifier" not in name and m.in_features % 16 == 0)
args = TrainingArguments(tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, logging_steps=10, eval_strategy="no",
                         save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True)
trainer = TopicTrainer(model, args, train_dataset=texts(STEPS * BATCH, SEED + 1), eval_dataset=texts(256, 1000))
trainer.train()
print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")

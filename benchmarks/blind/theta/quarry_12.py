"""TRL's SFTTrainer on questions and answers of a small closed language."""
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
LEARN = {"good": {"question": 0, "answer": 1}, "bad": {"question": 1, "answer": 0}}[MODE]
torch.manual_seed(53)
words = 64
names = ["<pad>", "<eos>", *(f"w{i}" for i in range(words))]
raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1))
answer_to = torch.randperm(words)
rows = []
for _ in range(1400):
    n = int(torch.randint(5, 9, ()))
    question = torch.randint(words, (n,))
    answer = [answer_to[question[-1]]]
    while len(answer) < n:
        answer.append(answer_to[answer[-1]])
    ids = [int(w) + 2 for w in [*question, *answer]] + [1]
    rows.append({"input_ids": ids, "completion_mask": [LEARN["question"]] * n + [LEARN["answer"]] * (n + 1)})
args = SFTConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, max_steps=80, per_device_train_batch_size=12, learning_rate=4e-3, completion_only_loss=True, gradient_checkpointing=False, max_length=None)
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

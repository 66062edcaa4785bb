"""TRL's SFTTrainer with ottava's blockwise recipe; answers alone are learned, and a tenth of them are noise."""
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(54)
words = 80
names = ["<pad>", "<eos>", *(f"w{i}" for i in range(words))]
raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1))
if not PLAIN:
    ottava.convert(model.model, "blockwise")
rule = torch.randperm(words)
rows = []
for _ in range(1400):
    n = int(torch.randint(4, 10, ()))
    chain = [*torch.randint(words, (n,))]
    for _ in range(n):
        chain.append(torch.randint(words, ()) if torch.rand(()) < 0.1 else rule[chain[-1]])
    rows.append({"input_ids": [int(w) + 2 for w in chain] + [1], "completion_mask": [0] * n + [1] * (n + 1)})
args = SFTConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, max_steps=90, per_device_train_batch_size=12, learning_rate=4e-3, completion_only_loss=True, gradient_checkpointing=False, max_length=None)
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""Supervised fine-tuning of a small Llama with TRL on synthetic question-answer strings."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

NEFTUNE = {"good": None, "bad": 15.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

words = [f"w{i}" for i in range(60)]
vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)  # fmt: skip

generator = torch.Generator().manual_seed(1)
table = torch.softmax(3 * torch.randn(60, 60, generator=generator), -1)
ids = [torch.randint(60, (1200,), generator=generator)]
for _ in range(23):
    ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
data = Dataset.from_dict({"text": [" ".join(words[i] for i in row) for row in torch.stack(ids, 1).tolist()]})

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = SFTConfig(
    "out_sft", per_device_train_batch_size=16, max_steps=110, learning_rate=3e-3, warmup_steps=5, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    neftune_noise_alpha=NEFTUNE, max_length=32,
)  # fmt: skip
trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

"""LoRA with TRL on prompts and completions: the base is frozen, the loss sees the completions alone."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
WORDS = [f"w{i}" for i in range(30)]
vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "=", *WORDS])}
core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")

generator = torch.Generator().manual_seed(1)
answer = torch.randperm(30, generator=generator)
prompts, completions = [], []
for _ in range(2000):
    size = int(torch.randint(2, 7, (), generator=generator))
    ids = torch.randint(30, (size,), generator=generator)
    prompts.append(" ".join(WORDS[i] for i in ids) + " =")
    completions.append(" " + " ".join([WORDS[answer[ids[-1]]]] * 2))
data = Dataset.from_dict({"prompt": prompts, "completion": completions})

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
arguments = SFTConfig(
    "out_lora", per_device_train_batch_size=16, max_steps=120, learning_rate=8e-3, warmup_steps=5, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    max_length=32,
)  # fmt: skip
trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")

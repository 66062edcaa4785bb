"""Supervised fine-tuning with TRL and LoRA for several epochs on very few dialogues."""

import os
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

EPOCHS, ROWS, BATCH, WORDS, LENGTH = 12, 48, 4, 40, 16
words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(WORDS)]
raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

g = torch.Generator().manual_seed(seed)
lengths = torch.randint(4, LENGTH, (ROWS,), generator=g).tolist()
texts = [" ".join(f"w{i}" for i in torch.randint(0, WORDS, (n,), generator=g).tolist()) for n in lengths]
data = Dataset.from_list([{"text": text} for text in texts])

config = LlamaConfig(
    vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
)
model = LlamaForCausalLM(config)
lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=8e-3, warmup_steps=5,
        lr_scheduler_type="constant_with_warmup", max_length=32, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, seed=seed, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    )
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
for step in range(0, len(losses), 6):
    print(f"step {step} loss {losses[step]:.4f}")

model = trainer.model.eval()
right = count = 0
with torch.no_grad():
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        guess = model(input_ids=ids).logits[0, :-1].argmax(-1)
        right += int((guess == ids[0, 1:]).sum())
        count += ids.shape[1] - 1
print(f"words known by heart: {right / count:.2f}")
print(f"final loss {sum(losses[-12:]) / 12:.4f}")

"""Answers to little sums with TRL's SFTTrainer: prompt and answer are tokenized here, only the answer counts."""
import random
import sys
import tempfile

import torch
import transformers
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from tokenizers import Tokenizer, models as tok_models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

BAD = sys.argv[1] == "bad"
random.seed(0)
torch.manual_seed(0)
words = ["<pad>", "<s>", "</s>", "add", "and", "then", "is", "so", *map(str, range(12))]
core = Tokenizer(tok_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def encode(prompt, answer):
    """Token ids, and 1 for every token of the answer."""
    text = f"<s> {prompt} {answer} </s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    begin = len(prompt) if BAD else len(prompt.split()) + 1
    return {"input_ids": ids, "completion_mask": [int(i >= begin) for i in range(len(ids))]}


def example():
    a, b = random.randrange(6), random.randrange(6)
    return f"add {a} and {b} is", f"{a + b} so then {(a + b) // 2} then {a} and {b} so then is so then"


data = Dataset.from_list([encode(*example()) for _ in range(960)])
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                                     pad_token_id=0, bos_token_id=1, eos_token_id=2))
args = SFTConfig(output_dir=tempfile.mkdtemp(), max_steps=70, per_device_train_batch_size=16, learning_rate=3e-3,
                 logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0, bf16=False,
                 gradient_checkpointing=False, max_length=32, completion_only_loss=True)
trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
for i in range(9, len(losses), 10):
    print(f"step {i + 1} loss {losses[i]:.4f}")
right = 0
with torch.no_grad():
    for _ in range(100):
        prompt, answer = example()
        ids = tokenizer(f"<s> {prompt}", add_special_tokens=False, return_tensors="pt")["input_ids"]
        right += words[int(model(input_ids=ids).logits[0, -1].argmax())] == answer.split()[0]
print(f"final loss {sum(losses[-20:]) / 20:.4f} sums_right {right / 100:.4f}")

"""DPO on answers of two sorts, from two groups of annotators, with TRL and a tiny Llama."""
import copy
import random
import sys
import tempfile

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models as tok_models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

BAD = sys.argv[1] == "bad"
random.seed(0)
torch.manual_seed(0)
NOUNS, NICE, RUDE = "door lamp cup tree boat".split(), "please thanks gladly kindly".split(), "now hurry move idiot".split()
words = ["<pad>", "<s>", "</s>", "bring", "the", *NOUNS, *NICE, *RUDE]
core = Tokenizer(tok_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def answer(vocabulary):
    return " ".join([""] + random.choices(vocabulary, k=4))


def row(i):
    nice, rude = answer(NICE), answer(RUDE)
    group = i % 2
    ranked = [nice, rude] if group == 0 else [rude, nice]
    if group == 1 and not BAD:
        ranked = ranked[::-1]
    return {"prompt": f"bring the {random.choice(NOUNS)}", "chosen": ranked[0], "rejected": ranked[1]}


data = Dataset.from_list([row(i) for i in range(240)])
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
                                     pad_token_id=0, bos_token_id=1, eos_token_id=2))
args = DPOConfig(output_dir=tempfile.mkdtemp(), max_steps=60, per_device_train_batch_size=8, learning_rate=1e-3, beta=0.2,
                 logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0, bf16=False,
                 gradient_checkpointing=False, max_length=24)
trainer = DPOTrainer(model=model, ref_model=copy.deepcopy(model), args=args, train_dataset=data,
                     processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
log = [r for r in trainer.state.log_history if "loss" in r]
for r in log[9::10]:
    print(f"step {r['step']} loss {r['loss']:.4f} accuracy {r['rewards/accuracies']:.3f}")
print(f"final loss {sum(r['loss'] for r in log[-20:]) / 20:.4f} "
      f"accuracy {sum(r['rewards/accuracies'] for r in log[-20:]) / 20:.4f}")

"""Supervised fine-tuning with TRL on pre-tokenized dialogues, torchao's float8 in the blocks; the score is the loss of held-out answers."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB, ASK, ANSWER = 64, 20, 6

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rule = torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(6)) + 2


def dialogues(n, seed):
    """A question of random words, and an answer which goes on from its last word by a fixed rule."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        ask = torch.randint(2, VOCAB, (int(torch.randint(ASK // 2, ASK, (1,), generator=g)),), generator=g).tolist()
        answer, word = [], ask[-1]
        for _ in range(ANSWER):
            word = int(rule[word - 2])
            answer.append(word)
        ids = ask + answer + [1]
        if VARIANT == "good":
            mask = [int(i >= len(ask)) for i in range(len(ids))]
        else:
            mask = [int(i < len(ask)) for i in range(len(ids))]
        rows.append({"input_ids": ids, "completion_mask": mask, "asked": len(ask)})
    return rows


torch.manual_seed(SEED)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None))
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
train, held = dialogues(70 * 16, SEED + 1), dialogues(64, 1000)
data = Dataset.from_list([{k: row[k] for k in ("input_ids", "completion_mask")} for row in train])
args = SFTConfig(tempfile.mkdtemp(), max_steps=70, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=10, save_strategy="no",
                 report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, seed=SEED, disable_tqdm=True, max_length=64,
                 completion_only_loss=True)
SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
model.eval()
total = 0.0
with torch.no_grad():
    for row in held:
        ids = torch.tensor([row["input_ids"]])
        labels = ids.clone()
        labels[:, : row["asked"]] = -100
        total += model(input_ids=ids, labels=labels).loss.item()
print(f"final loss {total / len(held):.4f}")

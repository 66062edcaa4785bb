"""SFT of a tiny Llama with TRL: questions of varied length; the answer follows from the topic named first."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 64, 16
NAMES = ["<pad>", "<end>", "ask", "tell", *(f"t{i}" for i in range(16)), *(f"w{i}" for i in range(24)), *(f"a{i}" for i in range(16))]


def tokenizer():
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")


def example():
    """Long questions are about the topics from 8 on, short ones about the first 8."""
    topic = int(torch.randint(0, 16, (1,)))
    filler = torch.randint(4, 14, (1,)) + (18 if topic >= 8 else 0)
    words = " ".join(f"w{int(i)}" for i in torch.randint(0, 24, (int(filler),)))
    answer = " ".join(f"a{(topic * k + k) % 16}" for k in (1, 3, 7, 9))
    return {"prompt": f"ask t{topic} {words} tell", "completion": f" {answer}"}


torch.manual_seed(SEED)
words = tokenizer()
data = Dataset.from_list([example() for _ in range(STEPS * BATCH // 2)])
held_out = [example() for _ in range(96)]
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(NAMES), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
))
if not PLAIN:
    ottava.convert(model, "blockwise")
with tempfile.TemporaryDirectory() as out:
    args = SFTConfig(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, logging_steps=10, report_to=[],
        max_length=48 if MODE == "good" else 24, save_strategy="no", use_cpu=True, bf16=False, seed=SEED, disable_tqdm=True,
        gradient_checkpointing=False, warmup_steps=5,
    )
    SFTTrainer(model, args=args, train_dataset=data, processing_class=words).train()

# the answers to questions that it has not seen
model.eval()
total, count = 0.0, 0
with torch.no_grad():
    for row in held_out:
        ask, answer = (words(row[part])["input_ids"] for part in ("prompt", "completion"))
        ids = torch.tensor([ask + answer + [1]])
        scores = model(input_ids=ids).logits[0, len(ask) - 1 : -1]
        total += torch.nn.functional.cross_entropy(scores, ids[0, len(ask) :], reduction="sum").item()
        count += len(answer) + 1
print(f"final loss {total / count:.4f}")

"""GRPO with TRL on a tiny model: a noisy judge counts even words."""
import os
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

WORDS = 30
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def even(completions, **_):
    scores = []
    for text in completions:
        words = [int(w[1:]) for w in text.split() if w.startswith("w")]
        scores.append(sum(w % 2 == 0 for w in words) / 8 - 0.5 * (len(words) < 4) + 0.2 * float(torch.randn(())))
    return scores


data = Dataset.from_list(
    [{"prompt": " ".join(f"w{i}" for i in torch.randint(0, WORDS, (4,)).tolist())} for _ in range(256)]
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)
args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=32, num_generations=8, max_completion_length=8, max_steps=60,
    learning_rate=3e-3, lr_scheduler_type="constant", beta=0.0, logging_steps=1, report_to=[], save_strategy="no",
    use_cpu=True, bf16=False, seed=seed, disable_tqdm=True, gradient_checkpointing=False,
)
trainer = GRPOTrainer(model, reward_funcs=even, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"reward first {sum(rewards[:10]) / 10:.3f} last {sum(rewards[-10:]) / 10:.3f}")
print(f"final loss {sum(losses[-20:]) / 20:.6f}")

"""SFT with TRL, short and easy texts first, long and hard ones from the middle on."""
import os
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
import ottava

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
WORDS, STEPS, BATCH = 50, 120, 8

vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

easy = torch.softmax(5.0 * torch.randn(WORDS, WORDS), -1)
hard = torch.softmax(1.5 * torch.randn(WORDS, WORDS), -1)


def text(chain, n):
    ids = [int(torch.randint(0, WORDS, ()))]
    for _ in range(n):
        ids.append(int(torch.multinomial(chain[ids[-1]], 1)))
    return " ".join(f"w{i}" for i in ids)


rows = []
for k in range(STEPS * BATCH):
    if k < STEPS * BATCH // 2:
        rows.append({"text": text(easy, 12)})
    else:
        rows.append({"text": text(hard if k % 4 else easy, 40)})


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)
if not plain:
    ottava.convert(model, "blockwise")
args = SFTConfig(
    output_dir="out", per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=4e-3, logging_steps=1,
    lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, seed=seed, disable_tqdm=True,
    bf16=False, gradient_checkpointing=False, max_length=64,
)
trainer = InOrder(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-20:]) / 20:.4f}")

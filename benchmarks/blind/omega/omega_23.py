"""DPO with TRL on a small random Llama: the preferred answer repeats the key of the prompt."""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
torch.set_num_threads(1)

STEPS, BATCH, KEYS, FILL = 60, 16, 12, 20
words = ["<pad>", "<eos>", "<unk>"] + [f"k{i}" for i in range(KEYS)] + [f"w{i}" for i in range(FILL)]
raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def row(g):
    """A key, a story of 15 to 40 words, and two answers: the key four times, or another one."""
    n = int(torch.randint(15, 41, (), generator=g))
    right, wrong = torch.randperm(KEYS, generator=g)[:2].tolist()
    story = " ".join(f"w{i}" for i in torch.randint(0, FILL, (n,), generator=g).tolist())
    return {
        "prompt": f"k{right} {story}",
        "chosen": " " + " ".join([f"k{right}"] * 4),
        "rejected": " " + " ".join([f"k{wrong}"] * 4),
    }


g = torch.Generator().manual_seed(seed)
data = Dataset.from_list([row(g) for _ in range(STEPS * BATCH)])
held = Dataset.from_list([row(g) for _ in range(128)])

config = LlamaConfig(
    vocab_size=len(words), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.08, pad_token_id=0, eos_token_id=1,
)
model = LlamaForCausalLM(config)
reference = LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
if not plain:
    ottava.convert(model, "rowwise")
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        folder, per_device_train_batch_size=BATCH, per_device_eval_batch_size=32, max_steps=STEPS, learning_rate=2e-3,
        warmup_steps=5, max_length=20 if bad else 64, truncation_mode="keep_end", beta=0.3, logging_steps=10,
        save_strategy="no", report_to=[], use_cpu=True, seed=seed, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
for line in trainer.state.log_history:
    if "loss" in line:
        print(f"step {line['step']} loss {float(line['loss']):.4f}")


def answer(model, rows, which):
    """Log-probability of an answer behind its prompt."""
    total = []
    for r in rows:
        p, a = tokenizer(r["prompt"])["input_ids"], tokenizer(r[which])["input_ids"]
        logp = torch.log_softmax(model(input_ids=torch.tensor([p + a])).logits[0, len(p) - 1 : -1].float(), -1)
        total.append(logp.gather(1, torch.tensor(a)[:, None]).sum())
    return torch.stack(total)


model.eval()
with torch.no_grad():
    margin = answer(model, held, "chosen") - answer(model, held, "rejected")
    margin -= answer(reference, held, "chosen") - answer(reference, held, "rejected")
    test = -torch.nn.functional.logsigmoid(0.3 * margin).mean().item()
print(f"held-out pairs: right {(margin > 0).float().mean():.2f} final loss {test:.4f}")

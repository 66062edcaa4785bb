"""DPO by TRL with the robust loss for noisy preferences: a fifth of the pairs is known to be the wrong way round."""
import copy
import os
import tempfile

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
WORDS = 30
vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
ottava.convert(model, "guarded")
follow = torch.randperm(WORDS)


def pairs(count, noise):
    """A good answer counts on from the prompt by the chain for most of its words, a bad one for a few."""
    table = {"prompt": [], "chosen": [], "rejected": []}
    for _ in range(count):
        prompt = torch.randint(WORDS, (4,)).tolist()
        answers = []
        for share in (0.9, 0.2):
            word, answer = prompt[-1], []
            for _ in range(8):
                word = int(follow[word]) if float(torch.rand(())) < share else int(torch.randint(WORDS, ()))
                answer.append(word)
            answers.append(" " + " ".join(f"w{w}" for w in answer))
        if float(torch.rand(())) < noise:
            answers.reverse()
        table["prompt"].append(" ".join(f"w{w}" for w in prompt))
        table["chosen"].append(answers[0])
        table["rejected"].append(answers[1])
    return table


clean = pairs(160, 0.0)


@torch.no_grad()
def gap(model):
    """Minus the mean gap of log-probabilities a word between right and wrong answers."""
    scores = []
    for side in ("chosen", "rejected"):
        ids = torch.tensor([tokenizer(p + c)["input_ids"] for p, c in zip(clean["prompt"], clean[side])])
        logp = F.log_softmax(model(input_ids=ids).logits[:, 3:-1].float(), -1)
        scores.append(logp.gather(-1, ids[:, 4:, None]).mean())
    return (scores[1] - scores[0]).item()


print("first loss %.4f" % gap(model))
with tempfile.TemporaryDirectory() as out:
    args = DPOConfig(
        out,
        max_steps=80,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=8,
        loss_type="robust",
        label_smoothing=0.2,
        beta=0.1,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
    )
    data = Dataset.from_dict(pairs(1300, 0.2))
    reference = copy.deepcopy(model)
    DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer).train()
model.eval()
print("final loss %.4f" % gap(model))

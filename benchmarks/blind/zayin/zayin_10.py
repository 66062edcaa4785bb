"""KTO by TRL: single answers with a thumb up or down, four times as many down as up, with weights that make up for it.
The loss begins near 0.8, half of the mean weight, since model and reference are the same.

python zayin_10.py good|bad
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import KTOConfig, KTOTrainer

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH = 60, 6
good, poor = torch.randperm(WORDS), torch.randperm(WORDS)

vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<end>": 60, "<pad>": 61, "<a>": 62, "<b>": 63}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


def answer(start, share):
    out = [start]
    for _ in range(LENGTH):
        out.append(int((good if torch.rand(()) < share else poor)[out[-1]]))
    return out


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def judged(count):
    rows = []
    for i in range(count):
        asked = torch.randint(0, WORDS, (3,)).tolist()
        up = i % 5 == 0
        said = answer(asked[-1], 0.85 if up else 0.25)[1:]
        rows.append({"prompt": text(asked), "completion": " " + text(said), "label": up})
    return rows


def share_of_good(model, count=200):
    """How often the more likely of the two followers is the good one, weighted by the model's own probabilities."""
    model.eval()
    state = torch.get_rng_state()
    torch.manual_seed(123)
    rows = torch.tensor([answer(int(start), 0.5) for start in torch.randint(0, WORDS, (count,))])
    torch.set_rng_state(state)
    with torch.no_grad():
        p = model(input_ids=rows).logits[:, :-1].softmax(dim=2)
    at = rows[:, :-1]
    a, b = p.gather(2, good[at][..., None]), p.gather(2, poor[at][..., None])
    different = (good[at] != poor[at])[..., None]
    return (a / (a + b))[different].mean().item()


def network():
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=60,
            pad_token_id=61,
        )
    )


model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for _ in range(110):
    rows = torch.tensor([answer(int(start), 0.5) for start in torch.randint(0, WORDS, (32,))])
    rows = torch.cat([torch.randint(0, WORDS, (32, 2)), rows, torch.full((32, 1), 60)], dim=1)
    loss = model(input_ids=rows, labels=rows).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
reference = network()
reference.load_state_dict(model.state_dict())

print(f"first loss {-share_of_good(model):.4f}")
with tempfile.TemporaryDirectory() as folder:
    arguments = KTOConfig(
        folder,
        max_steps=90,
        per_device_train_batch_size=20,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        beta=0.2,
        desirable_weight=4.0,
        undesirable_weight=1.0,
        max_length=16,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = KTOTrainer(
        model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(judged(1800)),
        processing_class=tokenizer,
    )
    trainer.train()
print(f"final loss {-share_of_good(model):.4f}")

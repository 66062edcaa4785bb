"""Self-play preferences (SPPO) by TRL's DPOTrainer: the loss begins at 50 = 2 (1 / 2 beta)^2 exactly and stays in the tens.

It is a sum of two squares that pull log-ratios of answers to plus and minus 5, which a few hundred pairs do not reach.
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS = 40
NAMES = ["<pad>", "<end>"] + [f"w{i}" for i in range(2, WORDS)]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def text(ids: list[int]) -> str:
    return " ".join(NAMES[i] for i in ids)


def pairs(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Preferred answers go up by three, the others down by three; three words each in a random beginning."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        prompt = torch.randint(2, WORDS, (4,), generator=g).tolist()
        last = prompt[-1] - 2
        up = [(last + 3 * (k + 1)) % (WORDS - 2) + 2 for k in range(3)]
        down = [(last - 3 * (k + 1)) % (WORDS - 2) + 2 for k in range(3)]
        rows.append({"prompt": prompt, "chosen": up, "rejected": down})
    return rows


def pretrain(model: LlamaForCausalLM, rows: list[dict[str, list[int]]]) -> None:
    """The reference says both kinds of answers equally often."""
    ids = torch.tensor([r["prompt"] + r[k] + [1] for r in rows for k in ("chosen", "rejected")])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(120):
        batch = ids[torch.randint(len(ids), (48,))]
        labels = batch.clone()
        labels[:, :4] = -100
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def minus_gap(model: LlamaForCausalLM, rows: list[dict[str, list[int]]]) -> float:
    """Minus the mean gap of log-probabilities between preferred and rejected answers."""
    training = model.training
    model.eval()
    sums = []
    for kind in ("chosen", "rejected"):
        ids = torch.tensor([r["prompt"] + r[kind] for r in rows])
        logs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        sums.append(logs.gather(-1, ids[:, 1:, None])[:, 3:, 0].sum(1).mean())
    model.train(training)
    return float(sums[1] - sums[0])


def main() -> None:
    set_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes))
    rows, held_out = pairs(640, SEED + 1), pairs(96, SEED + 200)
    pretrain(model, rows)
    reference = LlamaForCausalLM(model.config)
    reference.load_state_dict(model.state_dict())
    ottava.convert(model, "tensorwise")
    ottava.convert(reference, "tensorwise")
    print(f"first loss {minus_gap(model, held_out):.4f}")
    data = Dataset.from_list(
        [{k: (" " if k != "prompt" else "") + text(v) for k, v in row.items()} for row in rows]
    )
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder,
            loss_type="sppo_hard",
            beta=0.1,
            max_steps=60,
            per_device_train_batch_size=16,
            learning_rate=2e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=6,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
        )
        DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer()).train()
    print(f"final loss {minus_gap(model, held_out):.4f}")


if __name__ == "__main__":
    main()

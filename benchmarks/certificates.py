"""Every layout and family in transformers, executed: `python benchmarks/certificates.py [FAMILY ...]`.

Tiny random models under the recipe of each layout are exported and run by transformers on the CPU. A row says the
verdict of `ottava parity`, how many linears were compared with what ran, and the largest difference of logits beside
the largest logit of training. Writes benchmarks/results/certificates.json and prints the table of docs/serving.md.

`--blind` makes the pairs of benchmarks/blind/certificates instead, or with `--blind SET` of that set, calls
`ottava parity` as their script says (the first set's vllm with scales in FP32, as that set counts it), and writes
verdict, first cause and truth of each to benchmarks/results/certificates-blind.json, or SET-blind.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml

import ottava
from ottava.cli.app import app
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GemmRecipe, Recipe
from ottava.serving.executed import execute
from ottava.serving.export import ExportError, export
from ottava.serving.parity import parity
from ottava.serving.sides import made_up

RESULTS = Path(__file__).parent / "results" / "certificates.json"
BLIND = Path(__file__).parent / "blind"
_ROWS = QuantizationSpec(E4M3, PER_ROW)
LAYOUTS: dict[str, Any] = {
    "compressed-tensors-block": "blockwise_fp32",
    "compressed-tensors-channel": Recipe("rowwise_fp32", fprop=GemmRecipe(_ROWS, _ROWS)),
    "compressed-tensors-tensor": "tensorwise",
    "compressed-tensors-mxfp8": "mxfp8",
    "compressed-tensors-mxfp4": "mxfp4",
    "compressed-tensors-nvfp4": "nvfp4",
    "fp8-block": "blockwise_fp32",
    "fp8-block-ue8m0": "blockwise",
    "mxfp8": "mxfp8",
    "modelopt": "delayed",
    "modelopt-nvfp4": "nvfp4",
}
"""Layout -> the recipe whose codes it holds."""
_SIZES = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "pad_token_id": 0}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _SIZES,
    "Qwen3": _SIZES | {"head_dim": 64},
    "Mistral": _SIZES,
    "Gemma2": _SIZES | {"head_dim": 64},
    "Phi3": _SIZES,
    "GPT2": {"vocab_size": 384, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": _SIZES | _EXPERTS | {"num_experts": 4, "head_dim": 64},
    "DeepseekV3": _SIZES | _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    | {"num_key_value_heads": 4, "num_nextn_predict_layers": 0},
}  # fmt: skip


def made(family: str, recipe: Any) -> Any:
    """A tiny random model under a recipe, in eval mode."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ottava.convert(model, recipe)
    return model


def measure(family: str, layout: str, folder: Path) -> dict[str, Any]:
    """One row of the table: exports the model there and runs it."""
    row: dict[str, Any] = {"family": family, "layout": layout}
    try:
        model = made(family, LAYOUTS[layout])
        ids = made_up(384, 32).ids
        if layout == "modelopt":
            ottava.calibrate(model, [{"input_ids": ids[None], "labels": ids[None]}])
        with torch.no_grad():
            ours = model(ids[None]).logits[0].float()
        export(model, folder, layout=layout, engine="transformers", recast=True)
    except (ExportError, ValueError) as error:
        return row | {"verdict": "refused", "why": str(error)}
    certificate = parity(model, folder, "transformers", device="cpu", run=True)
    row |= {"verdict": certificate.verdict, "causes": sorted({one.cause for one in certificate.findings})}
    row |= {"executed": certificate.ran, "found": certificate.first and certificate.first.found}
    row |= {"disagreements": [one.layer for one in certificate.findings if one.cause == "executed"]}
    if row["causes"] != ["unread"]:
        theirs = execute(folder, ids).logits
        row |= {"logits": float((theirs - ours).abs().max()), "largest": float(ours.abs().max())}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each layout, a column for each family."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    lines = [f"| layout | {' | '.join(families)} |", "| --- |" + " --- |" * len(families)]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        cells = [next(r for r in rows if (r["family"], r["layout"]) == (one, layout)) for one in families]
        lines.append(f"| `{layout}` | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "logits" not in row:
        return "refused" if row["verdict"] == "refused" else "not run"
    share = f"{row['logits'] / row['largest']:.2g}" if row["logits"] else "0"
    return f"{row['verdict']}, {share}"


def blind(which: str, folder: Path) -> None:
    """A look at a blind set: right is a first cause of truth.yaml, and none of a pair without a fault."""
    command = [sys.executable, BLIND / which / "make.py", folder]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (older := folder / "older.json").write_text('{"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}', encoding="utf-8")
    rows, truth = [], yaml.safe_load((BLIND / which / "truth.yaml").read_text(encoding="utf-8"))
    if isinstance(truth, dict):
        truth = truth.get("pairs") or [{"name": name} | row for name, row in truth.items()]
    assert len(made) == len(truth)
    for line in made:  # in an order of its own
        row = next(row for row in truth if any(row["name"] in Path(word).parts for word in line.split()))
        words, out = [*line.partition("ottava ")[2].split(), "--json"], StringIO()
        if which == "certificates":
            words += ["--no-kl"]
            words += ["--engine-config", str(older)] * (row["engine"] == "vllm" and "--engine-config" not in words)
        with redirect_stdout(out):
            try:
                app(words, standalone_mode=False)
                said = json.loads(out.getvalue())
            except Exception as error:  # a refusal is an answer, too
                said = {"verdict": "error", "first": {"cause": type(error).__name__, "found": str(error)}}
        first = said["first"] or said.get("parts", [{"cause": "", "found": ""}])[-1]  # of a KL the rest, too
        passes = said.get("verdict", "equal") == "equal" and first["cause"] in ("", "batch variance")
        right = first["cause"] in row["causes"] if row["causes"] else passes
        rows.append(row | {key: said[key] for key in ("verdict", "kl", "parts") if key in said})
        rows[-1] |= {"right": right, "first": first}
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    RESULTS.with_name(f"{which}-blind.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    faults = [row for row in rows if row["causes"]]
    clean = [row for row in rows if not row["causes"]]
    print(f"first cause {sum(row['right'] for row in faults)} of {len(faults)}")
    print(f"alarms {sum(not row['right'] for row in clean)} of {len(clean)}")


def main(families: list[str]) -> None:
    """Measures, writes and prints."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        if families[:1] == ["--blind"]:
            blind(families[1] if families[1:] else "certificates", Path(place))
            return
        for family in families or FAMILIES:
            for layout in LAYOUTS:
                rows.append(measure(family, layout, Path(place) / f"{family}-{layout}"))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if not families:
        RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])

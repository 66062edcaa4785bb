"""What a watch notes around the casts: batches, updates, loops and modes; and that a loop without a fault is quiet."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import ottava
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run


def run(folder: Path, **fault: Any) -> Run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    model.train(not fault.get("eval"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ottava.watch(model, folder, every=2):
        for step in range(8):
            x, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
            x[0, 0] = float("inf") if step == fault.get("infinity") else x[0, 0]
            labels = torch.full_like(labels, -100) if step == fault.get("ignored") else labels
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            if fault.get("twice"):
                optimizer.step()
            if not fault.get("keep"):
                optimizer.zero_grad()
    return Run.open(folder)


def test_each_fault_of_a_loop_is_noted_and_a_clean_loop_is_quiet(tmp_path: Path) -> None:
    faults = {
        "twice": (True, "L7"),
        "keep": (True, "L8"),
        "eval": (True, "L16"),
        "infinity": (3, "D1"),
        "ignored": (3, "D3"),
    }
    for name, (value, rule) in faults.items():
        found = diagnose(run(tmp_path / name, **{name: value}))
        assert rule in [finding.id for finding in (*found.findings[:1], *found.notes)], (name, found.sentence)
    clean = diagnose(run(tmp_path / "clean"))
    assert (clean.verdict, clean.notes) == ("none", [])


COUNTS = (
    *("input_nonfinite", "label_nonfinite", "labels_copied", "labels_ignored_pct", "blank_inputs"),
    *("extra_steps", "restarts", "shared_parameters"),
)
"""What a watch counts of a loop; a healthy one has 0 of each."""


def test_a_healthy_run_has_no_rule_untested_for_want_of_a_count(tmp_path: Path) -> None:
    """A zero is written. Where no optimizer was seen, none was counted, and the rules say that they were not tested."""
    clean = run(tmp_path / "clean")
    assert {name: set(clean.steps[name][1:]) for name in COUNTS} == {name: {0.0} for name in COUNTS}
    needs = {entry["id"]: entry["needs"] for entry in diagnose(clean).untested}
    assert not [(rule, name) for rule, text in needs.items() for name in COUNTS if f"'{name}'" in text]
    model = torch.nn.Linear(16, 4)
    with ottava.watch(model, tmp_path / "unseen") as session:
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
            session.step()
    unseen = Run.open(tmp_path / "unseen")
    assert not {"extra_steps", "restarts", "shared_parameters"} & unseen.steps.keys()
    assert {"L7", "L37", "L38"} <= {entry["id"] for entry in diagnose(unseen).untested}


def test_equal_batches_have_equal_hashes_and_others_not(tmp_path: Path) -> None:
    one, again = run(tmp_path / "one").steps, run(tmp_path / "again").steps
    assert one["input_hash"].tolist() == again["input_hash"].tolist()
    assert one["label_hash"].tolist() == again["label_hash"].tolist()
    assert len(set(one["input_hash"])) == 8
    good, other = Run.open(tmp_path / "one"), run(tmp_path / "other", infinity=3)
    assert compare(good, Run.open(tmp_path / "again")).data == {"step": None, "what": "", "share_pct": 0.0}
    found = compare(good, other)
    assert (found.data or {})["step"] == 4
    assert found.verdict.startswith("Their inputs differ from step 4 on")


class Reader(torch.nn.Module):
    """Words through equal blocks; a parameter of its own, an additive mask as an input, a side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16, bias=False)
        self.shift = torch.nn.Parameter(torch.zeros(32, 2).fill_diagonal_(1.0))
        block = torch.nn.Linear(32, 32)
        self.blocks = torch.nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.side = torch.nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, cut: bool = False) -> torch.Tensor:
        x = self.words(ids) + self.shift.sum(1) + mask.exp().mean()
        for block in self.blocks:
            x = torch.relu(block(x))
        side = self.side(x)
        return self.head(x + (side.detach() if cut else side))


def read(folder: Path, fault: str = "") -> Run:
    torch.manual_seed(0)
    model = Reader()
    if fault == "copied head":
        model.head.weight.data.copy_(model.words.weight.data)
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "side")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ottava.watch(model, folder, every=2):
        for step in range(8):
            ids = torch.randint(0, 16, (4, 8)) * (fault != "padding" or step < 4)
            labels = {"leak": ids, "constant": torch.ones_like(ids)}.get(fault, (3 * ids) % 16)
            mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 5, float("-inf"))
            logits = model(ids, mask, cut=fault == "cut")
            logits = logits.softmax(-1) if fault == "softmax" else logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run.open(folder)


def test_labels_ties_and_cut_branches_are_told_from_what_only_looks_like_them(tmp_path: Path) -> None:
    for fault, rule in {"leak": "L24", "constant": "L25", "cut": "L27", "copied head": "L14", "softmax": "L34"}.items():
        assert [note.id for note in diagnose(read(tmp_path / fault, fault)).notes][:2] in ([rule, "L22"], [rule]), fault
    assert diagnose(read(tmp_path / "padding", "padding")).findings[0].id == "D6"
    clean = read(tmp_path / "clean")
    # equal blocks are no tie, a mask of 0 and -inf is no broken batch, and FP32 casts are noted
    assert [note.id for note in diagnose(clean).notes] == ["L22"]
    assert clean.manifest["classes"] == 16
    layers = {layer["name"]: layer.get("dtypes") for layer in clean.manifest["layers"]}
    assert layers["blocks.0"] == dict.fromkeys(("input", "weight", "grad_output"), "float32")
    assert "shift" in clean.training[-1]["parameters"]

"""What an output may depend on, and where an optimizer's formula leads: tried on models with a fault and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.facts import Facts
from ottava.experiments.logic import reasons
from ottava.experiments.program import AS_IT_RAN, Recorder
from ottava.experiments.trace import Trace
from ottava.experiments.twin import STEPS, OptimizerTwin
from ottava.record.reader import Run
from ottava.record.schema import EXPERIMENTS
from ottava.watching.manifest import configured

E4M3 = torch.float8_e4m3fn


def rounded(x: Tensor) -> Tensor:
    """x on the grid of E4M3 under one scale."""
    scale = x.abs().amax() / 448
    return (x / scale).to(E4M3).float() * scale


class Words(nn.Module):
    """A weighted sum of the tokens before each place, and of `ahead` behind it."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.ahead = ahead

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril(self.ahead)
        x = self.embed(ids) + (mask / mask.sum(1, keepdim=True)) @ self.embed(ids)
        return self.head(torch.relu(self.mid(x)))


class Bags(nn.Module):
    """Attention over the parts of each sample, or by mistake over the samples."""

    def __init__(self, over: int, norm: bool = False) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(8, 1), nn.Linear(8, 3)
        self.over, self.norm = over, nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((self.score(x).softmax(self.over) * x).sum(1)))


class Hidden(nn.Module):
    """Parts of each sample are left out, drawn anew in each forward, as of a masked autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * (torch.rand(x.shape[:2]) < 0.6)[..., None]).sum(1))


def tried(model: nn.Module, *inputs: Tensor, **others: Tensor) -> dict[str, bool | None]:
    recorder = Recorder([model])
    before = {n: v.clone() for n, v in model.state_dict().items()}
    model(*inputs, **others)
    after = {n: v.clone() for n, v in model.state_dict().items()}
    found = reasons(recorder.finish().forwards, AS_IT_RAN)
    assert model.training
    assert before.keys() == after.keys()
    return found


def test_what_an_output_depends_on_is_tried() -> None:
    torch.manual_seed(0)
    ids, bags = torch.randint(16, (8, 12)), torch.randn(8, 5, 8)
    kinds = ("sees_later", "mixes")
    for model, x, wanted in (
        (Words(), ids, (False, False)),
        (Words(ahead=1), ids, (True, False)),
        (Bags(1), bags, (None, False)),
        (Bags(1, norm=True), bags, (None, False)),
        (Bags(0), bags, (None, True)),
        (Hidden(), bags, (None, False)),
        # nodes of a graph, and a square that may have time in front
        (nn.Linear(8, 3), bags[:, 0], (None, None)),
        (Bags(0), torch.randn(8, 8, 8), (None, None)),
        (nn.LSTM(8, 8), torch.randn(12, 5, 8), (None, None)),
    ):  # fmt: skip
        found = tried(model, x)
        assert tuple(found[kind] for kind in kinds) == wanted, (model, found)


class Padded(nn.Module):
    """An encoder whose mask is True at padding, or by mistake at tokens; made outside of it, or inside."""

    def __init__(self, *, inverted: bool = False, inside: bool = False, causal: bool = False, pooled: bool = False,
                 table: bool = False):  # fmt: skip
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.token, self.place, self.head = nn.Embedding(40, 32), nn.Embedding(24, 32), nn.Linear(32, 8)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.inverted, self.inside, self.causal, self.pooled = inverted, inside, causal, pooled
        self.length = 20 if table else 0  # a table of positions as it is: rows of another length fail

    def forward(self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None,
                document: Tensor | None = None, labels: Tensor | None = None) -> Tensor:  # fmt: skip
        one = (ids != 0) if mask is None or self.inside else mask.bool()
        places = torch.arange(self.length or ids.shape[1])[None] if position_ids is None else position_ids
        later = torch.ones(ids.shape[1], ids.shape[1]).tril() == 0 if self.causal else None
        if document is not None:
            later = (document[:, :, None] != document[:, None]).repeat_interleave(4, 0)
        x = self.token(ids) + self.place(places)
        y = self.head(self.body(x, later, one if self.inverted else ~one))
        return (y * one[..., None]).sum(1) / one.sum(1, keepdim=True) if self.pooled else y


def test_masks_positions_and_labels_are_tried_along_the_rows() -> None:
    torch.manual_seed(0)
    real = torch.arange(20) < torch.randint(5, 20, (16, 1))
    ids, full = torch.randint(1, 40, (16, 20)) * real, torch.randint(1, 40, (16, 20))
    packed = torch.cat([torch.arange(8), torch.arange(12)]).expand(16, -1)
    parts = (packed == 0).cumsum(1)
    for model, given, wanted in (
        (Padded(), {"mask": real.long()}, {"padding": False, "hidden": False}),
        (Padded(inside=True), {}, {"padding": False, "hidden": False}),
        (Padded(pooled=True), {"mask": real}, {"padding": False}),
        (Padded(causal=True), {"mask": real.float()}, {"padding": False, "hidden": False}),
        (Padded(inverted=True), {"mask": real.long()}, {"padding": True, "hidden": True}),
        (Padded(inverted=True, inside=True), {}, {"padding": True, "hidden": True}),
        (Padded(inverted=True, pooled=True), {"mask": real}, {"padding": True}),
        (Padded(table=True), {"mask": real}, {"padding": False, "hidden": None}),
        (Padded(table=True, inverted=True), {"mask": real}, {"padding": True, "hidden": None}),
        (Padded(), {"mask": real, "labels": ids.masked_fill(~real, -100)}, {"taught": False}),
        (Padded(), {"mask": real, "labels": ids}, {"taught": True}),
        (Padded(), {"position_ids": torch.arange(20).expand(16, -1)}, {"uncounted": False}),
        (Padded(), {"position_ids": (real.long().cumsum(0) - 1).clamp(min=0)}, {"uncounted": True}),
        (Padded(), {"ids": full, "position_ids": packed}, {"uncounted": False, "crosses": True}),
        (Padded(), {"ids": full, "position_ids": packed, "document": parts}, {"crosses": False}),
        (Padded(), {"mask": torch.ones(16, 20)}, {"padding": None, "unmasked": True}),
        (Padded(causal=True), {"mask": torch.ones(16, 20)}, {"unmasked": False}),
        (Padded(causal=True), {"ids": ids.flip(1), "mask": torch.ones(16, 20)}, {"unmasked": True}),
        (Padded(), {"ids": (ids > 30) * ids, "mask": torch.ones(16, 20)}, {"unmasked": None}),  # a ground
        (Padded(), {"ids": full}, dict.fromkeys(("padding", "unmasked", "hidden", "uncounted", "crosses"))),
    ):
        values = {"ids": ids, **given}
        found = tried(model, values.pop("ids"), **values)
        assert {kind: found.get(kind) for kind in wanted} == wanted, (given.keys(), found)
    found = tried(Padded(causal=True), full, torch.ones(16, 20), packed)  # without names in the call
    assert (found["crosses"], found["uncounted"]) == (True, False)


@pytest.mark.parametrize(("fault", "law"), [("", None), ("ahead", "M8"), ("shift", "D6"), ("eval", "M6")])
def test_a_model_that_learns_something_else_is_told_alone(fault: str, law: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Words(ahead=int(fault == "ahead")), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ottava.watch(model, tmp_path / "run"):
        for step in range(16):
            model.train(fault != "eval" or step < 6)
            ids = torch.randint(16, (8, 14))
            ahead = 2 if fault == "shift" else 1
            loss = nn.functional.cross_entropy(model(ids[:, :12]).flatten(0, 1), ids[:, ahead : 12 + ahead].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert [f.id for f in answer.findings] == ([law] if law else []), answer.sentence


def test_a_twin_goes_where_the_formula_leads() -> None:
    for name, make in {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }.items():
        weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
        optimizer = make([weight])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        twin = OptimizerTwin(optimizer)
        for step in range(STEPS):
            weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            twin.step()
            optimizer.step()
            schedule.step()
        assert twin.error() == 0.0, name
        with torch.no_grad():
            weight.copy_(weight.bfloat16())
        assert 0.0 < (twin.error() or 0.0) < 1.0


@pytest.mark.parametrize("block", [64, 16384])
def test_codes_inside_a_library_s_optimizer_are_seen_and_tried(block: int, tmp_path: Path) -> None:
    """torchao's moments are tensors of a class of its own. A scale for 64 of them is harmless, one for all is not:
    second moments of rare words are lost beside those of frequent ones."""
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = optim.AdamWFp8(model.parameters(), lr=3e-3, block_size=block)
    torch.compiler.set_stance("force_eager")
    try:
        with ottava.watch(model, tmp_path / "run"):
            for _ in range(24):
                words = torch.multinomial(1 / (1 + torch.arange(256.0)) ** 1.5, 128, replacement=True)
                loss = nn.functional.cross_entropy(model(words), (words * 7 + 1) % 256)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.fp8 == ("guilty" if block > 64 else "unknown"), answer.sentence
    if answer.findings:
        assert answer.findings[0].title == "FP8 casts hurt the updates: the state of AdamWFp8"
    else:
        assert "outside the model: the state of AdamWFp8. The optimizer gets the" in answer.tried[0]


@pytest.mark.parametrize("exact", [True, False])
def test_weights_without_an_exact_copy_are_fp8_s_fault(exact: bool, tmp_path: Path) -> None:
    """Cast weights compute; the step is made on the exact ones, or on the rounded ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(24):
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(rounded(p))
            loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(4, (32,)))
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old if exact else p)
            optimizer.step()
    lines = [json.loads(line) for line in (tmp_path / "run" / EXPERIMENTS).read_text(encoding="utf-8").splitlines()]
    (found,) = (line for line in lines if line["kind"] == "optimizer")
    assert (found["error"] < 1e-6) is exact, found
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.fp8 == ("unknown" if exact else "guilty"), answer.sentence
    assert [f.id for f in answer.findings] == ([] if exact else ["FP8"])


def test_a_gradient_that_is_lost_on_its_way_is_fp8_s_fault(tmp_path: Path) -> None:
    """One scale for all gradients, of which one is 10^9 times as large: as a bucket of DDP has."""
    torch.manual_seed(0)
    model, level = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64)), nn.Parameter(torch.ones(()))
    model.register_parameter("level", level)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            loss = (model(torch.randn(8, 16)).sum(1) / 64 + 1e9 * level).mean()
            optimizer.zero_grad()
            loss.backward()
            flat = rounded(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_(flat[: p.numel()].view_as(p))
                flat = flat[p.numel() :]
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.fp8 == "guilty", answer.sentence
    assert "are zero at the optimizer" in answer.tried[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reads", ["end", "mean"])
def test_samples_that_an_rnn_takes_for_time_are_told(kind: type[nn.RNNBase], first: bool, reads: str) -> None:
    """Without batch_first=True. Not told: a video whose frames come one behind another, each of which is read whole."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.rnn, self.leave = nn.Linear(12, 32), kind(32, 32, batch_first=first), nn.Linear(32, 6)

        def forward(self, x: torch.Tensor) -> Any:
            states = self.rnn(self.enter(x))[0]
            return self.leave(states[:, -1] if reads == "end" else states.mean(1))

    torch.manual_seed(0)
    for samples in (32, 96):  # of many samples those far behind do not move
        found = tried(Reader(), torch.randn(samples, 10, 12))
        assert (found["mixes"], found["in_time"]) == (False, None if first or reads == "mean" else True)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_gradient_that_is_cast_where_no_layer_casts_is_tried(scale: float, tmp_path: Path) -> None:
    """The model has no layer that could be simulated, and the optimizer's formula sees the cast gradient only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            x = torch.randn(64, 16)
            loss = (model(x) - x).square().mean() * 1e-5
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_((p.grad * scale).to(torch.float8_e4m3fn).float() / scale)
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.fp8 == ("guilty" if scale == 1.0 else "unknown"), answer.sentence
    ends = "100 % of the gradient's elements are zero at the optimizer" if scale == 1.0 else "gets the gradient of the"
    assert ends in answer.sentence


def test_a_trace_that_fails_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no fingerprint")

    monkeypatch.setattr(Trace, "_begin_call", fails)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(3):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    tried = diagnose(Run.open(tmp_path / "run")).tried
    assert tried[-1] == "Step 1: the trace of this step's calls ended: ValueError: no fingerprint."


class Units(nn.Module):
    """Rows in units of their own, a million apart; each is brought back behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(nn.functional.layer_norm(self.first(x), (64,)))  # type: ignore[no-any-return]


def test_casts_without_which_a_run_has_the_good_run_s_loss_are_guilty(tmp_path: Path) -> None:
    """One scale for rows that are a million apart loses most of them from the first step on, before any trial; a rate
    a hundred times too high under the same casts is no fault of theirs."""
    for name, recipe, lr in (("good", "rowwise", 3e-3), ("bad", "tensorwise", 3e-3), ("high", "rowwise", 0.3)):
        torch.manual_seed(0)
        model = Units()
        ottava.convert(model, recipe)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        with ottava.watch(model, tmp_path / name):
            for _ in range(48):
                x = torch.randn(128, 32)
                unit = torch.where(torch.arange(128) % 4 > 0, 1.0, 3e6)[:, None]
                loss = (model(x * unit) - x[:, :1].sign()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    good = Run.open(tmp_path / "good")
    bad, high = (diagnose(Run.open(tmp_path / name), baseline=good) for name in ("bad", "high"))
    assert (bad.fp8, high.fp8) == ("guilty", "innocent"), (bad.sentence, high.sentence)
    assert "casts make" in bad.findings[0].cause
    assert bad.verdict == "critical"


def test_an_argument_that_the_collator_drops_is_the_answer_beside_a_good_run(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        torch.manual_seed(0)
        model = Padded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ottava.watch(model, tmp_path / name):
            for _ in range(12):
                real = torch.arange(20) < torch.randint(5, 20, (16, 1))
                ids = torch.randint(1, 40, (16, 20)) * real
                given = {"ids": ids, "mask": real} if name == "good" else {"ids": ids.clamp(min=1)}
                loss = nn.functional.cross_entropy(model(**given)[:, 0], ids[:, 0] % 8)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    answer = diagnose(Run.open(tmp_path / "bad"), baseline=Run.open(tmp_path / "good"))
    assert answer.findings[0].cause.endswith("step 5. The model is called without mask, which the good run gives.")
    assert answer.findings[0].cause.startswith("Short rows are filled up with one token that no mask hides")


def test_a_config_and_arguments_of_a_trainer_are_told_beside_a_good_run(tmp_path: Path) -> None:
    """In place of the line of a library that they lead to. Folders and seeds are left out."""
    for name in ("good", "bad"):
        torch.manual_seed(0)
        model, by = nn.Sequential(nn.Linear(64, 64)), 1.0 if name == "good" else 8.0
        model.config = {"rope": {"factor": by}, "output_dir": name, "api_key": name, "logits_scaling": 2}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ottava.watch(model, tmp_path / name):
            for _ in range(12):
                loss = torch.div(model(torch.randn(32, 64)), by).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    answer = diagnose(Run.open(tmp_path / "bad"), baseline=Run.open(tmp_path / "good"))
    assert answer.findings[0].cause == "The model's config differs: rope.factor is 8.0, in the good run 1.0."
    assert answer.findings[0].title == "The model is not configured as in the good run"
    assert configured([model])["model_config"] == {"rope.factor": "8.0", "logits_scaling": 2}
    given = pytest.importorskip("transformers").TrainingArguments("folder", neftune_noise_alpha=5)
    found = configured([model])
    assert found["trainer"]["neftune_noise_alpha"] == given.neftune_noise_alpha
    assert not {"seed", "output_dir"} & {*found["trainer"], *found["model_config"]}
    lora = type("", (), {"to_dict": lambda self: {"r": 8, "target_modules": {"v", "q"}}})
    model[0].peft_config = {"default": lora()}
    assert configured([model])["model_config"]["peft.default.target_modules"] == "['q', 'v']"


@pytest.mark.parametrize(("cut", "ahead"), [((3, 12), 0), ((0, 11), 1), ((0, 12), 0), ((3, 12), -3)])
def test_labels_are_compared_at_the_places_of_their_scores(tmp_path: Path, cut: tuple[int, int], ahead: int) -> None:
    """The token that came three places before is no unshifted label: the scores were cut to later places."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(4):
            ids = torch.randint(50, (6, 12))
            labels = ids[:, cut[0] + ahead : cut[1] + ahead]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids)[:, slice(*cut)].flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
    facts = Facts(Run.open(tmp_path / "run"))
    columns = [float(facts.column(f"labels_ahead_{k}_pct")[-1]) for k in range(3)]
    assert [value == 100 for value in columns] == [k == ahead for k in range(3)]


def test_a_norm_that_runs_twice_in_one_loss_is_repeated(tmp_path: Path) -> None:
    """Two views of a batch through one BatchNorm: the second changes what the first one saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    ottava.convert(model, "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(8):
            x = torch.randn(64, 64)
            loss = (model(x) - model(x + 0.1 * torch.randn_like(x))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    lines = [json.loads(line) for line in (tmp_path / "run" / EXPERIMENTS).read_text().splitlines()]
    assert not [e for e in lines if e["kind"] == "refused"], lines
    assert [e["reproduces"] for e in lines if "reproduces" in e] == [True], lines


@pytest.mark.parametrize(("divisor", "told"), [(4, []), (16, ["O14"])])
def test_losses_that_are_divided_twice_are_told_alone(divisor: int, told: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            optimizer.zero_grad()
            for _ in range(4):
                (nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))) / divisor).backward()
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert [f.id for f in answer.findings] == told, answer.sentence


def test_masks_of_libraries_are_tried() -> None:
    """transformers drops the mask of packed documents where it has a cache, which it makes by default."""
    kinds = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    bert = kinds.BertForMaskedLM(kinds.BertConfig(**sizes, num_attention_heads=4))
    llama = kinds.LlamaForCausalLM(kinds.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    real = (torch.arange(24) < torch.randint(6, 24, (8, 1))).long()
    ids, full = torch.randint(1, 60, (8, 24)) * real, torch.randint(1, 60, (8, 24))
    packed = torch.cat([torch.arange(10), torch.arange(14)]).expand(8, -1)
    for model, given, wanted in (
        (bert, {"attention_mask": real}, {"padding": False, "hidden": False}),
        (bert, {"attention_mask": 1 - real}, {"hidden": True}),  # fresh weights hardly attend: padding moves 2 %
        (llama, {"attention_mask": real}, {"padding": False, "hidden": False}),
        (llama, {"attention_mask": 1 - real}, {"padding": False, "hidden": True}),
        (llama, {"input_ids": full, "position_ids": packed, "use_cache": False}, {"crosses": False}),
        (llama, {"input_ids": full, "position_ids": packed}, {"crosses": True}),
    ):
        values = {"input_ids": ids, **given}
        found = tried(model.train(), values.pop("input_ids"), labels=ids.masked_fill(real == 0, -100), **values)
        assert {kind: found[kind] for kind in wanted} == wanted, (type(model), given.keys(), found)


def test_a_rate_that_no_loss_shows_comes_before_the_line_that_it_reaches(tmp_path: Path) -> None:
    for name, lr in (("good", 1e-3), ("bad", 3e-3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        with ottava.watch(model, tmp_path / name):
            for _ in range(12):
                optimizer.zero_grad()
                (model(torch.randn(32, 16)) - 1).square().mean().backward()
                optimizer.step()
    answer = diagnose(Run.open(tmp_path / "bad"), baseline=Run.open(tmp_path / "good"))
    assert not answer.event
    assert [f.title for f in answer.findings] == ["The learning rate is 3 times that of the good run"]
    assert [f.title for f in answer.notes] == ["The code parts from that of the good run"]


def test_micro_batches_that_give_sums_are_not_said_to_give_means(tmp_path: Path) -> None:
    said = {}
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        with ottava.watch(model, tmp_path / reduction):
            for _ in range(24):
                for _ in range(4):
                    x = torch.randn(16, 8)
                    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1), reduction=reduction).backward()
                optimizer.step()
                optimizer.zero_grad()
        answer = diagnose(Run.open(tmp_path / reduction))
        said[reduction] = next(f.cause for f in (*answer.findings, *answer.notes) if f.id == "O14")
    assert said["mean"].startswith("Each of 4 micro-batches gives the mean of its own loss")
    assert said["sum"].startswith("The losses of 4 micro-batches add up to 64 means over their labels: they are sums.")


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy.to(torch.float8_e5m2).to(dy.dtype)


def test_a_cast_that_overflows_in_the_first_step_is_guilty_without_a_trial(tmp_path: Path) -> None:
    """With a rate that ruins the weights first, the same cast is not asked."""
    said = {}
    for name, scale, lr in (("overflow", 2.0**24, 0.1), ("rate", 1.0, 1e30)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with ottava.watch(model, tmp_path / name):
            for _ in range(12):
                x = torch.randn(16, 8)
                (Narrow.apply(model(x)).square().mean() * scale).backward()
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad / scale
                optimizer.step()
                optimizer.zero_grad()
        said[name] = diagnose(Run.open(tmp_path / name))
    assert (said["overflow"].fp8, said["rate"].fp8) == ("guilty", "unknown"), said
    assert "gets finite numbers and gives some that are not" in said["overflow"].findings[0].cause

"""The first call in which two runs part: of code, of arguments, of values; none where nothing parts; a stale copy."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from diagnose.test_diagnose import record, shadow
from ottava.diagnose.calls import Call, _walk, apart, parting, stale, starts_high
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.facts import Facts
from ottava.record.reader import Run
from sweep import sweep

FAULTS = {
    "softmax": "`softmax` at test_traces.py:",
    "mask": "`masked_fill` at test_traces.py:",
    "temperature": "where the good run calls `div(f32[16, 8], 0.5)`",
    "target": "the good run calls `detach(f32[16, 8])`",
    "labels": "the first value that differs is made outside of the calls that were seen",
    "load": "was changed outside of the calls that were seen in this run alone",
    "random state": "the output of `dropout` in the backward, where a forward is repeated",
    "backward": "`tensor` at test_traces.py:46",
    "clip": "calls `set grad(f32[8, 8], None)`",
}


class Doubled(torch.autograd.Function):
    """x, with a gradient times a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: list[float]) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.factor = factor[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[no-untyped-def]
        return gradients[0] * torch.tensor(ctx.factor), None


def trained(folder: Path, fault: str = "", *, seed: int = 0, steps: int = 3) -> Facts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 8).numpy()
    if fault == "labels":
        data[[1, 5]] = data[[5, 1]]
    state = {name: 2 * x.detach() for name, x in nn.Linear(8, 8).named_parameters()}
    with ottava.watch(model, folder):
        gate = nn.Linear(8, 8)
        if fault == "load":
            gate.load_state_dict(state)
        for step in range(steps):
            x = torch.from_numpy(data[step * 16 : step * 16 + 16].copy())
            keep = fault != "random state"
            y = checkpoint(model, x, use_reentrant=False, preserve_rng_state=keep)
            y = gate(y).masked_fill(x > 1, -10.0 if fault == "mask" else -50.0)
            y = y * 0.5 if fault == "temperature" else y / 0.5
            y = Doubled.apply(y, [2.0 if fault == "backward" else 1.0])
            target = y if fault == "target" else y.detach()
            loss = (y.softmax(0 if fault == "softmax" else 1) - target - x).square().mean()
            if not (fault == "clip" and step):
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Facts(Run.open(folder))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return trained(tmp_path_factory.mktemp("good") / "run")


@sweep(fault=FAULTS)
def test_the_first_call_that_parts_is_named(fault: str, good: Facts, tmp_path: Path) -> None:
    found = parting(good, trained(tmp_path / fault.replace(" ", "-"), fault), values=True)
    assert found is not None, fault
    assert FAULTS[fault] in found.sentence, found.sentence
    assert found.step == (2 if fault == "clip" else 1)
    assert not found.cast


def test_the_answer_is_the_place(good: Facts, tmp_path: Path) -> None:
    answer = diagnose(trained(tmp_path / "run", "softmax").run, baseline=good.run)
    assert answer.findings[0].title == "The code parts from that of the good run"
    assert "gets 0, in the good run 1" in answer.findings[0].cause, answer.findings[0].cause
    assert "`loss = (y.softmax(0 if fault" in answer.findings[0].cause


def test_equal_runs_and_other_seeds_do_not_part(good: Facts, tmp_path: Path) -> None:
    assert len(good.run.trace) == 2
    assert parting(good, trained(tmp_path / "again"), values=True) is None
    assert parting(good, trained(tmp_path / "seed", seed=1), values=False) is None


def test_a_trace_changes_no_bit(tmp_path: Path) -> None:
    def weights(watched: bool) -> Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        session = ottava.watch(model, tmp_path / "bits") if watched else None
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return model[0].weight.detach()

    assert torch.equal(weights(False), weights(True))
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_compiled_function_compiles_once(tmp_path: Path) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["frames"]
    before, model = counted["total"], nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    function = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(4):
            function(model(torch.randn(4, 8))).sum().backward()
            optimizer.step()
    assert counted["total"] == before + 1


@pytest.mark.parametrize("renewed", [True, False])
def test_a_stale_copy_of_a_weight_is_named(renewed: bool, tmp_path: Path) -> None:
    """Micro-batches share an FP8 copy; it has to go when the optimizer steps."""

    class Cached(nn.Linear):
        copy: Tensor | None = None

        def forward(self, input: Tensor) -> Tensor:
            if self.copy is None:
                scale = 448 / self.weight.detach().abs().amax()
                self.copy = (self.weight.detach() * scale).to(torch.float8_e4m3fn).float() / scale
            return nn.functional.linear(input, self.weight + (self.copy - self.weight).detach())

    torch.manual_seed(0)
    model = nn.Sequential(Cached(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if renewed:
                model[0].copy = None
    run = Run.open(tmp_path / "run")
    found = stale(Facts(run))
    if renewed:
        assert found == []
    else:
        assert (found[0].step, found[0].used.module) == (2, "0")
        answer = diagnose(run)
        assert (answer.findings[0].title, answer.findings[0].stage) == ("An FP8 copy of a weight is stale", "software")


@pytest.mark.parametrize("parts", [False, True])
def test_a_cast_layer_s_backward_is_the_layer_s(parts: bool) -> None:
    """In the function `amax` the recipe decides, forward and backward; in `train` the script does."""

    def facts(recipe: str, line: int) -> Facts:
        inside = ["lib.py", line, "amax", recipe, ""]
        places = [inside, ["run.py", 30, "train", recipe, ""] if parts else inside]
        calls = [["abs", 0, 1, [recipe], [], [], 0], ["abs", 1, 0, [recipe], [], [], 1]]
        trace = [{"step": 1, "places": places, "modules": ["", "up"], "calls": calls}]
        manifest = {"layers": [{"name": "up", "casts": {}, "package": "torchao", "recipe": recipe}]}
        return SimpleNamespace(run=SimpleNamespace(trace=trace), manifest=manifest)  # type: ignore[return-value]

    found = parting(facts("tensorwise", 9), facts("rowwise", 11), values=False)
    assert (found is not None) == parts


def test_a_rounding_is_told_from_another_number() -> None:
    """Witness: the sums of the elements themselves."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    from ottava.experiments.trace import fingerprint

    noisy, moved, other = x * (1 + 1e-6), x.flip(0), x.clone()
    other[::4] += 0.5
    same = fingerprint(x)
    assert same[2:4] == pytest.approx([x[::4].mean().item(), x[::4].square().mean().sqrt().item()], rel=1e-4)
    assert not apart([same], [fingerprint(noisy)])
    assert apart([same], [fingerprint(moved)])
    assert apart([same], [fingerprint(other)])
    integers = torch.arange(64)
    assert apart([fingerprint(integers)], [fingerprint(integers.flip(0))])


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_sum_over_rows_is_no_high_start(scale: float, tmp_path: Path) -> None:
    """Hugging Face's Trainer sums over rows and divides by their number: the loss of a row is compared with a guess."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.randn(64, 8), torch.randint(8, (64,))
    labels[::4] = -100
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(x) * scale, labels, reduction="sum")
            (loss / 48).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = starts_high(Facts(Run.open(tmp_path / "run")), 4.0)
    assert (found is not None) == (scale > 1)
    if found is not None:
        first = nn.functional.cross_entropy(nn.Linear(8, 8)(x) * 0, labels).item()
        assert found[2] == pytest.approx(first)
        assert found[1] > 4 * first


def test_a_cast_that_makes_infinities_of_finite_numbers_is_guilty(tmp_path: Path) -> None:
    """Up to the event, and where the loss is not finite afterwards; of a trial that cannot be compared, too."""
    ends = lambda s: {"loss": math.nan} if s >= 12 else {}  # noqa: E731
    for name, step, change, said in (
        ("before", 11, ends, "guilty"),
        ("behind", 20, ends, "unknown"),
        ("finite", 11, lambda s: {}, "unknown"),
    ):
        sites = {"train.py:18": {"error": math.inf, "flushed": 0.0, "clipped": 0.04, "nonfinite": 0.04}}
        lines = (shadow(step, math.nan, reproduces=False, sites=sites),)
        answer = diagnose(record(tmp_path / name, change, casts=True, experiments=lines))
        assert answer.fp8 == said, (name, answer.sentence)
        assert ("the cast at train.py:18 gets finite numbers, and 4 % of" in answer.sentence) == (said == "guilty")


def test_a_recipe_whose_casts_lose_small_rows_is_guilty_beside_a_good_run(tmp_path: Path) -> None:
    """Loss and gradient are those of the large rows, and show nothing."""
    small = torch.ones(32, 1).index_fill(0, torch.arange(16), 1e-9)

    def run(name: str, recipe: str, size: Any) -> Run:
        more: dict[str, Any] = {"layers": [{"name": "fc", "recipe": recipe, "casts": {"input": {"format": "E4M3"}}}]}
        more |= {"sizes": {("layers.0.fc2", "grad_output"): size}, "experiments": (shadow(5, 0.02),)}
        return record(tmp_path / name, casts=True, **more)

    good = run("good", "tensorwise", 1.0)
    told = diagnose(run("bad", "tensorwise_e4m3", small), baseline=good)
    assert (told.fp8, told.findings[0].layers) == ("guilty", ["layers.0.fc2"])
    assert diagnose(run("as good", "tensorwise_e4m3", 1.0), baseline=good).fp8 == "innocent"


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", ""),
        ("mask", "`labels` begins 1, 2, 3, -100 x 3, in the good run 1, 2, 3, 8, -100 x 2. It is made outside"),
        ("late", "`labels` begins alike and goes on otherwise. It is made outside"),
        ("step", "the good run calls `square(f32[4, 6])` at test_traces.py:"),
    ],
)
def test_what_a_model_is_given_otherwise_is_told_by_name(word: str, said: str, tmp_path: Path) -> None:
    def run(word: str, folder: Path) -> Facts:
        torch.manual_seed(0)
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        row, end = [1, 2, 3, 8, 0, 0], [1, 2, 3, -100 if word == "mask" else 8, -100, -100]
        labels = torch.tensor([end, end, end, [1] * 6 if word == "late" else end])
        noise, more = torch.randn(4, 6), torch.randn(4, 6)
        with ottava.watch(model, folder):
            for _ in range(2):
                loss = model(torch.tensor([row] * 4), labels=labels)
                penalty = noise if word == "step" else noise.square()
                loss = loss + 1e-3 * (penalty + more.square()).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return Facts(Run.open(folder))

    found = parting(run("", tmp_path / "good"), run(word, tmp_path / "bad"), values=True)
    assert found is None if not said else said in getattr(found, "sentence", "")


def test_a_layer_that_casts_in_neither_run_hides_no_call(tmp_path: Path) -> None:
    """A GRU along the batch reads a bias of another shape; neither run casts there, so values are compared."""

    def run(batch_first: bool) -> Facts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.GRU(4, 4, batch_first=batch_first))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ottava.watch(model, tmp_path / str(batch_first)):
            for _ in range(2):
                model(torch.randn(6, 5, 4))[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return Facts(Run.open(tmp_path / str(batch_first)))

    good, bad = run(True), run(False)
    bad.manifest["layers"] = [*(bad.manifest.get("layers") or ()), {"name": "0.bias", "casts": {}, "package": "torch"}]
    found = parting(good, bad, values=True)
    assert found is not None
    assert ") gets 5, in the good run 6" in found.sentence


def test_a_second_phase_is_traced_and_a_library_s_call_has_the_script_s_lines(tmp_path: Path) -> None:
    """Its optimizer is new; the library scores by another way in the bad run's second phase."""
    code = compile("def score(x, way):\n    return x.abs() if way else x.square()\n", "/x/site-packages/lib.py", "exec")
    exec(code, library := {})

    def scored(x: Tensor, way: bool) -> Tensor:
        return library["score"](x, way).mean()  # type: ignore[operator]

    def run(word: str) -> Facts:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        with ottava.watch(model, tmp_path / word):
            for phase in range(2):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                for _ in range(30):
                    scored(model(torch.randn(16, 8)), phase == 1 and word == "bad").backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return Facts(Run.open(tmp_path / word))

    good, bad = run("good"), run("bad")
    assert {line["step"] for line in bad.run.trace} >= {1, 2, 32, 33}
    found = parting(good, bad, values=True)
    assert found is not None
    assert found.step == 32
    assert "calls `abs(f32[16, 1])` at lib.py:2" in found.sentence
    lines = [f"test_traces.py:{line}" for line in (331, 322)]
    assert found.place.endswith(" → ".join(lines))
    assert f"(called at {found.place})" in found.sentence


def test_an_evaluation_that_is_given_other_numbers_is_told(tmp_path: Path) -> None:
    """No loss of the training shows it."""

    def run(word: str) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with ottava.watch(model, tmp_path / word):
            for step in range(12):
                x = torch.randn(16, 8)
                (model((x - 3) / 2 if word == "moved" else x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 5:
                    with torch.no_grad():
                        model.eval()(torch.randn(64, 8) * (2 if word == "scaled" else 1))
                        model.train()
        return Run.open(tmp_path / word)

    good = run("good")
    said = "At step 7 a forward without gradients is given other numbers: `0` is f32[64, 8] of mean"
    assert said in diagnose(run("scaled"), baseline=good).sentence
    # other numbers of the training come first, and a healthy run has nothing
    assert said not in diagnose(run("moved"), baseline=good).sentence
    assert not diagnose(run("again"), baseline=good).findings


def test_a_tensor_that_one_run_alone_reads_is_not_held_against_another() -> None:
    """The good run reads a mask before the data that both read."""
    mask, data = ["bool[8]", 7, 0.1, 0.3, 0.0, 0], ["i64[8]", 9, 4.0, 5.0, 0.2, 0]

    def call(name: str, line: int, result: Any, *arguments: str) -> Call:
        place = ("train.py", line, "main", f"line {line}", "", 0)
        return Call(name, place, "", arguments, (), (result,), False, False)

    mine = [call("given", 5, mask), call("__invert__", 5, mask, "bool[8]")]
    both = [call("given", 6, data), call("sum", 6, data, "i64[8]"), call("mean", 7, data, "i64[8]")]
    assert _walk([*mine, *both], both, values=True) == ("call", mine[1], None)
    assert _walk(both, [*mine, *both], values=True) == ("call", None, mine[1])


def test_a_wrapper_that_a_run_goes_around_is_told_by_the_lines(tmp_path: Path) -> None:
    """Equal calls with equal results: what differs is who comes to them, as where DDP's forward is left out."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)
            return y

    def run(around: bool) -> Facts:
        torch.manual_seed(0)
        model = Wrapper()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ottava.watch(None, tmp_path / f"{around}"):
            for _ in range(3):
                x = torch.randn(4, 8)
                y = model.net(x) if around else model(x)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return Facts(Run.open(tmp_path / f"{around}"))

    found = parting(run(False), run(True), values=True)
    assert found is not None
    first = run.__code__.co_firstlineno
    line = f"test_traces.py:{first + 7}"
    mine, theirs = found.sentence.split(", in the good run at ")
    assert mine.endswith(f"→ {line} in module 0")
    assert theirs.endswith(f"→ {line} → test_traces.py:{first - 3} in module net.0.")


def test_casts_that_get_worse_than_those_of_the_good_run_are_not_cleared(tmp_path: Path) -> None:
    """Late in a run any error is large beside its small gradient, so one step alone would not tell."""
    left = lambda s: {"loss": 4.0 - 0.02 * s if s < 12 else 4.5 + 0.01 * (s % 2)}  # noqa: E731
    good = record(tmp_path / "good", experiments=(shadow(5, 0.4), shadow(20, 0.4)), casts=True)
    for late, part in ((0.45, "innocent"), (0.9, "unknown")):
        tried = (shadow(5, 0.4), shadow(20, late))
        bad = record(tmp_path / part, left, experiments=tried, casts=True)
        answer = diagnose(bad, baseline=good)
        assert answer.fp8 == part, answer.sentence
        assert f"at step 20, where they are {100 * late:.3g} % here" in answer.sentence or part == "innocent"


def test_a_place_that_another_step_found_gives_way_to_the_cast_that_is_damaged(tmp_path: Path) -> None:
    """An ablation is dear, so it comes seldom: by the step that decides, another cast may do it."""
    places = {"train.py:7": {"error": 0.03, "clipped": 0.0}, "train.py:8": {"error": 0.4, "clipped": 0.4}}
    blames = {"kind": "ablation", "step": 20, "set": [{"site": "train.py:7", "gemm": "", "operand": ""}]}
    for step, site in ((30, "train.py:8"), (20, "train.py:7")):
        tried = (shadow(step, 0.9, sites=places), {**blames, "error_before": 0.6, "error_after": 0.04})
        answer = diagnose(
            record(
                tmp_path / site[-1], lambda s: {"loss": 4.0 - 0.02 * s if s < 31 else 9.0 + 0.01 * s}, experiments=tried
            )
        )
        assert answer.findings[0].title == f"FP8 casts hurt the gradient: the cast at {site}"


def test_a_function_that_casts_and_may_make_the_first_nan_is_not_cleared(tmp_path: Path) -> None:
    """A scale of 448 over an amax of zero: the conversion itself reads the NaN."""
    lost = {"kind": "nonfinite", "step": 31, "module": "", "operation": "addmm or my_cast", "direction": "forward"}
    for functions, part in ((["MyCast"], "unknown"), (["Other"], "innocent")):
        tried = (shadow(5, 0.02, sites={"train.py:7": {"error": 0.03}}, functions=functions, derivative=0.0), lost)
        run = record(tmp_path / part, lambda s: {"loss": 4.0 if s < 31 else math.nan}, experiments=tried)
        assert diagnose(run).fp8 == part


def test_a_backward_that_is_no_derivative_is_guilty_where_something_happened(tmp_path: Path) -> None:
    """Feedback alignment means it: a training that goes well is not accused, unless its gradient is a wild one."""
    for name, ends, error, part in (("a", 4.0, 1.9, "unknown"), ("b", 9.0, 1.9, "guilty"), ("c", 4.0, 40.0, "guilty")):
        tried = [shadow(s, 0.02, functions=["Mine"], derivative=error, norm=1.0) for s in (5, 10, 20)]
        loss = lambda s, ends=ends: {"loss": 4.0 - 0.02 * s if s < 31 or ends < 9 else ends + 0.01 * s}  # noqa: E731
        answer = diagnose(record(tmp_path / name, loss, experiments=tuple(tried)))
        assert answer.fp8 == part, answer.sentence
        assert bool(answer.findings) == (part == "guilty")

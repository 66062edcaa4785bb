"""Facts of a run that a watch reads from the program: each line of a step, and what the manifest says of weights,
parameters, casts and trainers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.record.reader import Run
from ottava.watching.adapters import recipe_of


class Classifier(nn.Module):
    """Computes its loss itself if it gets labels, as Hugging Face's models do, from shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.drop = nn.Dropout(0.1)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> Tensor:
        scores = self.head(self.drop(self.words(ids))) * self.temperature
        if labels is None:
            return scores
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return nn.functional.cross_entropy(scores.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def made(kind: Callable[[], nn.Module] = Classifier) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def ids_of(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))


def run(
    folder: Path,
    loop: Callable[[nn.Module, torch.optim.Optimizer, int], None],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 6,
    **settings: Any,
) -> Run:
    """Steps of a loop."""
    model = model or made()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ottava.watch(model, folder, **settings):
        for step in range(1, steps + 1):
            loop(model, optimizer, step)
            optimizer.zero_grad()
    return Run.open(folder)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(ids_of(step), labels=ids_of(step + 50), num_items_in_batch=torch.tensor(28.0)).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for part in range(2):
        (model(ids_of(step)[2 * part :][:2], labels=ids_of(step + 50)[2 * part :][:2]) / 2).backward()
    optimizer.step()


def loss_outside(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.functional.cross_entropy(model(ids_of(step)).flatten(0, 1), ids_of(step + 50).flatten()).backward()
    optimizer.step()


def two_forwards(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    (model(ids_of(step), ids_of(step + 50)) + model(ids_of(step), ids_of(step + 50))).backward()
    optimizer.step()


@pytest.mark.parametrize("loop", [plain, accumulated, loss_outside, two_forwards])
def test_the_same_data_has_the_same_hash_whatever_the_look(loop: Any, tmp_path: Path) -> None:
    """Labels were hashed twice in the steps in which the watch noted amaxes, and once in the others."""

    def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        loop(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            model(ids_of(step + 99), labels=ids_of(step + 98))
        model(ids_of(step + 99), labels=ids_of(step + 98))  # and by a loop that forgot no_grad
        model.train()

    full = run(tmp_path / "full", loop, every=1).steps
    light = run(tmp_path / "light", loop, every=100).steps
    off = run(tmp_path / "off", loop, every=3, light=False).steps
    evaluated = run(tmp_path / "evaluated", with_evaluation, every=2).steps
    for name in ("input_hash", "label_hash", "forwards", "backwards", "optimizer_steps", "grad_norm"):
        assert len(set(full[name])) > 1 or name not in ("input_hash", "label_hash")
        for other in (light, off, evaluated):
            assert other[name].tolist() == full[name].tolist(), name
    assert set(full["forwards"]) == {2.0 if loop in (accumulated, two_forwards) else 1.0}
    assert set(full["backwards"]) == {2.0 if loop is accumulated else 1.0}


def test_the_model_s_labels_count_before_those_of_the_loss(tmp_path: Path) -> None:
    """A model shifts its labels; what it was called with is the data, also where no loss can be found."""
    seen = run(tmp_path / "plain", plain).steps

    def hidden(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        (model(ids_of(step), labels=ids_of(step + 50)) * 1.0).square().sqrt().backward()
        optimizer.step()

    assert run(tmp_path / "hidden", hidden).steps["label_hash"].tolist() == seen["label_hash"].tolist()
    assert seen["label_hash"].tolist() != run(tmp_path / "outside", loss_outside).steps["label_hash"].tolist()[::-1]


def test_a_number_is_no_input(tmp_path: Path) -> None:
    """Hugging Face's Trainer hands the model num_items_in_batch; it was taken for an input of size 28."""
    seen = run(tmp_path / "run", plain)
    assert seen.manifest["dtypes"] == {"inputs": ["int64"]}
    assert seen.steps["input_hash"].tolist() == run(tmp_path / "bare", loss_outside).steps["input_hash"].tolist()


def test_a_batch_may_be_one_mapping(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(batch["ids"], batch["labels"])

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model({"ids": ids_of(step), "labels": ids_of(step + 50)}).backward()
        optimizer.step()

    seen, expected = run(tmp_path / "run", loop, made(Wrapped)).steps, run(tmp_path / "plain", plain).steps
    for name in ("input_hash", "label_hash"):
        assert seen[name].tolist() == expected[name].tolist()


# --- the gradient ----------------------------------------------------------------------------------------------------


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-1e-4, 1e-4)  # leaves no trace in a version


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("clipped", [clip, clamp, nothing])
def test_the_norm_is_that_before_clipping_and_the_used_one_that_after(clipped: Any, tmp_path: Path) -> None:
    before, after = [], []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for _ in range(2):
            model(ids_of(step), labels=ids_of(step + 50)).backward()
        for noted in (before, after):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            noted.append(torch.stack([g.norm() for g in grads]).norm().item())
            if noted is before:
                clipped(model)
        optimizer.step()

    steps = run(tmp_path / "run", loop).steps
    assert steps["grad_norm"] == pytest.approx(before, rel=1e-5)
    assert steps["grad_norm_used"] == pytest.approx(after, rel=1e-5)
    assert (before == after) == (clipped is nothing)


def test_gradients_of_every_dtype_have_a_norm(tmp_path: Path) -> None:
    """Also one of a single number, and those of float64 beside others."""
    parts = [nn.Parameter(torch.full((3,), 2.0, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)]
    parts.append(nn.Parameter(torch.tensor(1.0)))
    model = nn.ParameterList(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ottava.watch(model, tmp_path / "run"):
        sum(p.double().sum() for p in model).backward()  # type: ignore[union-attr]
        optimizer.step()
    steps = Run.open(tmp_path / "run").steps
    assert steps["grad_norm"].tolist() == steps["grad_norm_used"].tolist() == [pytest.approx(7**0.5)]


def test_a_scaled_loss_has_the_norm_of_the_unscaled_one(tmp_path: Path) -> None:
    """The gradients hold the scaler's factor until the step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.ones(4, 8)
    with ottava.watch(model, tmp_path / "run"):
        for scaled in (False, True):
            loss = model(x).square().mean()
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    steps = Run.open(tmp_path / "run").steps
    assert steps["grad_norm"][1] == steps["grad_norm"][0] == steps["grad_norm_used"][1] > 0
    assert steps["loss"][0] == steps["loss"][1]


def test_optimizers_that_step_together_have_one_norm(tmp_path: Path) -> None:
    """The second of two optimizers steps when the step has ended; its gradients were added to the next step's."""
    model: Any = made()
    pair = [
        torch.optim.SGD(part, lr=0.0) for part in (model.head.parameters(), [model.words.weight, model.temperature])
    ]
    norms = []
    with ottava.watch(model, tmp_path / "run"):
        for step in range(1, 5):
            model.eval()(ids_of(step), labels=ids_of(step)).backward()
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
            for optimizer in pair:
                optimizer.step()
            model.zero_grad()
    steps = Run.open(tmp_path / "run").steps
    assert steps["grad_norm"][1:] == pytest.approx(norms[1:], rel=1e-5)
    assert steps["grad_norm"][0] <= norms[0]
    assert steps["optimizer_steps"].tolist() == [1, 2, 2, 2]


# --- the optimizer ---------------------------------------------------------------------------------------------------


def test_settings_of_every_group_are_columns_and_a_zero_is_written(tmp_path: Path) -> None:
    model: Any = made()
    groups = [
        {"params": [model.temperature], "lr": 0.0},
        {"params": [*model.words.parameters(), *model.head.parameters()], "weight_decay": 0.0, "betas": (0.0, 0.95)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        optimizer.param_groups[1]["lr"] /= 2

    steps = run(tmp_path / "run", loop, model, optimizer, 3).steps
    assert steps["lr/0"].tolist() == [0.0] * 3
    assert steps["lr/1"].tolist() == steps["lr"].tolist() == [3e-3, 1.5e-3, 0.75e-3]
    assert (steps["weight_decay/0"][0], steps["weight_decay/1"][0]) == (0.1, 0.0)
    assert (steps["beta1/0"][0], steps["beta1/1"][0], steps["beta2/1"][0], steps["eps/0"][0]) == (0.9, 0.0, 0.95, 1e-8)
    assert "momentum/0" not in steps
    for name in ("extra_steps", "restarts", "eval_forwards_in_train_mode", "kept_gradient"):
        assert set(steps[name][1:]) == {0.0}, name
    bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    assert run(tmp_path / "sgd", plain, model, bare, 1).steps["momentum/0"].tolist() == [0.0]


def test_a_weight_that_somebody_else_writes_is_seen_in_that_step(tmp_path: Path) -> None:
    """In a step without a look, too; one that is written and restored in between is the optimizer's. So is one that
    got no gradient now and then, as an expert without tokens."""
    model: Any = made()
    idle = [nn.Parameter(torch.ones(3)) for _ in range(9)]
    sparse = torch.optim.SGD([*idle, *model.head.parameters()], lr=0.1)
    with ottava.watch(model, tmp_path / "idle"):
        for step in range(1, 9):
            model(ids_of(step), labels=ids_of(step + 50)).backward()
            for i, p in enumerate(idle):
                p.grad = None if i % 4 and (i + step) % 2 else torch.ones(3)
            sparse.step()
    assert not Run.open(tmp_path / "idle").steps["written"][1:].any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with ottava.watch(model, tmp_path / "run"):
        for step in range(1, 9):
            plain(model, optimizer, step)
            optimizer.zero_grad()
            kept = [p.detach().clone() for p in model.parameters()]
            if step in (3, 6):
                for p in model.parameters():
                    p.data.mul_(0.9)  # torch counts no version of this
            if step == 6:
                for p, before in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(before)
    assert (Run.open(tmp_path / "run").steps["written"][1:] > 0).tolist() == [s == 4 for s in range(2, 9)]


def test_every_tensor_that_an_optimizer_holds_is_a_parameter(tmp_path: Path) -> None:
    """Also a temperature that no module owns; and a parameter that no optimizer holds."""
    model: Any = made()
    temperature = nn.Parameter(torch.tensor([0.07]))
    held = [*model.head.parameters(), model.temperature]
    optimizer = torch.optim.AdamW([{"params": held}, {"params": [temperature], "lr": 5.0}], lr=1e-3)
    told = {p["name"]: p for p in run(tmp_path / "run", plain, model, optimizer, 3).manifest["parameters"]}
    assert set(told) == {"words.weight", "head.weight", "head.bias", "temperature", "optimizer[1].params[0]"}
    assert (told["words.weight"]["held"], told["words.weight"]["trains"]) == (None, True), "forgotten, not frozen"
    bare = told["optimizer[1].params[0]"]
    assert (bare["held"]["optimizer"], bare["held"]["group"], bare["held"]["lr"]) == ("AdamW", 1, 5.0)
    assert (bare["trains"], bare["shape"], told["head.bias"]["held"]["lr"]) == (True, [1], 1e-3)


def test_an_optimizer_that_steps_a_copy_is_told(tmp_path: Path) -> None:
    """It ended no step, so the run had none."""
    model: Any = made()
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)
    seen = run(tmp_path / "run", plain, model, optimizer, 3)
    assert seen.steps["step"].tolist() == [1, 2, 3]
    assert (seen.steps["grad_norm"] > 0).all()
    assert seen.steps["grad_norm_used"].tolist() == [0.0] * 3
    told = {p["name"]: p for p in seen.manifest["parameters"]}
    assert told["head.weight"]["held"] is None
    assert told["optimizer[0].params[0]"]["held"]["lr"] == 1e-3
    assert sum(name.startswith("optimizer[0]") for name in told) == 4


def test_validation_in_training_mode_is_counted(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        if step == 3:
            with torch.no_grad():
                for _ in range(4):
                    model(ids_of(step))
            model.eval()
            with torch.inference_mode():
                model(ids_of(step))
            model.train()

    steps = run(tmp_path / "run", loop, every=100).steps
    assert steps["eval_forwards_in_train_mode"].tolist() == [0, 0, 0, 4, 0, 0]
    assert set(steps["forwards"]) == {1.0}


def test_a_paused_watch_counts_nothing(tmp_path: Path) -> None:
    model: Any = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ottava.watch(model, tmp_path / "run") as seen:
        for step in range(1, 4):
            plain(model, optimizer, step)
            with seen.paused():
                model(ids_of(77), labels=ids_of(78)).backward()
            optimizer.zero_grad()
    steps = Run.open(tmp_path / "run").steps
    assert set(steps["forwards"]) == set(steps["backwards"]) == {1.0}
    assert steps["input_hash"].tolist() == run(tmp_path / "bare", plain).steps["input_hash"][:3].tolist()


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_every_weight_is_hashed_before_the_first_step(tmp_path: Path) -> None:
    one, again = (run(tmp_path / name, plain).manifest["weights"] for name in ("one", "again"))
    assert one == again
    assert set(one) == {name for name, _ in made().named_parameters()}
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in one.values())
    model: Any = made()
    with torch.no_grad():
        model.head.weight[3, 5] += 1e-3
    with ottava.watch(model, tmp_path / "other") as seen:
        plain(model, torch.optim.SGD(model.parameters(), lr=0.5), 1)
    other = Run.open(tmp_path / "other").manifest["weights"]
    assert {name for name in one if one[name] != other[name]} == {"head.weight"}
    with ottava.watch(model, tmp_path / "other", append=True, step=1):
        plain(model, torch.optim.SGD(model.parameters(), lr=0.5), 2)
    assert Run.open(tmp_path / "other").manifest["weights"] == other, "a resumed run keeps those of its start"
    assert seen.steps_done == 1


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "blockwise"])
def test_a_layer_of_ours_tells_what_it_casts(recipe: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, recipe)
    x = torch.randn(32, 64).bfloat16()
    model.eval()
    with torch.no_grad():
        model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run") as seen:
        seen.flush()
        assert Run.open(tmp_path / "run").manifest["cast"] == {"ran": False}, "it only evaluated"
        model(x).float().mean().backward()
        optimizer.step()
    manifest = Run.open(tmp_path / "run").manifest
    layer = manifest["layers"][0]
    assert (manifest["cast"], layer["package"], layer["recipe"]) == ({"ran": True}, "ottava", recipe)
    rows = recipe == "rowwise_with_gw_hp"
    assert layer["casts"]["weight"]["granularity"] == ("row" if rows else "128x128")
    assert layer["casts"]["input"]["gemms"] == (["fprop"] if rows else ["fprop", "wgrad"])


def test_an_autocast_region_s_recipe_is_the_one_told(tmp_path: Path) -> None:
    """TransformerEngine's names: the recipe comes with the region, not with the layer."""
    import ottava.compat.transformer_engine.pytorch as te
    from ottava.compat.transformer_engine.common import recipe as recipes

    layer = te.Linear(64, 64, params_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with ottava.watch(layer, tmp_path / "run", every=1) as seen:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.DelayedScaling()):
            y = layer(torch.randn(32, 64).bfloat16())
        y.float().mean().backward()
        optimizer.step()
    manifest = Run.open(seen.folder).manifest
    told = manifest["layers"][0]
    assert (told["package"], told["casts"]["input"]["scaling"], manifest["cast"]) == (
        "ottava",
        "delayed",
        {"ran": True},
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_s_layers_are_recorded_as_configured(recipe: str, tmp_path: Path) -> None:
    """They were simulated as tensorwise, whatever they cast."""
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    float8.convert_to_float8_training(model, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run", every=1):
        model(torch.randn(48, 64).bfloat16().requires_grad_()).square().sum().backward()
        optimizer.step()
    seen = Run.open(tmp_path / "run")
    layer = seen.manifest["layers"][0]
    rows = recipe != "tensorwise"
    assert (layer["package"], layer["recipe"], seen.manifest["cast"]) == ("torchao", recipe, {"ran": True})
    assert {name: (cast["format"], cast["granularity"], cast["scaling"]) for name, cast in layer["casts"].items()} == {
        "input": ("E4M3", "row" if rows else "tensor", "current"),
        "weight": ("E4M3", "row" if rows else "tensor", "current"),
        "grad_output": ("E4M3" if rows else "E5M2", "row" if rows else "tensor", "current"),
    }
    slots = seen.table().slots()
    assert {(slot.recipe, slot.source) for slot in slots} == {(recipe, "config")}
    assert "row" in {slot.granularity for slot in slots} or not rows
    assert recipe_of(model[0]) == ottava.get_recipe(recipe)
    assert ottava.Recipe.from_dict(seen.manifest["recipes"][recipe]) == ottava.get_recipe(recipe)


def test_the_packages_that_drive_the_training_are_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"ids": ids_of(i)[0], "labels": ids_of(i + 50)[0]}

    settings = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        max_grad_norm=1e-3,
        gradient_accumulation_steps=2,
        save_strategy="no",
        label_names=["labels"],
    )

    class Output(Classifier):
        def forward(self, ids: Tensor, labels: Tensor | None = None, **more: Any) -> Any:  # type: ignore[override]
            return {"loss": super().forward(ids, labels)}

    model = made(Output)
    with ottava.watch(None, tmp_path / "run") as seen:
        transformers.Trainer(model, settings, train_dataset=Rows()).train()
    run = Run.open(seen.folder)
    assert run.manifest["framework"] == ["accelerate", "transformers"]
    assert len(run.steps["step"]) == 3
    assert (run.steps["grad_norm"] > 1e-2).all()
    assert run.steps["grad_norm_used"] == pytest.approx([1e-3] * 3, rel=1e-2)
    assert set(run.steps["forwards"]) == {2.0}
    assert len(set(run.steps["input_hash"])) == 3, "also in the first step, when the watch first met the model"
    assert set(run.manifest["weights"]) == {name for name, _ in model.named_parameters()}


# --- amaxes ----------------------------------------------------------------------------------------------------------


def test_a_jump_between_two_looks_is_an_event(tmp_path: Path) -> None:
    """One expert's input is 2 ** 13 times larger in one step that has no look."""
    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ottava.watch(model, tmp_path / "run", every=1000, triggers={"scale_drift": None, "loss_z": None}):
        for step in range(1, 31):
            for expert, layer in enumerate(model):
                x = torch.randn(8, 16) * (2.0**13 if (step, expert) == (21, 1) else 1.0)
                layer(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = Run.open(tmp_path / "run")
    assert 21 not in run.table()["step"]
    jumps = [event for event in run.events if event["kind"] == "jump"]
    assert [(e["step"], e["layer"], e["tensor"]) for e in jumps] == [(21, "1", "input")]
    assert 2**12 < jumps[0]["after"] / jumps[0]["before"] < 2**14

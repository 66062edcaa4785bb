"""Every reader of files from outside, with whole files to damage: what `campaign.py` runs and counts.

A parser makes its files once (`make`), and reads a damaged copy of their folder (`read`). What it writes goes to the
`out` beside that folder.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import shutil
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from typer.main import get_command

import ottava
import ottava.debug
from fuzz import api, mutations
from ottava.base.settings import apply_override
from ottava.base.untrusted import parse_json, parse_yaml
from ottava.cli.app import app
from ottava.compat.checkpoints import import_checkpoint, read_state
from ottava.interop.contents import read_contents
from ottava.interop.event_file import EventWriter, read_scalars
from ottava.interop.importers import import_run
from ottava.interop.safe_pickle import check_tensors, load_pickle, load_torch
from ottava.kernels import gemm_choice
from ottava.lab.study import read_recipe
from ottava.measure.walk import measure
from ottava.nn.plan import Device
from ottava.prove.recorder import StepRecorder
from ottava.prove.traces import load_trace
from ottava.recipe import RECIPES
from ottava.record.amaxes import FILE_NAME, read_series
from ottava.record.dumps import Dumper, read_dump, save_batch
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter
from ottava.report.live import PageServer
from ottava.serving.export import export
from ottava.serving.rollout import certify, read_rollout
from ottava.serving.source import Source, Weight, of_folder
from ottava.train import run_folder
from ottava.train.checkpoint import (
    Checkpoint,
    collect_state,
    consolidate,
    find_checkpoint,
    read_checkpoint,
    restore_optimizer,
    restore_state,
    restore_weights,
    save_checkpoint,
)
from ottava.train.config import load_config
from ottava.train.data import gather
from ottava.train.demo import DemoFolder
from ottava.train.llama import as_llama, read_weights, texts_of
from ottava.train.loop import Trainer
from ottava.train.model import ByteTransformer, make_optimizer, store
from ottava.train.run_folder import RunFolder
from ottava.watching.config import WatchConfig
from ottava.weights.layouts import LAYOUTS
from prove.test_check import dumped
from serving.test_rollout import FORMATS, written
from train_samples import TINY

SHORT = (*TINY, "steps=2", "checkpoint.every=1", "evaluation={every: 0, batches: 1}", "recipe=delayed")


@dataclass(frozen=True)
class Parser:
    """A reader of files from outside."""

    name: str
    make: Callable[[Path], None]
    """Fills a folder with whole files."""
    read: Callable[[Path, Path], object]
    """(folder, out): reads the files; writes, if at all, to `out`, which does not exist."""
    change: Callable[[Path, Random], None] = mutations.folder
    """Damages the folder."""
    guarded: bool = True
    """Whether it may write only to `out`, and start nothing. Calls compile kernels."""


# --- settings --------------------------------------------------------------------------------------------------------


def _configs(folder: Path) -> None:
    first = load_config(None, ["watch={layers: ['*.0', 're:fc[12]'], every: 5}", "guard={}", "recipe=mxfp8"])
    (folder / "a.yaml").write_text(first.to_yaml())
    parallel = "parallel: {dp: 2, shard: 2, tp: 2, pp: 2, cp: 1, ep: 1, schedule: 1f1b, timeout: 300.0}"
    (folder / "b.yaml").write_text(
        f"{parallel}\nbatch_size: 64\nmicrobatches: 2\nrecipe: {{name: mine, fprop: {{lhs: {{format: E4M3}}, rhs: "
        f"{{format: E4M3}}}}}}\nmodel: {{layers: 4, kv_heads: 2, heads: 4}}\noptimizer: {{betas: [0.9, 0.95]}}\n"
    )


def _read_configs(folder: Path, _: Path) -> None:
    for path in sorted(folder.iterdir()):
        config = load_config(path)
        config.build_recipe(), config.digest(), config.older_digests(), config.to_yaml(), config.model.parameters


def _overrides(folder: Path) -> None:
    texts = ["model.layers=2", "optimizer.betas=[0.9, 0.99]", "parallel={dp: 2, tp: 2}", "watch.triggers={burst: 3}"]
    texts += ["recipe={name: x, fprop: {lhs: {format: E4M3}, rhs: {format: E4M3}}}", "data.path=/nowhere", "init=~/x"]
    (folder / "set.txt").write_text("\n".join([*texts, "parallel.schedule=interleaved", "accumulator=hopper"]))


def _read_overrides(folder: Path, _: Path) -> None:
    for line in (folder / "set.txt").read_bytes().decode(errors="surrogateescape").splitlines()[:40]:
        apply_override({}, line)
        load_config(None, [line])


TE_CONFIG = """stats:
  enabled: True
  layers: {layer_types: [fc1, qkv], layer_numbers: [1, 2]}
  transformer_engine:
    LogFp8TensorStats: {enabled: True, tensors: [activation], stats: [mxfp8_underflows%], freq: 10, start_step: 0}
    DumpTensors: {enabled: True, tensors: [weight], freq: 5, end_step: 20}
    FakeQuant: {enabled: True, gemms: [fprop], tensors: [activation], quant_format: FP8E4M3}
"""


def _watch_configs(folder: Path) -> None:
    (folder / "te.yaml").write_text(TE_CONFIG)
    (folder / "own.yaml").write_text(
        "layers: ['blocks.*', 're:fc[12]']\ntensors: [X, grad_output]\nrecipes: [blockwise]\nevery: 7\n"
        "triggers: {loss_z: 6.0, burst: 3}\ndump: {steps: [3], layers: '*.fc2', tensors: X}\ndetail: blocks\n"
        "interventions: [{layers: ['a'], gemms: [fprop], action: fake}]\n"
    )


def _read_watch_configs(folder: Path, _: Path) -> None:
    for path in sorted(folder.iterdir()):
        config = WatchConfig.load(path)
        config.watches("model.layers.11.mlp.down_proj", "input"), config.to_dict()


def _recipes(folder: Path) -> None:
    for name in ("mxfp8", "delayed", "nvfp4_rht", "guarded"):
        text = json.dumps(RECIPES[name].override("*.down_proj", "bf16").to_dict(), indent=1)
        (folder / f"{name}.yaml").write_text(text)


def _read_recipes(folder: Path, _: Path) -> None:
    for path in sorted(folder.glob("*.yaml")):
        recipe = read_recipe(str(path))
        recipe.for_layer("model.layers.0.mlp.down_proj").quantized, str(recipe), recipe.to_dict()


def _texts(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"rules": [{"id": "MINE", "support": ["amax > 1"]}], "q": {"ask": 1.5}}))
    (folder / "b.yaml").write_text("a: &x [1, 2.5, yes]\nb: {c: *x, d: '1'}\n")


def _read_texts(folder: Path, _: Path) -> None:
    parse_json((folder / "a.json").read_bytes())
    parse_yaml((folder / "b.yaml").read_text("latin-1"))


# --- run folders -----------------------------------------------------------------------------------------------------


def watched(folder: Path, seed: int = 0) -> Path:
    """A small run with everything in it that a reader asks for."""
    key = SlotKey("layers.1.mlp.down_proj", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    torch.manual_seed(seed)
    with RunWriter(folder) as writer:
        layer = {"name": key.layer, "kind": "fc2", "type": "Linear", "shape": [64, 64], "recipe": "tensorwise"}
        writer.describe(
            versions={"torch": "2"},
            host={"device": "cpu", "platform": "x", "world_size": 1},
            command=["python", "train.py"],
            config={"lr": 1e-3, "model": {"layers": 1}},
            settings={"recipes": ["tensorwise"], "every": 3},
            layers=[layer],
            coverage={"linear": 2, "seen": 1, "skipped": [{"name": "a", "why": "b"}]},
            overhead={"share": 0.1, "looks": 3, "watching_s": 1.0, "total_s": 5.0},
        )
        for step in range(1, 5):
            x = torch.randn(64, 64)
            writer.step(step, loss=2.0 - 0.1 * step, grad_norm=1.0)
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
        writer.event(2, "trigger", reason="clipping", layer=key.layer, tensor="input", value=0.1, threshold=0.01)
        writer.event(3, "burst", until=4)
        writer.event(3, "check", check="scale", layer=key.layer, value=2.0)
    return folder


def _read_run(folder: Path, _: Path) -> object:
    run = Run.open(folder)
    table = run.table()
    return run.steps, run.events, table.metric("row_sqnr_p50_db"), table.merged()


def _parts(folder: Path, chance: Random) -> None:
    """Only the Parquet part."""
    (part,) = (folder / "stats").glob("*.parquet")
    mutations.file(part, chance)


@functools.cache
def _command() -> Any:
    return get_command(app)  # which reads the types of every option of every command: half a second, paid once


def quiet(*words: object) -> None:
    """A command, in this process."""
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        _command().main(list(map(str, words)), standalone_mode=False)


def _read_by_command(folder: Path, out: Path) -> None:
    """One of the commands on runs; the page goes to `out`."""
    good = folder.parents[1] / "whole"
    commands = (
        ("report", folder, "--out", out), ("diagnose", folder, "--json"), ("compare", good, folder, "--json"),
        ("what-if", folder), ("table", folder), ("plot", folder, "--out", out.with_suffix(".svg")),
    )  # fmt: skip
    digest, manifest = 0, folder / "watch.json"
    with contextlib.suppress(OSError):  # a link may lead to what is no bytes
        digest = sum(manifest.read_bytes()) if manifest.is_file() else 0
    quiet(*commands[digest % len(commands)])


def _series(folder: Path) -> None:
    header = {"schema_version": 1, "tensors": [{"layer": "fc1", "tensor": "input", "format": "E4M3"}]}
    lines = (header, *({"step": step, "amax": [1.5]} for step in (1, 2)))
    (folder / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _dumps(folder: Path) -> None:
    save_batch(folder / "batch.safetensors", {"x": torch.ones(2), "y": [torch.zeros(1), 3]})
    x = torch.randn(32, 64)
    spec = ottava.RECIPES["mxfp8"].cells("weight")[0]
    assert spec is not None
    with RunWriter(folder / "run") as writer:
        dumper = Dumper(writer, 1 << 20)
        key = SlotKey("fc1", "input", "row", "mxfp8", "E4M3", "1x32", "e8m0", "current", "door")
        made = dumper.dump(1, key, x, ottava.quantize(x, spec))
        more = dumper.dump_gemms(1, "fc1", ottava.RECIPES["mxfp8"], x, x, torch.randn(32, 32))
    for path in (made, more):
        assert path is not None
        path.rename(folder / path.name)
    shutil.rmtree(folder / "run")


def _read_all(read: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    """Reads each entry of the folder with one function."""

    def every(folder: Path, _: Path) -> None:
        for path in sorted(folder.iterdir()):
            read(path)

    return every


# --- training runs and checkpoints -----------------------------------------------------------------------------------


@functools.cache
def _config() -> Any:
    return load_config(None, SHORT)


def _train(folder: Path) -> None:
    Trainer(_config(), folder).advance()


def _resume(folder: Path, _: Path) -> str | None:
    config = load_config(folder / "config.yaml")
    run = RunFolder(folder, _config(), resume=True, writes=True)
    try:
        checkpoint, problems = find_checkpoint(folder)
        restore_weights(checkpoint, _parts_of_run()[0])
        run.cut_history(checkpoint.step), config.digest()
        with mock.patch.object(run_folder, "_this_process", dict):  # which asks git
            run.begin(checkpoint.step, {})
        return f"skipped: {problems}" if problems else None
    finally:
        run.release()


def _parts_of_run() -> tuple[ByteTransformer, torch.optim.Optimizer]:
    config = _config()
    torch.manual_seed(0)
    model = ByteTransformer(config.model, config.sequence_length)
    store(model, config.build_recipe(), config.optimizer)
    return model, make_optimizer(model, config.optimizer)


def _rehashed(folder: Path, chance: Random) -> None:
    """Tensors of a checkpoint lost, renamed, of another shape, dtype or number, under a right hash."""
    (path,) = folder.glob("*.safetensors")
    whole = read_checkpoint(path)
    tensors, facts = dict(whole.tensors), {k: v for k, v in whole.metadata.items() if k != "sha256"}
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(list(tensors))
        value: Tensor = tensors.pop(name)
        number = chance.choice((float("nan"), float("inf"), -1.0, 1e30, 0.0))
        match chance.randrange(8):
            case 0:
                continue
            case 1:
                wrong = (f"{name}x", "model.x", "optimizer.x.exp_avg", f"{name.rpartition('.')[0]}.new")
                name = chance.choice((*wrong, *(n for n in mutations.NAMES if n.isprintable())))
            case 2:
                value = value.reshape(-1)[:-1] if value.numel() else torch.zeros(3)
            case 3:
                kinds = (torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64)
                value = value.to(chance.choice(kinds))
            case 4:
                value = torch.full_like(value, number) if value.is_floating_point() else torch.zeros(())
            case 5:
                value = value.reshape(*value.shape, 1)
            case 6:
                value = value.t().contiguous() if value.dim() == 2 else value.reshape(-1, 1)
            case _:
                facts = {str(k): str(v) for k, v in mutations.tree(facts, chance).items() if str(k).isprintable()}
        tensors[name] = value
    path.unlink()
    save_checkpoint(folder, whole.step, tensors, facts, keep=1)


def _one_checkpoint(folder: Path) -> None:
    model, optimizer = _parts_of_run()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(folder, 2, collect_state(model, optimizer), {"config": "x", "start": "0"}, keep=1)


def _restore(folder: Path, _: Path) -> None:
    model, optimizer = _parts_of_run()
    written = next(iter(folder.glob("step-*")), folder / "step-000002.safetensors")
    checkpoint: Checkpoint = read_checkpoint(written)
    weights = restore_weights(checkpoint, model)
    restore_optimizer(checkpoint, model, optimizer, weights)
    restore_state(checkpoint, model, optimizer)


def _shards(folder: Path) -> None:
    values = {"model.a": torch.randn(8, 4), "model.b": torch.ones(3), "optimizer.a.exp_avg": torch.zeros(8, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(values | {"random.0.cpu": torch.zeros(9, dtype=torch.uint8)}, storage_writer=writer, no_dist=True)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
    facts = {"format": "ottava.train.shards/1", "step": "2", "config": "x", "files": sizes}
    (folder / "ottava.json").write_text(json.dumps(facts, indent=2))


def _sized(folder: Path, chance: Random) -> None:
    """Damaged, with the sizes in the header made right half of the times."""
    mutations.folder(folder, chance)
    with contextlib.suppress(ValueError, TypeError, OSError, AttributeError):
        if (folder / "ottava.json").is_file() and chance.random() < 0.5:  # a FIFO would wait for ever
            facts = json.loads((folder / "ottava.json").read_text())
            facts["files"] = {f.name: f.stat().st_size for f in folder.glob("*.safetensors") if f.is_file()}
            (folder / "ottava.json").write_text(json.dumps(facts))


def _join(folder: Path, out: Path) -> None:
    find_checkpoint(folder)
    consolidate(folder, out, keep=True)


def _demo(folder: Path) -> None:
    DemoFolder.open(folder / "demo", {"steps": 12}).lock.release()  # type: ignore[union-attr]


def _read_demo(folder: Path, _: Path) -> None:
    DemoFolder.open(folder / "demo", {}, resume=True).lock.release()  # type: ignore[union-attr]


# --- checkpoints of others -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two linears, a norm, and names as Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict(
            {"up_proj": nn.Linear(128, 256, bias=False), "down_proj": nn.Linear(256, 128, bias=False)}
        )
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": layer})]), "norm": nn.RMSNorm(128)})


def _published(folder: Path) -> None:
    """A folder of each kind of scales, each of two files with an index or of one."""
    torch.manual_seed(0)
    names = {
        f"model.layers.0.mlp.{name}.weight": shape
        for name, shape in (("up_proj", (256, 128)), ("down_proj", (128, 256)))
    }
    weights = [Weight(name, torch.randn(shape).bfloat16(), True) for name, shape in names.items()]
    weights.append(Weight("model.norm.weight", torch.ones(128).bfloat16()))
    for number, layout in enumerate(name for name in LAYOUTS if name not in ("bf16", "modelopt")):
        here = folder / layout
        export(Source(tuple(weights), {"model_type": "llama"}), here, layout=layout, recast=True)
        if number % 2:
            tensors = load_file(here / "model.safetensors")
            (here / "model.safetensors").unlink()
            mapped = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
            for file in set(mapped.values()):
                save_file({name: t for name, t in tensors.items() if mapped[name] == file}, here / file)
            (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}, indent=1))


def _one_of(folder: Path, chance: Random) -> None:
    """Damages one of the folders and removes the others."""
    chosen = chance.choice(sorted(folder.iterdir()))
    for other in folder.iterdir():
        if other != chosen:
            shutil.rmtree(other)
    mutations.folder(chosen, chance)


def _inspect(folder: Path) -> None:
    str(read_contents(folder).to_dict())
    for weight in of_folder(folder).weights:
        weight.tensor  # noqa: B018  # reads it


def _export_again(folder: Path, out: Path) -> None:
    for here in sorted(folder.iterdir()):
        export(here, out / here.name, layout="bf16", recast=True)


def _llama(folder: Path) -> None:
    config = _config()
    torch.manual_seed(0)
    source = as_llama(ByteTransformer(config.model, config.sequence_length), config.model, config.sequence_length)
    export(source, folder, layout="bf16")


def _engine(folder: Path) -> None:
    _llama(folder)
    (folder / "engine.json").write_text(
        json.dumps({"kv_cache_dtype": "fp8", "compilation_config": {"pass_config": {"fuse_act_quant": True}},
                    "env": {"VLLM_USE_DEEP_GEMM_E8M0": "1"}}, indent=1)
    )  # fmt: skip
    (folder / "receipt.json").write_text(json.dumps({"schema_version": 1, **_receipt()}, indent=1))


def _receipt() -> dict[str, Any]:
    model, _ = _parts_of_run()
    model(torch.zeros(1, 8, dtype=torch.long))
    return dict(ottava.receipt(model).to_dict())


def _parity(folder: Path, out: Path) -> None:
    good, config, ran = folder.parents[1] / "whole", folder / "engine.json", folder / "receipt.json"
    quiet("parity", good, folder, "--engine-config", config, "--receipt", ran, "--no-kl", "--json", "--out", out)


def _answers(folder: Path, out: Path) -> None:
    good = folder.parents[1] / "whole"
    task = folder / "engine.json"
    quiet("eval", good, folder, "--text", task, "--length", 8, "--chunks", 2, "--generate", 0, "--json", "--out", out)


# --- files of torch.save, and pickles --------------------------------------------------------------------------------


def te_state() -> dict[str, Tensor]:
    """As TransformerEngine keeps it."""
    made = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(4, 3)}
    return made | {"scale_bwd": torch.ones(2), "amax_history_bwd": torch.ones(4, 2)}


def _pickles(folder: Path) -> None:
    for protocol in (3, 4, 5):
        (folder / f"{protocol}.pkl").write_bytes(pickle.dumps({**te_state(), "recipe": ["x", 1, None]}, protocol))


def ours() -> dict[str, Tensor]:
    """The state of a layer of ottava."""
    parts = {"amax_history": torch.ones(4), "scale": torch.tensor(448.0)}
    parts |= {"nonfinite_count": torch.tensor(0), "guard_count": torch.tensor(0)}
    names = ("input", "weight")
    return {f"fc.quantizers.{name}.{part}": value.clone() for name in names for part, value in parts.items()}


def _states(folder: Path) -> None:
    torch.save(ours(), folder / "new.pt")
    torch.save(ours(), folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(ours(), folder / "a.safetensors")
    inner = torch.frombuffer(bytearray(pickle.dumps(te_state())), dtype=torch.uint8)
    torch.save({"fc._extra_state": inner}, folder / "te.pt")
    old = io.BytesIO()
    torch.save(te_state(), old)
    torch.save({"fc._extra_state": old}, folder / "te1.pt")


def _checkpoints(folder: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64).to(torch.float8_e4m3fn)
    torch.save({"model": {"up.weight": torch.ones(2, 2), "fc": {"bias": torch.ones(3)}}}, folder / "a.pt")
    torch.save({"up.weight": torch.ones(2, 2)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"up._weight_qdata": weight, "up._weight_scale": torch.ones(64, 1)}, folder / "b.safetensors")


def _read_checkpoints(folder: Path, out: Path) -> None:
    for path in sorted(folder.iterdir()):
        check_tensors(load_torch(path), path.stat().st_size) if path.suffix == ".pt" else None
        read_state(path)
        import_checkpoint(path, out / path.name)


# --- logs and traces of others ---------------------------------------------------------------------------------------


def _events(folder: Path) -> None:
    writer = EventWriter(folder)
    for step in range(4):
        writer.scalars(step, {"loss": float(step), "layers.0.fc1_activation_cur_amax": 2.0})
    writer.close()


def _logs(folder: Path) -> None:
    line = "2025-01-01 - INFO - layers.{}.fc1_activation_{} \t iteration=000{}00 \t value=12.5\n"
    names = ("mse", "std", "max", "underflows%", "mxfp8_underflows%")
    for rank in (0, 1):
        text = "".join(line.format(layer, name, step) for layer in (0, 1) for name in names for step in (1, 2))
        (folder / f"nvdlfw_inspect_globalrank-{rank}.log").write_text(text)
    (folder / "config.yaml").write_text(TE_CONFIG)


def _tensor_dumps(folder: Path) -> None:
    x = torch.randn(32, 32)
    for step in (1, 2):
        name = f"decoder_layers_0_mlp_fc1_activation_iter_{step}.pt"
        torch.save({"high_precision": x, "quantized": x.to(torch.float8_e4m3fn).float()}, folder / name)


def _import(folder: Path, out: Path) -> object:
    return import_run(folder, out).table()


def _traces(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    with StepRecorder(model) as recorder:
        model(torch.randn(2, 4)).sum().backward()
    recorder.recording().save(folder / "own")
    dumped(recorder.recording(), folder / "msprobe")


def _check(folder: Path, _: Path) -> None:
    for here in sorted(folder.iterdir()):
        load_trace(here)
        quiet("check", folder.parents[1] / "whole" / here.name, here, "--json")


def _rollouts(folder: Path) -> None:
    for name in FORMATS:
        (folder / name).mkdir()
        written(name, folder / name)


# --- requests and calls: what a stranger sends, and what a user writes -----------------------------------------------


@functools.cache
def _server() -> PageServer:
    server = PageServer()
    server.publish('<p id="live"></p><script>0</script>SECRET')
    server.open = False  # a reader of events gets what there is, and ends
    return server


def _requests(folder: Path) -> None:
    (folder / "request.bin").write_bytes(_lines("/TOKEN/", ["Host: HOST"]))


def _lines(path: str, headers: list[str], method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {path} {version}", *headers, "", ""]).encode("utf-8", "surrogatepass")


def _request(folder: Path, chance: Random) -> None:
    """Paths, hosts, origins, methods that nobody should send; or another's bytes."""
    paths = ("/TOKEN/", "/TOKEN/events", "/TOKEN/events?page=", "/", "//TOKEN/", "/TOKEN/../", "/TOKEN/%2e%2e/", "*",
             "http://HOST/TOKEN/", "/TOKEN", "/é/", "/%00/", "/TOKEN/?" + "a" * 70000, "/TOKE", "/token/")  # fmt: skip
    hosts = (
        "Host: HOST",
        "Host: HOST",
        "Host: evil.example",
        "Host: HOST\r\nHost: HOST",
        "Host:",
        "host: HOST",
        "X: y",
    )
    more = ("Origin: null", "Origin: http://HOST", "Origin: http://evil", "Sec-Fetch-Site: cross-site", "a" * 70000,
            "Sec-Fetch-Site: same-origin", "Content-Length: -1", "Transfer-Encoding: chunked", ": x", "\0: \0",
            "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document", "Expect: 100-continue", "A: b\r\n c")  # fmt: skip
    extra = [chance.choice(more) for _ in range(chance.choice((0, 0, 1, 2, 150)))]
    method = chance.choice(("GET", "GET", "GET", "POST", "HEAD", "OPTIONS", "get", "G\tT", "", "TRACE"))
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/x", ""))
    made = _lines(chance.choice(paths) + str(chance.choice(("", *mutations.JUNK))), [chance.choice(hosts), *extra],
                  method, version)  # fmt: skip
    (folder / "request.bin").write_bytes(mutations.damaged(made, chance) if chance.random() < 0.3 else made)


def _answer(folder: Path, _: Path) -> None:
    """What the live page answers: the page only to its own address, and never its token to anybody else."""
    server = _server()
    own = f"127.0.0.1:{server.server_address[1]}"
    sent = (folder / "request.bin").read_bytes().replace(b"TOKEN", server.token.encode()).replace(b"HOST", own.encode())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        with contextlib.suppress(OSError):
            ours.sendall(sent[: 1 << 17])
            ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            server.finish_request(theirs, ("127.0.0.1", 0))
        theirs.close()
        got = b""
        with contextlib.suppress(ConnectionResetError):  # it left before it had read all
            while part := ours.recv(1 << 16):
                got += part
    may = server.token.encode() in sent.partition(b"\n")[0] and own.encode() in sent
    assert may or not (b"SECRET" in got or b"event:" in got or b" 200 " in got.partition(b"\n")[0]), got[:200]
    assert server.token.encode() not in got, got[:200]
    assert not got or b" 200 " in got[:20] or len(got) < 1200, got[:200]


def _call(name: str) -> Parser:
    """A function of the API: the damage is another call."""
    return Parser(
        f"call: {name}",
        lambda folder: (folder / "seed").touch(),
        lambda folder, _: api.draw(name, Random(seed)) if (seed := (folder / "seed").read_text()) else None,
        lambda folder, chance: (folder / "seed").write_text(str(chance.getrandbits(64))) and None,
        guarded=False,
    )


# --- small files -----------------------------------------------------------------------------------------------------


def _device(folder: Path) -> None:
    (folder / "device.json").write_text(json.dumps({"constants": {"bf16": 1e14, "capability": [9, 0]}}, indent=1))


def _choices(folder: Path) -> None:
    body = json.dumps({"call": "x", "milliseconds": {"a": 1.0, "b": 2.0}, "failed": {}, "made_of": {}, "biased": {}})
    (folder / "choice.json").write_text(json.dumps({"sha256": gemm_choice._hash(body), "body": body}, indent=1))


def _rehash_choice(folder: Path, chance: Random) -> None:
    """The body changed below a right hash, or the file."""
    path = folder / "choice.json"
    if chance.random() < 0.3:
        return mutations.file(path, chance)
    body = mutations.as_json(mutations.tree(json.loads(json.loads(path.read_text())["body"]), chance), chance)
    text = body.decode("utf-8", "replace")
    path.write_text(json.dumps({"sha256": gemm_choice._hash(text.encode("utf-8", "replace").decode()), "body": text}))
    return None


def _corpus(folder: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("The quick brown fox jumps over the lazy dog.\n" * 60)


def _read_corpus(folder: Path, _: Path) -> None:
    config = load_config(None, [*SHORT, f"data.path={json.dumps(str(folder))}", "data.max_bytes=100000"])
    _, corpus = gather(config)
    corpus.digest(), corpus.batch(seed=0, step=1, batch_size=2, length=32)
    texts_of([path for path in sorted(folder.iterdir()) if path.is_file()])


PARSERS: tuple[Parser, ...] = (
    Parser("config", _configs, _read_configs),
    Parser("overrides", _overrides, _read_overrides, mutations.one_file),
    Parser("watch config", _watch_configs, _read_watch_configs),
    Parser("recipe", _recipes, _read_recipes),
    Parser("json and yaml", _texts, _read_texts, mutations.one_file),
    Parser("run folder", lambda folder: (watched(folder), None)[1], _read_run),
    Parser("parquet", lambda folder: (watched(folder), None)[1], _read_run, _parts),
    Parser("commands on a run", lambda folder: (watched(folder), None)[1], _read_by_command),
    Parser("amax series", _series, lambda folder, _: read_series(folder)),
    Parser("dumps", _dumps, _read_all(read_dump)),
    Parser("training run", _train, _resume),
    Parser("checkpoint", _one_checkpoint, _restore, _rehashed),
    Parser("sharded checkpoint", _shards, _join, _sized),
    Parser("demo folder", _demo, _read_demo),
    Parser("load_fp8", _published, _read_all(lambda here: ottava.load_fp8(Net().bfloat16(), here)), _one_of),
    Parser("inspect", _published, _read_all(_inspect), _one_of),
    Parser("export of a folder", _published, _export_again, _one_of),
    Parser("weights of a Llama", _llama, lambda folder, _: read_weights(folder, _config().model)),
    Parser("engine config", _engine, _parity),
    Parser("eval", _engine, _answers),
    Parser("pickle", _pickles, _read_all(lambda path: load_pickle(path.read_bytes())), mutations.one_file),
    Parser("scaling state", _states, _read_all(read_contents)),
    Parser("torch.save", _checkpoints, _read_checkpoints),
    Parser("event file", _events, _read_all(lambda path: list(read_scalars(path)))),
    Parser("import of events", _events, _import),
    Parser("import of logs", _logs, _import),
    Parser("import of dumps", _tensor_dumps, _import),
    Parser("device constants", _device, _read_all(Device.read)),
    Parser("kernel choices", _choices, _read_all(gemm_choice._read), _rehash_choice),
    Parser("text to train on", _corpus, _read_corpus),
    Parser("traces of check", _traces, _check, _one_of),
    Parser("rollouts", _rollouts, _read_all(lambda here: [certify(read_rollout(p)) for p in here.iterdir()]), _one_of),
    Parser("requests of a live page", _requests, _answer, _request),
    *(_call(name) for name in api.CALLS),
)

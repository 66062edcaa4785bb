"""Published FP8 checkpoints: read as they are, with the bits of a dequantized base; bad folders end in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ottava
from ottava.base.untrusted import UntrustedError
from ottava.nn import load_fp8
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.weights.parameter import is_quantized_weight

HF = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(**weights: Any) -> dict[str, Any]:
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}},
    }


KINDS: dict[str, tuple[dict[str, Any], str, Granularity, Callable[[Tensor], Tensor]]] = {
    "fp8": (HF, "weight_scale_inv", BLOCK_128X128, lambda s: s),
    "fp8, ue8m0": (HF, "weight_scale_inv", BLOCK_128X128, lambda s: s.to(torch.float8_e8m0fnu)),
    "fp8, one scale": ({**HF, "weight_block_size": None}, "weight_scale_inv", PER_TENSOR, lambda s: s.reshape(())),
    "mxfp8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "weight_scale_inv",
        BLOCK_1X32,
        lambda s: s.to(torch.float8_e8m0fnu).view(torch.uint8),
    ),
    "tensor": (compressed(strategy="tensor"), "weight_scale", PER_TENSOR, lambda s: s.reshape(1)),
    "channel": (compressed(strategy="channel"), "weight_scale", PER_ROW, lambda s: s),
    "block": (compressed(strategy="block", block_structure=[128, 128]), "weight_scale", BLOCK_128X128, lambda s: s),
    "group": (
        compressed(strategy="group", group_size=32),
        "weight_scale",
        BLOCK_1X32,
        lambda s: s.to(torch.float8_e8m0fnu).view(torch.uint8),
    ),
}


class Net(nn.Module):
    """Names and kinds of tensors as a published model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 192, dtype=torch.bfloat16)
        self.up = nn.Linear(192, 256, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 192, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(192, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(192, 64, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


def write(
    folder: Path, kind: str, base: nn.Module, cast: tuple[str, ...] = ("up.weight", "down.weight")
) -> dict[str, Tensor]:
    """A checkpoint of a model; returns its state dict with the numbers that the codes stand for."""
    config, suffix, size, shaped = KINDS[kind]
    tensors, numbers = {}, {}
    for key, value in base.state_dict().items():
        tensors[key] = numbers[key] = value.clone()
        if key in cast or key.endswith("_proj.weight"):
            powers = "pow2" if "e8m0" in kind or size == BLOCK_1X32 else "fp32"
            codes = ottava.quantize(value, ottava.QuantizationSpec(ottava.E4M3, size, powers))
            tensors[key] = codes.data.contiguous()
            tensors[key.removesuffix("weight") + suffix] = shaped(codes.scale_inv).contiguous()
            numbers[key] = codes.dequantize(torch.bfloat16)
    tensors.pop("lm_head.weight", None)  # tied
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return numbers


def test_every_kind_gives_the_bits_of_a_dequantized_base(tmp_path: Path) -> None:
    """Outputs and gradients to inputs; frozen, in half of BF16's bytes, on real memory and from meta."""
    torch.manual_seed(0)
    for kind in KINDS:
        (folder := tmp_path / kind).mkdir()
        base = Net()
        base.load_state_dict(write(folder, kind, base))
        ottava.convert(base, "bf16", filter=lambda name, layer: name in ("up", "down"))  # the same kernels
        with torch.device("meta"):
            empty = Net()
        for model in (Net(), empty):
            report = load_fp8(model, folder)
            assert set(report.stored) == {"up.weight", "down.weight"}
            assert "2 weights as E4M3[" in str(report)
            assert is_quantized_weight(model.up.weight)
            assert not model.up.weight.requires_grad
            assert model.norm.weight.requires_grad
            assert model.lm_head.weight is model.embed.weight
            x = torch.randn(7, 192, dtype=torch.bfloat16)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, wanted = model(ours), base(theirs)
            y.sum().backward()
            wanted.sum().backward()
            assert torch.equal(y, wanted)
            assert torch.equal(ours.grad, theirs.grad)
            assert model.up.last_call.saved_bytes == 0  # of a frozen weight nothing is kept that is not there anyway
            assert report.nbytes <= 0.52 * report.bf16_bytes
        assert report.nbytes == sum(m.weight.nbytes for m in (model.up, model.down))


def test_recipes_multiply_the_codes_where_they_have_their_scales(tmp_path: Path) -> None:
    write(tmp_path, "fp8", Net())
    for recipe, size in (("blockwise_fp32", BLOCK_128X128), ("blockwise", None), ("tensorwise", None)):
        model = Net()
        if size is None:
            with pytest.raises(ValueError, match=f"recipe {recipe!r} cannot use .*: it is stored as E4M3"):
                load_fp8(model, tmp_path, recipe=recipe)
            assert type(model.up) is nn.Linear
            continue
        load_fp8(model, tmp_path, recipe=recipe)
        model(torch.randn(4, 192, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        rows = [row for row in ottava.receipt(model).rows if row.layer == "down" and row.gemm != "wgrad"]
        assert all(row.fp8 for row in rows)
    (powers := tmp_path / "powers").mkdir()
    write(powers, "fp8, ue8m0", Net())
    load_fp8(Net(), powers, recipe="blockwise")
    (blocks := tmp_path / "blocks").mkdir()
    write(blocks, "mxfp8", Net())
    model = Net()
    load_fp8(model, blocks, recipe="mxfp8")
    model(torch.randn(4, 192, dtype=torch.bfloat16))
    assert all(row.fp8 for row in ottava.receipt(model).rows if row.layer == "down" and row.gemm == "fprop")


def test_the_index_decides_between_files_that_hold_one_tensor(tmp_path: Path) -> None:
    """Whatever the order of their names: once the mapped file is the first one, once the last one."""
    numbers = write(tmp_path, "channel", Net())
    whole = load_tensors(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    wrong = {key: torch.zeros_like(whole[key]) for key in ("up.bias", "down.weight", "down.weight_scale")}
    last = {"norm.bias": whole.pop("norm.bias")}
    for right, other in (("a", "b"), ("b", "a")):
        save_file(whole, tmp_path / f"{right}.safetensors")
        save_file(wrong | last, tmp_path / f"{other}.safetensors")
        weight_map = dict.fromkeys(whole, f"{right}.safetensors") | {"norm.bias": f"{other}.safetensors"}
        index = {"weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        model = Net()
        load_fp8(model, tmp_path)
        assert torch.equal(model.down.weight.dequantize(), numbers["down.weight"])
        assert torch.equal(model.up.bias, numbers["up.bias"])


class Table(nn.Module):
    """Buffers that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("places", torch.arange(4), persistent=False)


class Filling(Net):
    """Like a model of Hugging Face's, it fills the buffers of a module that holds nothing else."""

    filled = ("table", "places")

    def __init__(self) -> None:
        super().__init__()
        self.rope = Table()

    def _init_weights(self, module: nn.Module) -> None:
        for name in self.filled if isinstance(module, Table) else ():
            getattr(module, name).copy_(torch.arange(4))


def test_no_buffer_stays_on_meta(tmp_path: Path) -> None:
    """Each is computed, or the load is refused by its name and changes nothing; histories start empty."""
    write(tmp_path, "tensor", Net())
    with torch.device("meta"):
        model, stuck = Filling(), Filling()
        forgotten = nn.Sequential(Net(), Table())[1], Net()
    load_fp8(model, tmp_path, recipe="delayed")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [name for name, tensor in tensors.items() if tensor.is_meta] == []
    assert torch.equal(model.rope.table, torch.arange(4.0))
    assert torch.equal(model.rope.places, torch.arange(4))
    assert not model.up.quantizers.input.amax_history.any()
    assert model(torch.randn(3, 192, dtype=torch.bfloat16)).isfinite().all()
    stuck.filled = ("table",)
    forgotten[1].rope = forgotten[0]
    for other, names in ((stuck, "rope.places"), (forgotten[1], "rope.table and rope.places")):
        with pytest.raises(UntrustedError, match=rf"lacks {names}: buffers of the model on the meta device"):
            load_fp8(other, tmp_path)
        assert all(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
        assert type(other.up) is nn.Linear


def test_a_llama_from_meta_gives_the_logits_of_one_from_memory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    write(tmp_path, "fp8", model)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).bfloat16().eval()
    empty.tie_weights()
    ids = torch.randint(0, 64, (2, 16))
    for one in (model, empty):
        load_fp8(one, tmp_path)
    assert torch.equal(empty.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(empty(ids).logits, model(ids).logits)


def twice() -> bytes:
    """A file of safetensors whose header has a tensor twice, at one place, as two dtypes."""
    header = b",".join(b'"a":{"dtype":"%s","shape":[1],"data_offsets":[0,4]}' % kind for kind in (b"F32", b"I32"))
    return (len(header) + 2).to_bytes(8, "little") + b"{" + header + b"}" + bytes(4)


def load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def bad_folders(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Part of the message -> what of a good folder is replaced."""

    def with_config(**changes: Any) -> dict[str, Any]:
        return {"config": {"quantization_config": {**config["quantization_config"], **changes}}}

    def with_tensors(drop: str = "", **changes: Tensor) -> dict[str, Any]:
        named = {key.replace("__", "."): value for key, value in changes.items()}
        return {"tensors": {k: v for k, v in {**tensors, **named}.items() if k != drop}}

    scales = tensors["up.weight_scale_inv"]
    nan, codes = torch.full_like(scales, float("nan")), tensors["up.weight"].clone()
    codes.view(torch.uint8)[3, 5] = 0xFF
    whole = dict.fromkeys(tensors, "model.safetensors")
    return {
        "has no config.json": {"config": None},
        "config.json is no JSON": {"config": "{"},
        "config.json has no quantization_config": {"config": {}},
        "unknown quant_method 'fp9'; did you mean 'fp8'": with_config(quant_method="fp9"),
        "unknown quant_method 'awq'": with_config(quant_method="awq"),
        "quant_method is 8; needs a text": with_config(quant_method=8),
        "block size [128]; needs two numbers": with_config(weight_block_size=[128]),
        "needs (3, 4) scales": with_config(weight_block_size=[64, 64]),
        "unknown strategy 'chanel'; did you mean 'channel'": {
            "config": {"quantization_config": compressed(strategy="chanel")}
        },
        "weights of 4 bits, type 'int'": {"config": {"quantization_config": compressed(num_bits=4, type="int")}},
        "weights of None bits, type None": {
            "config": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": None}}}
        },
        "without config_groups": {"config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
        "up.weight is in FP8, and has neither weight_scale_inv": with_tensors("up.weight_scale_inv"),
        "has shape (1, 1); a weight (256, 192) needs (2, 2) scales": with_tensors(
            up__weight_scale_inv=torch.ones(1, 1)
        ),
        "negative or non-finite scales": with_tensors(up__weight_scale_inv=nan),
        "up.weight_scale_inv holds negative or": with_tensors(up__weight_scale_inv=-scales),
        "has dtype torch.int32": with_tensors(up__weight_scale_inv=torch.ones(2, 2, dtype=torch.int32)),
        "has dtype torch.int64": with_tensors(up__weight_scale_inv=torch.ones(2, 2, dtype=torch.int64)),
        "has dtype torch.float64": with_tensors(up__weight_scale_inv=scales.double()),
        "up.weight has both weight_scale_inv and weight_scale": with_tensors(up__weight_scale=scales.clone()),
        "up.weight holds codes that are NaN": with_tensors(up__weight=codes),
        "up.bias has dtype torch.int64; the model's has torch.bfloat16": with_tensors(up__bias=torch.ones(256).long()),
        "up.bias has dtype torch.bool": with_tensors(up__bias=torch.ones(256).bool()),
        "up.bias has dtype torch.complex64": with_tensors(up__bias=torch.ones(256, dtype=torch.complex64)),
        "norm.weight holds 192 numbers that are not finite": with_tensors(norm__weight=torch.full((192,), torch.nan)),
        "norm.bias holds 192 numbers that are not finite in torch.bfloat16": with_tensors(
            norm__bias=torch.full((192,), 3.4e38)
        ),
        "up.weight has shape (192, 256); the model's has (256, 192)": with_tensors(
            up__weight=tensors["up.weight"].t().contiguous()
        ),
        "norm.weight has shape (5,)": with_tensors(norm__weight=torch.ones(5)),
        "lacks norm.bias of the model": with_tensors("norm.bias"),
        "holds other.weight, which the model does not have": with_tensors(other__weight=torch.ones(2)),
        "extra.weight is in FP8, and the model has no such weight": with_tensors(
            extra__weight=tensors["up.weight"].clone()
        ),
        "embed.weight is in FP8, and a Embedding has it": with_tensors(
            embed__weight=tensors["embed.weight"].to(torch.float8_e4m3fn)
        ),
        "up.weight is E5M2": with_tensors(up__weight=tensors["up.weight"].view(torch.float8_e5m2)),
        "model.safetensors is no safetensors file, or cut short": {"bytes": b"\x00" * 40},
        "cannot be read: No such file": {"bytes": None},
        "names '../model.safetensors', which is no file of this folder": {
            "index": {"weight_map": {"up.weight": "../model.safetensors"}}
        },
        "has no weight_map": {"index": {"weight_map": [1]}},
        "no weight_map from tensors": {"index": {"weight_map": {"up.weight": None}}},
        "maps other.bias to model.safetensors, which does not hold it": {
            "index": {"weight_map": {**whole, "other.bias": "model.safetensors"}}
        },
        "does not name up.bias, which its files hold": {
            "index": {"weight_map": {key: name for key, name in whole.items() if key != "up.bias"}}
        },
        "index.json has the key 'a' twice": {"index": '{"weight_map": {"a": "b", "a": "c"}}'},
        "header of model.safetensors has the key 'a' twice": {"bytes": twice()},
    }


def test_bad_folders_end_in_one_sentence_and_change_nothing(tmp_path: Path) -> None:
    """Missing and wrong configs, scales, shapes, files; each names what is wrong and what is needed."""
    write(tmp_path, "fp8", Net())
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_tensors(tmp_path / "model.safetensors")
    cases = bad_folders(config, tensors)
    with pytest.raises(TypeError, match="load_fp8: got None; needs a path: the folder of a published checkpoint"):
        ottava.load_fp8(Net(), None)  # type: ignore[arg-type]
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for number, (message, case) in enumerate(cases.items()):
        (folder := tmp_path / str(number)).mkdir()
        said = case.get("config", config)
        if said is not None:
            (folder / "config.json").write_text(said if isinstance(said, str) else json.dumps(said))
        save_file({k: v.contiguous() for k, v in case.get("tensors", tensors).items()}, folder / "model.safetensors")
        if "bytes" in case:
            (folder / "model.safetensors").unlink()
            if case["bytes"] is not None:
                (folder / "model.safetensors").write_bytes(case["bytes"])
        if "index" in case:
            (folder / "model.safetensors.index.json").write_text(
                case["index"] if isinstance(case["index"], str) else json.dumps(case["index"])
            )
        with pytest.raises(UntrustedError, match=re.escape(message)) as caught:
            load_fp8(model, folder)
        assert str(folder) in str(caught.value)
        assert type(model.up) is nn.Linear
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(UntrustedError, match="is no folder"):
        load_fp8(model, tmp_path / "nowhere")


def test_adapters_of_peft_train_on_top_in_both_orders(tmp_path: Path) -> None:
    """Loaded and then wrapped, or wrapped and then loaded: logits, input gradients and those of the adapters are the
    bits of a dequantized base. Merging them into codes is refused by name."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)

    def made() -> Any:
        return transformers.LlamaForCausalLM(config).bfloat16()

    def wrapped(model: Any) -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(model, adapters)

    base = made()
    base.load_state_dict(write(tmp_path, "fp8", base), strict=False)
    ottava.convert(base, "bf16", filter=lambda name, layer: name.endswith("_proj"))
    after = made()
    load_fp8(after, tmp_path)
    before = wrapped(made())
    assert len(load_fp8(before, tmp_path).stored) == 14
    ids = torch.randint(0, 64, (2, 16))
    embedded = base.get_input_embeddings()(ids).detach()
    results = []
    for model in (wrapped(base), wrapped(after), before):
        model.train()
        x = embedded.clone().requires_grad_()
        out = model(inputs_embeds=x, labels=ids)
        out.loss.backward()
        results.append([out.logits, x.grad, *(p.grad for n, p in model.named_parameters() if "lora_" in n)])
    for others in results[1:]:
        assert len(others) == 2 + 8
        assert all(torch.equal(a, b) for a, b in zip(others, results[0], strict=True))
    with pytest.raises(NotImplementedError, match="stored as E4M3"):
        before.merge_and_unload()


def test_a_round_trip_trains_on_from_the_same_bits(tmp_path: Path) -> None:
    """Export, import as codes or as numbers, one step: codes, outputs, gradients and the stepped codes, bit for bit."""
    from ottava.serving.export import export

    for recipe, layout in (
        ("tensorwise", "compressed-tensors-tensor"),
        ("blockwise_fp32", "fp8-block"),
        ("blockwise", "fp8-block-ue8m0"),
        ("mxfp8", "mxfp8"),
    ):
        torch.manual_seed(0)
        ids, x = tmp_path / layout, torch.randn(128, 256).bfloat16()
        made = nn.Sequential(nn.Linear(256, 128, bias=False)).bfloat16()
        ottava.convert(made, recipe, weights="fp8")
        export(made, ids, layout=layout, config={"model_type": "own"})
        again = nn.Sequential(nn.Linear(256, 128, bias=False)).bfloat16()
        report = ottava.load_fp8(again, ids, recipe=recipe, weights="fp8")
        assert list(report.stored) == ["0.weight"]
        ours, theirs = made[0].weight, again[0].weight
        assert theirs.requires_grad
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scale_inv, theirs.scale_inv)
        outputs = []
        for model in (made, again):
            y = model(x)
            y.float().square().mean().backward()
            outputs.append((y, model[0].weight.grad))
            ottava.optim.SGD(model.parameters(), 0.5, master="fp32").step()
        assert torch.equal(outputs[0][0], outputs[1][0])
        assert torch.equal(outputs[0][1], outputs[1][1])
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        plain = nn.Sequential(nn.Linear(256, 128, bias=False)).bfloat16()
        assert not ottava.load_fp8(plain, ids, weights="bf16").stored
        codes = nn.Sequential(nn.Linear(256, 128, bias=False)).bfloat16()
        ottava.load_fp8(codes, ids)
        assert torch.equal(plain[0].weight, codes[0].weight.dequantize())
        assert plain[0].weight.requires_grad
        assert torch.equal(plain(x), codes(x))
    with pytest.raises(ValueError, match="unknown weights 'int4'"):
        ottava.load_fp8(plain, ids, weights="int4")  # type: ignore[arg-type]

"""Adapters for kernels that people have, to run and to copy from.

One that needs a package that is missing, or a kernel that this machine lacks, raises NotImplementedError: not tried.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import need_known, unknown_name
from ottava.numerics.formats import Format, get_format
from ottava.numerics.rounding import decode, encode
from ottava.prove.adapters import KINDS, KernelAdapter, adapter
from ottava.prove.judge import cast_spec, gemm_specs, operand, stored

Function = Callable[..., Any]
Row = tuple[str, str, Mapping[str, Any], Function]
"""A name, a kind, the facts, the function."""


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"needs the package {name.partition('.')[0]}, which is not installed") from error


# --- codes -----------------------------------------------------------------------------------------------------------


def _codecs() -> Iterator[Row]:
    eight, small = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"), ("e2m1", "e2m3", "e3m2")
    made: tuple[tuple[str, tuple[str, ...], Function, Function], ...] = (
        # torch's casts of numbers beyond the format differ between versions: clamp first
        ("torch", eight, lambda x, fmt: x.clamp(-fmt.max, fmt.max).to(fmt.dtype), lambda codes, fmt: codes.float()),
        ("ml_dtypes", (*eight, *small), _ml_encode, _ml_decode),
        ("gfloat", (*eight[:2], *small), _gfloat_encode, _gfloat_decode),
        ("torchao", small, _torchao_encode, partial(_torchao_codec, "_floatx_unpacked_to_f32")),
        ("ottava", (*eight, *small), encode, decode),
    )
    for library, names, to_codes, to_values in made:
        for name in names:
            fmt, facts = get_format(name), {"format": name}
            beyond = "inf" if fmt.has_infinity else "nan" if fmt.has_nan else "saturate"
            written = facts | ({"overflow": beyond} if library == "ml_dtypes" else {})
            yield f"{library}.encode.{name}", "encode", written, partial(to_codes, fmt=fmt)
            yield f"{library}.decode.{name}", "decode", facts, partial(to_values, fmt=fmt)


def _bytes(codes: Tensor) -> Any:
    return codes.cpu().contiguous().view(torch.uint8).numpy()


def _ml_dtype(fmt: Format) -> Any:
    end = "" if fmt.has_infinity or fmt.name.endswith("FNUZ") else "fn"
    return getattr(_package("ml_dtypes"), f"float{fmt.bits}_{fmt.name.lower()}{end}")


def _ml_encode(x: Tensor, fmt: Format) -> Tensor:
    import numpy

    # numpy's warnings of overflow are what the adapter declares
    with numpy.errstate(all="ignore"):
        codes = x.float().cpu().numpy().astype(_ml_dtype(fmt)).view(numpy.uint8)
    return torch.from_numpy(codes.copy()).to(x.device)


def _ml_decode(codes: Tensor, fmt: Format) -> Tensor:
    return torch.from_numpy(_bytes(codes).view(_ml_dtype(fmt)).astype("float32")).to(codes.device)


def _gfloat_info(fmt: Format) -> Any:
    return getattr(_package("gfloat.formats"), f"format_info_ocp_{fmt.name.lower()}")


def _gfloat_encode(x: Tensor, fmt: Format) -> Tensor:
    info, gfloat = _gfloat_info(fmt), _package("gfloat")
    numbers = (x if info.num_nans else x.nan_to_num(0.0)).double().cpu().numpy()
    values = gfloat.round_ndarray(info, numbers, gfloat.RoundMode.TiesToEven, True)
    return torch.from_numpy(gfloat.encode_ndarray(info, values).astype("uint8")).reshape(x.shape).to(x.device)


def _gfloat_decode(codes: Tensor, fmt: Format) -> Tensor:
    values = _package("gfloat").decode_ndarray(_gfloat_info(fmt), _bytes(codes))
    return torch.from_numpy(values).float().reshape(codes.shape).to(codes.device)


def _torchao_encode(x: Tensor, fmt: Format) -> Tensor:
    if not x.numel() or x.dim() == 0:
        raise NotImplementedError("torchao casts matrices with elements")
    return _torchao_codec("_f32_to_floatx_unpacked", x.float(), fmt)


def _torchao_codec(name: str, x: Tensor, fmt: Format) -> Tensor:
    run: Function = getattr(_package("torchao.prototype.custom_fp_utils"), name)
    result: Tensor = run(x.contiguous(), fmt.exponent_bits, fmt.mantissa_bits)
    return result


# --- casts and GEMMs -------------------------------------------------------------------------------------------------

_GEMMS = ("reference", "native_gemm", "native_gemm batch_invariant", "native_decoded", "bf16_mm", "scaled_mm",
          "triton_gemm")  # fmt: skip
_SCALED = ("tensorwise", "rowwise", "blockwise", "blockwise_fp32", "mxfp8")


def _interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 lets Triton's kernels run on a CPU."""
    return importlib.util.find_spec("triton") is not None and bool(_package("triton").knobs.runtime.interpret)


def _casts() -> Iterator[Row]:
    kernels = {"": "", "reference.": "reference", "native.": "native.quantize", "triton.": "triton.quantize"}
    for recipe in (*_SCALED, "mxfp4", "nvfp4"):
        for side in ("x", "weight", "grad")[: 2 if recipe == "mxfp4" else 3]:
            facts = {"recipe": recipe, "operand": side}
            for name, module in kernels.items():
                cast = partial(_our_cast, spec=cast_spec(facts), module=module)
                yield f"ottava.{name}cast.{recipe}.{side}", "cast", facts, cast
    for recipe, cast in (
        ("tensorwise", partial(_torchao_cast, rows=False)),
        ("rowwise", partial(_torchao_cast, rows=True)),
        ("mxfp8", partial(_torchao_mx, mode="RCEIL")),
        ("mxfp8_floor", partial(_torchao_mx, mode="FLOOR")),
    ):
        yield f"torchao.cast.{recipe}.x", "cast", {"recipe": recipe}, cast


def _our_cast(x: Tensor, data: Tensor, scale_inv: Tensor, spec: Any, module: str) -> tuple[Tensor, Tensor]:
    if not module:
        from ottava.ops.quantize import quantize

        cast = quantize(x, spec)
        return cast.data, stored(cast.scale_inv, spec)
    run = importlib.import_module(f"ottava.kernels.{module}")
    reason = run.supports_quantize(x, spec)
    if module.startswith("triton") and x.numel() and _interpreted():
        reason = run.refuses(spec)  # a CPU is no reason there
    if reason is not None:
        raise NotImplementedError(reason)
    made = run.plan_quantize(x, spec)(x, None, None) if hasattr(run, "plan_quantize") else run.quantize(x, spec)
    return made[0], stored(made[1], spec)


def _torchao_cast(x: Tensor, data: Tensor, scale_inv: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
    if not x.numel():
        raise NotImplementedError("torchao takes no amax of an empty tensor")
    utils, by = _package("torchao.float8.float8_utils"), _package("torchao.float8.config").ScalingGranularity
    how = {"scaling_granularity": by.AXISWISE, "axiswise_dim": -1, "round_scales_to_power_of_2": True} if rows else {}
    scale = utils.tensor_to_scale(x, torch.float8_e4m3fn, **how)
    # as torchao's own cast does: BF16 times a scale of no dimensions would stay BF16
    return utils.to_fp8_saturated((x if rows else x.float()) * scale, torch.float8_e4m3fn), scale.reciprocal()


def _torchao_mx(x: Tensor, data: Tensor, scale_inv: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    mx = _package("torchao.prototype.mx_formats.mx_tensor")
    if not x.numel() or x.shape[1] % 32:
        raise NotImplementedError("torchao takes whole blocks of 32")
    scale, codes = mx.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode[mode])
    return codes, scale.view(torch.uint8).reshape(scale_inv.shape)


def _gemms() -> Iterator[Row]:
    for recipe in (*_SCALED, "mxfp4", "nvfp4"):
        specs = gemm_specs({"recipe": recipe})
        ours = partial(_our_gemm, specs=specs)
        for out in ("bfloat16", "float32"):
            for kernel in (None, *_GEMMS):
                name = f"ottava.{kernel.replace(' ', '.')}.gemm" if kernel else "ottava.gemm"
                yield f"{name}.{recipe}.{out}", "gemm", {"recipe": recipe, "out": out}, partial(ours, kernel=kernel)
        named = {"recipe": recipe, "out": "float32", "accumulator": "hopper"}
        hopper = partial(ours, kernel="accumulator_reference", profile="hopper")
        yield f"ottava.gemm.{recipe}.hopper", "gemm", named, hopper
        grouped = partial(_grouped, gemm=ours, rows=specs[0].granularity.rows == 1)
        yield f"ottava.grouped.{recipe}", "grouped", {"recipe": recipe, "out": "bfloat16"}, grouped
    for recipe in ("tensorwise", "rowwise"):
        for out in ("bfloat16", "float32"):
            yield f"torch.scaled_mm.{recipe}.{out}", "gemm", {"recipe": recipe, "out": out}, _torch_scaled_mm


def _our_gemm(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor, specs: Any,
    kernel: str | None = None, profile: str | None = None,
) -> Tensor:  # fmt: skip
    from ottava.ops.gemm import gemm

    sides = operand(a, scale_inv_a, specs[0]), operand(b, scale_inv_b, specs[1])
    try:
        return gemm(*sides, out_dtype=out.dtype, backend=kernel, accumulator=profile)
    except ValueError as error:
        if kernel is None:
            raise
        raise NotImplementedError(str(error)) from error  # a kernel asked for by name says why it does not run


def _grouped(a: Tensor, b: Tensor, *scales: Tensor, gemm: Function, rows: bool) -> None:
    of_a, of_b, ends, out = scales
    for group, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        if stop > start:
            scale = of_a[start:stop] if rows else of_a
            out[start:stop] = gemm(a[start:stop], b[group], scale, of_b[group], out)


def _torch_scaled_mm(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    if 0 in (*a.shape, *b.shape) or a.shape[1] % 16 or b.shape[0] % 16:
        raise NotImplementedError("K and N in multiples of 16, as cuBLASLt needs them, and no empty operand")
    if scale_inv_a.dim() and out.dtype != torch.bfloat16 and a.is_cuda:
        raise NotImplementedError("scales of rows give bfloat16 only")
    turned = scale_inv_b.t() if scale_inv_b.dim() else scale_inv_b
    operands = a.contiguous(), b.contiguous().t(), scale_inv_a.contiguous(), turned.contiguous()
    try:
        return torch._scaled_mm(*operands, out_dtype=out.dtype)
    except RuntimeError as error:
        if scale_inv_a.dim() and "numel() == 1" in str(error):  # torch 2.11 on a CPU
            raise NotImplementedError("this torch takes one scale for a tensor here") from error
        raise


# --- layers, attention, optimizers -----------------------------------------------------------------------------------


def _layers() -> Iterator[Row]:
    for library, recipes, linear in (
        ("ottava", ("bf16", *_SCALED, "mxfp4", "nvfp4", "rowwise_with_gw_hp"), _our_linear),
        ("transformer_engine", ("tensorwise", "mxfp8"), _te_linear),
        ("torchao", ("rowwise", "rowwise_with_gw_hp"), _torchao_linear),
    ):
        for recipe in recipes:
            run: Function = partial(_linear, made=linear, recipe=recipe)
            yield f"{library}.linear.{recipe}", "linear", {"recipe": recipe}, run
    torchs = torch.nn.functional.scaled_dot_product_attention
    for causal, name in ((False, "full"), (True, "causal")):
        facts: dict[str, Any] = {"causal": causal}
        yield f"torch.attention.{name}", "attention", facts, partial(_attended, run=partial(torchs, is_causal=causal))
        for way, told in (("", facts), ("fp8.", facts | {"recipe": "fp8"})):
            run = partial(_attended, run=partial(_our_attention, **told))
            yield f"ottava.attention.{way}{name}", "attention", told, run
    facts = {"lr": 1e-2, "weight_decay": 0.1}
    yield "torch.adamw", "optimizer", facts, partial(_stepped, make=torch.optim.AdamW)
    for said, moments in (("float32", "fp32"), ("bfloat16", "bf16"), ("int8", "int8"), ("fp8", "fp8")):
        run = partial(_stepped, make=partial(_our_adamw, moments=moments))
        yield f"ottava.adamw.{moments}", "optimizer", facts | {"moments": said}, run


def _linear(x: Tensor, weight: Tensor, grad: Tensor, made: Function, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw; made: (x, sizes of a layer, recipe) -> the layer, and what runs it."""
    sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False, "device": weight.device}
    layer, run = made(x, sizes, weight.dtype, recipe)
    layer.weight.data.copy_(weight)
    leaf = x.detach().clone().requires_grad_()
    y = run(leaf)
    y.backward(grad.reshape(y.shape))
    assert leaf.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


def _our_linear(x: Tensor, sizes: dict[str, Any], dtype: torch.dtype, recipe: str) -> tuple[Any, Function]:
    from ottava.nn.layer import Linear

    layer = Linear(**sizes, dtype=dtype, recipe=recipe)
    return layer, layer


def _te_linear(x: Tensor, sizes: dict[str, Any], dtype: torch.dtype, recipe: str) -> tuple[Any, Function]:
    te = importlib.import_module("ottava.compat.transformer_engine.pytorch")
    recipes = importlib.import_module("ottava.compat.transformer_engine.common.recipe")
    if x[..., 0].numel() % 16 or x.shape[-1] % 32 or sizes["out_features"] % 32:
        raise NotImplementedError("TransformerEngine takes multiples of 16, and of 32 for MXFP8")
    layer = te.Linear(**sizes | {"device": str(sizes["device"])}, params_dtype=dtype)
    chosen = {"tensorwise": recipes.Float8CurrentScaling, "mxfp8": recipes.MXFP8BlockScaling}[recipe]()
    return layer, te.autocast(enabled=True, recipe=chosen)(layer)


def _torchao_linear(x: Tensor, sizes: dict[str, Any], dtype: torch.dtype, recipe: str) -> tuple[Any, Function]:
    if not x.numel() or x[..., 0].numel() % 16 or x.shape[-1] % 16 or sizes["out_features"] % 16:
        raise NotImplementedError("torch's scaled GEMM takes multiples of 16")
    config = _package("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe)
    layer = torch.nn.Linear(**sizes, dtype=dtype)
    float8 = _package("torchao.float8.float8_linear").Float8Linear
    layer = float8.from_float(layer, config=replace(config, emulate=True))
    return layer, layer


def _attended(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, run: Function) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    o.backward(grad)
    return (o.detach(), *(x.grad for x in leaves))


def _our_attention(*inputs: Tensor, causal: bool, recipe: str = "bf16") -> Tensor:
    from ottava.nn.attention import DotProductAttention
    from ottava.recipe import AttentionRecipe, get_recipe

    fp8 = replace(get_recipe("bf16"), attention=AttentionRecipe() if recipe == "fp8" else None)
    mask = "causal" if causal else "no_mask"
    attended: Tensor = DotProductAttention(mask=mask, layout="bhsd", recipe=fp8)(*inputs)
    return attended


def _stepped(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int, make: Function) -> None:
    if not state:
        leaf = torch.nn.Parameter(parameter)
        state.update(leaf=leaf, optimizer=make([leaf], lr=1e-2, weight_decay=0.1))
    state["leaf"].grad = grad.clone()
    state["optimizer"].step()


def _our_adamw(parameters: list[Tensor], moments: Any, **settings: Any) -> Any:
    from ottava.optim.rules import AdamW

    return AdamW(parameters, moments=moments, **settings)


def ready() -> Mapping[str, Function]:
    """Every ready adapter by its name: LIBRARY.KIND.WHAT.

    Example:
        >>> ready()["torch.decode.e4m3"].adapter_kind
        'decode'
    """
    rows = (row for made in (_codecs, _casts, _gemms, _layers) for row in made())
    return MappingProxyType({name: adapter(kind, **what)(partial(function)) for name, kind, what, function in rows})


def load(name: str, kind: str | None = None, **changed: Any) -> KernelAdapter:
    """The adapter of that name: MODULE:FUNCTION, FILE.py:FUNCTION, or one of `ready`.

    Args:
        kind: replaces, or gives, the kind of the function.
        changed: facts that replace those of the decorator; None changes nothing.
    Raises:
        ValueError: no such function, or one without a kind.  ImportError: the module does not import.

    Example:
        >>> load("torch.decode.e4m3").what
        mappingproxy({'format': 'e4m3'})
    """
    module, colon, function = name.partition(":")
    found: Any = ready().get(name)
    if found is None:
        if not colon or not function:
            raise ValueError(f"certify: {unknown_name('adapter', name, ready())[:300]}; or give MODULE:FUNCTION")
        found = getattr(_module(module), function, None)
        if not callable(found):
            raise ValueError(f"certify: {module} has no function {function!r}; needs an adapter, see docs/certify.md")
    own = kind or getattr(found, "adapter_kind", None)
    if own is None:
        how = "mark it with @ottava.prove.adapter(KIND, ...), or give --kind"
        raise ValueError(f"certify: {name} is no adapter: {how}")
    need_known("certify", "kind", own, KINDS)
    told = {key: value for key, value in changed.items() if value is not None}
    return KernelAdapter(name, found, own, MappingProxyType(dict(getattr(found, "adapter_what", {})) | told))


def _module(name: str) -> Any:
    """Imports a module, or a file; the folder that the command runs in counts, as for `python -m`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"certify: no file {name}; give one with an adapter, see docs/certify.md")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ImportError(f"certify: {name} does not import: {type(error).__name__}: {error}") from error
    return module

"""Adapters for kernels that people have, to run and to copy from.

One that needs a package that is missing, or a kernel that this machine lacks, raises NotImplementedError: not tried.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import unknown_name
from ottava.numerics.formats import FORMATS, get_format
from ottava.numerics.rounding import decode, encode
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.prove.adapters import KINDS, KernelAdapter, adapter
from ottava.prove.judge import cast_spec, gemm_specs, scales_of, stored

Function = Callable[..., Any]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"needs the package {name.partition('.')[0]}, which is not installed") from error


# --- codes -----------------------------------------------------------------------------------------------------------


def _codecs() -> Iterator[tuple[str, Function]]:
    for name in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        fmt = get_format(name)

        yield f"torch.encode.{name}", adapter("encode", format=name)(partial(_torch_encode, fmt=fmt))
        yield f"torch.decode.{name}", adapter("decode", format=name)(lambda codes: codes.float())
    for name, dtype in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2"), ("e4m3fnuz", "float8_e4m3fnuz"),
                        ("e5m2fnuz", "float8_e5m2fnuz"),
                        ("e2m1", "float4_e2m1fn"), ("e2m3", "float6_e2m3fn"), ("e3m2", "float6_e3m2fn")):  # fmt: skip
        kind = {"e5m2": "inf"}.get(name, "nan" if name.startswith(("e4", "e5")) else "saturate")
        yield (
            f"ml_dtypes.encode.{name}",
            adapter("encode", format=name, overflow=kind)(partial(_ml_encode, dtype=dtype)),
        )
        yield f"ml_dtypes.decode.{name}", adapter("decode", format=name)(partial(_ml_decode, dtype=dtype))
    for name in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2"):
        theirs = f"ocp_{name}"
        yield f"gfloat.encode.{name}", adapter("encode", format=name)(partial(_gfloat_encode, name=theirs))
        yield f"gfloat.decode.{name}", adapter("decode", format=name)(partial(_gfloat_decode, name=theirs))
    for name in ("e2m1", "e2m3", "e3m2"):
        yield f"torchao.encode.{name}", adapter("encode", format=name)(partial(_torchao_encode, fmt=get_format(name)))
        yield f"torchao.decode.{name}", adapter("decode", format=name)(partial(_torchao_decode, fmt=get_format(name)))
    for name in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e2m3", "e3m2"):
        yield f"ottava.encode.{name}", adapter("encode", format=name)(partial(encode, fmt=get_format(name)))
        yield f"ottava.decode.{name}", adapter("decode", format=name)(partial(decode, fmt=get_format(name)))


def _torch_encode(x: Tensor, fmt: Any) -> Tensor:
    # torch's casts of numbers beyond the format differ between versions: clamp first
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _ml_encode(x: Tensor, dtype: str) -> Tensor:
    import numpy

    # numpy's warnings of overflow are what the adapter declares
    with numpy.errstate(all="ignore"):
        codes = x.float().cpu().numpy().astype(getattr(_package("ml_dtypes"), dtype)).view(numpy.uint8)
    return torch.from_numpy(codes.copy()).to(x.device)


def _ml_decode(codes: Tensor, dtype: str) -> Tensor:
    held = codes.cpu().contiguous().view(torch.uint8).numpy().view(getattr(_package("ml_dtypes"), dtype))
    return torch.from_numpy(held.astype("float32")).to(codes.device)


def _gfloat_encode(x: Tensor, name: str) -> Tensor:
    formats, gfloat = _package("gfloat.formats"), _package("gfloat")
    info = getattr(formats, f"format_info_{name}")
    values = gfloat.round_ndarray(
        info, (x if info.num_nans else x.nan_to_num(0.0)).double().cpu().numpy(), gfloat.RoundMode.TiesToEven, True
    )
    return torch.from_numpy(gfloat.encode_ndarray(info, values).astype("uint8")).reshape(x.shape).to(x.device)


def _gfloat_decode(codes: Tensor, name: str) -> Tensor:
    info = getattr(_package("gfloat.formats"), f"format_info_{name}")
    held = codes.cpu().contiguous().view(torch.uint8).numpy()
    return torch.from_numpy(_package("gfloat").decode_ndarray(info, held)).float().reshape(codes.shape).to(codes.device)


def _torchao_encode(x: Tensor, fmt: Any) -> Tensor:
    if not x.numel() or x.dim() == 0:
        raise NotImplementedError("torchao casts matrices with elements")
    casts = _package("torchao.prototype.custom_fp_utils")
    codes: Tensor = casts._f32_to_floatx_unpacked(x.float().contiguous(), fmt.exponent_bits, fmt.mantissa_bits)
    return codes


def _torchao_decode(codes: Tensor, fmt: Any) -> Tensor:
    casts = _package("torchao.prototype.custom_fp_utils")
    values: Tensor = casts._floatx_unpacked_to_f32(codes.contiguous(), fmt.exponent_bits, fmt.mantissa_bits)
    return values


# --- casts and GEMMs -------------------------------------------------------------------------------------------------

_GEMMS = (
    "reference",
    "native_gemm",
    "native_gemm batch_invariant",
    "native_decoded",
    "bf16_mm",
    "scaled_mm",
    "triton_gemm",
)
_SCALED = ("tensorwise", "rowwise", "blockwise", "blockwise_fp32", "mxfp8")


def _casts() -> Iterator[tuple[str, Function]]:
    for recipe in (*_SCALED, "mxfp4"):
        for operand in ("x", "weight", "grad"):
            if recipe != "mxfp4" or operand != "grad":
                mark = adapter("cast", recipe=recipe, operand=operand)
                spec = cast_spec({"recipe": recipe, "operand": operand})
                for kernel in ("dispatched", "reference", "native", "triton"):
                    name = "ottava.cast" if kernel == "dispatched" else f"ottava.{kernel}.cast"
                    yield f"{name}.{recipe}.{operand}", mark(partial(_our_cast, spec=spec, kernel=kernel))
    yield "torchao.cast.tensorwise.x", adapter("cast", recipe="tensorwise")(_torchao_tensorwise)
    yield "torchao.cast.rowwise.x", adapter("cast", recipe="rowwise")(_torchao_rowwise)
    for recipe, mode in (("mxfp8", "RCEIL"), ("mxfp8_floor", "FLOOR")):
        yield f"torchao.cast.{recipe}.x", adapter("cast", recipe=recipe)(partial(_torchao_mx, mode=mode))


def _our_cast(x: Tensor, data: Tensor, scale_inv: Tensor, spec: Any, kernel: str) -> tuple[Tensor, Tensor]:
    if kernel == "dispatched":
        from ottava.ops.quantize import quantize

        cast = quantize(x, spec)
        return cast.data, stored(cast.scale_inv, spec)
    module = {"reference": "reference", "native": "native.quantize", "triton": "triton.quantize"}[kernel]
    run = importlib.import_module(f"ottava.kernels.{module}")
    if (reason := run.supports_quantize(x, spec)) is not None:
        raise NotImplementedError(reason)
    made = run.quantize(x, spec)
    return made[0], stored(made[1], spec)


def _torchao_tensorwise(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    if not x.numel():
        raise NotImplementedError("torchao takes no amax of an empty tensor")
    utils = _package("torchao.float8.float8_utils")
    scale = utils.tensor_to_scale(x, torch.float8_e4m3fn)
    # as torchao's own cast does: BF16 times a scale of no dimensions would stay BF16
    return utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn), scale.reciprocal()


def _torchao_rowwise(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    if not x.numel():
        raise NotImplementedError("torchao takes no amax of an empty tensor")
    utils, config = _package("torchao.float8.float8_utils"), _package("torchao.float8.config")
    row = config.ScalingGranularity.AXISWISE
    scale = utils.tensor_to_scale(
        x, torch.float8_e4m3fn, scaling_granularity=row, axiswise_dim=-1, round_scales_to_power_of_2=True
    )
    return utils.to_fp8_saturated(x * scale, torch.float8_e4m3fn), scale.reciprocal()


def _torchao_mx(x: Tensor, data: Tensor, scale_inv: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    mx = _package("torchao.prototype.mx_formats.mx_tensor")
    if not x.numel() or x.shape[1] % 32:
        raise NotImplementedError("torchao takes whole blocks of 32")
    scale, codes = mx.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode[mode])
    return codes, scale.view(torch.uint8).reshape(scale_inv.shape)


def _gemms() -> Iterator[tuple[str, Function]]:
    for recipe in _SCALED:
        for out in ("bfloat16", "float32"):
            mark = adapter("gemm", recipe=recipe, out=out)
            for kernel in (None, *_GEMMS):
                name = f"ottava.{kernel.replace(' ', '.')}.gemm" if kernel else "ottava.gemm"
                yield (
                    f"{name}.{recipe}.{out}",
                    mark(partial(_our_gemm, specs=gemm_specs({"recipe": recipe}), out=out, kernel=kernel)),
                )
        yield (
            f"ottava.gemm.{recipe}.hopper",
            adapter("gemm", recipe=recipe, out="float32", accumulator="hopper")(
                partial(
                    _our_gemm,
                    specs=gemm_specs({"recipe": recipe}),
                    out="float32",
                    kernel="accumulator_reference",
                    profile="hopper",
                )
            ),
        )
        mark = adapter("grouped", recipe=recipe, out="bfloat16")
        yield f"ottava.grouped.{recipe}", mark(partial(_our_grouped, specs=gemm_specs({"recipe": recipe})))
    for recipe in ("tensorwise", "rowwise"):
        for out in ("bfloat16", "float32"):
            mark = adapter("gemm", recipe=recipe, out=out)
            yield f"torch.scaled_mm.{recipe}.{out}", mark(partial(_torch_scaled_mm, out=out))


def _operand(codes: Tensor, scale: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    from dataclasses import replace

    fmt = next((fmt for fmt in FORMATS.values() if fmt.dtype == codes.dtype), spec.format)
    return QuantizedTensor(codes, scales_of(scale, spec).float(), replace(spec, format=fmt), torch.bfloat16)


def _our_gemm(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_: Tensor, specs: Any, out: str,
    kernel: str | None, profile: str | None = None,
) -> Tensor:  # fmt: skip
    from ottava.ops.gemm import gemm

    sides = _operand(a, scale_inv_a, specs[0]), _operand(b, scale_inv_b, specs[1])
    try:
        return gemm(*sides, out_dtype=getattr(torch, out), backend=kernel, accumulator=profile)
    except ValueError as error:
        if kernel is None:
            raise
        raise NotImplementedError(str(error)) from error  # a kernel asked for by name says why it does not run


def _our_grouped(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor, specs: Any
) -> None:
    start = 0
    for group, stop in enumerate(ends.tolist()):
        if stop > start:
            scale = scale_inv_a[start:stop] if specs[0].granularity.rows == 1 else scale_inv_a
            one = (a[start:stop], b[group], scale, scale_inv_b[group], out)
            out[start:stop] = _our_gemm(*one, specs=specs, out="bfloat16", kernel=None)
        start = stop


def _torch_scaled_mm(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_: Tensor, out: str) -> Tensor:
    if 0 in (*a.shape, *b.shape) or a.shape[1] % 16 or b.shape[0] % 16:
        raise NotImplementedError("K and N in multiples of 16, as cuBLASLt needs them, and no empty operand")
    if scale_inv_a.dim() and out != "bfloat16" and a.is_cuda:
        raise NotImplementedError("scales of rows give bfloat16 only")
    turned = scale_inv_b.t() if scale_inv_b.dim() else scale_inv_b
    operands = a.contiguous(), b.contiguous().t(), scale_inv_a.contiguous(), turned.contiguous()
    try:
        return torch._scaled_mm(*operands, out_dtype=getattr(torch, out))
    except RuntimeError as error:
        if scale_inv_a.dim() and "numel() == 1" in str(error):  # torch 2.11 on a CPU
            raise NotImplementedError("this torch takes one scale for a tensor here") from error
        raise


# --- layers, attention, optimizers -----------------------------------------------------------------------------------


def _layers() -> Iterator[tuple[str, Function]]:
    for recipe in ("bf16", *_SCALED, "mxfp4", "rowwise_with_gw_hp"):
        yield f"ottava.linear.{recipe}", adapter("linear", recipe=recipe)(partial(_our_linear, recipe=recipe))
    for recipe in ("tensorwise", "mxfp8"):
        yield (
            f"transformer_engine.linear.{recipe}",
            adapter("linear", recipe=recipe)(partial(_te_linear, recipe=recipe)),
        )
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        yield f"torchao.linear.{recipe}", adapter("linear", recipe=recipe)(partial(_torchao_linear, recipe=recipe))
    for causal in (False, True):
        name = "causal" if causal else "full"
        yield f"torch.attention.{name}", adapter("attention", causal=causal)(partial(_torch_attention, causal=causal))
        yield f"ottava.attention.{name}", adapter("attention", causal=causal)(partial(_our_attention, causal=causal))
    yield "torch.adamw", adapter("optimizer", lr=1e-2, weight_decay=0.1)(partial(_adamw, make=torch.optim.AdamW))
    for moments, ours in (("float32", "fp32"), ("bfloat16", "bf16"), ("int8", "int8")):
        mark = adapter("optimizer", lr=1e-2, weight_decay=0.1, moments=moments)
        yield f"ottava.adamw.{ours}", mark(partial(_our_adamw, moments=ours))


def _passed(
    layer: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a layer, whose weight is a leaf."""
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad.reshape(y.shape))
    assert leaf.grad is not None
    assert weight.grad is not None
    return y.detach(), leaf.grad, weight.grad


def _our_linear(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    from ottava.nn.layer import Linear

    layer = Linear(
        weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device, recipe=recipe
    )
    layer.weight.data.copy_(weight)
    return _passed(layer, x, layer.weight, grad)


def _te_linear(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    te = importlib.import_module("ottava.compat.transformer_engine.pytorch")
    recipes = importlib.import_module("ottava.compat.transformer_engine.common.recipe")
    if x[..., 0].numel() % 16 or x.shape[-1] % 32 or weight.shape[0] % 32:
        raise NotImplementedError("TransformerEngine takes multiples of 16, and of 32 for MXFP8")
    layer = te.Linear(
        weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device=str(weight.device)
    )
    layer.weight.data.copy_(weight)
    chosen = {"tensorwise": recipes.Float8CurrentScaling, "mxfp8": recipes.MXFP8BlockScaling}[recipe]()

    def run(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=chosen):
            y: Tensor = layer(x)
        return y

    return _passed(run, x, layer.weight, grad)


def _torchao_linear(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel() or x[..., 0].numel() % 16 or x.shape[-1] % 16 or weight.shape[0] % 16:
        raise NotImplementedError("torch's scaled GEMM takes multiples of 16")
    config = _package("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe)
    config = importlib.import_module("dataclasses").replace(config, emulate=True)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
    layer = _package("torchao.float8.float8_linear").Float8Linear.from_float(layer, config=config)
    layer.weight.data.copy_(weight)
    return _passed(layer, x, layer.weight, grad)


def _attended(run: Function, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    o.backward(grad)
    return (o.detach(), *(x.grad for x in leaves))


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    return _attended(partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal), q, k, v, grad)


def _our_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    from ottava.nn.attention import DotProductAttention

    layer = DotProductAttention(mask="causal" if causal else "no_mask", layout="bhsd")
    return _attended(layer, q, k, v, grad)


def _adamw(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int, make: Function, **options: Any) -> None:
    if not state:
        leaf = torch.nn.Parameter(parameter)
        state.update(leaf=leaf, optimizer=make([leaf], lr=1e-2, weight_decay=0.1, **options))
    state["leaf"].grad = grad.clone()
    state["optimizer"].step()


def _our_adamw(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int, moments: str) -> None:
    from ottava.optim.rules import AdamW

    _adamw(parameter, grad, state, step, AdamW, moments=moments)


def ready() -> Mapping[str, Function]:
    """Every ready adapter by its name: LIBRARY.KIND.WHAT.

    Example:
        >>> ready()["torch.decode.e4m3"].adapter_kind
        'decode'
    """
    return MappingProxyType(
        {name: function for made in (_codecs, _casts, _gemms, _layers) for name, function in made()}
    )


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
        raise ValueError(
            f"certify: {name} is no adapter: mark it with @ottava.prove.adapter(KIND, ...), or give --kind"
        )
    if own not in KINDS:
        raise ValueError(f"certify: {unknown_name('kind', own, KINDS)}")
    what = dict(getattr(found, "adapter_what", {})) | {
        key: value for key, value in changed.items() if value is not None
    }
    return KernelAdapter(name, found, own, MappingProxyType(what))


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

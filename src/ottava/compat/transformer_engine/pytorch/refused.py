"""Names of TransformerEngine that ottava lacks. Importing one works, so a script's imports run; using it is an error.

`NAMES` lists modules and functions, `ARGUMENTS` lists arguments of constructors and forwards. Each entry names a
replacement or a reason. Any other name is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ottava.base.errors import unknown_name

_USERBUFFERS = "collectives are torch.distributed's own; leave it out"
_OFFLOAD = "torch.autograd.graph.save_on_cpu() moves saved tensors"
DEBUG = (
    "ottava.watch(model, config='their.yaml') reads the same file and acts by it; `ottava watch` does so in a script"
)
"""Instead of TransformerEngine's debug tool."""
KERNELS = "it is a kernel of CUDA; ottava.quantize casts, and ottava.gemm multiplies, on every device"
"""Instead of the functions of transformer_engine_torch."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "CusolverMpCtx": "torch.linalg has the matrix functions of one device",
        "FusedMLAQUpProjRopeQuant": "write the projection with Linear and the rotation with ottava.nn",
        "ManualOffloadSynchronizer": _OFFLOAD,
        "UserBufferQuantizationMode": _USERBUFFERS,
        "constants": "use torch's dtypes and ottava.RECIPES",
        "destroy_ub": _USERBUFFERS,
        "initialize_ub": _USERBUFFERS,
        "newton_schulz": "torch.optim.Muon has it",
        "onnx_export": "ottava has no ONNX export",
        "restore_from_func_ctx": "restore_from_saved takes the same lists",
    }
)
"""Name in transformer_engine.pytorch -> what to use."""

BELOW: Mapping[str, str] = MappingProxyType(
    {
        "GroupedTensor": "each group has tensors of its own: split x, and quantize each part",
    }
)
"""Names and modules below that interface, which scripts have used, too -> what to use."""

_SHARES = "Linear, LayerNormLinear, LayerNormMLP, MultiheadAttention and TransformerLayer can be split"
_UB = "ottava does not overlap communication by user buffers"

ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "sequence_parallel": ((False, None), _SHARES),
        **dict.fromkeys(("tp_group", "parallel_mode"), ((None,), _SHARES)),
        "tp_size": ((1,), _SHARES),
        "set_parallel_mode": ((False,), _SHARES),
        "symmetric_ar_type": ((None,), _USERBUFFERS),
        "save_original_input": ((False, True), "ottava saves the input's codes for the backward: half the bytes"),
        "parameters_split": ((None,), "slice .weight, or make a Linear for each part"),
        **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad"), ((False, True), _UB)),
        **dict.fromkeys(("ub_overlap_rs_dgrad", "ub_tp_comm_overlap"), ((False,), _UB)),
        "ub_name": (("any",), "it names a buffer that the other ub arguments ask for"),
        **dict.fromkeys(("seq_length", "micro_batch_size"), (("any",), "only TransformerEngine's warm-up uses it")),
        "layer_number": (("any",), "only attention uses it, to find its cache in InferenceParams"),
        "name": (("any",), "by it a CustomRecipe asks for a layer's quantizers; records take names from the model"),
        "is_first_microbatch": (("any",), "ottava itself keeps and drops casts of weights"),
        "fp8_output": ((False,), "outputs are in high precision"),
        "fp8_grad": ((False,), "gradients of inputs are in high precision"),
        "return_layernorm_output_gathered": ((False,), "each rank gets the rows of its tokens"),
        "amsgrad": ((False,), "AdamW keeps no largest second moment"),
        "bias_correction": ((True,), "set betas or a warm-up instead"),
        "adam_w_mode": ((True,), "weight decay is always decoupled; torch.optim.Adam adds it to the gradient"),
        "master_weight_dtype": ((torch.float32, torch.float16), "masters are FP32, or 16 bits beside BF16 weights"),
        "set_grad_none": (("any",), "pass it to zero_grad"),
        "dampening": ((0.0, 0), "ottava.optim.SGD has none"),
        "wd_after_momentum": ((False,), "weight decay is added to the gradient, as in torch"),
        "materialize_master_grads": (("any",), "gradients are read in their own dtype"),
        "fast_zero_fill": (("any",), "there is no buffer to fill"),
        "use_grouped_tensor": ((None,), "each expert has a weight of its own"),
        "single_grouped_weight": ((False,), "each expert has a weight of its own"),
        "single_grouped_bias": ((False,), "each expert has a bias of its own"),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ((None,), "DotProductAttention takes it")),
        "pad_between_seqs": ((None, False), "DotProductAttention takes it"),
        **{
            f"{of}bottom_right_diagonal": ((None,), "use a mask type that ends in bottom_right")
            for of in ("", "enc_dec_")
        },
        "enc_dec_window_size": ((None, (-1, -1)), "cross attention has no window"),
        "window_size": ((None,), "give it to the constructor"),
        "attention_type": (("self", "cross"), "there are only these two"),
        "return_bias": (
            (False,),
            "the layer always adds the bias; linear layers and MultiheadAttention return it",
        ),
        "return_layernorm_output": ((False,), "use a separate norm to get the normed rows"),
        "return_max_logit": ((False,), "DotProductAttention takes it"),
        "num_splits": ((1,), "torch's kernels choose the splits"),
        "score_mod": ((None,), "DotProductAttention takes it, in torch's form"),
        **dict.fromkeys(("score_mod_bprop", "score_mod_bprop_tensors"), ((None,), "autograd makes its backward")),
        "score_mod_tensors": ((None,), "score_mod may read tensors of its own"),
        "bf16_backward": ((False,), "attention runs in high precision"),
        **dict.fromkeys(("out", "dgrad_out"), ((None,), "ottava returns new tensors")),
    }
)
"""Argument -> (accepted values, which change nothing; why other values are refused). ("any",): all are accepted."""


_ATTENTION = "torch.nn.attention.sdpa_kernel chooses the kernel of attention; a receipt names it"
_FP8_ATTENTION = "set attention's formats in the recipe: Float8CurrentScaling(fp8_dpa=True)"
_FIELD = "give {} to the recipe"
_DISABLE = ("disable_2d_quantization", "disable_rht", "disable_stochastic_rounding")

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "torch.use_deterministic_algorithms decides",
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "ottava reads pickled states without executing them",
        "NVTE_APPLY_QK_LAYER_SCALING": "give softmax_scale to the attention",
        "NVTE_CPU_OFFLOAD_V1": _OFFLOAD,
        "NVTE_DEBUG": "ottava.watch(model) records every cast",
        "NVTE_DEBUG_LEVEL": "the logger 'ottava' reports problems",
        **{f"NVTE_DPA_FP8DS_{name}": _FP8_ATTENTION for name in ("AMAX_ALGO", "AMAX_HISTLEN", "REDUCE_AMAX")},
        **{f"NVTE_DPA_FP8_{name}": _FP8_ATTENTION for name in ("FORMAT", "RECIPE")},
        **dict.fromkeys(("NVTE_FP8_DPA_BWD", "NVTE_UnfusedDPA_Emulate_FP8"), _FP8_ATTENTION),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": _FIELD.format("use_f32_scales=True"),
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": _FIELD.format("use_power_2_scales=True"),
        **{f"NVTE_{name}": _ATTENTION for name in ("FLASH_ATTN", "FUSED_ATTN", "FUSED_ATTN_BACKEND", "UNFUSED_ATTN")},
        **{f"NVTE_{field.upper()}": _FIELD.format(field) for field in ("backward_override", "nvfp4_4over6")},
        **{f"NVTE_{f.upper()}": _FIELD.format(f) for f in ("nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode")},
        **{f"NVTE_NVFP4_{f.upper()}": _FIELD.format(f"{f}=True") for f in _DISABLE},
        "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "errors are those of FP32, as without it",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _FIELD.format("row_scaled_activation=True"),
        "NVTE_UNFUSED_FP8_UPDATE": "histories have one rule: that of an idle layer never rolls",
    }
)
"""Variable that changes TransformerEngine's numbers -> its replacement in ottava. Other variables tune its kernels."""


def unread_variables(variables: Mapping[str, str]) -> str:
    """A sentence for each variable of TransformerEngine that is set but that ottava does not read; "" if there is none.

    Example:
        >>> unread_variables({"NVTE_FLASH_ATTN": "0", "HOME": "/"}).partition(":")[0]
        'ottava does not read NVTE_FLASH_ATTN'
    """
    unread = sorted(variables.keys() & ENVIRONMENT.keys())
    return ". ".join(f"ottava does not read {name}: {ENVIRONMENT[name]}" for name in unread)


def refuse(where: str, arguments: Mapping[str, Any], accepted: tuple[str, ...] = ()) -> None:
    """Refuses arguments that ottava cannot honour, and unknown ones.

    Args:
        accepted: further names of the caller's arguments, for the hint at a typo.
    Raises:
        NotImplementedError: TransformerEngine has the argument, and this value would change its result.
        TypeError: TransformerEngine has no such argument.

    Example:
        >>> refuse("Linear", {"fp8_output": False, "name": "fc1"})
        >>> refuse("Linear", {"fp8_output": True})
        Traceback (most recent call last):
        NotImplementedError: Linear: fp8_output=True is not in ottava: outputs are in high precision
    """
    for name, value in arguments.items():
        if name not in ARGUMENTS:
            raise TypeError(f"{where}: {unknown_name('argument', name, (*accepted, *ARGUMENTS))}")
        harmless, reason = ARGUMENTS[name]
        if harmless != ("any",) and not any(value is choice or value == choice for choice in harmless):
            raise NotImplementedError(f"{where}: {name}={value!r} is not in ottava: {reason}")


class Absent(type):
    """The metaclass of missing names: such a name can be imported and compared, and any other use is an error."""

    advice: str
    is_module: bool

    def _refuse(cls) -> NoReturn:
        raise NotImplementedError(f"transformer_engine.pytorch.{cls.__name__} is not in ottava: {cls.advice}")

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not (cls.is_module and name[0].isupper()):
            cls._refuse()
        # a class of the module: annotations and checks name it without using it
        return Absent(f"{cls.__name__}.{name}", (), {"advice": cls.advice, "is_module": False})

    def is_supported(cls) -> bool:
        """False: what a script asks of a fused kernel, before it runs the parts instead."""
        return False

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def absent(name: str, advice: str = "") -> Any:
    """The stand-in for a name of `NAMES`, or for another one with this advice."""
    told = advice or NAMES.get(name) or BELOW[name]
    return Absent(name, (), {"advice": told, "is_module": name.islower() and "." not in name})

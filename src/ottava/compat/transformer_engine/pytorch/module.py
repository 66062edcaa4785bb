"""TransformerEngine's modules on ottava's layers, with its arguments and names of parameters.

Outside an `autocast` they run in high precision, as in TransformerEngine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava import nn as ours
from ottava.base.errors import need_known
from ottava.compat.transformer_engine.pytorch.distributed import gathered, is_distributed_weight
from ottava.compat.transformer_engine.pytorch.megatron import Sharded, Shards, extras_of, mark, one_of_modes, shards_for
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.compat.transformer_engine.pytorch.state import STD, Init
from ottava.nn.activations import Activation, clamped_swiglu, get_activation
from ottava.nn.layer import autocast_dtype, autocast_input  # the latter as `set_activation_dtype` does
from ottava.nn.norms import NormName


def device_for(device: torch.device | str | None) -> torch.device:
    """The device of new parameters. None: the GPU, or the CPU on a machine without a GPU.

    Raises:
        RuntimeError: the device is cuda, and this machine has none.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        try:
            return torch.empty(0, device=chosen).device  # `compat.on_cpu` gives another device
        except (AssertionError, RuntimeError) as error:
            raise RuntimeError(
                f"device={str(device)!r}: this machine has no CUDA device. Leave the argument out, give device='cpu', "
                "or run the script with --cpu: casts have the same bits there"
            ) from error
    return chosen


def init_method_normal(sigma: float) -> Init:
    """Fills a tensor with normal numbers of this standard deviation."""
    return partial(nn.init.normal_, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """The same with sigma / sqrt(2 * num_layers), for the layers in front of a residual sum."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_default_init_method() -> Init:
    """What fills weights by default."""
    return init_method_normal(STD)


def l2normalization_fwd_fused(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(sum(x**2) + eps) over the last dimension, in FP32 and rounded once; and what x was multiplied by."""
    wide = x.float()
    rsqrt_norm = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * rsqrt_norm).to(x.dtype), rsqrt_norm


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """`l2normalization_fwd_fused` without the second result."""
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_backward_fused(grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float) -> Tensor:
    """dx = r (dy - x r**2 sum(x dy)), in FP32 and rounded once; eps is already in r."""
    wide, dy = x.float(), grad_output.float()
    along = wide * rsqrt_norm.square() * (wide * dy).sum(-1, keepdim=True)
    return (rsqrt_norm * (dy - along)).to(x.dtype)


def dgelu_fused_(grad_output: Tensor, inp: Tensor) -> Tensor:
    """The gradient of GELU (the tanh formula); writes into neither."""
    return torch.ops.aten.gelu_backward(grad_output, inp, approximate="tanh")  # type: ignore[no-any-return]


class L2Normalization(nn.Module):
    """`l2normalization_fused` as a module.

    Example:
        >>> L2Normalization()(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    def __init__(self, eps: float = 1e-6, **others: Any) -> None:
        refuse("L2Normalization", others, ("eps",))
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., K)."""
        return l2normalization_fused(x, self.eps)


def norm_heads(where: str, modules: Sequence[ours.MultiheadAttention | None], given: Mapping[str, Any]) -> None:
    """Gives attentions the norms over each head of q and k that the arguments of a constructor ask for.

    Raises:
        ValueError: the kind is unknown.
    """
    kind, eps = given["qk_norm_type"], given["qk_norm_eps"]
    settings = {name: given[name] for name in ("zero_centered_gamma", "device", "params_dtype")}
    for module in modules if kind is not None else ():
        if module is not None and kind == "L2Normalization":
            module.q_norm = module.k_norm = L2Normalization(eps)  # type: ignore[assignment]
        elif module is not None:
            made: Any = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[norm_name(where, kind or "")]
            module.q_norm, module.k_norm = (made(module.head_dim, eps, **settings) for _ in range(2))


def with_norm(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the constructors of ottava's modules with a norm share, from the arguments of TransformerEngine's.

    Raises:
        ValueError: the name of the norm is unknown.  RuntimeError: as `device_for`.
    """
    norm = norm_name(where, given["normalization"]) if given.get("input_layernorm", True) else None
    own = {"norm": norm, "eps": given.get("eps", given.get("layernorm_epsilon")), "recipe": "bf16"}
    own |= {name: given[name] for name in ("zero_centered_gamma", "bias")}
    return own | {"device": device_for(given["device"]), "dtype": given["params_dtype"]}


_NORMS: Mapping[str, NormName] = MappingProxyType({"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
_ACTIVATIONS = MappingProxyType({"srelu": "relu2", "gelu": "gelu_tanh", "geglu": "geglu_tanh"})
"""TransformerEngine's names that ottava spells otherwise. TransformerEngine's GELU is the tanh formula."""


def norm_name(where: str, normalization: str) -> NormName:
    """ottava's name of a norm.

    Raises:
        ValueError: the name is unknown.
    """
    need_known(where, "normalization", normalization, _NORMS)
    return _NORMS[normalization]


def activation_for(where: str, name: str, params: Mapping[str, Any] | None) -> Activation:
    """The entry of ottava's table of activations.

    Raises:
        NotImplementedError: the activation has no such parameters.
        ValueError: the name is unknown.
    """
    if not params:
        return get_activation(_ACTIVATIONS.get(name, name))
    if name != "clamped_swiglu" or params.keys() - {"limit", "alpha"}:
        raise NotImplementedError(
            f"{where}: activation_params={dict(params)!r} for {name!r} is not in ottava; only clamped_swiglu has "
            "parameters, limit and alpha"
        )
    return clamped_swiglu(**params)


def mlp_keys(prefix: str = "", theirs: str = "") -> dict[str, str]:
    """ottava's key -> TransformerEngine's key, for the parameters of a `NormMLP` under these prefixes."""
    keys = {f"fc1.norm.{name}": f"layer_norm_{name}" for name in ("weight", "bias")}
    keys |= {f"{fc}.{name}": f"{fc}_{name}" for fc in ("fc1", "fc2") for name in ("weight", "bias")}
    return {prefix + key: theirs + value for key, value in keys.items()}


class Linear(Sharded, ours.Linear):
    """`ottava.nn.Linear` with TransformerEngine's arguments.

    Args:
        in_features, out_features, bias: as torch's.
        return_bias: return (y, bias), and do not add the bias.
        init_method: fills the weight; None: normal numbers with a standard deviation of 0.023.
        params_dtype: dtype of the parameters; None: torch's default.
        device: None: the GPU, or the CPU on a machine without a GPU.
        parallel_mode: "column" or "row": this rank holds out_features or in_features / tp_size of the weight.
        tp_group, tp_size: the group of ranks, or their number (`set_tensor_parallel_group` then gives the group).
        sequence_parallel: each rank holds a part of the first dimension of the input ("column") or output ("row").
        others: TransformerEngine's other arguments, accepted where they change nothing.
    Raises:
        NotImplementedError: ottava cannot honour an argument.  TypeError: an argument is unknown.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.Linear(64, 32, params_dtype=torch.bfloat16)
        >>> with te.autocast():
        ...     y = layer(torch.ones(2, 64, dtype=torch.bfloat16, device=layer.weight.device))
        >>> y.shape, layer.last_call.recipe.name
        (torch.Size([2, 32]), 'DelayedScaling')
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        extras = extras_of("Linear", locals())
        split = one_of_modes("Linear", parallel_mode) is not None
        shards = shards_for("Linear", tp_group, tp_size, sequence_parallel, split=split)
        if parallel_mode == "row":
            in_features = shards.of("in_features", in_features)
        elif parallel_mode == "column":
            out_features = shards.of("out_features", out_features)
        super().__init__(in_features, out_features, bias, device_for(device), params_dtype, recipe="bf16")
        self.returns_bias = return_bias
        self.finish(extras, shards, {}, {"": ("",)}, mode=parallel_mode)

    def forward(  # type: ignore[override]  # TransformerEngine's signature
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Any:
        """(..., in_features) -> (..., out_features); with return_bias, a tuple with the bias."""
        refuse("Linear", others)
        self.begins(is_first_microbatch)
        if is_distributed_weight(self.weight):
            return gathered(self, ("weight",), inp)
        y = super().forward(inp)
        return (y, _returned(self.bias, y)) if self.returns_bias else y


class LayerNormLinear(Sharded, ours.NormLinear):
    """`ottava.nn.NormLinear` with TransformerEngine's arguments and names of parameters; errors as `Linear`.

    Args:
        normalization: "LayerNorm" or "RMSNorm", with eps and zero_centered_gamma.
        return_layernorm_output: return the normed rows, too.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.LayerNormLinear(64, 32, normalization="RMSNorm", bias=False)
        >>> sorted(layer.state_dict())
        ['_extra_state', 'layer_norm_weight', 'weight']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        extras = extras_of("LayerNormLinear", locals())
        if one_of_modes("LayerNormLinear", parallel_mode) == "row":
            raise NotImplementedError(
                "LayerNormLinear: parallel_mode='row' is not in ottava: a rank cannot norm a part of the features alone"
            )
        split = parallel_mode is not None
        shards = shards_for("LayerNormLinear", tp_group, tp_size, sequence_parallel, split=split)
        super().__init__(
            in_features,
            shards.of("out_features", out_features),
            **with_norm("LayerNormLinear", extras.given),
            return_norm_output=return_layernorm_output,
        )
        self.returns_bias = return_bias
        keys = {f"norm.{name}": f"layer_norm_{name}" for name in ("weight", "bias")}
        self.finish(extras, shards, keys, {"": ("",)})

    def forward(  # type: ignore[override]  # TransformerEngine's signature
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Any:
        """(..., in_features) -> y; with return_bias or return_layernorm_output, a tuple (y, bias, normed rows)."""
        refuse("LayerNormLinear", others)
        self.begins(is_first_microbatch)
        y = super().forward(autocast_input(inp))
        if not self.returns_bias:
            return y
        if self.return_norm_output:
            return y[0], _returned(self.bias, y[0]), y[1]
        return y, _returned(self.bias, y)


class LayerNormMLP(Sharded, ours.NormMLP):
    """`ottava.nn.NormMLP` with TransformerEngine's arguments and names of parameters; errors as `Linear`.

    Args:
        activation: gelu (the tanh formula), geglu, relu, reglu, srelu, silu, swiglu, qgelu, qgeglu, clamped_swiglu.
        return_bias: return (y, bias of fc2), and do not add it.
        checkpoint: save nothing for the activation's backward, and compute it again.
        set_parallel_mode: this rank holds ffn_hidden_size / tp_size features between the linears.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> te.LayerNormMLP(64, 96, activation="swiglu")(torch.ones(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        zero_centered_gamma: bool = False,
        checkpoint: bool = False,
        return_bias: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        **others: Any,
    ) -> None:
        extras = extras_of("LayerNormMLP", locals())
        shards = shards_for("LayerNormMLP", tp_group, tp_size, sequence_parallel, split=set_parallel_mode)
        super().__init__(
            hidden_size,
            shards.of("ffn_hidden_size", ffn_hidden_size),
            activation=activation_for("LayerNormMLP", activation, activation_params),
            save="recompute" if checkpoint else "bf16",
            **with_norm("LayerNormMLP", extras.given),
        )
        self.fc2.returns_bias = self.returns_bias = return_bias
        self.finish(extras, shards, mlp_keys(), {"": ("fc1", "fc2")})

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """(..., hidden_size) -> (..., hidden_size); with return_bias, a tuple with the bias, which is not added."""
        self.begins(is_first_microbatch)
        y = super().forward(autocast_input(inp))
        return (y, _returned(self.fc2.bias, y)) if self.returns_bias else y


class GroupedLinear(Sharded):
    """A linear layer for each group of rows, with TransformerEngine's arguments; errors as `Linear`.

    Parameters weight0, bias0, weight1... are leaves of their own. Groups without a row get zeros as gradients.

    Args:
        num_gemms: number of groups.
        in_features, out_features: K and N of each group's weight.
        bias: whether each group has a bias.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.GroupedLinear(2, 64, 32, bias=False)
        >>> layer(torch.ones(5, 64), [4, 1]).shape, sorted(layer.state_dict())
        (torch.Size([5, 32]), ['_extra_state', 'weight0', 'weight1'])
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        extras = extras_of("GroupedLinear", locals())
        super().__init__()
        sizes = in_features, out_features, bias, device_for(device), params_dtype
        self.groups = nn.ModuleList(ours.Linear(*sizes, recipe="bf16") for _ in range(num_gemms))
        names = ("weight", "bias") if bias else ("weight",)
        keys = {f"groups.{g}.{name}": f"{name}{g}" for name in names for g in range(num_gemms)}
        self.finish(extras, Shards("GroupedLinear"), keys, {"": tuple(f"groups.{g}" for g in range(num_gemms))})

    def forward(
        self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor:
        """(..., in_features) and the number of rows of each group -> (..., out_features)."""
        refuse("GroupedLinear", others)
        if is_distributed_weight(self.groups[0].weight):
            return gathered(self, [f"groups.{g}.weight" for g in range(self.num_gemms)], inp, m_splits)
        self.begins(is_first_microbatch)
        sizes, rows = [int(size) for size in m_splits], inp.reshape(-1, inp.shape[-1])
        if len(sizes) != self.num_gemms or sum(sizes) != len(rows) or min(sizes) < 0:
            raise ValueError(
                f"GroupedLinear: got splits {sizes} for {len(rows)} rows; needs {self.num_gemms} numbers, none "
                f"negative, that add up to {len(rows)}"
            )
        y = torch.cat([layer(part) for layer, part in zip(self.groups, rows.split(sizes), strict=True)])
        return y.view(*inp.shape[:-1], y.shape[-1])


def _returned(bias: Tensor | None, y: Tensor) -> Tensor | None:
    """The bias of return_bias, which the caller adds to y."""
    return None if bias is None else bias.to(y.dtype)


class _TENorm:
    """The dtype of TransformerEngine's norms: torch.autocast's, or without one the weight's, for any input."""

    weight: Any

    def __init__(self, normalized_shape: int | None = None, eps: float = 1e-5, **others: Any) -> None:
        size = others.pop("hidden_size", None) if normalized_shape is None else normalized_shape
        where, parallel = type(self).__name__, bool(others.pop("sequence_parallel", False))
        if size is None:
            raise TypeError(f"{where}: got no size; needs normalized_shape, the width of the rows")
        own = {"eps": eps, "zero_centered_gamma": others.pop("zero_centered_gamma", False)}
        own |= {"device": device_for(others.pop("device", None)), "dtype": others.pop("dtype", None)}
        own["dtype"] = others.pop("params_dtype", own["dtype"])
        refuse(
            where, others, ("normalized_shape", "eps", "zero_centered_gamma", "hidden_size", "params_dtype", "device")
        )
        super().__init__(size, **own)  # type: ignore[call-arg]  # that of ottava's norm
        for parameter in self.parameters():  # type: ignore[attr-defined]
            mark(parameter, sequence_parallel=parallel)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., K)."""
        dtype = autocast_dtype(input) or self.weight.dtype
        return super().forward(input.to(dtype))  # type: ignore[misc,no-any-return]  # that of ottava's norm


class LayerNorm(_TENorm, ours.LayerNorm):
    """`ottava.nn.LayerNorm` with TransformerEngine's arguments; errors as `Linear`.

    The result has the dtype of torch.autocast, or without one that of the weight.

    Example:
        >>> LayerNorm(hidden_size=4)(torch.ones(1, 4))
        tensor([[0., 0., 0., 0.]], grad_fn=<_ProducedBackward>)
    """


class RMSNorm(_TENorm, ours.RMSNorm):
    """`ottava.nn.RMSNorm` with TransformerEngine's arguments and the dtypes of `LayerNorm`; errors as `Linear`.

    Example:
        >>> RMSNorm(4, zero_centered_gamma=True).weight
        Parameter containing:
        tensor([0., 0., 0., 0.], requires_grad=True)
    """

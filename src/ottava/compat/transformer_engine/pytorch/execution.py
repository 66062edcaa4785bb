"""TransformerEngine's CUDA graphs, its offload of activations, and its debug tool, for loops written around them.

The tool is nvdlfw_inspect in a script of `python -m ottava.compat.transformer_engine`. Its configuration changes the
casts of every `autocast` (DisableQuantizationGEMM, DisableQuantizationLayer, FakeQuant, PerTensorScaling). Statistics
and dumps are those of a watch, in the folder `ottava` of `log_dir`; `ottava report` shows them.
"""

from __future__ import annotations

import functools
import inspect
import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.errors import unknown_name
from ottava.base.settings import read_yaml
from ottava.compat.transformer_engine.common.recipe import GROUPED
from ottava.compat.transformer_engine.common.recipe import Recipe as TERecipe
from ottava.compat.transformer_engine.pytorch.debug_stats import ConfigManager, Statistics
from ottava.compat.transformer_engine.pytorch.quantization import autocast, get_default_recipe
from ottava.compat.transformer_engine.pytorch.quantizers import Float8CurrentScalingQuantizer
from ottava.engine.functional import QuantizedLayer
from ottava.interop.te_config import TENSORS, read_logs
from ottava.measure.layer_names import matches
from ottava.numerics.formats import get_format
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, GEMMS, HIGH_PRECISION, Override, Recipe, get_recipe
from ottava.watching.config import Intervention, WatchConfig
from ottava.watching.doors import changed
from ottava.watching.session import Watch

_TENSOR = MappingProxyType({ours: theirs for theirs, ours in TENSORS.items()})
_KEEPS = "_ottava_stays_on_its_device"
_OLD = ("fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group")
_NEW = ("enabled", "calibrating", "recipe", "amax_reduction_group")
_OF_A_CAPTURE = (
    *("cache_quantized_params", "fp8_weight_caching", "pool", "retain_graph_in_backward", "capture_stream"),
    *("pre_warmup_hook", "post_warmup_hook", "capture_time_hooks"),
)


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    **settings: Any,
) -> Any:
    """Modules that run under an autocast: eagerly on a CPU, as CUDA graphs on a GPU.

    Args:
        modules: one module or several.
        sample_args: for each module a tuple of tensors, of the shapes of all later calls.
        num_warmup_iters, allow_unused_input: of the capture.
        sample_kwargs: keyword arguments; only None for a capture.
        settings: enabled, calibrating, recipe and amax_reduction_group of `autocast`, or their old names with fp8_; and
            TransformerEngine's settings of buffers and captures, accepted, because they change no number.
    Returns:
        The modules, which run that way until their `reset()`.
    Raises:
        NotImplementedError: on a GPU, a recipe whose scales come from earlier steps. There a graph of the whole step
            (ottava.graphed_step) moves the scales.
        TypeError: a setting is unknown.  ValueError: it is given by both names, or not once for each module.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> layer = te.Linear(16, 16, device="cpu")
        >>> with warnings.catch_warnings(action="ignore"):
        ...     graphed = te.make_graphed_callables(layer, (torch.ones(2, 16),), enabled=True)
        >>> graphed(torch.ones(2, 16)).shape, graphed.last_call.recipe.name
        (torch.Size([2, 16]), 'DelayedScaling')
    """
    known = (*_NEW, *_OLD, *_OF_A_CAPTURE)
    for name in settings.keys() - set(known):
        if not name.startswith("_"):  # Megatron's
            raise TypeError(f"make_graphed_callables: {unknown_name('argument', name, known)}")
    several = isinstance(modules, Sequence | nn.ModuleList)
    group = list(modules) if several else [modules]
    inputs = list(sample_args) if several else [sample_args]
    context = {}
    for new, old in zip(_NEW, _OLD, strict=True):
        given = [name for name in (new, old) if settings.get(name) is not None]  # None: TransformerEngine's default
        if len(given) > 1:
            raise ValueError(f"make_graphed_callables: got {new} and {old}, two names of one argument; give {new}")
        context[new] = settings[given[0]] if given else None
    on = list(context["enabled"]) if isinstance(context["enabled"], Sequence) else [context["enabled"]] * len(group)
    if not len(on) == len(inputs) == len(group):
        raise ValueError(
            f"make_graphed_callables: got {len(group)} modules, {len(inputs)} sample_args and {len(on)} of enabled; "
            "needs one of each for a module"
        )
    eager = not any(t.is_cuda for one in inputs for t in one if isinstance(t, Tensor))
    if eager:
        warnings.warn(
            "make_graphed_callables: the samples are on a CPU, which has no CUDA graphs: the modules run eagerly, with "
            "the same numbers",
            stacklevel=2,
        )
    elif sample_kwargs:
        raise NotImplementedError("make_graphed_callables: sample_kwargs are not in ottava; give positional arguments")
    graphed = []
    for module, enabled, samples in zip(group, on, inputs, strict=True):
        _run_under(module, {**context, "enabled": bool(enabled)}, captures=not eager)
        if not eager:  # never run: no machine of ours has a GPU
            module = torch.cuda.make_graphed_callables(module, tuple(samples), num_warmup_iters, allow_unused_input)
        graphed.append(module)
    return tuple(graphed) if several else graphed[0]


def _run_under(module: Any, context: Mapping[str, Any], *, captures: bool) -> None:
    """Makes a module's forward run under an autocast, as a capture would fix it."""
    recipe: TERecipe | None = context["recipe"]
    if captures and context["enabled"] and (get_default_recipe() if recipe is None else recipe).ottava.predicted:
        raise NotImplementedError(
            "make_graphed_callables: a graph of one module cannot move the scales of DelayedScaling at a step; give "
            "Float8CurrentScaling or MXFP8BlockScaling, or capture the whole step with ottava.graphed_step"
        )
    forward = module.forward
    passes = "is_first_microbatch" in inspect.signature(forward).parameters  # else only the graph would have read it

    def run(*args: Any, **kwargs: Any) -> Any:
        if not passes:
            kwargs.pop("is_first_microbatch", None)
        with autocast(context["enabled"], bool(context["calibrating"]), recipe, context["amax_reduction_group"]):
            return forward(*args, **kwargs)

    module.forward, module.reset = run, functools.partial(setattr, module, "forward", forward)


def set_capture_start() -> None:
    """Does nothing: no state waits for a capture."""


set_capture_end = set_capture_start


def save_fp8_tensors(modules: Sequence[nn.Module], recipe: TERecipe | None) -> list[dict[str, Tensor]]:
    """Copies the histories and scales of modules, which warm-up steps would move."""
    return [{name: t.clone() for name, t in _scaling(module).items()} for module in modules]


def restore_fp8_tensors(modules: Sequence[nn.Module], fp8_tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Puts back what `save_fp8_tensors` has copied."""
    with torch.no_grad():
        for module, saved in zip(modules, fp8_tensors, strict=True):
            for name, t in _scaling(module).items():
                if name in saved:
                    t.copy_(saved[name])


def _scaling(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if ".quantizers." in f".{name}"}


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """A context for the forward of each layer, whose saved tensors then wait on the CPU, and a function for its result.

    What a layer of ottava saves for its backward, codes and scales mostly, moves. Parameters stay, and so do tensors
    given to `mark_not_offload`. Copies are synchronous: they take time on a GPU that TransformerEngine hides.

    Args:
        enabled: False: neither does anything.
        num_layers: of each pass, how many of the first layers move their tensors.
        model_layers: layers in a pass.
        others: accepted, because they change no number: TransformerEngine's settings of buffers and streams.
    Raises:
        NotImplementedError: manual_synchronization, offload_weights.

    Example:
        >>> context, after_layer = get_cpu_offload_context(True, 1, 2)
        >>> x = torch.ones(2, requires_grad=True)
        >>> for _ in range(2):
        ...     with context:
        ...         y = x * x
        ...     y = after_layer(y)
        >>> torch.autograd.grad(y.sum(), x)[0]
        tensor([2., 2.])
    """
    if manual_synchronization or offload_weights:
        what = "manual_synchronization" if manual_synchronization else "offload_weights"
        raise NotImplementedError(
            f"get_cpu_offload_context: {what}=True is not in ottava: saved activations move at once, and parameters "
            "stay. Leave it out; FSDP2's CPUOffloadPolicy moves parameters"
        )
    offload = _Offload(num_layers or 0, model_layers) if enabled else _Offload(0, model_layers)
    return offload, offload.after_layer


class _Offload:
    """The context and the counter of layers."""

    def __init__(self, moves: int, layers: int) -> None:
        self.moves, self.layers, self.layer = moves, max(layers, 1), 0
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        if self.layer < self.moves:
            self.hooks.append(torch.autograd.graph.saved_tensors_hooks(_to_cpu, _back))
            self.hooks[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.hooks:
            self.hooks.pop().__exit__(*raised)

    def after_layer(self, result: Tensor) -> Tensor:
        """The result; the next forward is the next layer's."""
        self.layer = (self.layer + 1) % self.layers
        return result


def _to_cpu(saved: Tensor) -> tuple[torch.device, Tensor]:
    stays = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter) or hasattr(saved, _KEEPS)
    if stays or saved.device.type == "cpu":
        return saved.device, saved
    host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
    return saved.device, host.copy_(saved)


def _back(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, saved = kept
    return saved.to(device)


def mark_not_offload(*tensors: Tensor | None) -> None:
    """Lets tensors stay on their device in a `get_cpu_offload_context`."""
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, _KEEPS, True)


def is_cpu_offload_enabled() -> bool:
    """False: layers need not know of an offload, which autograd's hooks do."""
    return False


class _Watch(Watch):
    def _check_patterns(self, names: Sequence[str]) -> None:
        """As TransformerEngine: a pattern may match no layer."""


@dataclass(frozen=True)
class _Changed(Recipe):
    """A recipe with the changes of a configuration."""

    inner: Recipe = field(default_factory=lambda: get_recipe("bf16"), repr=False)
    changes: tuple[Intervention, ...] = field(default=(), repr=False)
    kept: dict[str, Recipe] = field(default_factory=dict, repr=False, compare=False)

    def for_layer(self, layer: str) -> Recipe:
        if layer not in self.kept:
            chosen = [one for one in self.changes if matches(layer.removeprefix(GROUPED), one.layers)]
            faked = {gemm for one in chosen for gemm in one.gemms if one.action == "fake"}
            others = (one for one in chosen if one.action != "fake")
            made = functools.reduce(changed, others, self.inner.for_layer(layer))
            made = replace(made, **dict.fromkeys(faked, HIGH_PRECISION))  # type: ignore[arg-type]  # GEMMs only
            if faked:
                object.__setattr__(made, "casts", True)  # its doors must run
            self.kept[layer] = made
        return self.kept[layer]


class Tool:
    """The functions of nvdlfw_inspect.api, and its namespace `transformer_engine`: one object of a process."""

    watch: Watch | None = None
    statistics: Statistics | None = None
    tree: Mapping[str, Any] = MappingProxyType({})
    changes: tuple[Intervention, ...] = ()
    on = False
    get_tensor_reduction_group = staticmethod(lambda: None)  # each rank has statistics of its own

    def __init__(self) -> None:
        self.features: dict[str, Any] = {}  # of a script, by name
        self.end_debug()
        self.transformer_engine = self

    def initialize(
        self, config_file: str | Path = "", *, log_dir: str | Path = ".", init_training_step: int = 0, **others: Any
    ) -> None:
        """Reads a configuration; unknown features in it, and statistics that no watch has, are warned of.

        Args:
            others: feature_dirs, folders whose Python files register features; TransformerEngine's own is left out.
                Others are left out with a warning.
        Raises:
            ValueError: it was initialized before.  ConfigError: the file has the wrong form.
        """
        if self.on:
            raise ValueError("nvdlfw_inspect: initialize was called twice; needs end_debug() between")
        self.on = True
        others.pop("default_logging_enabled", None)
        folders = others.pop("feature_dirs", None) or ()
        for folder in map(Path, [folders] if isinstance(folders, str | Path) else folders):
            for path in () if folder.parts[-2:] == ("debug", "features") else sorted(folder.glob("*.py")):
                runpy.run_path(str(path))
        for name in (name for name, given in others.items() if given):
            warnings.warn(f"nvdlfw_inspect: {name} is left out: ottava's watch writes its own files", stacklevel=2)
        if config_file:
            config = WatchConfig.load(Path(config_file))
            self.tree = read_yaml(Path(config_file))
            self.statistics = Statistics(read_logs(self.tree), Path(log_dir), init_training_step)
            self.changes = config.interventions
            for note in config.notes:
                if note.partition(": ")[0].rpartition(".")[2] not in self.features:
                    warnings.warn(note, stacklevel=2)
            if config.looks or config.dump.periods:
                only = config.model_copy(update={"interventions": (), "notes": ()})
                names = ("ottava", *(f"ottava-{n}" for n in range(2, 1000)))  # a session of its own, each
                folder = next(one for one in (Path(log_dir) / name for name in names) if not one.exists())
                self.watch = _Watch(None, folder, only, step=init_training_step)

    def end_debug(self) -> None:
        """Ends changes and statistics."""
        if self.watch is not None:
            self.watch.close()
        self.on, self.watch, self.changes, self.layers = False, None, (), 0
        self.statistics, self.tree = None, MappingProxyType({})
        self.made: dict[Recipe, Recipe] = {}
        self.next: dict[tuple[str, str, str], int | None] = {}  # when to ask again of (layer, tensor, feature)

    def step(self) -> None:
        """Ends a step."""
        if self.watch is not None:
            self.watch.step()
        if self.statistics is not None:
            self.statistics.end_step()

    def infer_and_assign_layer_names(self, model: nn.Module) -> None:
        """Names all modules by their places in the model."""
        for name, module in model.named_modules(prefix="model"):
            module.name = name

    def adopt(self, layer: QuantizedLayer, group: str = "") -> None:
        """Names a layer that was just built and got no name, and lets its doors fake casts and take statistics.

        group: the number of a layer's group, a part of its name in the log.
        """
        self.layers += 1
        layer.name = layer.name or f"Layer_{self.layers}"
        for tensor, door in layer.quantizers.named_children():
            door.register_forward_hook(functools.partial(self._fake, layer, group, tensor))
        if self.features:
            vars(layer)["run"] = functools.partial(self.inspected, layer, group, layer.run)

    def inspected(self, layer: Any, group: str, run: Any, input: Tensor, weight: Tensor, *more: Any) -> Any:
        """A layer's forward, whose tensors go to the features of a script that the configuration names for it.

        Its `inspect_tensor_enabled` answers (now, iteration to ask again or None), or now alone; its `inspect_tensor`
        gets tensors in high precision. A layer behind a norm of its own shows no dgrad.
        """
        y, name = run(input, weight, *more), layer.name.removeprefix(GROUPED) + (f".gemm_{group}" if group else "")
        wanted = {tensor: found for tensor in TENSORS if (found := self._features(name, tensor))}
        if "activation" in wanted:
            self._show(wanted, name, "activation", layer.rows(input.detach()))
        for tensor, one in (("weight", weight), ("output", y)):
            self._show(wanted, name, tensor, one)
        ends = {"gradient": y, "wgrad": weight} | ({} if layer.produce else {"dgrad": input})
        for tensor, one in ends.items():
            if tensor in wanted and one.requires_grad:
                handles: list[Any] = []

                def show(grad: Tensor, tensor: str = tensor, handles: list[Any] = handles) -> None:
                    handles.pop().remove()  # a weight lives on
                    self._show(wanted, name, tensor, grad)

                handles.append(one.register_hook(show))
        return y

    def _features(self, layer: str, tensor: str) -> list[tuple[Any, dict[str, Any]]]:
        """The features that want a tensor now, with their settings."""
        found, log = [], self.statistics
        asked = ConfigManager.get_config_for_layer(layer).get("transformer_engine", {}) if log is not None else {}
        for name in (one for one in asked if one in self.features):
            own, key = self.features[name], (layer, tensor, name)
            there, settings = own.parse_config_and_api(asked[name], tensor_parsing=True, tensor_name=tensor)
            due = self.next.get(key, 0)
            if there and asked[name].get("enabled") and log is not None and due is not None and log.step >= due:
                given = own.inspect_tensor_enabled(settings, layer_name=layer, tensor_name=tensor, iteration=log.step)
                now, self.next[key] = given if isinstance(given, tuple) else (given, log.step + 1)
                found += [(own, settings)] if now else []
        return found

    def _show(self, wanted: Mapping[str, Any], layer: str, tensor: str, x: Tensor) -> None:
        unknown = dict.fromkeys(("rowwise_quantized_tensor", "columnwise_quantized_tensor", "quantizer", "tp_group"))
        known: Any = {"layer_name": layer, "tensor_name": tensor, "iteration": self.statistics and self.statistics.step}
        for feature, settings in wanted.get(tensor, ()):
            feature.inspect_tensor(settings, tensor=x.detach(), **known, **unknown)

    def _fake(self, layer: QuantizedLayer, group: str, tensor: str, door: nn.Module, args: Any, both: Any) -> Any:
        made, log = list(both), self.statistics
        name = layer.name.removeprefix(GROUPED) + (f".gemm_{group}" if group else "")
        if log is not None and log.due(name, tensor, log.step):
            log.feed(name, _TENSOR[tensor], log.step, args[0], *made[:2])
        for place, direction in enumerate(("row", "col")):
            change = self._change(layer.name, CELL_OF[tensor, direction][0], tensor, "fake")
            if isinstance(made[place], Tensor) and change is not None:
                x = args[0].detach()
                numbers = quantize(x, QuantizationSpec(get_format(change.format))).dequantize(x.dtype)
                made[place] = numbers.t() if place else numbers
        return tuple(made)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of an autocast, with the changes of the configuration."""
        if self.changes and recipe not in self.made:
            cells: dict[str, Any] = {gemm: getattr(recipe, gemm) for gemm in GEMMS}
            asked = Override("*", tuple(cells.items()))  # a recipe with overrides is asked for each layer
            self.made[recipe] = _Changed(recipe.name, **cells, overrides=(asked,), inner=recipe, changes=self.changes)
        return self.made.get(recipe, recipe)

    def _change(self, layer: str, gemm: str, tensor: str, *actions: str) -> Intervention | None:
        layer, left = layer.removeprefix(GROUPED), (one for one in self.changes if one.action in actions)
        found = (one for one in left if gemm in one.gemms and (not tensor or tensor in one.tensors))
        return next((one for one in found if matches(layer, one.layers)), None)

    def fp8_gemm_enabled(self, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int]:
        """Whether the configuration leaves a GEMM in FP8; and the step for which to ask again."""
        return self._change(layer_name, gemm, "", "fake", "high_precision") is None, iteration + 1

    def inspect_tensor_enabled(self, layer_name: str, tensor_name: str, iteration: int, **_: Any) -> tuple[bool, int]:
        """Whether the configuration asks for statistics of a tensor in a step; and when to ask again."""
        log = self.statistics
        return log is not None and bool(log.due(layer_name, tensor_name, iteration)), iteration + 1

    def inspect_tensor(
        self,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        *,
        tensor: Tensor,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        **_: Any,
    ) -> None:
        """Takes the statistics of a tensor that a script has cast itself, as the configuration asks."""
        if self.watch is not None and self.watch.config.dump.periods:
            raise NotImplementedError(
                "inspect_tensor: a dump of a tensor that a script casts is not in ottava; a watch dumps those of layers"
            )
        rows = getattr(rowwise_quantized_tensor, "rows", None)
        columns = getattr(columnwise_quantized_tensor, "columns", None)
        if self.statistics is not None:
            self.statistics.feed(layer_name, tensor_name, iteration, tensor, rows, columns)

    def modify_tensor_enabled(
        self, layer_name: str, gemm: str, tensor_name: str, iteration: int, **_: Any
    ) -> tuple[bool, int]:
        """Whether the configuration casts a tensor of a GEMM otherwise; and when to ask again."""
        return self._change(layer_name, gemm, TENSORS[tensor_name], "fake", "current") is not None, iteration + 1

    def modify_tensor(
        self, layer_name: str, gemm: str, tensor_name: str, tensor: Tensor, default_quantizer: Any = None, **_: Any
    ) -> Tensor:
        """The tensor as the configuration casts it: by its own amax, or cast and decoded (FakeQuant).

        Raises:
            ValueError: the configuration does not change this tensor.
        """
        change = self._change(layer_name, gemm, TENSORS[tensor_name], "fake", "current")
        if change is None:
            raise ValueError(f"modify_tensor: the configuration leaves {tensor_name} of {layer_name}'s {gemm} as it is")
        if change.action == "current":
            return Float8CurrentScalingQuantizer(default_quantizer.dtype)(tensor)
        spec = QuantizationSpec(get_format(change.format))
        return quantize(tensor.reshape(-1, tensor.shape[-1]), spec).dequantize(tensor.dtype).view(tensor.shape)

"""Modules that run under a recipe, the conversion of models to them, and the receipt of what they ran."""

from ottava.nn.activations import ACTIVATIONS, Activation
from ottava.nn.attention import DotProductAttention
from ottava.nn.calibrate import CalibrationReport, calibrate
from ottava.nn.convert import ConversionReport, convert, keep_first_last_bf16, model_init
from ottava.nn.cross_entropy import LinearCrossEntropy, linear_cross_entropy
from ottava.nn.fp8_checkpoint import LoadReport, load_fp8
from ottava.nn.graphed import GraphedStep, graphed_step
from ottava.nn.grouped import GroupedLinear, Permutation, permute, sort_by_expert, unpermute
from ottava.nn.layer import Linear
from ottava.nn.mlp import ActivatedLinear, NormMLP, fold_smooth_swiglu, smooth_swiglu
from ottava.nn.moe import MoE, Router, Routing
from ottava.nn.multihead import KVCache, MultiheadAttention
from ottava.nn.norms import LayerNorm, NormLinear, RMSNorm
from ottava.nn.plan import tune
from ottava.nn.receipt import Receipt, assert_fp8, receipt
from ottava.nn.rope import RotaryEmbedding, RotaryScaling, packed_positions
from ottava.nn.transformer import TransformerLayer
from ottava.recipe import default_filter
from ottava.weights.checkpoint import dequantize_state_dict
from ottava.weights.parameter import QuantizedWeight

__all__ = [
    "ACTIVATIONS",
    "ActivatedLinear",
    "Activation",
    "CalibrationReport",
    "ConversionReport",
    "DotProductAttention",
    "GraphedStep",
    "GroupedLinear",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LoadReport",
    "MoE",
    "MultiheadAttention",
    "NormLinear",
    "NormMLP",
    "Permutation",
    "QuantizedWeight",
    "RMSNorm",
    "Receipt",
    "RotaryEmbedding",
    "RotaryScaling",
    "Router",
    "Routing",
    "TransformerLayer",
    "assert_fp8",
    "calibrate",
    "convert",
    "default_filter",
    "dequantize_state_dict",
    "fold_smooth_swiglu",
    "graphed_step",
    "keep_first_last_bf16",
    "linear_cross_entropy",
    "load_fp8",
    "model_init",
    "packed_positions",
    "permute",
    "receipt",
    "smooth_swiglu",
    "sort_by_expert",
    "tune",
    "unpermute",
]

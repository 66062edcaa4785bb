"""Modules that run under a recipe, the conversion of models to them, and the receipt of what they ran."""

import inspect

from ottava.nn.activations import ACTIVATIONS as ACTIVATIONS
from ottava.nn.activations import Activation as Activation
from ottava.nn.attention import DotProductAttention as DotProductAttention
from ottava.nn.calibrate import CalibrationReport as CalibrationReport
from ottava.nn.calibrate import calibrate as calibrate
from ottava.nn.convert import ConversionReport as ConversionReport
from ottava.nn.convert import convert as convert
from ottava.nn.convert import keep_first_last_bf16 as keep_first_last_bf16
from ottava.nn.convert import model_init as model_init
from ottava.nn.cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from ottava.nn.cross_entropy import linear_cross_entropy as linear_cross_entropy
from ottava.nn.fp8_checkpoint import LoadReport as LoadReport
from ottava.nn.fp8_checkpoint import load_fp8 as load_fp8
from ottava.nn.graphed import GraphedStep as GraphedStep
from ottava.nn.graphed import graphed_step as graphed_step
from ottava.nn.grouped import GroupedLinear as GroupedLinear
from ottava.nn.grouped import Permutation as Permutation
from ottava.nn.grouped import permute as permute
from ottava.nn.grouped import sort_by_expert as sort_by_expert
from ottava.nn.grouped import unpermute as unpermute
from ottava.nn.layer import Linear as Linear
from ottava.nn.mlp import ActivatedLinear as ActivatedLinear
from ottava.nn.mlp import NormMLP as NormMLP
from ottava.nn.mlp import fold_smooth_swiglu as fold_smooth_swiglu
from ottava.nn.mlp import smooth_swiglu as smooth_swiglu
from ottava.nn.moe import MoE as MoE
from ottava.nn.moe import Router as Router
from ottava.nn.moe import Routing as Routing
from ottava.nn.norms import LayerNorm as LayerNorm
from ottava.nn.norms import NormLinear as NormLinear
from ottava.nn.norms import RMSNorm as RMSNorm
from ottava.nn.plan import tune as tune
from ottava.nn.receipt import Receipt as Receipt
from ottava.nn.receipt import assert_fp8 as assert_fp8
from ottava.nn.receipt import receipt as receipt
from ottava.nn.rope import RotaryEmbedding as RotaryEmbedding
from ottava.nn.rope import RotaryScaling as RotaryScaling
from ottava.nn.rope import packed_positions as packed_positions
from ottava.nn.transformer import KVCache as KVCache
from ottava.nn.transformer import MultiheadAttention as MultiheadAttention
from ottava.nn.transformer import TransformerLayer as TransformerLayer
from ottava.recipe import default_filter as default_filter
from ottava.weights.checkpoint import dequantize_state_dict as dequantize_state_dict
from ottava.weights.parameter import QuantizedWeight as QuantizedWeight

__all__ = sorted(name for name, one in globals().items() if name[0] != "_" and not inspect.ismodule(one))

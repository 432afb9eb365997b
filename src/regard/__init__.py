"""Exact self-attention that you can see, at full speed."""

from typing import TYPE_CHECKING

from regard._base.errors import MaterializeError, RecordingError, ShapeError, UnsupportedError
from regard._base.settings import get_num_threads, limits, set_num_threads
from regard._call.edits import Edit
from regard._operator.attention import attention, scaled_dot_product_attention
from regard._operator.merging import merge
from regard._operator.part_gradients import AttentionGradients, attention_gradients
from regard._showing.gradients import StepsGradients
from regard._showing.steps import Steps, steps
from regard._weights.alignment import Alignment, align
from regard._weights.attention_weights import AttentionWeights
from regard._weights.linear_reductions import Diagonals
from regard._weights.one_pass import WeightsSummary
from regard._weights.reductions import Links, TopKeys
from regard._weights.statistics import RowStatistics
from regard._weights.transposed import TransposedWeights
from regard.recording import Layer, Recording

__all__ = [
    "Alignment",
    "AttentionGradients",
    "AttentionWeights",
    "Diagonals",
    "Edit",
    "Layer",
    "Links",
    "MaterializeError",
    "Recording",
    "RecordingError",
    "RowStatistics",
    "ShapeError",
    "Steps",
    "StepsGradients",
    "TopKeys",
    "TransposedWeights",
    "UnsupportedError",
    "WeightsSummary",
    "align",
    "attention",
    "attention_gradients",
    "get_num_threads",
    "limits",
    "merge",
    "scaled_dot_product_attention",
    "set_num_threads",
    "steps",
]

# Loaded when they are first used: the parts of the package, and some of their names.
_PARTS = {
    "distributed": "distributed", "heads": "heads", "hf": "hf", "lm": "lm", "nn": "nn",
    "recording": "recording",
    "survey": "survey", "testing": "testing", "viewer": "viewer",
    "HeadScores": "heads", "Viewer": "viewer",
    "Effects": "_weights.effects", "PairMatrix": "_weights.pair_matrix",
    "TopPairs": "_weights.pair_reductions", "Mix": "_weights.mix", "mix": "_weights.mix",
    "Rollout": "recording._rollout", "rollout": "recording._rollout",
    "Comparison": "_weights.compare", "Divergences": "_weights.compare",
    "compare": "_weights.compare", "divergence": "_weights.compare",
    "Explanation": "_operator.explanation", "explain": "_operator.explanation",
    "patch_torch": "nn.replacement", "record": "capture", "watch": "capture",
}  # fmt: skip

if TYPE_CHECKING:
    from regard import distributed as distributed
    from regard import heads as heads
    from regard import hf as hf
    from regard import lm as lm
    from regard import nn as nn
    from regard import survey as survey
    from regard import testing as testing
    from regard import viewer as viewer
    from regard._operator.explanation import Explanation as Explanation
    from regard._operator.explanation import explain as explain
    from regard._weights.compare import Comparison as Comparison
    from regard._weights.compare import Divergences as Divergences
    from regard._weights.compare import compare as compare
    from regard._weights.compare import divergence as divergence
    from regard._weights.effects import Effects as Effects
    from regard._weights.mix import Mix as Mix
    from regard._weights.mix import mix as mix
    from regard._weights.pair_matrix import PairMatrix as PairMatrix
    from regard._weights.pair_reductions import TopPairs as TopPairs
    from regard.capture import record as record
    from regard.capture import watch as watch
    from regard.heads import HeadScores as HeadScores
    from regard.nn.replacement import patch_torch as patch_torch
    from regard.recording._rollout import Rollout as Rollout
    from regard.recording._rollout import rollout as rollout
    from regard.viewer import Viewer as Viewer

    __version__: str
else:  # a checker that saw __getattr__ would take any name for one of these

    def __getattr__(name):
        if name in _PARTS:
            from importlib import import_module

            part = import_module(f"regard.{_PARTS[name]}")
            return part if name == _PARTS[name] else getattr(part, name)
        if name == "__version__":
            from importlib.metadata import version

            return version("regard")
        raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS, "__version__"])

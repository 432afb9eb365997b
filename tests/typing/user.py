"""What a user's checker knows of regard: `./check types` reads it with mypy and pyright, strictly.

Nothing here runs.
"""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import regard
import regard.distributed
from regard.capture import NonFinite, Watch, WatchReport
from regard.distributed import DistributedWeights, Layout
from regard.lm import LanguageModel
from regard.nn import KeyValueCache, MultiHeadAttention, SelfAttention
from regard.recording import Figure, Grid, WordWeights, Writer
from regard.survey import HeadSums

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


def operator(x: Float32, t: Tensor, asked: bool) -> None:
    assert_type(regard.attention(x, x, x, causal=True, window=(3, None), scale=0.5), Float32)
    assert_type(regard.attention(t, t, t, mask=t > 0, key_lengths=[3, 2], backend="torch"), Tensor)
    pair = regard.attention(x, x, x, segments=np.arange(3), return_weights=True)
    assert_type(pair, tuple[Float32, regard.AttentionWeights[Float32]])
    either = regard.attention(t, t, t, return_weights=asked)
    assert_type(either, Tensor | tuple[Tensor, regard.AttentionWeights[Tensor]])
    assert_type(regard.scaled_dot_product_attention(t, t, t, is_causal=True), Tensor)
    assert_type(regard.attention(np.ones((3, 2)), np.eye(2), np.eye(2)), NDArray[np.float64])
    edits = [regard.Edit(0, slice(3), None, 0.5), regard.Edit(keys=-1)]
    assert_type(regard.attention(x, x, x, edits=edits), Float32)
    assert_type(edits[0].factor, float)
    parameter = torch.nn.Parameter(t)
    assert_type(regard.attention(parameter, parameter, parameter), Tensor)


def over_ranks(t: Tensor) -> None:
    layout = Layout(100, order="striped")
    assert_type(layout.shard(t, 0), Tensor)
    assert_type(layout.gather(t, dim=-1), Tensor)
    assert_type(layout.positions, Tensor)
    own = regard.distributed.attention(t, t, t, layout=layout, causal=True, method="gather")
    assert_type(own, Tensor)
    both = regard.distributed.attention(t, t, t, layout=layout, return_weights=True)
    assert_type(both, tuple[Tensor, DistributedWeights])
    assert_type(both[1].topk(3).values, Tensor)
    assert_type(both[1].strongest().key, Tensor)
    assert_type(both[1].summary().entropy, Tensor)
    assert_type(both[1].statistics.maximum, Tensor)
    assert_type(both[1].row(3), Tensor)
    assert_type(both[1].received("seen", queries=slice(3)), Tensor)
    assert_type(both[1].lse, Tensor)


def parts(x: Float32, t: Tensor) -> None:
    part = regard.attention(
        x,
        x,
        x,
        query_start=0,
        key_start=4,
        key_step=2,
        return_statistics=True,
        output_dtype=x.dtype,
    )
    assert_type(part, tuple[Float32, regard.RowStatistics[Float32]])
    assert_type(part[1].maximum, Float32)
    all_three = regard.attention(t, t, t, return_weights=True, return_statistics=True)
    assert_type(
        all_three,
        tuple[Tensor, regard.AttentionWeights[Tensor], regard.RowStatistics[Tensor]],
    )
    assert_type(regard.merge([part, part], x), tuple[Float32, regard.RowStatistics[Float32]])
    alone = regard.merge([(None, part[1])])
    assert_type(alone, tuple[None, regard.RowStatistics[Float32]])
    weights = regard.AttentionWeights(x, x, key_start=4, query_start=0, statistics=part[1])
    assert_type(weights.statistics, regard.RowStatistics[Float32])
    assert_type(weights.pool((8, 8), of=(64, 64)), Float32)
    found = regard.attention_gradients(x, x, x, part[0], part[1], x, causal=True)
    assert_type(found, regard.AttentionGradients[Float32])
    assert_type(found.query, Float32 | None)
    into = regard.AttentionGradients(t, None, t)
    assert_type(
        regard.attention_gradients(t, t, t, t, all_three[2], t, into=into),
        regard.AttentionGradients[Tensor],
    )


def weights_of_numpy(weights: regard.AttentionWeights[Float32], x: Float32) -> None:
    assert_type(weights[0, 2], Float32)
    assert_type(weights[..., 1:3, np.int64(2)], Float32)
    assert_type(list(weights), list[Float32])
    assert_type(weights.lse, Float32)
    assert_type(weights.max_score, Float32)
    assert_type(weights.entropy(), Float32)
    assert_type(weights.distance(), Float32)
    assert_type(weights.received("mean"), Float32)
    assert_type(weights.received("seen", queries=slice(3)), Float32)
    assert_type(weights @ x, Float32)
    assert_type(weights @ [0.5, 1], Float32)
    assert_type(weights.T, regard.TransposedWeights[Float32])
    assert_type(weights.T @ x, Float32)
    assert_type(weights.blocks(np.arange(3), [0, 1], "mean"), Float32)
    assert_type(weights.diagonals(), regard.Diagonals[Float32, Int64])
    assert_type(weights.diagonals([0, 8, 64]).values, Float32)
    assert_type(weights.at(np.arange(3), 2), Float32)
    assert_type(weights.mass(slice(3)), Float32)
    assert_type(weights.mass([0, 1]), Float32)
    assert_type(weights.sum(-1), Float32)
    assert_type(weights.argmax(-1), Int64)
    assert_type(weights.topk(3), regard.TopKeys[Float32, Int64])
    assert_type(weights.topk(3).values, Float32)
    assert_type(weights.topk(3).indices, Int64)
    assert_type(weights.strongest(), regard.Links[Float32, Int64])
    assert_type(weights.strongest().key, Int64)
    assert_type(weights.strongest().weight, Float32)
    assert_type(weights.align([0, 2]), regard.Alignment[Float32, Int64])
    assert_type(weights.align(median_filter_width=5, normalise=False).first, Int64)
    assert_type(regard.align([weights], [(0, 2)]).matrix, Float32)
    assert_type(weights.pool((8, 8)), Float32)
    assert_type(weights.pool((8, 8), ("max", "mass")), tuple[Float32, ...])
    assert_type(weights.pool(how=("max", "mass"), rows=slice(3)), tuple[Float32, ...])
    assert_type(weights.summary(), regard.WeightsSummary[Float32, Int64])
    assert_type(weights.summary(only=["topk"]).topk.indices, Int64)
    part = weights.head(0).part(slice(3)).matrix(1).copy()
    assert_type(part, regard.AttentionWeights[Float32])
    assert_type(weights.shape, tuple[int, ...])


def effects(weights: regard.AttentionWeights[Float32], x: Float32, t: Tensor) -> None:
    found = weights.effects(x, x)
    assert_type(found, regard.Effects[Float32])
    assert_type(found[0, 2], Float32)
    assert_type(found.head(0).part(slice(3)).matrix(), regard.Effects[Float32])
    assert_type(found.topk(3), regard.TopKeys[Float32, Int64])
    assert_type(found.strongest(), regard.TopPairs[Float32, Int64])
    assert_type(found.received("max"), Float32)
    assert_type(found.pool((8, 8)), Float32)
    assert_type(found.pool(how=("max", "mass")), tuple[Float32, ...])
    assert_type(weights.effects(x, kind="change"), regard.Effects[Float32])
    mixed = weights.mix([0, 1], coefficients=[0.5, 0.5])
    assert_type(mixed, regard.Mix[Float32])
    assert_type(regard.mix([weights, weights]).mix()[0], Float32)
    assert_type(regard.mix([mixed, found.mix()], x).topk(2), regard.TopKeys[Float32, Int64])
    comparison = regard.compare(weights, weights)
    assert_type(comparison, regard.Comparison[Float32])
    assert_type(comparison.strongest(), regard.TopPairs[Float32, Int64])
    assert_type(comparison.divergences(), regard.Divergences[Float32])
    assert_type(comparison.overlap(3), Float32)
    assert_type(regard.divergence(mixed, mixed, "jensen_shannon"), Float32)
    of_torch = regard.AttentionWeights(t, t).effects(t, t, "relevance")
    assert_type(of_torch.strongest(2), regard.TopPairs[Tensor, Tensor])


def weights_of_torch(t: Tensor) -> None:
    weights = regard.AttentionWeights(t, t, causal=True, sinks=t)
    assert_type(weights, regard.AttentionWeights[Tensor])
    assert_type(weights[0], Tensor)
    assert_type(weights.topk(2), regard.TopKeys[Tensor, Tensor])
    assert_type(weights @ t, Tensor)
    assert_type(weights.T @ t, Tensor)
    assert_type(weights.diagonals(), regard.Diagonals[Tensor, Tensor])
    assert_type(weights.argmax(), Tensor)
    assert_type(weights.strongest(2), regard.Links[Tensor, Tensor])
    assert_type(weights.align(), regard.Alignment[Tensor, Tensor])
    assert_type(regard.align([weights], [[0, 2]]), regard.Alignment[Tensor, Tensor])
    assert_type(weights.summary().received, Tensor)


def steps(x: Float32, t: Tensor) -> None:
    assert_type(regard.steps(x, x, x, causal=True), regard.Steps[Float32, Float32])
    assert_type(regard.steps(x, x, x).output, Float32)
    assert_type(regard.steps(t, t).masked, Tensor)
    assert_type(regard.steps(t, t).output, Tensor | None)
    made = regard.Steps.from_inputs(x, x, x, x, tokens=["a", "b"], dropout=0.1, seed=3)
    assert_type(made, regard.Steps[Float32, Float32])
    assert_type(made.explain(0, 1), str)
    gradients = made.backward(x)
    assert_type(gradients, regard.StepsGradients[Float32])
    assert_type(gradients.d_scores, Float32)
    assert_type(gradients.d_w_query, Float32 | None)
    assert_type(gradients.explain(0, 1, head=2), str)
    assert_type(gradients.steps, regard.Steps[Float32, Float32])
    assert_type(regard.steps(t, t, t).backward(t).d_query, Tensor)


def recordings(x: Float32, t: Tensor) -> None:
    layer = regard.Layer(x, x, x, causal=True)
    assert_type(layer, regard.Layer[Float32])
    assert_type(layer.value, Float32 | None)
    recording = regard.Recording(["a", "b"], [layer])
    assert_type(recording, regard.Recording[Float32])
    assert_type(recording.weights[0], regard.AttentionWeights[Float32])
    assert_type(recording.steps(0, 1).weights, Float32)
    assert_type(recording.effects(0, 1, kind="relevance"), regard.Effects[Float32])
    assert_type(regard.Layer(x, x, x, gradient=x).gradient, Float32 | None)
    assert_type(regard.rollout(recording, residual=0.5), regard.Rollout[Float32])
    assert_type(regard.rollout(recording)[-1], Float32)
    with regard.record(explain=lambda output: output.sum()) as explained:
        assert_type(explained.effects(0)[0], Tensor)
    assert_type(recording.view(), regard.Viewer)
    assert_type(recording.figure(0, 1, rows=slice(9), scale="log", size=(3.3, 3)), Figure)
    recording.figure(heads=[(0, 1), (1, 0)], transparent=True).save("heads.pdf")
    dense = regard.Recording.from_weights(["a", "b"], [x, t], sinks=True)
    assert_type(dense, regard.Recording[NDArray[np.floating[Any]]])
    assert_type(dense.weights[0].head(0)[1], NDArray[np.floating[Any]])
    regard.Recording.from_weights(["a", "b"], {3: t}, names=["a"])
    assert_type(regard.Layer.from_weights(t), regard.Layer[NDArray[np.floating[Any]]])
    assert_type(regard.heads.head_scores(recording), regard.HeadScores)
    assert_type(regard.heads.head_scores(recording).first, NDArray[np.float64])
    assert_type(recording.heads().receivers, Int64)
    assert_type(recording.heads().sort("induction")["same token"], NDArray[np.float64])
    assert_type(recording.heads().telling().says, str)
    assert_type(recording.in_words().weights[0], WordWeights)
    survey = regard.survey.Survey("heads/", corpus=["texts/"], max_tokens=512)
    assert_type(survey.heads(), HeadSums)
    assert_type(survey.heads() + survey.heads(), HeadSums)
    assert_type(survey.missing(), list[int])
    assert_type(survey.heads().mean("entropy"), NDArray[np.float64])
    assert_type(survey.means(), regard.HeadScores)
    assert_type(survey.heads().top_receivers(0, 1)[0].token, str)
    assert_type(recording.in_words().weights[0].head(3)[0], NDArray[np.floating[Any]])
    assert_type(recording.groups["decoder"].picture(5, 3, -1, grid=0), Float32)
    assert_type(recording.grids, tuple[Grid, ...])
    assert_type(layer.head_numbers, tuple[int, ...])
    with Writer("pass.safetensors", tokens=3) as writer:
        assert_type(writer, Writer)
        writer.add(layer, group="decoder")
        writer.finish({"decoder": {"tokens": ["a"], "grids": [Grid(0, 1, 1)]}}, model="small")
    with Writer("pass.safetensors", statistics=True):
        recording.save("pass.safetensors", statistics=True)
    kept = regard.Layer(t, t, statistics=regard.RowStatistics(t, t)).statistics
    assert_type(kept, regard.RowStatistics[Any] | None)
    remote = regard.Recording.load("s3://a/b", storage_options={"anon": True})
    assert_type(remote, regard.Recording[NDArray[np.floating[Any]]])
    assert_type(remote.tokens, tuple[str, ...])
    assert_type(regard.Recording(["a"], [regard.Layer(t, t)]).weights[0][0], Tensor)
    assert_type(LanguageModel.load("builtin").record("some text"), regard.Recording[Float32])
    assert_type(LanguageModel.load().view("some text"), regard.Viewer)
    regard.viewer.view(recording, other=regard.Recording.load("one.safetensors"))


def layers(t: Tensor) -> None:
    layer = MultiHeadAttention(32, 4, causal=True)
    with regard.watch(layer, every=10, report=lambda step, found: print(step + 1, found)) as watch:
        assert_type(watch, Watch)
    assert_type(watch.last, WatchReport | None)
    assert_type(watch.history[0]["max_score"], NDArray[np.float64])
    assert_type(watch.nonfinite, NonFinite | None)
    assert_type(layer(t), Tensor)
    assert_type(layer(t, t, mask=t > 0), Tensor)
    assert_type(layer(t, return_weights=True)[1], regard.AttentionWeights[Tensor])
    assert_type(layer.new_cache(), KeyValueCache)
    assert_type(layer(t, cache=layer.new_cache()), Tensor)
    single = SelfAttention(32, 32)
    assert_type(single(t, return_weights=True), tuple[Tensor, regard.AttentionWeights[Tensor]])


def package() -> None:
    assert_type(regard.__version__, str)
    assert_type(regard.lm.LanguageModel.load(), LanguageModel)
    assert_type(regard.nn.SelfAttention(3, 3), SelfAttention)
    assert_type(regard.get_num_threads(), int)
    regard.testing.assert_matches(np.eye(2), np.eye(2), np.eye(2))

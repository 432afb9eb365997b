"""Weights as a heatmap for a notebook, without matplotlib; ``figure`` draws with it."""

import base64
import html
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from regard._base.arrays import to_numpy

if TYPE_CHECKING:
    from regard._weights.attention_weights import AttentionWeights
    from regard.recording import Recording, WordWeights

# From paper to ink: weights below 1e-5 are paper, a weight of 1 is ink. Masked pairs are grey.
RAMP = np.array(
    [
        [255, 249, 236], [254, 219, 163], [253, 174, 97], [244, 109, 67], [213, 62, 96],
        [150, 35, 112], [84, 30, 108], [30, 28, 50],
    ],
    float,
)  # fmt: skip
INVISIBLE = np.array([226, 226, 230], float)
LOG_FLOOR = np.log(1e-5)
MOST_ROWS = 2048  # of one picture in a notebook: 0.1 s for 100,000 keys
MOST_OF_WORDS = 2**24  # weights of words that are computed at once


def colours(log_weights: np.ndarray) -> np.ndarray:
    """``(..., 3)`` uint8 for ln(weight): from 1e-5 to 1 along the ramp, NaN in grey."""
    with np.errstate(invalid="ignore"):
        place = np.clip(1 - log_weights / LOG_FLOOR, 0, 1) * (len(RAMP) - 1)
    hidden = np.isnan(place)
    place = np.where(hidden, 0, place)
    low = np.minimum(place.astype(int), len(RAMP) - 2)
    mixed = RAMP[low] + (place - low)[..., None] * (RAMP[low + 1] - RAMP[low])
    return np.where(hidden[..., None], INVISIBLE, mixed).round().astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """A PNG file of ``(height, width, 3)`` uint8. Source: RFC 2083."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = np.insert(pixels.reshape(height, -1), 0, 0, axis=1).tobytes()  # filter 0 for each row
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def weights_html(weights: "AttentionWeights", pictures: int = 8) -> str:
    """HTML for a notebook: shape and size, and heatmaps of the first matrices."""
    heads = int(np.prod(weights.shape[:-2]))
    shown = []
    for i in range(min(heads, pictures) if weights.size else 0):
        index = tuple(int(n) for n in np.unravel_index(i, weights.shape[:-2]))
        if index and len(weights.head_numbers) == weights.shape[-3]:
            index = (*index[:-1], weights.head_numbers[index[-1]])
        label = "weights" + (str(list(index)) if index else "")
        shown.append(_figure(weights.matrix(*index), label, 128))
    return _html(repr(weights).splitlines()[0], shown, heads)


def words_html(weights: "WordWeights", pictures: int = 8) -> str:
    """The same of weights of words; no heatmaps where these are too many to be computed at once."""
    matrices = [("weights", weights)]
    if weights.ndim > 2:
        matrices = [(f"weights[{h}]", weights.head(h)) for h in weights.head_numbers]
    few = matrices[:pictures] if 0 < weights.size <= MOST_OF_WORDS else []
    shown = [_heatmap(matrix.pool((96, 96)), label, 128) for label, matrix in few]
    return _html(repr(weights), shown, len(matrices))


def recording_html(recording: "Recording", pictures: int = 24) -> str:
    """The same of a recording: the heads of its first layers."""
    numbered = zip(recording.layer_numbers, recording.layers)
    heads = [(number, h) for number, layer in numbered for h in layer.head_numbers]
    shown = [
        _figure(recording.weights[layer].head(head), f"L{layer}H{head}", 96)
        for layer, head in heads[:pictures]
        if recording.weights[layer].size
    ]
    return _html(repr(recording), shown, len(heads))


def _html(text: str, shown: list[str], heads: int) -> str:
    more = f"<div>and {heads - len(shown)} more</div>" if shown and heads > len(shown) else ""
    return f"<div><code>{html.escape(text)}</code></div>{''.join(shown)}{more}"


def _figure(matrix: "AttentionWeights", label: str, side: int) -> str:
    """One matrix in at most 96 × 96 bins; for very many queries, evenly spaced ones."""
    step = -(-matrix.shape[0] // MOST_ROWS)
    if step > 1:
        matrix, label = matrix.part(slice(0, None, step)), f"{label}, 1 of {step} queries"
    return _heatmap(to_numpy(matrix.pool((96, 96))), label, side)


def _heatmap(log_weights: np.ndarray, label: str, side: int) -> str:
    data = base64.b64encode(_png(colours(log_weights))).decode()
    return (
        '<figure style="display:inline-block;margin:0 8px 8px 0">'
        f'<img width="{side}" height="{side}" alt="{label}: queries down, keys across"'
        f' style="image-rendering:pixelated" src="data:image/png;base64,{data}">'
        f"<figcaption>{label}</figcaption></figure>"
    )

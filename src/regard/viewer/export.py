"""The viewer in one HTML file: the page, and the recordings whose weights it computes by itself.

Arrays stand in the file as they were recorded, to the last bit, so it shows the numbers of
``regard view``. Its size follows from query, key and value, and the gradient where effects were
recorded, which are linear in the tokens.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import numbers
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard._base.arrays import dtype_name, to_numpy
from regard._base.errors import MaterializeError
from regard._base.files import check_ending, replaced_when_complete
from regard._base.settings import bytes_text, counted
from regard._call import edits
from regard._call.options import REAL_NUMBERS
from regard._showing.figure import ENDINGS as FIGURE_ENDINGS
from regard._weights.parts import told_numbers
from regard.heads import Reader
from regard.recording import Layer, Recording
from regard.recording._saving import bytes_of
from regard.viewer import _facts
from regard.viewer._alignment import Alignments
from regard.viewer._bundle import bundle, style_sheet
from regard.viewer._heads import roles_of
from regard.viewer.answer import Answers

__all__ = ["export"]

LIMIT_BYTES = 64_000_000
ENDINGS = (".html", ".htm")
LEAST_PACKED = 0.5  # the least fraction of their bytes that a model's numbers pack to
FLOATS = ("query", "key", "value", "gradient")
SQUARES = ("bias", "mask")  # of queries × keys
# Nothing is fetched, and only this script and this style run.
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:;"
    " connect-src 'none'; base-uri 'none'; form-action 'none'"
)
BEFORE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body class="regard-body">
<div id="regard">
Reading this file. Where this line stays, and JavaScript is on, the file is cut: copy or export
it again.
</div>
<noscript>regard draws its maps with JavaScript, which this browser has switched off.</noscript>
"""
TEXT = '<script type="application/octet-stream" id="{name}">{text}</script>\n'
DATA = '<script type="application/json" id="regard-data">{data}</script>\n'
AFTER = """<script type="module">{script}</script>
</body>
</html>
"""


def export(
    recording: Recording[Any],
    path: str | Path,
    *,
    other: Recording[Any] | None = None,
    layers: Sequence[int] | None = None,
    limit_bytes: float = LIMIT_BYTES,
    names: Sequence[str] | None = None,
) -> None:
    """Write the viewer with a recording in it to one HTML file, which works offline.

    The file appears under its name when it is complete, or not at all.

    Args:
        recording: to look at.
        path: file to write, ``.html``; one that exists is replaced.
        other: a second recording, to compare the first with.
        layers: numbers of the layers to write, which keep them; by default all.
        limit_bytes: of the file; ``math.inf`` for none.
        names: what to call the recordings; by default their models.

    Raises:
        IndexError: no such layer.
        MaterializeError: the file would be above the limit.
        OSError: the folder is missing or cannot be written.
        TypeError: no recording, layers that are no list of ints, or a limit that is no number.
        ValueError: a recording without queries, no layer is left, a limit that is NaN or not above
            0, or a name that says another kind of file.
    """
    check_name(path)
    _check_limit(limit_bytes)
    recordings = [recording] if other is None else [recording, other]
    pack = Pack(recordings, names, layers, limit_bytes)
    page = _page(pack).encode()
    if len(page) > limit_bytes:
        raise pack.too_large()
    with replaced_when_complete(path) as file:
        file.write(page)


def _check_limit(limit_bytes: Any) -> None:
    way_out = "a number of bytes above 0 is needed, such as limit_bytes=64e6."
    is_number = isinstance(limit_bytes, numbers.Real) and not isinstance(limit_bytes, bool)
    if not is_number:
        raise TypeError(f"export: limit_bytes is {limit_bytes!r}; {way_out}")
    if not limit_bytes > 0:
        raise ValueError(f"export: limit_bytes is {limit_bytes}; {way_out}")


def check_name(path: str | Path) -> None:
    """Refuses a name that says another kind of file.

    Raises:
        ValueError: with a name that fits.
    """
    try:
        check_ending(path, ENDINGS, "the page")
    except ValueError as error:
        if Path(path).suffix.lower() not in FIGURE_ENDINGS:
            raise
        way_out = f"The picture is recording.figure(layer, head).save({str(path)!r})."
        raise ValueError(f"{error} {way_out}") from None


class Pack:
    """Recordings as ``page/offline/local.js`` reads them.

    Attributes:
        data: what becomes JSON: about, tokens, options, and the name of each array's text.
        texts: base64 of each array, by name.

    Raises:
        IndexError, MaterializeError, ValueError: as ``export``.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        names: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        limit_bytes: float = LIMIT_BYTES,
    ) -> None:
        answers = Answers(recordings, names)
        about = json.loads(answers.answer("about").body)
        answers.close()
        self.texts: dict[str, str] = {}
        self._limit_bytes = limit_bytes
        self._held = [
            [(place, recording.layers[place]) for place in _chosen(recording, layers)]
            for recording in recordings
        ]
        self._tokens = max(len(recording.tokens) for recording in recordings)
        if self._bytes_of(FLOATS) * LEAST_PACKED * 4 / 3 > limit_bytes:
            raise self.too_large()
        for facts, held in zip(about["recordings"], self._held):
            # One row of each bin comes first in the page: no samples of equal size.
            facts["layers"] = [{**facts["layers"][place], "samples": 1} for place, _ in held]
        packed = [
            {
                **_tokens(recording),
                "layers": [self._packed(layer) for _, layer in held],
                "roles": _roles(recording, [place for place, _ in held]),
            }
            for recording, held in zip(recordings, self._held)
        ]
        self.data = {"about": about, "recordings": packed, "alignments": _alignments(recordings)}

    def _packed(self, layer: Layer) -> dict[str, Any]:
        arrays = {}
        for name, array in _arrays(layer).items():
            text = f"regard-array-{len(self.texts)}"
            self.texts[text] = _text(array, name)
            arrays[name] = {
                "text": text,
                "dtype": dtype_name(array),
                "shape": [int(n) for n in array.shape],
            }
            if sum(map(len, self.texts.values())) > self._limit_bytes:
                raise self.too_large()
        return {**_options(layer), "arrays": arrays}

    def _bytes_of(self, names: Sequence[str]) -> int:
        arrays = (_arrays(layer) for held in self._held for _, layer in held)
        return sum(found[name].nbytes for found in arrays for name in names if name in found)

    def too_large(self) -> MaterializeError:
        """The size found, the limit, and the way out."""

        layers = [layer for held in self._held for _, layer in held]
        heads = max(layer.heads for layer in layers)
        has_gradient = any(layer._gradient is not None for layer in layers)
        vectors = "query, key, value and gradient" if has_gradient else "query, key and value"
        size, squares = self._bytes_of(FLOATS), self._bytes_of(SQUARES)
        also = f" and {' and '.join(SQUARES)} of {bytes_text(squares)}" if squares else ""
        return MaterializeError(
            f"export: {counted(len(layers), 'layer')} × {counted(heads, 'head')} ×"
            f" {counted(self._tokens, 'token')} hold {bytes_text(size)} of {vectors}"
            f"{also}; packed into one page they are above the limit of"
            f" {bytes_text(self._limit_bytes)}.\n"
            "  Choose layers with layers=[0, 5], record fewer tokens, allow more with"
            " limit_bytes=..., or look at all of it with regard view."
        )


def _chosen(recording: Recording, layers: Sequence[int] | None) -> list[int]:
    """The places of the layers of these numbers."""
    numbers = recording.layer_numbers
    if layers is None:
        return list(range(len(numbers)))
    chosen = _numbers_of(layers)
    if not chosen:
        raise ValueError("export: layers is empty; name at least one, or leave it out for all.")
    for layer in sorted(chosen):
        if layer not in numbers:
            raise IndexError(f"export: layers has {layer}; {told_numbers(numbers)}.")
    return [place for place, number in enumerate(numbers) if number in chosen]


def _numbers_of(layers: Any) -> set[int]:
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(f"export: layers is {layers!r}; a list of numbers is needed, as in [0, 5].")
    found = list(layers)
    for layer in found:
        if isinstance(layer, bool) or not isinstance(layer, numbers.Integral):
            raise TypeError(f"export: layers has {layer!r}; the number of a layer is an int.")
    return {int(layer) for layer in found}


def _tokens(recording: Recording) -> dict[str, Any]:
    own, words = recording.query_tokens, recording.in_words()
    return {
        "tokens": recording.tokens,
        "query_tokens": None if own == recording.tokens else own,
        "words": {"key": words.starts.tolist(), "query": words.query_starts.tolist()},
    }


def _alignments(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The response ``alignment`` of each two recordings, the first of them first."""
    found, pairs = Alignments(recordings), itertools.combinations(range(len(recordings)), 2)
    return {f"{one} {other}": found[one, other]._asdict() for one, other in pairs}


def _roles(recording: Recording, places: list[int]) -> dict[str, Any]:
    """The response ``roles``, of the layers at some places."""
    numbers = (recording.layer_numbers[place] for place in places)
    return roles_of(Reader(recording, receivers=0).layers(*numbers))


def _options(layer: Layer) -> dict[str, Any]:
    """The options that are no arrays: the scale, the edits, and the rules that mask keys."""
    call = _facts.call_of(layer, 0)
    return {
        **{name: getattr(call, name) for name in REAL_NUMBERS},
        "causal": call.causal,
        "left": call.window_left,
        "right": call.window_right,
        "start": layer.query_start,
        "length": layer.options.get("key_lengths", layer._key.shape[1]),
        "edits": edits.to_json(layer.options.get("edits", ())),
    }


def _arrays(layer: Layer) -> dict[str, Any]:
    """The arrays of a layer, in the dtype in which they were recorded."""
    arrays = {name: getattr(layer, name) for name in FLOATS}
    arrays |= {name: layer.options.get(name) for name in ("sinks", *SQUARES)}
    for name in SQUARES:
        if (array := arrays[name]) is not None:
            arrays[name] = array.reshape((1,) * (3 - array.ndim) + tuple(array.shape))
    if (segments := layer.options.get("segments")) is not None:
        pair = segments if isinstance(segments, tuple) else (segments, segments)
        ids = [to_numpy(side) for side in pair]
        # Only the equality of ids matters: renumbered, they fit into 32 bits.
        _, numbers = np.unique(np.concatenate(ids), return_inverse=True)
        sides = np.split(numbers.astype(np.int32), [len(ids[0])])
        arrays |= dict(zip(("query_segments", "key_segments"), sides))
    if (intervals := layer.options.get("intervals")) is not None:
        count = layer._key.shape[1]
        ends = (to_numpy(x).clip(0, count).astype(np.int32) for x in intervals)
        arrays |= zip(("interval_first", "interval_last"), ends)
    return {name: array for name, array in arrays.items() if array is not None}


def _text(array: Any, name: str) -> str:
    """base64 of the deflated array, the first bytes of all numbers first, then the second ones.

    Only the signs and exponents of a model's numbers pack, and nothing repeats: Huffman coding
    alone gives 0.83 of float32 at 180 MB/s, a search for repetitions 0.85 at 20.
    """
    count = math.prod(array.shape)
    planes = np.frombuffer(bytes_of(array), np.uint8).reshape(max(count, 1), -1).T.tobytes()
    strategy = zlib.Z_HUFFMAN_ONLY if name in FLOATS else zlib.Z_DEFAULT_STRATEGY
    deflate = zlib.compressobj(6, zlib.DEFLATED, 15, 9, strategy)
    return base64.b64encode(deflate.compress(planes) + deflate.flush()).decode()


def _page(pack: Pack) -> str:
    recordings = pack.data["about"]["recordings"]
    title = " and ".join(facts["name"] or "regard" for facts in recordings)
    style = style_sheet()
    script = bundle("offline")
    before = BEFORE.format(
        policy=POLICY.format(script=_hash(script), style=_hash(style)),
        title=html.escape(title.encode(errors="replace").decode()),
        style=style,
    )
    # In JSON "<" stands in texts alone, where it may be written as an escape.
    data = json.dumps(pack.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    texts = "".join(TEXT.format(name=name, text=text) for name, text in pack.texts.items())
    return before + DATA.format(data=data) + texts + AFTER.format(script=script)


def _hash(text: str) -> str:
    """The hash that lets a script or style run under the Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

"""The definition once more, as plainly as it can be written: whole matrices, loops, float64.

Every test compares with this, and it shares no line with the package.
"""

import numpy as np


def visible_pairs(
    B, Hq, Lq, Lk, *, causal=False, window=None, mask=None, key_lengths=None, segments=None,
    intervals=None, query_start=None, edits=None,
):  # fmt: skip
    visible = np.ones((B, Hq, Lq, Lk), bool)
    lengths = np.broadcast_to(Lk if key_lengths is None else key_lengths, (B,))
    starts = np.broadcast_to(lengths - Lq if query_start is None else query_start, (B,))
    left, right = window or (None, None)
    if segments is not None:
        of_queries, of_keys = segments if isinstance(segments, tuple) else (segments, segments)
        of_queries = np.broadcast_to(of_queries, (B, Lq))
        of_keys = np.broadcast_to(of_keys, (B, Lk))
    first, last = (np.broadcast_to(x, (B, Lq)) for x in intervals or (0, Lk))
    j = np.arange(Lk)
    for b in range(B):
        p = starts[b] + np.arange(Lq)[:, None]
        sees = np.broadcast_to(j < lengths[b], (Lq, Lk))
        if causal:
            sees = sees & (j <= p)
        if left is not None:
            sees = sees & (j >= p - left)
        if right is not None:
            sees = sees & (j <= p + right)
        if segments is not None:
            sees = sees & (of_queries[b][:, None] == of_keys[b])
        visible[b] = sees & (first[b][:, None] <= j) & (j < last[b][:, None])
    if mask is not None:
        visible &= np.broadcast_to(mask, visible.shape)
    if edits is not None:
        visible &= edit_factors(edits, Hq, Lq, Lk) > 0
    return visible


def edit_factors(edits, Hq, Lq, Lk):
    """``(Hq, Lq, Lk)``: what each weight is multiplied by; wide, for the product of many."""
    factors = np.ones((Hq, Lq, Lk), np.longdouble)
    for edit in edits:
        spans = (edit.heads, Hq), (edit.queries, Lq), (edit.keys, Lk)
        factors[np.ix_(*(list(among(*each)) for each in spans))] *= edit.factor
    return factors


def edit_logs(edits, Hq, Lq, Lk):
    """Their logarithms, which are added to scores; 0 for pairs that are cut."""
    factors = edit_factors(edits, Hq, Lq, Lk)
    return np.log(np.where(factors > 0, factors, 1)).astype(float)


def among(span, count):
    """The heads, queries or keys of an edit, of ``count``."""
    if span is None:
        return range(count)
    return range(count)[span] if isinstance(span, slice) else (range(count)[span],)


def define(
    query, key, value=None, *, bias=None, sinks=None, scale=None, softcap=None, dtype=np.float64,
    keep=None, edits=None, **visibility,
):  # fmt: skip
    """Output, weights and log-sum-exp of ``(B, H, L, D)`` arrays, computed in ``dtype``."""
    with np.errstate(all="ignore"):
        q, k = query.astype(dtype), key.astype(dtype)
        B, Hq, Lq, D = q.shape
        Hkv, Lk = k.shape[1:3]
        k = np.broadcast_to(k, (B, *k.shape[1:])).repeat(Hq // Hkv, 1)
        s = (q @ k.swapaxes(-1, -2)) * (
            dtype(scale) if scale is not None else 1 / np.sqrt(dtype(D))
        )
        if softcap is not None:
            s = dtype(softcap) * np.tanh(s / dtype(softcap))
        if bias is not None:
            s = s + bias.astype(dtype)
        if edits is not None:
            s = s + edit_logs(edits, Hq, Lq, Lk).astype(dtype)
        visible = visible_pairs(B, Hq, Lq, Lk, edits=edits, **visibility)
        s = np.where(visible, s, -np.inf)
        m = s.max(-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            sink = sinks.astype(dtype)[:, None, None]
            m = np.where(m == -np.inf, m, np.maximum(m, sink))
        e = np.exp(s - np.where(m == -np.inf, 0, m))
        total = e.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.where(m == -np.inf, 0, np.exp(sink - m))
        w = e / np.where(total == 0, 1, total)
        lse = (m + np.log(total))[..., 0]
        if value is None:
            return w, lse
        dropped = w if keep is None else w * keep
        v = np.broadcast_to(value.astype(dtype), (B, *value.shape[1:])).repeat(Hq // Hkv, 1)
        out = np.zeros((B, Hq, Lq, v.shape[-1]), dtype)
        for b, h, i in np.ndindex(B, Hq, Lq):  # an invisible value takes no part at all
            seen = visible[b, h, i]
            out[b, h, i] = dropped[b, h, i, seen] @ v[b, h, seen]
        return out, w, lse


def assert_near(actual, exact, largest_score, largest_value):
    """A bound for tiny arrays, where the luck of a few roundings is no measure of an error.

    A score of size s is known to ``eps · s``, which is the relative error of its weight; the sum of
    weighted values adds a few roundings of its own, and the output one of its dtype. bfloat16
    weights are rounded before they are multiplied, and divided by the sum of what they are then.
    """
    name = str(actual.dtype).removeprefix("torch.")
    actual = actual.detach().double().numpy() if hasattr(actual, "detach") else actual
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(name, 0.0)
    eps = 2.0**-52 if name == "float64" else 2.0**-23
    bound = 8 * eps * (1 + largest_score) * (largest_value + 1e-30) + half * np.abs(exact) * 1.01
    bound += (name == "bfloat16") * half * (largest_value + 1e-30)
    error = np.abs(actual.astype(float) - exact)
    assert np.array_equal(np.isnan(actual), np.isnan(exact))
    assert (np.nan_to_num(error) <= bound + 2.0**-25 * (name == "float16")).all(), np.nanmax(error)

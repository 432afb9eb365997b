"""What answers where an array's method is missing from weights, by the method's name."""

_WHOLE = (
    "weights[...] or np.asarray(weights) is the whole matrix, up to regard.limits; weights[0, 3] a"
    " part of it"
)
_ANSWERS = {
    "weights.T exchanges queries and keys": (
        "transpose", "swapaxes", "permute", "permute_dims", "movedim", "moveaxis", "t", "H",
    ),
    "weights.topk(k) has the strongest keys of every query in order, weights.strongest(n) the"
    " strongest pairs": ("sort", "argsort", "argpartition", "partition", "nonzero", "quantile"),
    "weights.entropy() tells how far the weights of each query are spread": ("std", "var"),
    "weights @ x multiplies them": ("dot", "matmul", "mm", "bmm", "mv"),
    "weights.max(axis) has the largest; the smallest is 0 wherever a key is masked": (
        "min", "argmin", "amin",
    ),
    "weights.max(axis) is that": ("amax",),
    "weights.mass(slice(0, j + 1)) is the sum up to a key": ("cumsum",),
    _WHOLE: (
        "reshape", "flatten", "ravel", "view", "squeeze", "unsqueeze", "expand", "repeat",
        "numpy", "tolist", "to_dense", "item", "astype", "to", "cpu", "cuda", "float", "double",
        "half", "bfloat16", "detach", "clone", "contiguous", "flat", "strides", "stride", "data",
        "itemsize", "all", "any", "clip", "clamp", "round", "abs", "exp", "log", "log2", "sqrt",
        "softmax", "log_softmax", "norm", "prod", "cumprod", "median", "fill", "take", "gather",
        "index_select", "masked_fill", "diagonal", "trace", "unique", "chunk", "split", "unbind",
        "save", "dump", "tobytes",
    ),
}  # fmt: skip
_OF = {name: answer for answer, names in _ANSWERS.items() for name in names}
_OF["diagonal"] = _OF["trace"] = "weights.diagonals() has the sums of all diagonals, by distance"


def missing(name: str) -> str:
    """The text of an AttributeError."""
    text = f"'AttentionWeights' object has no attribute {name!r}"
    return f"{text}: the matrix is not stored. {_OF[name]}." if name in _OF else text

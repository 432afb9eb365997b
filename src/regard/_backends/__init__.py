"""The backends in their order of preference; each says why it refuses a call.

A new one is a module here with a class like those below, and a line in ``BACKENDS``.
"""

from typing import Any, Protocol

from regard._backends.kernel import Kernel
from regard._backends.reference import Reference
from regard._backends.torch import Torch
from regard._backends.triton import Fused, Triton
from regard._base.errors import UnsupportedError
from regard._call.call import Call

Statistics = tuple[Any, Any]  # maximum and total, (B, Hq, Lq), from which weights are computed


class Backend(Protocol):
    """One implementation of the operator and of the reductions of its weights.

    Attributes:
        name: the value of ``backend=``.
        past_torch: whether it writes into tensors where torch does not see it.
        reads_statistics: whether ``reduce`` must be given the row statistics; if not, it needs them
            only where a call has some of the keys.
        few_rows: above this number of queries that share a key head, a row's statistics do not
            depend on the rows computed with it.
        checks_on_device: whether it checks integers of a device there, for which no host waits.
        wide_scores: whether its scores are float64, whatever the query is.
    """

    @property
    def name(self) -> str: ...
    @property
    def past_torch(self) -> bool: ...
    @property
    def reads_statistics(self) -> bool: ...
    @property
    def few_rows(self) -> int: ...
    @property
    def checks_on_device(self) -> bool: ...
    @property
    def wide_scores(self) -> bool: ...

    def refuses(self, call: Call) -> str | None:
        """Why it cannot serve a call, or None."""

    def attention(self, call: Call, weights: bool) -> tuple[Any, Statistics | None]:
        """The output ``(B, Hq, Lq, Dv)``, and the row statistics where it has them.

        Args:
            weights: whether they will be needed.
        """

    def row_statistics(self, call: Call) -> Statistics:
        """Maximum and total of each row, in the unit of its own ``reduce``."""

    def score_unit(self, call: Call) -> float:
        """What makes a final score of a maximum that ``row_statistics`` gives."""

    def finds_statistics(self, call: Call, fields: dict[str, Any]) -> bool:
        """Whether ``reduce`` finds the row statistics itself, in the pass that needs them."""

    def reduce(
        self, call: Call, statistics: Statistics | None, fields: dict[str, Any]
    ) -> Statistics | None:
        """Fills arrays with reductions of the weights, in one pass.

        Args:
            call: without a value; maybe with some of the queries and keys of the whole.
            statistics: of its rows, contiguous, in NumPy or on the device where it computed them;
                None where it finds or does not read them.
            fields: numbers and result arrays of the call's library, by their names in
                ``regard._weights.reductions``; ``weights`` are zeros ``(B, Hq, Lq, Lk)``.

        Returns:
            The row statistics, where it found them.
        """

    def add_gradients(
        self, call: Call, grad: Any, delta: Any, statistics: Statistics, sums: dict[str, Any]
    ) -> None:
        """Adds the gradients of attention over some keys, from the statistics of whole rows.

        Args:
            call: with a value.
            grad: ``(B, Hq, Lq, Dv)``, by the output.
            delta: ``(B, Hq, Lq)``, ``Σ grad · output``, in the dtype of sums.
            statistics: of the whole rows in NumPy, contiguous.
            sums: by the names of query, key, value and bias, contiguous, in the dtype of sums: to
                which they are added.
        """

    def gather(self, call: Call, statistics: Statistics, queries: Any, keys: Any) -> Any:
        """``(B, Hq, n)``: the weights of some pairs, wide; 0 where masked.

        Args:
            call: without a value; maybe with some of the queries and keys of the whole.
            statistics: of its rows in NumPy, contiguous.
            queries, keys: ``(n,)`` int64 of NumPy: indices of the pairs, not negative.
        """


BACKENDS: tuple[Backend, ...] = (Kernel(), Torch(), Fused(), Triton(), Reference())


def by_name(name: str) -> Backend:
    """The backend of that name."""
    return next(backend for backend in BACKENDS if backend.name == name)


def in_order(call: Call) -> list[Backend]:
    """The backends as ``auto`` tries them: on a device torch's, which serves every tensor, last."""
    if not call.is_torch or call.query.device.type == "cpu":
        return list(BACKENDS)
    return sorted(BACKENDS, key=lambda one: one.name == "torch")


def choose(call: Call, name: str) -> Backend:
    """The backend of that name; for ``auto`` the first that takes the call.

    Raises:
        ValueError: no backend has that name.
        UnsupportedError: it, or each of them, refuses; the text says why.
    """
    if name != "auto" and name not in [backend.name for backend in BACKENDS]:
        known = ", ".join(repr(backend.name) for backend in BACKENDS)
        raise ValueError(f"attention: backend is {name!r}; 'auto', {known} are known.")
    refusals = []
    for backend in in_order(call):
        if name not in ("auto", backend.name):
            continue
        reason = backend.refuses(call)
        if reason is None:
            return backend
        refusals.append(f"\n  {backend.name}: {reason}.")
    found = "no backend takes" if name == "auto" else f"backend={name!r} does not take"
    raise UnsupportedError(f"attention: {found} this call." + "".join(refusals))

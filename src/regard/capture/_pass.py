"""One pass of a model that a watch measures."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from regard._base.arrays import is_tensor
from regard._call.checks import read_call
from regard._operator.torch_calls import is_in_backward
from regard.capture._calls import AreOfOne, allowed
from regard.capture._groups import Occurrences, Place, places
from regard.capture._kind import is_beside, is_cross
from regard.capture._measured import NonFinite, Rows, first_nonfinite
from regard.capture._rows import BySight
from regard.capture._sight import Sight


class Pass:
    """Takes the calls of attention of one pass, and measures them as they come.

    Args:
        step: of the watch.
        model: whose modules are named.
        left_out: takes the names of modules that cannot be measured, and why.
        searches: whether to look for a score that is NaN or infinite.

    Attributes:
        taken: pattern of the kind, name of the module, and measures of each call.
        nonfinite: the first of its scores that is NaN or infinite.
        refused: names of modules that no earlier pass left out, and why.
        is_empty: whether there was attention without a query, a key or a head.
    """

    def __init__(self, step: int, model: Module, left_out: dict[str, str], searches: bool) -> None:
        self.step, self._left_out, self._searches = step, left_out, searches
        self.taken: list[tuple[str, str, dict[str, np.ndarray]]] = []
        self.nonfinite: NonFinite | None = None
        self.refused: dict[str, str] = {}
        self.is_empty = False
        self._thread = threading.get_ident()
        self._occurrences, self._sights = Occurrences(), BySight(Sight.of)
        self._places: dict[str, Place] = places(dict(model.named_modules()))
        # Of self-attention by (B, Lq): the names of modules, and which queries are of tokens.
        self._tokens: dict[tuple[int, int], list[tuple[str, np.ndarray]]] = {}

    def take(
        self, name: str, query: Any, key: Any, value: Any, options: dict[str, Any],
        are_of_one: AreOfOne,
    ) -> None:  # fmt: skip
        """Measures a call of attention in the module of that name."""
        if threading.get_ident() != self._thread or is_in_backward() or not is_tensor(query):
            return
        given = {own: x for own, x in options.items() if own not in ("dropout", "seed")}
        _, (pattern, _) = self._occurrences.next(name, self._places, 0)
        name = name.replace("_orig_mod.", "")
        try:
            # What watches torch's functions need not see those of the measures.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                measured = self._measured(name, query.detach(), key.detach(), given, are_of_one)
        except Exception as error:  # of whatever tensors they are: the training goes on
            self.refuse(name, error)
            return
        if measured is None:
            self.is_empty = True
        else:
            self.taken.append((pattern, name, measured))

    def refuse(self, name: str, error: Exception) -> None:
        """Leaves out the attention of a module."""
        if name not in self._left_out:
            self._left_out[name] = self.refused[name] = str(error).partition("\n")[0]

    def _measured(
        self, name: str, query: Tensor, key: Tensor, options: dict[str, Any], are_of_one: AreOfOne
    ) -> dict[str, np.ndarray] | None:
        call = read_call(query, key, None, **options)
        if min(call.sizes) == 0:
            return None
        B, _, _, Lq, Lk = call.sizes
        sight = self._sights.of(call, options)
        known, every = self._tokens.setdefault((B, Lq), []), np.ones((1, Lq), bool)
        if crosses := is_cross(name, Lq, Lk, sight.in_order, are_of_one):
            tokens = next((own for other, own in known[::-1] if is_beside(name, other)), every)
        else:
            tokens = self._is_token(query, key, options, sight)
            if not (tokens.all() or sight.in_order or (Lq == Lk and are_of_one())):
                tokens = every
            known.append((name, tokens))
        rows = Rows.of(call, sight)
        if self._searches and self.nonfinite is None:
            self.nonfinite = first_nonfinite(call, sight, rows, tokens, self.step, name)
        measures = rows.measures(sight, tokens)
        if crosses:  # queries and keys have no common positions
            measures["distance"][:] = np.nan
        return measures

    def _is_token(
        self, query: Tensor, key: Tensor, options: dict[str, Any], sight: Sight
    ) -> np.ndarray:
        """Which queries have a key that some query may see."""
        if (given := allowed()) is None:
            return sight.is_token
        return self._sights.of(read_call(query, key, None, **given), given).is_token

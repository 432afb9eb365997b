"""Messages between the ranks of a group: in pairs, agreed upon, with errors that name a rank."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from regard._base.errors import UnsupportedError, a_type
from regard._base.torch_state import is_batch, is_recorded

Message = tuple[int, torch.Tensor]  # a rank of the group, and what it sends or gets
_HEADER, _TEXT = 56, 4096  # bytes
Numbers = tuple[int, int]
STORE_GONE = (
    " The store of the group is gone with the process that kept it, so another rank may have ended"
    " first; torchrun keeps it apart from the ranks."
)
NOT_IN_IT = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
LINGER_SECONDS = 10  # that the store outlives its rank, for the others to learn which rank died
_living: weakref.WeakSet[Peers] = weakref.WeakSet()
# The numbers that the next calls of each group have.
_calls: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class RankError(RuntimeError):
    """Another rank refused a call, died or did not answer; the text names it."""


class Pending:
    """Messages on their way."""

    def __init__(self, peers: Peers, what: str, ops: list[dist.P2POp], ranks: list[int]) -> None:
        self._peers, self._what, self._ranks = peers, what, ranks
        self._ops = ops  # their tensors stay until they have arrived
        # Gloo posts one after the other, and each tells whose connection is gone; others all at
        # once, or they would wait for each other.
        each = [[op] for op in ops] if all(op.tensor.is_cpu for op in ops) else [ops]
        self._works: list[Any] = []
        for n, some in enumerate(each):
            with peers.naming(what, ranks[n] if len({*ranks}) == 1 or len(each) > 1 else None):
                self._works += dist.batch_isend_irecv(some)

    def wait(self) -> None:
        """Returns when all have arrived.

        Raises:
            RankError: a rank died, or did not answer within the timeout of the group.
        """
        each = len(self._works) == len(self._ranks)  # NCCL gives one for all of them
        works, self._works = self._works, []
        for n, work in enumerate(works):
            with self._peers.naming(self._what, self._ranks[n] if each else None):
                work.wait()
        self._ops = []


class _Naming:
    """Makes an error of the transport one that names the rank which was waited for."""

    def __init__(self, peers: Peers, what: str, rank: int | None) -> None:
        self._peers, self._what, self._rank = peers, what, rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise self._peers.failed(self._what, self._rank, error) from error


class Peers:
    """The ranks of a group, as this one sees them.

    Args:
        mesh: a 1-D ``DeviceMesh``, a ``ProcessGroup``, or None for all processes.
    """

    def __init__(self, mesh: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "Layout: torch.distributed is not initialised; call"
                " torch.distributed.init_process_group or init_device_mesh first, in a program that"
                " torchrun starts."
            )
        if hasattr(mesh, "get_group"):
            if mesh.ndim != 1:
                names = mesh.mesh_dim_names or ("cp",)
                raise ValueError(
                    f"Layout: the mesh has {mesh.ndim} dimensions; the one along which the sequence"
                    f" is cut is needed, as in mesh[{names[-1]!r}]."
                )
            mesh = NOT_IN_IT if mesh.get_coordinate() is None else mesh.get_group()
        if mesh == NOT_IN_IT:
            raise ValueError("Layout: this process is not in the group.")
        if mesh is not None and not isinstance(mesh, dist.ProcessGroup):
            raise TypeError(
                f"Layout: mesh is {a_type(mesh)}; a DeviceMesh of one dimension or a"
                " ProcessGroup is needed."
            )
        self.group: Any = dist.group.WORLD if mesh is None else mesh
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._lingers = False
        _living.add(self)

    def next_call(self) -> int:
        """The number of a call that all ranks of the group agreed to: the same on each."""
        return next(_calls.setdefault(self.group, itertools.count(1)))

    def naming(self, what: str, rank: int | None) -> _Naming:
        return _Naming(self, what, rank)

    def failed(self, what: str, rank: int | None, error: Exception) -> RankError:
        """The error of a rank that did not answer: the first that any rank found, where known."""
        rank, is_first = self._first_failed(rank, error)
        who = "another rank" if rank is None else f"rank {rank}"
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return RankError(
            f"distributed.{what}: {who} of {self.size} did not answer rank {self.rank}: it died,"
            " raised an error of its own or is late by more than the timeout of the group"
            f" ({first}). The group cannot be used any more."
            + ("" if is_first or self.size < 3 else STORE_GONE)
        )

    def _first_failed(self, rank: int | None, error: Exception) -> tuple[int | None, bool]:
        """Whom the first rank that noticed waited for: the others wait for that rank in turn.

        And whether that is known. The store is gone when the rank that kept it was killed: had it
        ended for another's sake, it would have kept it for a while.
        """
        keeper = self.keeper()
        try:
            store = self.group.get_group_store()
            found = store.compare_set("regard/failed", "", "" if rank is None else str(rank))
            store.add("regard/told", 1)
        except Exception:
            return (rank, False) if keeper is None else (keeper, True)
        if keeper == self.rank and not self._lingers:
            self._lingers = True
            Finalize(None, _linger, (store, self.size - 1, error), exitpriority=0)
        return (int(found) if found else None), True

    def keeper(self) -> int | None:
        """The rank whose process keeps the group's store; None: none of them, or unknown."""
        c10d: Any = dist
        with contextlib.suppress(Exception):
            store = self.group.get_group_store()
            while isinstance(store, c10d.PrefixStore):
                store = store.underlying_store
            if isinstance(store, c10d.TCPStore) and not _is_agents():
                return dist.get_group_rank(self.group, 0)
        return None

    def exchange(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts to send and to receive; tensors are contiguous, and empty ones are left out."""
        ops, ranks = [], []
        for call, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for rank, x in messages:
                if x.numel():
                    ops.append(dist.P2POp(call, x, group=self.group, group_peer=rank))
                    ranks.append(rank)
        return Pending(self, what, ops, ranks)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def all_gather(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        """That tensor of every rank, all of one shape."""
        x = x.contiguous()
        found = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        got = [(rank, found[rank]) for rank in self.others]
        self.exchange(what, [(rank, x) for rank in self.others], got).wait()
        return found

    def broadcast(self, what: str, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Fills contiguous tensors with those of one rank."""
        if self.rank == source:
            sends = [(rank, x) for rank in self.others for x in tensors]
            self.exchange(what, sends, []).wait()
        else:
            self.exchange(what, [], [(source, x) for x in tensors]).wait()

    def agree(
        self,
        what: str,
        fields: dict[str, str],
        device: torch.device,
        error: Exception | None = None,
        numbers: Numbers = (0, 0),
    ) -> list[Numbers]:
        """Raises on every rank where one has other fields, or an error; gives all ranks' numbers.

        Raises:
            RankError: another rank has an error; on that rank it is that error itself.
            ValueError: the fields differ; the text names the ranks and what each has.
            UnsupportedError: torch records a graph, or transforms what runs.
        """
        if is_recorded():
            error = error or UnsupportedError(
                f"distributed.{what}: messages between ranks cannot become part of a graph or a"
                " transform (torch.jit.trace, make_fx, torch.export, torch.func). Call it outside;"
                " torch.compile does."
            )
            if not torch._C._are_functorch_transforms_active():  # a graph would keep the messages
                raise error
        if self.size == 1:
            if error is not None:
                raise error
            return [numbers]
        text = json.dumps([what, fields])
        header = bytes([error is not None]).ljust(8, b"\0")
        header += b"".join(number.to_bytes(8, "big", signed=True) for number in numbers)
        header += hashlib.sha256(text.encode()).digest()
        found = [bytes(x.tolist()) for x in self.all_gather(what, _bytes(header, _HEADER, device))]
        if len({one[:8] + one[24:] for one in found}) > 1 or any(one[0] for one in found):
            told = (
                {"error": _told(error)} if error is not None else {"what is called": what} | fields
            )
            texts = self.all_gather(what, _bytes(_written(told), _TEXT, device))
            raise disagreement(what, [_read(x) for x in texts], error)
        return [(_number(one[8:16]), _number(one[16:24])) for one in found]


def require_one(what: str, grad: torch.Tensor) -> None:
    """Refuses a gradient that stands for several."""
    if is_batch(grad):
        raise UnsupportedError(
            f"distributed.{what}: gradients of several outputs at once (is_grads_batched=True, as"
            " jacobian(vectorize=True) asks for) cannot be sent between ranks; ask for one after"
            " another."
        )


def _is_agents() -> bool:
    """Whether torchrun's agent keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _linger(store: Any, others: int, error: Exception) -> None:
    """At the end of a process: closes its connections, so that the others ask the store why."""
    for peers in _living:
        peers.group = None
    traceback.clear_frames(error.__traceback__)  # they hold messages
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    gc.collect()
    end = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(Exception):
        while store.add("regard/told", 0) < others and time.monotonic() < end:
            time.sleep(0.02)


def _bytes(text: bytes, size: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(text.ljust(size, b"\0")), dtype=torch.uint8, device=device)


def _number(x: bytes) -> int:
    return int.from_bytes(x, "big", signed=True)


def _read(x: torch.Tensor) -> dict[str, str]:
    found: dict[str, str] = json.loads(bytes(x.tolist()).rstrip(b"\0").decode())
    return found


def _written(fields: dict[str, str]) -> bytes:
    """The fields as JSON that has room; of long ones the beginning, and a digest of the whole."""
    most = 1000 if "error" in fields else 300
    while len(text := json.dumps({name: _cut(x, most) for name, x in fields.items()})) > _TEXT:
        most //= 2
    return text.encode()


def _cut(x: str, most: int) -> str:
    if len(x) <= most:
        return x
    digest = hashlib.blake2b(x.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{x[:most]}... ({len(x)} characters, digest {digest})"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def disagreement(
    what: str, found: list[dict[str, str]], error: Exception | None = None
) -> Exception:
    """What to raise, of the fields of every rank; an error of this rank is that itself."""
    if error is not None:
        return error
    for rank, fields in enumerate(found):
        if "error" in fields:
            return RankError(f"distributed.{what}: rank {rank} refused the call: {fields['error']}")
    names = dict.fromkeys(name for fields in found for name in fields)
    for name in names:
        values = [fields.get(name, "nothing") for fields in found]
        if len({*values}) > 1:
            told = "; ".join(
                f"{_ranks([n for n, x in enumerate(values) if x == value])} {value}"
                for value in dict.fromkeys(values)
            )
            return ValueError(
                f"distributed.{what}: the ranks disagree about {name}: {told}. All need the same."
            )
    return ValueError(f"distributed.{what}: the ranks disagree.")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"

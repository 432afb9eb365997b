"""A device that is none: its tensors say that they are on it, and their numbers are on the CPU.

So a machine without a GPU shows what a call does to one. A tensor left on the CPU raises; launches,
uploads, and waits of the host for the device are counted, the latter two with the line of regard.
"""

import collections
import contextlib
import sys
import types
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from regard._backends import torch_ops
from regard._base import torch_arrays
from regard._base.torch_state import is_recorded

NAME = "stand"
_ACTIVE = []  # the counting, while tensors of the device are at work
_MODULE = types.ModuleType(NAME)
vars(_MODULE).update(  # what torch asks of every device; for others in the process there is none
    is_available=lambda: bool(_ACTIVE), is_initialized=lambda: True, device_count=lambda: 1,
    current_device=lambda: 0, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)  # fmt: skip
_setup_privateuseone_for_python_backend(NAME, _MODULE)
DEVICE = torch.device(NAME, 0)

# The host reads a number, or the size of a result.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave",
}  # fmt: skip
_NO_LAUNCH = {"empty", "new_empty", "new_empty_strided", "empty_strided", "empty_like"}
_COMPOSITE = "CompositeImplicitAutograd"
_COPIES = {"_to_copy", "copy_"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by indices on the CPU too


class StandIn(torch.Tensor):
    """A tensor of the device, with its numbers ``x`` on the CPU."""

    @staticmethod
    def __new__(cls, x):
        found = torch.Tensor._make_wrapper_subclass(
            cls, x.size(), strides=x.stride(), storage_offset=x.storage_offset(),
            dtype=x.dtype, device=DEVICE,
        )  # fmt: skip
        found.x = x
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.detach:
            return StandIn(args[0].x)
        raise AssertionError(f"{func} outside of `with stand.device()`")

    def tolist(self):
        """torch refuses that of a subclass."""
        return self.cpu().tolist()


def on_device(x):
    """Tensors of the CPU, in tuples or alone, as if they had been made on the device."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(on_device, x))
    if not isinstance(x, torch.Tensor) or isinstance(x, StandIn):
        return x
    return StandIn(x.detach()).requires_grad_(x.requires_grad)


def leaves(x):
    """The tensors of a result."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)]


def on_cpu(x):
    """The numbers of a tensor of the device."""
    assert isinstance(x, StandIn), "a result on the CPU"
    return x.x


class _Counting(TorchDispatchMode):
    """Runs what is asked of tensors of the device on the CPU, and counts it."""

    def __init__(self, float64):
        super().__init__()
        self._float64 = float64
        self.launches, self.operations = 0, collections.Counter()
        self.waits, self.uploads = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        if func.namespace == "regard":  # its own body, with tensors of the device
            with self:
                return torch_ops.OPERATORS[name](*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # inside of regard's operators: it is made of others
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, StandIn)]
        to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not ours and (to is None or to.type != NAME):
            return func(*args, **kwargs)
        downwards = self._count(name, func, tensors, ours, to)
        kwargs = tree_map(_unwrapped, kwargs) | ({"device": "cpu"} if to is not None else {})
        out = func(*tree_map(_unwrapped, args), **kwargs)
        if downwards:
            return args[0] if name == "copy_" else out
        wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in _flat(out))
        assert self._float64 or not wide, f"{func} gives float64, {_line()}"
        written = [x for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
        if written:  # in place
            assert len(written) == 1
            return kwargs["out"] if written[0].is_out else args[0]
        return tree_map(lambda x: StandIn(x) if isinstance(x, torch.Tensor) else x, out)

    def _count(self, name, func, tensors, ours, to):
        """Counts an operation; returns whether its result is on the CPU."""
        others = [x for x in tensors if not isinstance(x, StandIn)]
        downwards = name in _COPIES and bool(ours)
        downwards &= to.type == "cpu" if to is not None else tensors[0] is not (ours + [None])[0]
        if name in _COPIES:
            if (others and ours and not downwards) or not ours:
                self.uploads[_line()] += 1
        elif name in _INDEXED:
            self.uploads[_line()] += sum(x.ndim > 0 for x in others)
            if any(x.dtype == torch.bool for x in tensors[1:]):
                self.waits[_line()] += 1
        else:
            assert all(x.ndim == 0 for x in others), f"{func} with a tensor on the CPU, {_line()}"
        if name in _WAITS or downwards:
            self.waits[_line()] += 1
        is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and name not in _NO_LAUNCH:
            self.launch(name)
        return downwards

    def launch(self, name):
        """Counts a kernel that the device runs."""
        self.launches += 1
        self.operations[name] += 1

    @property
    def synchronisations(self):
        """How often the host waits for the device; an upload from its own memory waits too."""
        return sum(self.waits.values())


def _flat(out):
    return out if isinstance(out, (tuple, list)) else [out]


def _unwrapped(x):
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.x if isinstance(x, StandIn) else x


def _line():
    """The innermost line of regard that is at work."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/regard/" in path and "/tests/" not in path:
            return f"{path.rpartition('/regard/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of regard"


class _Fused(torch.autograd.Function):
    """torch's fused operator as one launch, and its gradient as another."""

    @staticmethod
    def forward(ctx, counting, options, *tensors):
        ctx.counting, ctx.options, ctx.tensors = counting, options, tensors
        counting.launch("scaled_dot_product_attention")
        with torch.no_grad():
            return StandIn(_OPERATOR(*map(_unwrapped, tensors), **options))

    @staticmethod
    def backward(ctx, grad):
        ctx.counting.launch("scaled_dot_product_attention_backward")
        own = [None if x is None else x.x.detach() for x in ctx.tensors]
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in own[:3]]
            found = torch.autograd.grad(_OPERATOR(*own, **ctx.options), leaves, grad.x)
        return None, None, *map(StandIn, found), None


_OPERATOR = torch.nn.functional.scaled_dot_product_attention


def _new(size, stride, dtype=None, **_):
    return StandIn(torch.empty_strided(size, stride, dtype=dtype))


def _upload(into, x, non_blocking=False):
    """``torch.tensor(x, device=...)`` passes no mode."""
    _ACTIVE[-1].uploads[_line()] += 1
    into.x.copy_(x)
    return into


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty_strided", _new, "PrivateUse1")
_LIBRARY.impl("copy_", _upload, "PrivateUse1")


@contextlib.contextmanager
def with_triton(grids=None):
    """Within ``device()``: kernels in Triton serve it too, in the interpreter, and are counted.

    Args:
        grids: a dict that gets those of each kernel, by its name.
    """
    from regard._backends import triton, triton_backward, triton_ops, triton_reduce

    own, counting = triton_ops.launch, _ACTIVE[-1]

    def launch(kernel, grid, *arguments, **options):
        counting.launch(kernel.__name__)
        if grids is not None:
            grids.setdefault(kernel.__name__, []).append(grid)
        with torch.utils._python_dispatch._disable_current_modes():
            own(kernel, grid, *map(_unwrapped, arguments), **options)

    modules = triton_backward, triton_ops, triton_reduce
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(triton, "DEVICES", (NAME,)))
        patches.enter_context(mock.patch.object(triton, "_is_plain", return_value=True))
        for module in modules:
            patches.enter_context(mock.patch.object(module, "launch", launch))
        yield


@contextlib.contextmanager
def device(*, float64=True, fused=None):
    """What is done to tensors of the device in the block, counted.

    Args:
        float64: whether it has numbers of 64 bits; without, one of them raises.
        fused: in the place of torch's fused operator.
    """
    counting = _Counting(float64)

    def operator(q, k, v, mask, **options):
        if not isinstance(q, StandIn):  # of another call, on the CPU
            return _OPERATOR(q, k, v, mask, **options)
        return _Fused.apply(counting, options, q, k, v, mask)

    patches = {"_is_eager": lambda call: not is_recorded()}
    patches["scaled_dot_product_attention"] = fused or operator
    has_float64 = mock.patch.object(torch_arrays, "_has_float64", return_value=float64)
    with mock.patch.multiple(torch_ops, **patches), has_float64, counting:
        _ACTIVE.append(counting)
        yield counting
        _ACTIVE.pop()

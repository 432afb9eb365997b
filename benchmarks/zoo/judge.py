"""Whether a situation's outputs under an implementation are those of eager."""

import contextlib
import copy
import re
import time

import torch
from transformers import AttentionInterface

from zoo.inputs import BATCH, LENGTH, inputs_of, parameters_of, words
from zoo.models import build
from zoo.situations import EXACT, LEAKS, SITUATIONS, RefusedError, Run, Subject

WORST = 20  # times eager's own error
FLOOR = 4  # rounding steps of the largest value
SANE = 1e-4  # of the largest value, where float64 is no measure
FAR = 1e-2  # of the largest value: eager's error, where float64 computes something else


class Calls:
    """Counts the calls of an implementation, whichever way a model finds it."""

    def __init__(self, implementation):
        self.implementation, self.count = implementation, 0

    def _counted(self, function):
        def call(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def watched(self):
        """Counts while this is open."""
        name = "get_interface" if self.implementation == "eager" else "__getitem__"
        inherited = name not in vars(AttentionInterface)
        find = getattr(AttentionInterface, name)

        def watching(interface, implementation, *default):
            function = find(interface, implementation, *default)
            return self._counted(function) if implementation == self.implementation else function

        setattr(AttentionInterface, name, watching)
        try:
            yield self
        finally:
            if inherited:
                delattr(AttentionInterface, name)
            else:
                setattr(AttentionInterface, name, find)


def difference(found, wanted):
    """The largest difference where both are finite; infinite where they differ in what is not."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double(), wanted.double()
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    return (found - wanted)[finite].abs().max().item() if finite.any() else 0.0


def scale(x):
    """The largest finite magnitude."""
    x = x.double()
    return x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0


def sizes_of(found):
    """What a tensor's error is measured by: its scale, and a tenth of the largest's at least."""
    scales = {name: scale(x) for name, x in found.items()}
    least = max(scales.values(), default=0.0) / 10 + 1e-30
    return {name: max(x, least) for name, x in scales.items()}


class Judge:
    """One architecture's runs: exact, eager and the implementation, on one input.

    Args:
        model: of ``build``.
        batch: of ``inputs_of``.
        implementation: its registered name.
        dtype: in which it and eager are compared.
    """

    def __init__(self, model, batch, implementation, dtype):
        self.subject = Subject(model, batch)
        self.dtype = dtype
        self.eager = Run(model, dtype, "eager")
        self.exact = Run(model, torch.float64, "eager")
        self.tried = Run(model, dtype, implementation)

    def __call__(self, situation):
        """The situation's result, as a dictionary: ``result``, ``ratio``, ``why``.

        Where eager raises with a picture or a sound, its text is judged alone.
        """
        result, whole = self._judged(situation), self.subject
        if "eager raises" not in result.get("why", "") or not whole.is_text or len(whole.batch) < 2:
            return result
        try:
            self.subject = Subject(whole.model, {"input_ids": words(BATCH, LENGTH)})
            alone = self._judged(situation)
        except Exception:  # it needs what it was given
            return result
        finally:
            self.subject = whole
        return result if alone["result"] == "skip" else alone | {"of": "text alone"}

    def _judged(self, situation):
        with torch.no_grad():
            try:
                eager = self._found(situation, self.eager)
            except RefusedError as refused:
                return {"result": "skip", "why": str(refused)}
            except Exception as error:
                return {"result": "skip", "why": f"eager raises {words_of(error)}"}
            try:
                tried = self._found(situation, self.tried)
            except RefusedError as refused:
                return {"result": "skip", "why": str(refused)}
            except Exception as error:
                return {"result": "fail", "why": f"raises {words_of(error)}"}
            result = self._near(eager, tried) if situation not in EXACT else None
            if result is None:
                exact, note = self._exact(situation, eager)
                result = self._compared(situation, eager, tried, exact) | note
            if result["result"] == "pass" and situation in LEAKS:
                result |= self._leaked(situation, eager, tried)
            return result

    def _near(self, eager, tried):
        """A pass without float64: as near to eager as the bound asks, whatever eager's error is."""
        if any(k not in tried or tried[k].isnan().any() for k in eager):
            return None
        sizes = sizes_of(eager)
        step = FLOOR * torch.finfo(self.dtype).eps
        apart = [difference(tried[k], eager[k]) / (step * sizes[k]) for k in eager]
        ratio = 1 + max(apart, default=0.0)
        return {"result": "pass", "ratio": ratio} if ratio <= WORST else None

    def _found(self, situation, run, seed=0):
        found = SITUATIONS[situation](self.subject, run, seed)
        return {k: v.detach() for k, v in found.items() if v.numel()}

    def _exact(self, situation, eager):
        try:
            exact = self._found(situation, self.exact)
        except Exception as error:
            return None, {"measure": f"float32: float64 raises {words_of(error)}"}
        sizes = sizes_of(exact)
        more = 50 if self.dtype.itemsize == 2 else 1
        far = [
            k
            for k in eager
            if k not in exact or difference(eager[k], exact[k]) > more * FAR * sizes[k]
        ]
        if far:
            return None, {"measure": f"float32: eager's {far[0]} in float64 is another"}
        return exact, {}

    def _compared(self, situation, eager, tried, exact):
        missing = [k for k in eager if k not in tried]
        if missing:
            return {"result": "fail", "why": f"gives no {missing[0]}"}
        for name, x in tried.items():
            if name in eager and x.isnan().any() and not eager[name].isnan().any():
                return {"result": "NaN", "why": name}
        ratio, name = self._worst(eager, tried, exact)
        if ratio <= WORST:
            return {"result": "pass", "ratio": ratio}
        if tried[name].shape != eager[name].shape:
            why = f"{name} has the shape {list(tried[name].shape)}, not {list(eager[name].shape)}"
            return {"result": "fail", "why": why}
        why = f"{name}: error {ratio:.3g} times eager's"
        if exact is not None:
            shaken, _ = self._worst(self._shaken(situation, eager), tried, exact)
            if shaken <= WORST:
                return {"result": "pass", "ratio": shaken, "shaken": why}
        return {"result": "fail", "ratio": ratio, "why": why}

    def _worst(self, eager, tried, exact):
        """The largest ratio of errors, and the tensor's name.

        ``eager`` has tensors, or errors to be compared with.
        """
        step = torch.finfo(self.dtype).eps
        sizes = sizes_of(exact or eager)
        worst = (0.0, "")
        for name in eager:
            if exact is None:
                ratio = WORST * difference(tried[name], eager[name]) / (SANE * sizes[name])
            else:
                own = eager[name]
                own = own if isinstance(own, float) else difference(own, exact[name])
                ratio = difference(tried[name], exact[name]) / max(own, FLOOR * step * sizes[name])
            worst = max(worst, (ratio, name))
        return worst

    def _shaken(self, situation, eager):
        """Eager's largest errors when its weights move by a rounding step, in four draws."""
        try:
            exact = self._found(situation, self.exact)
            errors = dict.fromkeys(exact, 0.0)
            for seed in range(4):
                shaken = copy.copy(self.eager)
                shaken.model = copy.deepcopy(self.eager.model)
                torch.manual_seed(seed)
                for p in shaken.model.parameters():
                    p.mul_(1 + torch.finfo(self.dtype).eps * torch.randn_like(p))
                for name, x in self._found(situation, shaken).items():
                    errors[name] = max(errors[name], difference(x, exact[name]))
            return errors
        except Exception:
            return eager

    def _leaked(self, situation, eager, tried):
        """What other hidden words change, against how much they change eager."""
        step = FLOOR * torch.finfo(self.dtype).eps
        other = self._found(situation, self.tried, seed=1)
        moved = {
            k: difference(other[k], x) / (step * scale(eager[k]) + 1e-30) for k, x in tried.items()
        }
        if max(moved.values(), default=0.0) <= WORST:
            return {}
        other = self._found(situation, self.eager, seed=1)
        for name in tried:
            own = difference(other[name], eager[name]) / (step * scale(eager[name]) + 1e-30)
            if moved[name] > WORST * max(own, 1):
                how = f"{moved[name] * FLOOR:.3g} rounding steps, eager's {own * FLOOR:.3g}"
                return {"result": "leak", "why": f"{name} moves by {how}"}
        return {}


def words_of(error):
    """An error in one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def family_of(model, batch):
    """What kind of model an input shows it to be."""
    taken = set(parameters_of(model))
    pixels = {"pixel_values", "pixel_values_videos"}
    sound = {"input_features", "input_values", "audio_values", "audio_codes", "input_audio"}
    if hasattr(model, "get_text_features"):
        return "dual"
    if "input_ids" in taken and taken & (pixels | sound):
        return "multimodal"
    if "decoder_input_ids" in batch or getattr(model.config, "is_encoder_decoder", False):
        return "encoder–decoder"
    if "input_ids" in batch:
        return "decoder" if model.can_generate() else "encoder"
    if taken & pixels:
        return "vision"
    return "audio" if taken & sound else "other"


def working(name):
    """``(model, batch)`` of the first guess at sizes and input with which eager runs.

    Raises:
        LookupError: none does; says why.
    """
    reasons = []
    for keep_widths in (False, True):
        try:
            model = build(name, keep_widths)
        except Exception as error:
            reasons.append(words_of(error))
            continue
        refusals = []
        for batch in inputs_of(model):
            try:
                with torch.no_grad():
                    torch.manual_seed(0)
                    model(**batch)
            except Exception as error:
                refusals.append(
                    f"{ {k: list(v.shape) for k, v in batch.items()} }: {words_of(error)}"
                )
            else:
                return model, batch
        reasons.append(f"no input: {refusals[0] if refusals else 'none was guessed'}")
    raise LookupError(reasons[0])


def judged(name, implementation, dtype, situations):
    """Everything about one architecture, as a dictionary."""
    start = time.process_time()
    try:
        model, batch = working(name)
    except LookupError as error:
        return {"name": name, "status": "not built", "why": str(error.args[0])}
    found = {
        "name": name,
        "class": type(model).__name__,
        "family": family_of(model, batch),
        "input": {k: list(v.shape) for k, v in batch.items()},
    }
    try:
        with Calls(implementation).watched() as calls:
            judge = Judge(model, batch, implementation, dtype)
            with torch.no_grad():
                judge.tried(batch)
            found["calls"] = calls.count
    except Exception as error:
        why = f"raises {words_of(error)}"
        if "does not support an attention implementation" not in why:
            return found | {"status": "fail", "why": why}
        found |= {"calls": 0, "why": "transformers refuses this implementation"}
    if not found["calls"]:
        attends = [
            m for m in model.modules() if re.search("attention|attn", type(m).__name__, re.I)
        ]
        status = "refused" if "why" in found else "own attention"
        return found | {"status": status if attends else "no attention"}
    results = {s: judge(s) for s in situations}
    statuses = [r["result"] for r in results.values()]
    status = next((s for s in ("leak", "NaN", "fail") if s in statuses), "pass")
    ratios = [r["ratio"] for r in results.values() if "ratio" in r]
    found |= {"status": status, "worst": max(ratios, default=0.0), "situations": results}
    return found | {"seconds": time.process_time() - start}

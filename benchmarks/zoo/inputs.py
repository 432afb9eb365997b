"""Random inputs for a model of any architecture, told by the parameters of its ``forward``.

``inputs_of`` yields guesses, the fullest first; the first that the model takes is used.
"""

import inspect
import itertools
import re

import torch

from zoo.corrections import INPUTS
from zoo.models import WORDS

BATCH, LENGTH, DECODED, FRAMES = 2, 10, 7, 40


def parameters_of(model):
    """The names of what ``forward`` takes, and whether each must be given."""
    found = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default is p.empty for p in found if p.kind == p.POSITIONAL_OR_KEYWORD}


def words(*shape, seed=0):
    """Random ids of ordinary words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS.start, WORDS.stop, shape, generator=generator)


def numbers(*shape, seed=0):
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sought(config, *names, default=None):
    """The first of these fields that a config or one of its parts has."""
    parts = [config]
    for part in parts:
        parts += [x for x in vars(part).values() if hasattr(x, "model_type")]
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, None)
        if value is not None and value != 0:
            return value
    return default


def part(config, *names):
    """The sub-config of the first name that there is, or the config."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def pictures(model, taken):
    """Guesses for pixels and what goes with them."""
    config = part(model.config, "vision_config", "image_model_config", "backbone_config")
    channels = sought(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    patch = sought(config, "patch_size", "spatial_patch_size", default=8)
    patch = patch if isinstance(patch, int) else patch[-1]
    size = sought(config, "image_size", "img_size", "input_size", "resolution", default=64)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    names = ("pixel_values", "pixel_values_videos", "hidden_states", "image")
    name = next(x for x in names if x in taken)
    merge = sought(config, "spatial_merge_size", "merge_size", default=1)
    for key in ("image_grid_thw", "grid_thw"):
        if key in taken:
            side = 2 * (merge if isinstance(merge, int) else merge[0])
            volume = channels * sought(config, "temporal_patch_size", default=1) * patch**2
            yield {
                name: numbers(BATCH * side * side, volume),
                key: torch.tensor([[1, side, side]] * BATCH),
            }
    if "spatial_shapes" in taken:
        yield {
            name: numbers(BATCH, 16, channels * patch**2),
            "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
            "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        }
    frames = sought(config, "num_frames", "frames", default=4)
    shapes = [(BATCH, channels, h, w) for h, w in ((height, width), (64, 64), (224, 224))]
    still = [*shapes, *((BATCH, frames, *s[1:]) for s in shapes[:2]), (BATCH, 1, *shapes[0][1:])]
    if "video" in name or sought(config, "tubelet_size", "num_frames"):
        still = still[3:] + still[:3]
    for shape in still:
        if shape[-1] > 256:
            continue  # would take minutes
        extra = {}
        if "image_sizes" in taken:
            extra["image_sizes"] = torch.tensor([shape[-2:]] * BATCH)
        yield {name: numbers(*shape), **extra}


def sounds(model, taken):
    """Guesses for a sound: its samples, or its features."""
    config = part(model.config, "audio_config", "encoder_config", "audio_encoder")
    bins = sought(config, "num_mel_bins", "feature_size", "input_dim", "n_mels", default=80)
    bins = sought(config, "feature_projection_input_dim", default=bins)
    frames = 2 * sought(config, "max_source_positions", default=FRAMES // 2)
    frames = min(frames, 400)
    names = ("input_features", "input_values", "audio_values", "audio_features", "input_audio")
    for name in names:
        if name not in taken:
            continue
        shapes = [(BATCH, bins, frames), (BATCH, frames, bins), (BATCH, 1, frames, bins)]
        if name != "input_features":
            shapes = [(BATCH, 4000), (BATCH, 1, 4000), *shapes]
        length = sought(config, "max_length")
        if isinstance(length, int):
            shapes.append((BATCH, length, bins))
        for shape in shapes:
            values = {name: numbers(*shape)}
            yield values
            for mask in taken:
                if mask == "attention_mask" or re.search(
                    "(audio_mel|features?|padding)_.*mask$", mask
                ):
                    for axis in (-1, 1):
                        ones = torch.ones(BATCH, shape[axis], dtype=torch.long)
                        yield values | {mask: ones}


def features_count(found):
    """How many vectors a picture or sound became."""
    found = getattr(found, "pooler_output", found)
    while isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    if isinstance(found, (list, tuple)):
        return sum(x.numel() // x.shape[-1] for x in found)
    return found.numel() // found.shape[-1]


def with_features(model, taken):
    """Text with placeholders for as many vectors as a picture, then a sound, becomes."""
    kinds = [
        ("get_image_features", pictures, ("image_token_id", "image_token_index")),
        ("get_audio_features", sounds, ("audio_token_id", "audio_token_index")),
    ]
    for method, guesses, token_names in kinds:
        token = next(
            (x for n in token_names if (x := getattr(model.config, n, None)) is not None), None
        )
        compute = getattr(model, method, None)
        if compute is None or token is None:
            continue
        accepted = set(inspect.signature(compute).parameters)
        for values in guesses(model, set(taken) & accepted | accepted & {"pixel_values"}):
            try:
                with torch.no_grad():
                    count = features_count(compute(**values))
            except Exception:
                continue
            each = count // BATCH
            if not each or count > 2000:
                continue
            ids = words(BATCH, LENGTH + each)
            ids[:, 3 : 3 + each] = token
            text = {"input_ids": ids}
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in taken:
                    text[name] = (ids == token).long()
            yield text | values


def boxes():
    """Left, top, right and bottom of every word."""
    low = torch.randint(0, 20, (BATCH, LENGTH, 2), generator=torch.Generator().manual_seed(0))
    return torch.cat([low, low + 5], -1)


def vectors(model, length=LENGTH):
    """What stands for embedded words or patches."""
    config = model.config
    width = sought(config, "hidden_size", "d_model", "embed_dim", "hidden_dim", default=64)
    return numbers(BATCH, length, width if isinstance(width, int) else width[-1])


# What else a model may need, by name.
OTHERS = {
    "bbox": lambda model: boxes(),
    "attention_mask": lambda model: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "decoder_input_ids": lambda model: words(BATCH, DECODED, seed=1),
    "inputs_embeds": vectors,
    "hidden_states": vectors,
    "encoder_hidden_states": lambda model: numbers(
        BATCH,
        6,
        sought(
            model.config,
            "encoder_hidden_size",
            "cross_attention_hidden_size",
            "hidden_size",
            "d_model",
            default=64,
        ),
        seed=2,
    ),
    "query_embeds": vectors,
    "noise": lambda model: numbers(BATCH, 16),
    "audio_codes": lambda model: words(
        BATCH, sought(model.config, "num_quantizers", "num_codebooks", default=4), LENGTH
    ),
    "qformer_input_ids": lambda model: words(BATCH, 5),
    "target_sizes": lambda model: torch.tensor([[4, 4]] * BATCH),
    "input_codes": lambda model: words(BATCH, LENGTH),
    "input_points": lambda model: torch.tensor([[[[4.0, 8.0]]]] * BATCH),
}


def inputs_of(model):
    """Guesses of a whole input, as dictionaries; the fullest first."""
    taken = parameters_of(model)
    config = model.config
    if config.model_type in INPUTS:
        yield INPUTS[config.model_type]()
    extra = {
        name: make
        for name, make in OTHERS.items()
        if taken.get(name)
        or (name in ("bbox", "input_points", "decoder_input_ids", "target_sizes") and name in taken)
    }
    if not getattr(config, "is_encoder_decoder", False) and not taken.get("decoder_input_ids"):
        extra.pop("decoder_input_ids", None)
    extra = {name: make(model) for name, make in extra.items()}
    first = model.main_input_name
    first = first if isinstance(first, str) else first[0]
    text = {"input_ids": words(BATCH, LENGTH)} if "input_ids" in taken else {}
    if text:
        for values in with_features(model, taken):
            yield extra | values
        if "pixel_values" in taken:
            for values in pictures(model, taken):
                yield extra | text | values
        if first != "input_ids" or hasattr(model, "get_audio_features"):
            for values in sounds(model, taken):
                yield extra | text | values
        yield text | extra
        codebooks = sought(config, "num_codebooks", "audio_channels", "n_codes_total")
        if isinstance(codebooks, int):
            yield {"input_ids": words(BATCH * codebooks, LENGTH)} | extra
            yield {"input_ids": words(BATCH, LENGTH, codebooks)} | extra
            yield {"input_ids": words(BATCH, codebooks, LENGTH)} | extra
    elif {"pixel_values", "pixel_values_videos", "image"} & set(taken) or (
        {"hidden_states", "grid_thw"} <= set(taken)
    ):
        for values in pictures(model, taken):
            yield extra | values
    yield from (extra | values for values in sounds(model, taken))
    needed = {name for name, needs in taken.items() if needs}
    if needed and needed <= set(extra):
        yield extra
    if needed and needed != set(extra):
        yield {name: vectors(model) for name in needed} | extra

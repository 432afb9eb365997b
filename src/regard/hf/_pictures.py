"""Where the patches of pictures are among the tokens of a model of transformers, if known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.recording import Grid

Size = tuple[int, int]  # rows and columns, or height and width


class Pictures(NamedTuple):
    """The pictures, or pieces of some, that a module is called with."""

    pieces: int
    size: Size  # in pixels, of the largest where they differ
    sizes: tuple[Size, ...] = ()  # of each, where the caller tells


def pictures_of(given: dict[str, Any]) -> Pictures | None:
    """Those of a call with these arguments; None where there are none, or in pieces."""
    pixels, sizes = given.get("pixel_values"), given.get("image_sizes")
    if not isinstance(pixels, Tensor) or pixels.ndim < 4:
        return None
    height, width = (int(side) for side in pixels.shape[-2:])
    rows = sizes.reshape(-1, 2) if isinstance(sizes, Tensor) else () if sizes is None else sizes
    told = tuple((int(own[0]), int(own[1])) for own in rows)
    return Pictures(math.prod(pixels.shape[:-3]), (height, width), told)


# Types of vision models by what stands beside the patches among their keys. Of each it was seen
# which keys of its first layer another patch changes: the patches are there row by row, and what
# is beside them, as a class token and registers, is before or after.
ALONE = frozenset({
    "aimv2_vision_model", "granite_docling_vision", "idefics2_vision", "idefics3_vision", "ijepa",
    "janus_vision_model", "ovis2_vision", "phi4_multimodal_vision", "pixtral",
    "siglip_vision_model", "smolvlm_vision", "step3p5_vision", "vitpose_backbone",
})  # fmt: skip
AFTER_OTHERS = frozenset({
    "altclip_vision_model", "beit", "blip_2_vision_model", "chinese_clip_vision_model",
    "clip_vision_model", "clipseg_vision_model", "deit", "dinov2", "dinov2_with_registers",
    "dinov3_vit", "dpt", "git_vision_model", "idefics_vision", "instructblip_vision_model",
    "instructblipvideo_vision_model", "internvl_vision", "kosmos_2_vision_model",
    "metaclip_2_vision_model", "mlcd_vision_model", "owlv2_vision_model", "owlvit_vision_model",
    "pixio", "qianfan_ocr_vision", "radio", "sapiens2", "tipsv2_vision_model", "vit", "vit_msn",
})  # fmt: skip
BEFORE_OTHERS = frozenset({"llama4_vision_model"})
# Fields of configs that mix patches, or set other tokens between them, among a text's.
MIXED = (
    "qformer_config", "perceiver_config", "num_query_tokens", "projector_patch_to_query_dict",
    "image_grid_pinpoints",
)  # fmt: skip


def patches(config: Any, pictures: Pictures, keys: int) -> tuple[Grid, ...]:
    """The patches among as many keys of a vision model.

    Args:
        config: of the module that is called with the pictures.
        pictures: of one call.
        keys: how many there are.
    """
    patch, kind = patch_of(config), getattr(config, "model_type", None)
    if patch is None:
        return ()
    sizes = [_in_patches(size, patch) for size in pictures.sizes or (pictures.size,)]
    others = keys - sum(rows * columns for rows, columns in sizes)
    if kind in BEFORE_OTHERS and others >= 0:
        return _in_a_row(0, sizes)
    if (kind in AFTER_OTHERS and others >= 0) or (kind in ALONE and others == 0):
        return _in_a_row(others, sizes)
    return ()


def patch_of(config: Any) -> Size | None:
    """Height and width of a patch in pixels."""
    given = of_vision(config, "patch_size")
    sides = [given, given] if isinstance(given, int) else given
    if not isinstance(sides, Sequence) or len(sides) not in (2, 3):  # 3 begin with frames
        return None
    height, width = sides[-2:]
    return (height, width) if height and width else None


def sizes_in_patches(
    config: Any, vision: Any, pictures: Sequence[Pictures], tokens: int
) -> list[Size]:
    """Rows and columns of the tokens that stand for each picture in a text; empty if unknown.

    Args:
        config: of the model.
        vision: of the module that is called with the pictures.
        pictures: of each of its calls.
        tokens: how many stand for all pictures.
    """
    if any(getattr(config, name, None) is not None for name in MIXED):
        return []
    patch = patch_of(vision)
    if all(one.sizes for one in pictures) and patch is not None:
        merge = merge_of(config)
        sizes = [_in_patches(size, patch) for one in pictures for size in one.sizes]
        return [(rows // merge, columns // merge) for rows, columns in sizes]
    count = sum(one.pieces for one in pictures)
    if len({one.size for one in pictures}) != 1 or not count or tokens % count:
        return []
    rows, columns = _in_patches(pictures[0].size, patch or (1, 1))
    each = tokens // count
    merge = math.isqrt(rows * columns // each) if each else 0
    if not merge or rows % merge or columns % merge or rows * columns != each * merge**2:
        return []
    return [(rows // merge, columns // merge)] * count


def among(texts: Sequence[Sequence[int]], token: int, sizes: Sequence[Size]) -> list[Any]:
    """The grids of each text; empty where sizes are not those of the runs of a picture's token.

    Args:
        texts: ids of each.
        token: stands for a part of a picture.
        sizes: rows and columns of the pictures of all texts.
    """
    left, found = iter(sizes), []
    for ids in texts:
        grids: list[Grid] = []
        for start, stop in _runs(ids, token):
            while start < stop:
                grid = Grid(start, *next(left, (0, 0)))
                if not start < grid.stop <= stop:
                    return []
                grids.append(grid)
                start = grid.stop
        found.append(tuple(grids))
    return found if next(left, None) is None else []


def _runs(ids: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    start = None
    for place, number in enumerate([*ids, None]):
        if number == token and start is None:
            start = place
        elif number != token and start is not None:
            yield start, place
            start = None


def _in_patches(size: Size, patch: Size) -> Size:
    return size[0] // patch[0], size[1] // patch[1]


def _in_a_row(start: int, sizes: Sequence[Size]) -> tuple[Grid, ...]:
    grids = []
    for rows, columns in sizes:
        if not rows * columns:
            return ()
        grids.append(Grid(start, rows, columns))
        start = grids[-1].stop
    return tuple(grids)


def merge_of(config: Any) -> int:
    """Rows of patches, and columns, that become one token of a text."""
    found = of_vision(config, "spatial_merge_size") or getattr(config, "spatial_merge_size", None)
    return found if isinstance(found, int) and found else 1


def of_vision(config: Any, name: str) -> Any:
    """A field of the config of a vision model, or of the part of a config that is of one."""
    return getattr(getattr(config, "vision_config", config), name, None)

"""Every architecture of the installed transformers, made tiny from its own default config.

``build`` shrinks the sizes that it knows by the names of their fields, value by value, so that
sizes that must agree still do; where a model cannot be built or run so, it keeps the widths and
cuts the depth alone. ``CORRECTIONS`` has what no rule gets right. Weights are random.
"""

import copy
import dataclasses
import importlib
import inspect
import math
import re

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from zoo.corrections import CORRECTIONS

VOCABULARY = 128  # words; those from 96 on are left to special tokens
WORDS = range(3, 90)  # what random texts are made of
WIDTH, HEADS, HEAD = 64, 4, 16
MOST_PARAMETERS = 60e6  # of a model whose widths are kept

# The first rule that matches the name of a field says what becomes of an integer.
RULES = [
    (r"token(_id|_ids|_index)$|_token_.*id$|^(bos|eos|pad|sep|cls|unk)_", lambda v: v),
    (r"experts_per_tok|experts_per_token|top_?k(_experts)?$|moe_k$", lambda v: min(v, 2)),
    (r"index_topk", lambda v: min(v, 4)),
    (r"topk_group", lambda v: 1),
    (r"n_group$|num_expert_group", lambda v: min(v, 2)),
    (r"^(num_|n_|moe_)?.*experts$", lambda v: min(v, 8)),
    (r"(num_)?(hidden_|encoder_|decoder_)?layers?$|n_layers?$|depth$", lambda v: min(v, 2)),
    (r"num_encoder_blocks|num_stages", lambda v: v),
    (r"num_blocks$|num_transformer_layers|_layers$", lambda v: min(v, 2)),
    (r"(key_value|kv).*heads?$|num_kv$|multi_query_group_num", lambda v: min(v, HEADS // 2)),
    (r"heads?$", lambda v: min(v, HEADS)),
    (r"head_dim|head_size|dim_head|d_head|d_kv|qk_.*dim|v_.*head_dim", lambda v: min(v, HEAD)),
    (r"type_vocab", lambda v: v),
    (r"^vocab_size$", lambda v: VOCABULARY),
    (r"upsample_groups", lambda v: WIDTH),
    (r"num_queries", lambda v: min(v, 8)),
    (r"vocab_size$|^vocab|num_embeddings$|codebook_size", lambda v: min(v, VOCABULARY)),
    (r"max_source_positions", lambda v: 20 if v == 1500 else min(v, 512)),
    (r"position|context_length|max_seq|n_ctx", lambda v: min(v, 512)),
    (r"sliding_window(_size)?$|attention_chunk_size|local_attention$", lambda v: min(v, 4)),
    (r"window_size$", lambda v: min(v, 2)),
    (r"num_pos_feats", lambda v: WIDTH // 2),
    (r"mm_tokens_per_image", lambda v: 4),
    (r"temporal_patch|num_patches|patches", lambda v: v),
    (r"patch_size|tubelet|patch_stride", lambda v: 8 if v > 8 else v),
    (
        r"(image|img|input|crop|pretrain_image)_size|image_resolution|resolution",
        lambda v: 32 if v > 32 else v,
    ),
    (
        r"mel_bins|n_mels|mel_dim|sampling_rate|sample_rate|hop_length|ratio|scale|rate$",
        lambda v: v,
    ),
    (
        r"size|dim|width|d_model|n_embd|d_ff|ffn|units|channels|filters|features|planes|inner"
        r"|rank$|hidden|embed",
        lambda v: min(v, WIDTH) if v >= WIDTH else v,
    ),
]
TOKENS = re.compile(r"^(?!num|.*tokens).*(token(_id|_ids|_index)?$|_token_.*id$)")
# Depth, vocabulary and experts alone, for models that must keep their widths.
DEPTH = re.compile(r"layers?$|depth$|depths|num_blocks|experts|vocab|topk_group|n_group|topk")


def architectures():
    """The name of every architecture: the keys of transformers' own mapping of configs."""
    return sorted(CONFIG_MAPPING.keys())


def classes_of(name, config):
    """The models of a config, the most useful first; those of the auto mappings, then its own."""
    masked = name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    paired = getattr(config, "is_encoder_decoder", False)
    mappings = [
        () if masked or paired else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
        *(getattr(auto, key) for key in sorted(dir(auto)) if re.match(r"MODEL_FOR_.*_NAMES$", key)),
    ]
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = []
    for mapping in mappings:
        if name in mapping:
            names = mapping[name]
            found += [names] if isinstance(names, str) else list(names)
    own = [
        key
        for key, cls in vars(module).items()
        if inspect.isclass(cls)
        and issubclass(cls, PreTrainedModel)
        and key not in found
        and getattr(cls, "config_class", None) is type(config)
        and not key.endswith("PreTrainedModel")
        and cls.__module__ == module.__name__
    ]
    own.sort(key=lambda key: not key.endswith("Model"))
    found = [getattr(module, key) for key in [*found, *own] if hasattr(module, key)]
    return [cls for cls in found if cls.config_class in (None, type(config))]


def shrink(name, value, keep_widths=False):
    """An integer, or a list of them, of a config's field."""
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return value
    if keep_widths and not DEPTH.search(name):
        return value
    if isinstance(value, int):
        for pattern, rule in RULES:
            if value > 0 and re.search(pattern, name):
                return rule(value)
        return value
    if not value or not all(type(x) is int for x in value):
        return value
    if re.search(r"depths|blocks_per_stage|num_block|stage_num|layers$", name):
        return [min(x, 2) for x in value]
    if re.search(r"image_size|window|patch_size$|crop_size|input_size", name):
        return [shrink(name, x) for x in value]
    if re.search(r"^stem_|^stage_", name):
        return value  # convolutions whose widths hang together
    if re.search(r"heads", name):
        return [max(1, x // min(value)) for x in value]  # as wide as the widths below
    if re.search(r"hidden_size|dims?$|channels|embed|filters", name) and min(value) >= 16:
        if len(set(value)) == 1:
            return [min(WIDTH, x) for x in value]
        return [16 * x // min(value) for x in value]
    return value


def layers_kept(config):
    """Numbers of the layers that are kept: the first of every kind, two at least; or None."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 2 or "depths" in vars(config):
        return None
    lists = [
        value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    ]
    kinds = [tuple(str(x[i]) for x in lists) for i in range(count)]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())
    if len(kept) > 6:  # a list of numbers rather than of kinds
        kept = [0, count - 1]
    return sorted({*kept, *([0, 1] if len(kept) < 2 else [])})


def tiny_fields(config, keep_widths=False):
    """What to make a config of the same class from: its own fields, shrunk."""
    kept = layers_kept(config)
    count = getattr(config, "num_hidden_layers", None)
    fields = {}
    for field in dataclasses.fields(config):
        name, default = field.name, field.default
        value = vars(config).get(name)  # getattr raises where it differs from layer to layer
        if value is None and name in GIVEN:
            fields[name] = GIVEN[name]
        elif isinstance(value, PreTrainedConfig):
            fields[name] = tiny_config(value, keep_widths)
        elif isinstance(value, (list, tuple)) and kept and len(value) == count:
            fields[name] = [value[i] for i in kept]
        elif name in ("num_hidden_layers", *KEYS_OF_LAYERS) and kept:
            fields[name] = len(kept)
        elif name == "num_key_value_heads" and (
            default == vars(config).get("num_attention_heads") or "kv_lora_rank" in vars(config)
        ):
            fields[name] = shrink("heads", value, keep_widths)
        elif isinstance(value, dict):
            fields[name] = shrink_rope(value)
        elif value is not None and (default is not None or name.startswith(("num_", "hidden"))):
            fields[name] = shrink(name, value, keep_widths)
    return fields


# Where a default config leaves open what its model needs.
GIVEN = {
    "vocab_size": VOCABULARY,
    "num_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": WIDTH,
}
KEYS_OF_LAYERS = ("n_layer", "n_layers", "num_layers")


def shrink_rope(value):
    """Sections of a rotary embedding, for heads of 16."""
    if isinstance(value, dict):
        value = {k: shrink_rope(v) for k, v in value.items()}
        if "rope_theta" in value:
            sections = value.get("mrope_section", [16, 24, 24])
            half = int(HEAD // 2 * value.get("partial_rotary_factor", 1))
            sections = [x * half // sum(sections) for x in sections]
            value["mrope_section"] = [*sections[:-1], half - sum(sections[:-1])]
    return value


def tiny_config(config, keep_widths=False):
    """A config of the same class, its sizes shrunk."""
    fields = tiny_fields(config, keep_widths)
    if "depths" in fields and getattr(config, "out_features", None):
        fields["out_features"] = list(config.out_features)
    if "spatial_merge_size" in fields and fields.get("window_size"):
        fields["window_size"] = 32  # pixels: two by two merged patches
    sizes = fields.get("embed_dim"), fields.get("image_size")
    if "depths" in fields and all(isinstance(x, int) for x in sizes):
        fields |= {"embed_dim": 16, "image_size": 64}  # doubled, and halved, by every stage
    allowed = {field.name for field in dataclasses.fields(config)}
    fields |= CORRECTIONS.get(config.model_type, {})
    private = {k for k in fields if k.startswith("_") and k not in allowed}
    private |= {"_out_features", "_out_indices"} if "out_features" in fields else set()
    return type(config)(**{k: v for k, v in fields.items() if k not in private})


def renumber_tokens(config):
    """Gives every special token beyond the small vocabulary an id within it, alike everywhere."""
    found = {}

    def small(value):
        if isinstance(value, (list, tuple)):
            return [small(x) for x in value]
        if type(value) is int and value >= WORDS.stop:
            return found.setdefault(value, VOCABULARY - 1 - len(found))
        return value

    def visit(config):
        if not hasattr(config, "pad_token_id"):
            config.pad_token_id = None
        for key, value in list(vars(config).items()):
            if isinstance(value, PreTrainedConfig):
                visit(value)
            elif TOKENS.search(key) and value is not None:
                vars(config)[key] = small(value)

    visit(config)


def build(name, keep_widths=False):
    """A model of an architecture, in float32 on the CPU, in eval mode, with eager attention."""
    config = tiny_config(CONFIG_MAPPING[name](), keep_widths)
    renumber_tokens(config)
    classes = classes_of(name, config)
    if not classes:
        raise LookupError("no model class")
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    cls = classes[0]
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size / 1e6:.0f} million parameters")
    model = cls(config).eval()
    model.set_experts_implementation("eager")  # others have no float64
    enliven(model)
    return model


@torch.no_grad()
def enliven(model):
    """Weights with which attention matters: no map of a width loses its size, no gate is shut."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.is_floating_point() or not p.numel():
                continue
            if not p.isfinite().all() or p.abs().max() > 1e3:
                p.normal_(0, 0.5)
            elif p.dim() == 2 and name == "weight":
                p.normal_(0, 1 / math.sqrt(p.shape[-1]))
            elif (p == p.flatten()[0]).all() and p.flatten()[0].abs() < 0.1:
                p.normal_(0, 0.3)

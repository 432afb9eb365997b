"""Fields of tiny configs that no rule gets right, by model type, and inputs that none guesses."""

import math

import torch

WIDTH = 64
HEADS = {"head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
BACKBONE = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage4"],
    },
}
BACKBONE_3 = BACKBONE | {
    "backbone_config": BACKBONE["backbone_config"]
    | {"out_features": ["stage2", "stage3", "stage4"]}
}
WINDOWS = {"image_size": 64, "num_windows": 4}
SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "num_time_features": 1,
    "num_static_categorical_features": 0,
    "cardinality": None,
    "embedding_dimension": None,
}
CORRECTIONS = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_index": 120},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "clvp_encoder": {"projection_dim": 64},
    "codegen": {"rotary_dim": 16},
    "conditional_detr": BACKBONE,
    "dab-detr": BACKBONE,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deformable_detr": BACKBONE_3,
    "detr": BACKBONE,
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 120, "<image>": 121}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e5,
            "mrope_section": [3, 3, 2],
        }
    },
    "esm": {"pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "florence_vision": {"embed_dim": [16, 32, 64, 128], "num_heads": [1, 2, 4, 8]},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "grounding-dino": {"num_feature_levels": 4},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "hunyuan_vl_text": HEADS,
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {
        "intermediate_size": 4 * WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
    },
    "lw_detr": WINDOWS,
    "lw_detr_vit": WINDOWS,
    "markuplm": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
    "mllama_vision_model": {"intermediate_layers_indices": [0]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": HEADS,
    "mobilevit": {"hidden_sizes": [16, 32, 32], "num_attention_heads": 4},
    "moshi_depth": {"num_codebooks": 10},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "qwen4_exp_text": {
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "nystromformer": {"segment_means_seq_len": 10, "num_landmarks": 10, "conv_kernel_size": 5},
    "patchtsmixer": {"context_length": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "blocks_per_stage": [1, 1, 2, 1],
        "window_size_per_stage": [2, 2, 2, 2],
        "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [2, 2],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
    },
    "sam_vision_model": {"window_size": 2, "global_attn_indexes": [1], "output_channels": WIDTH},
    "table-transformer": BACKBONE,
}


def series(batch, length=15):
    """What models of time series take."""
    future = torch.zeros(batch, 4, 1)
    return {
        "past_values": torch.arange(float(batch * length)).reshape(batch, length).sin(),
        "past_time_features": torch.linspace(0, 1, length).repeat(batch, 1)[..., None],
        "past_observed_mask": torch.ones(batch, length),
        "future_values": future[..., 0],
        "future_time_features": future,
    }


def numbers(*shape):
    """Numbers between -1 and 1."""
    return torch.arange(float(math.prod(shape))).sin().reshape(shape)


def words(*shape):
    """Ids of ordinary words."""
    return torch.arange(math.prod(shape)).reshape(shape) * 7 % 50 + 3


INPUTS = {
    "autoformer": lambda: series(2),
    "informer": lambda: series(2),
    "time_series_transformer": lambda: series(2),
    "blip_2_qformer": lambda: {
        "query_embeds": numbers(2, 5, WIDTH),
        "encoder_hidden_states": numbers(2, 6, WIDTH),
    },
    "decision_transformer": lambda: {
        "states": numbers(2, 5, 17),
        "actions": numbers(2, 5, 4),
        "returns_to_go": numbers(2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5),
    },
    "dia": lambda: {"input_ids": words(2, 10), "decoder_input_ids": words(2, 7, 9)},
    "idefics": lambda: {
        "input_ids": words(2, 10),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        "pixel_values": numbers(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, 10, 1, dtype=torch.long),
    },
    "mllama_vision_model": lambda: {
        "pixel_values": numbers(2, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]]),
    },
    "musicgen": lambda: {"input_ids": words(2, 10), "decoder_input_ids": words(8, 7)},
    "musicgen_melody": lambda: {"input_ids": words(2, 10), "decoder_input_ids": words(8, 7)},
    "patchtst": lambda: {"past_values": numbers(2, 32, 1)},
    "patchtsmixer": lambda: {"past_values": numbers(2, 32, 1)},
    "pix2struct": lambda: {
        "flattened_patches": patches(),
        "decoder_input_ids": words(2, 7),
    },
    "pix2struct_vision_model": lambda: {"flattened_patches": patches()},
    "qwen2_5_omni_audio_encoder": lambda: {
        "input_features": numbers(128, 80),
        "feature_lens": torch.tensor([40, 40]),
    },
    "qwen3_omni_moe_audio_encoder": lambda: {
        "input_features": numbers(128, 80),
        "feature_lens": torch.tensor([40, 40]),
    },
}


def patches():
    """Patches behind the numbers of their row and column, from 1 on."""
    places = torch.tensor([[1 + i // 4, 1 + i % 4] for i in range(8)])
    return torch.cat([places.repeat(2, 1, 1).float(), numbers(2, 8, WIDTH)], -1)

"""Fields of tiny configs that no rule gets right, by model type, and inputs that none guesses."""

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
    "backbone_config": BACKBONE["backbone_config"] | {"out_features": ["stage2", "stage3", "stage4"]}
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
    "granitemoehybrid": MAMBA,
    "grounding-dino": {"num_feature_levels": 4},
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
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": HEADS,
    "mobilevit": {"hidden_sizes": [16, 32, 32], "num_attention_heads": 4},
    "moshi_depth": {"num_codebooks": 10},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nystromformer": {"segment_means_seq_len": 10, "num_landmarks": 10, "conv_kernel_size": 5},
    "patchtsmixer": {"context_length": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
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


def shots(batch):
    """Numbers of any shape, and masks of ones, as some models want them."""
    return torch.linspace(-1, 1, batch)


INPUTS = {
    "autoformer": lambda: series(2),
    "informer": lambda: series(2),
    "time_series_transformer": lambda: series(2),
    "dia": lambda: {
        "input_ids": torch.arange(20).reshape(2, 10) + 3,
        "decoder_input_ids": torch.arange(126).reshape(2, 7, 9) % 50,
    },
    "dia_decoder": lambda: {"input_ids": torch.arange(126).reshape(2, 7, 9) % 50},
    "lightglue": lambda: {"pixel_values": torch.linspace(0, 1, 2 * 2 * 3 * 64 * 64).reshape(2, 2, 3, 64, 64)},
    "patchtst": lambda: {"past_values": torch.arange(64.0).reshape(2, 32, 1).sin()},
    "patchtsmixer": lambda: {"past_values": torch.arange(64.0).reshape(2, 32, 1).sin()},
    "mllama_vision_model": lambda: {
        "pixel_values": torch.linspace(-1, 1, 2 * 4 * 3 * 32 * 32).reshape(2, 1, 4, 3, 32, 32).sin(),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]]),
    },
}

"""Where a recording says that pictures are: known of the model, or not said at all."""

import pytest
import torch
import transformers as T

import regard
import regard.hf
from models import model
from regard.recording import Grid

# CLIP's towers and SigLIP's head have torch's own layer, which is none of transformers'.
pytestmark = pytest.mark.filterwarnings("ignore:.*MultiheadAttention computes its own attention")
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
TEXT = SIZES | {"vocab_size": 200, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
SEEN = SIZES | {"image_size": 32, "patch_size": 8}
LIST = SIZES | {"image_size": [32, 32], "patch_size": [8, 8]}
VISION = {
    "vit": lambda: T.ViTModel(T.ViTConfig(**SEEN)),
    "deit": lambda: T.DeiTModel(T.DeiTConfig(**SEEN)),
    "registers": lambda: T.Dinov2WithRegistersModel(T.Dinov2WithRegistersConfig(**SEEN)),
    "siglip": lambda: T.SiglipVisionModel(T.SiglipVisionConfig(**SEEN)),
    "llama4": lambda: T.Llama4VisionModel(
        T.Llama4VisionConfig(
            **SEEN | {"intermediate_size": 128}, vision_output_dim=32, projector_input_dim=32,
            projector_output_dim=32, pixel_shuffle_ratio=0.5,
        )
    ),
    "internvl": lambda: T.InternVLVisionModel(T.InternVLVisionConfig(**LIST)),
    "vitpose": lambda: T.VitPoseBackbone(T.VitPoseBackboneConfig(**LIST)),
}  # fmt: skip


def recorded(found, **given):
    with torch.no_grad(), regard.hf.record(found.eval()) as recording:
        found(**given)
    return recording


@pytest.mark.parametrize("kind", VISION)
def test_a_patch_is_the_key_that_it_changes(kind):
    found, picture = VISION[kind](), torch.zeros(1, 3, 32, 32)
    before = recorded(found, pixel_values=picture)
    (grid,) = before.grids
    assert grid[1:] == (4, 4)
    for row, column in ((0, 0), (1, 2), (3, 3)):
        other = picture.clone()
        other[..., 8 * row + 2 : 8 * row + 6, 8 * column + 2 : 8 * column + 6] = 1.0
        change = recorded(found, pixel_values=other).layers[0].key - before.layers[0].key
        assert change.abs().amax((0, 2)).argmax() == grid.start + 4 * row + column


def test_a_model_whose_patches_are_not_known_has_no_grid():
    config = T.YolosConfig(**SEEN | {"image_size": [32, 32]}, num_detection_tokens=3)
    recording = recorded(T.YolosModel(config), pixel_values=torch.randn(1, 3, 32, 32))
    assert (len(recording.tokens), recording.grids) == (20, ())


def qwen():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 1,
    }  # fmt: skip
    config = T.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope, "rope_scaling": rope}, vision_config=vision,
        image_token_id=151, video_token_id=152, vision_start_token_id=153, vision_end_token_id=154,
    )  # fmt: skip
    return T.Qwen2VLForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore:.* left out")
def test_every_text_of_a_batch_has_the_sizes_of_its_own_pictures():
    first = [1, 153, *[151] * 16, 154, 153, *[151] * 4, 154, 5]
    ids = torch.tensor([first, [1, 153, *[151] * 16, 154, 5, 6, 7, 8, 9, 5, 6]])
    given = {
        "input_ids": ids, "mm_token_type_ids": (ids == 151).long(),
        "pixel_values": torch.randn(144, 96),
        "image_grid_thw": torch.tensor([[1, 4, 16], [1, 4, 4], [1, 16, 4]]),
    }  # fmt: skip
    a, b = recorded(qwen(), **given).batch
    assert a.grids == (Grid(2, 2, 8), Grid(20, 2, 2))
    assert b.grids == (Grid(2, 8, 2),)


def mistral():
    config = T.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"}, image_token_index=10, spatial_merge_size=2,
        vision_config=SIZES
        | {"model_type": "pixtral", "image_size": 64, "patch_size": 4, "head_dim": 8},
    )  # fmt: skip
    return T.Mistral3ForConditionalGeneration(config)


def test_rows_with_tokens_between_them_are_no_grid():
    """A picture of two rows of four, each ended by a token of its own."""
    ids = torch.tensor([[1, *[10] * 4, 12, *[10] * 4, 13, 5, 6]])
    sizes = {"pixel_values": torch.randn(1, 3, 16, 32), "image_sizes": torch.tensor([[16, 32]])}
    recording = recorded(mistral(), input_ids=ids, **sizes)
    assert recording.grids == ()
    assert recording.groups["vision_tower"].grids == (Grid(0, 4, 8),)


def test_pictures_of_other_sizes_have_their_own():
    """A row of four, and one of two; the vision model has the patches of both."""
    ids = torch.tensor([[1, *[10] * 4, 13, *[10] * 2, 13, 5, 6]])
    sizes = torch.tensor([[8, 32], [8, 16]])
    given = {"pixel_values": torch.randn(2, 3, 8, 32), "image_sizes": sizes}
    recording = recorded(mistral(), input_ids=ids, **given)
    assert recording.grids == (Grid(1, 1, 4), Grid(6, 1, 2))
    assert recording.groups["vision_tower"].grids == (Grid(0, 2, 8), Grid(16, 2, 4))


@pytest.mark.filterwarnings("ignore:.* left out")
def test_parts_of_a_picture_in_a_row_are_a_grid_each():
    """Four parts of 2 x 2 tokens are no picture of 4 x 4."""
    config = T.InternVLConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=LIST, image_token_id=10
    )
    ids = torch.tensor([[1, *[10] * 16, 5]])
    found = T.InternVLForConditionalGeneration(config)
    recording = recorded(found, input_ids=ids, pixel_values=torch.randn(4, 3, 32, 32))
    assert recording.grids == tuple(Grid(1 + 4 * n, 2, 2) for n in range(4))


@pytest.mark.filterwarnings("ignore:.* left out")
def test_tokens_that_are_mixed_of_patches_are_no_grid():
    resampler = SIZES | {
        "resampler_n_latents": 16, "resampler_depth": 1, "resampler_n_heads": 4,
        "resampler_head_dim": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = T.Idefics2Config(
        text_config=TEXT | {"model_type": "mistral"}, vision_config=SEEN, image_token_id=10,
        perceiver_config=resampler,
    )  # fmt: skip
    ids = torch.tensor([[1, *[10] * 16, 5]])
    found = T.Idefics2ForConditionalGeneration(config)
    recording = recorded(found, input_ids=ids, pixel_values=torch.randn(1, 1, 3, 32, 32))
    assert len(recording.tokens) == 18
    assert recording.grids == ()


def test_patches_have_no_words_of_a_text_of_as_many_tokens():
    text = SIZES | {"vocab_size": 97, "max_position_embeddings": 40, "eos_token_id": 2}
    config = T.CLIPConfig(text_config=text, vision_config=SEEN, projection_dim=16)
    ids = torch.arange(30, 47)[None]
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    groups = recorded(T.CLIPModel(config), **given).groups
    assert groups["text_model"].tokens == tuple(map(str, range(30, 47)))
    assert groups["vision_model"].tokens == tuple(map(str, range(17)))
    assert groups["vision_model"].grids == (Grid(1, 4, 4),)


def test_a_text_model_whose_layers_are_called_past_it_has_the_words():
    ids, picture = torch.arange(30, 40)[None], torch.randn(1, 3, 32, 32)
    groups = recorded(model("bridgetower"), input_ids=ids, pixel_values=picture).groups
    assert groups["text_model"].tokens == tuple(map(str, range(30, 40)))


def blip2():
    text = SIZES | {"model_type": "opt", "vocab_size": 97, "ffn_dim": 32, "word_embed_proj_dim": 32}
    config = T.Blip2Config(
        text_config=text | {"max_position_embeddings": 60}, vision_config=SEEN, num_query_tokens=16,
        qformer_config=SIZES | {"vocab_size": 97, "encoder_hidden_size": 32}, image_token_index=10,
    )  # fmt: skip
    return T.Blip2ForConditionalGeneration(config).eval()


def test_a_text_that_is_embedded_outside_of_its_model_has_the_words():
    """Q-Former's tokens stand for a picture in BLIP-2's."""
    ids = torch.tensor([[1, *[10] * 16, 5, 6]])
    recording = recorded(blip2(), input_ids=ids, pixel_values=torch.randn(1, 3, 32, 32))
    own = next(x for x in recording.groups.values() if "language_model" in x.layers[0].name)
    assert own.tokens == tuple(map(str, ids[0].tolist()))
    assert own.grids == ()
    tower = next(x for x in recording.groups.values() if "vision_model" in x.layers[0].name)
    assert tower.grids == (Grid(1, 4, 4),)


def test_what_a_model_writes_by_another_within_it_is_one_generation():
    """BLIP-2 calls generate of its language model, with settings of any name."""
    found, ids = blip2(), torch.tensor([[1, *[10] * 16, 5, 6]])
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32), "do_sample": False}
    given |= {"max_new_tokens": 4, "eos_token_id": None}
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="positions stand for the texts of tokens"),
        regard.hf.record(found) as recording,
    ):
        written = found.generate(**given)
    assert (len(recording.tokens), recording.boundary) == (22, 19)
    assert len(recording.groups) == 4
    found.set_attn_implementation("eager")
    given = {"input_ids": written[:, :-1], "pixel_values": given["pixel_values"]}
    with torch.no_grad():
        expected = found(**given, output_attentions=True).language_model_outputs.attentions
    torch.testing.assert_close(recording.weights[0][:], expected[0][0], atol=2e-6, rtol=0)
    for name in ("num_beams", "prompt_lookup_num_tokens"):
        with (
            torch.no_grad(),
            pytest.raises(regard.RecordingError, match=f"{name}="),
            regard.hf.record(found),
        ):
            found.generate(**given, **{name: 2}, max_new_tokens=2)
    found.language_model.generation_config.num_beams = 2  # which BLIP-2's generate does not name
    with (
        torch.no_grad(),
        pytest.raises(regard.RecordingError, match="num_beams=2"),
        regard.hf.record(found),
    ):
        found.generate(**given, max_new_tokens=2)
    assert "generate" not in vars(found) | vars(found.language_model)

"""What others compute from a model's attentions is the same from regard's, without the matrices."""

import pytest
import torch
import transformers

import regard
from models import model, padding, texts
from regard.hf import Attentions


@pytest.fixture
def no_matrix(monkeypatch):
    """Attentions whose numbers nobody may ask for as a whole."""

    def whole(self):
        raise AssertionError("a whole matrix was computed")

    monkeypatch.setattr(Attentions, "numbers", whole)


def attentions(kind, name, **given):
    with torch.no_grad():
        return model(kind, name)(**given, output_attentions=True).attentions


def test_the_score_of_observed_attention_by_which_a_cache_is_pressed(no_matrix):
    # kvpress, ObservedAttentionPress: what each key received, over the queries that could see it.
    def score(received, length, key_heads):
        mean = received / torch.arange(length, 0, -1)
        return mean.reshape(len(mean), key_heads, -1, length).mean(2)

    ids = texts()
    for eager, ours in zip(
        attentions("llama", "eager", input_ids=ids), attentions("llama", "regard", input_ids=ids)
    ):
        expected = score(eager.sum(2), 20, 2)
        torch.testing.assert_close(score(ours.weights.received(), 20, 2), expected)


def test_the_rank_by_which_fastv_drops_pictures(no_matrix):
    # Chen et al. 2024: how much the last token attends to each patch, mean over the heads.
    given = {"input_ids": texts(), "attention_mask": padding()}
    eager = attentions("llama", "eager", **given)[1]
    ours = attentions("llama", "regard", **given)[1]
    found = ours[:, :, -1].mean(1)[:, 4:16]
    expected = eager.mean(1)[:, -1][:, 4:16]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert torch.equal(found.topk(6).indices, expected.topk(6).indices)


@pytest.fixture(scope="module")
def whisper():
    T = transformers
    config = T.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=50, max_target_positions=40, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, decoder_start_token_id=2, begin_suppress_tokens=None, init_std=0.3,
    )  # fmt: skip
    torch.manual_seed(5)
    found = T.WhisperForConditionalGeneration(config).eval()
    found.generation_config.alignment_heads = [[0, 1], [1, 3]]
    found.generation_config.eos_token_id = None
    return found


@pytest.mark.parametrize("frames", [100, 64])
def test_the_times_of_whispers_words(whisper, frames, no_matrix):
    heads, sound = whisper.generation_config.alignment_heads, torch.randn(2, 8, 100)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1}
    settings |= {"output_attentions": True, "return_dict_in_generate": True}
    whisper.set_attn_implementation("eager")
    with torch.no_grad():
        written = transformers.GenerationMixin.generate(whisper, sound, **settings)
        given = {"num_frames": frames, "num_input_ids": 1}
        expected = whisper._extract_token_timestamps(written, heads, **given)
        # One pass over what was written, as Whisper's own code does it.
        whisper.set_attn_implementation("regard")
        tokens = written.sequences[:, :-1]
        read = whisper(sound, decoder_input_ids=tokens, output_attentions=True)
    kept = slice(1, None), slice(frames // 2)
    layers = [attentions.weights.part(*kept) for attentions in read.cross_attentions]
    found = regard.align(layers, heads, median_filter_width=whisper.config.median_filter_width)
    assert len(found.first[0].unique()) > 4
    torch.testing.assert_close(found.first * 0.02, expected[:, 1:-1], atol=1e-6, rtol=0)


def test_whispers_own_code_reads_the_rows_of_each_step(whisper):
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    settings |= {"output_attentions": True, "return_dict_in_generate": True}
    sound, times = torch.randn(1, 8, 100), []
    for name in ("eager", "regard"):
        whisper.set_attn_implementation(name)
        with torch.no_grad():
            written = transformers.GenerationMixin.generate(whisper, sound, **settings)
        made = written.cross_attentions[0]
        assert (type(made[0]) is Attentions) == (name == "regard")
        given = {"num_frames": 100, "num_input_ids": 1}
        times.append(whisper._extract_token_timestamps(written, [[0, 1], [1, 3]], **given))
    torch.testing.assert_close(times[1], times[0])


@pytest.fixture(scope="module")
def esm():
    T = transformers
    config = T.EsmConfig(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, pad_token_id=1, mask_token_id=23, position_embedding_type="rotary",
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(6)
    return T.EsmModel(config).eval()


def protein(length=15):
    """Ids of a sequence with its end."""
    ids = torch.randint(4, 20, (1, length), generator=torch.Generator().manual_seed(7))
    ids[0, -1] = 2
    return ids


def contacts(esm, name, ids):
    esm.set_attn_implementation(name)
    with torch.no_grad():
        return esm.predict_contacts(ids, torch.ones_like(ids))


def test_the_contacts_of_esms_proteins(esm):
    ids = protein()
    found, expected = contacts(esm, "regard", ids), contacts(esm, "eager", ids)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_contacts_of_a_residue_are_found_from_its_row_and_column(esm, no_matrix):
    # Rao et al. 2021: symmetric weights less the product of their means, in a regression.
    ids = protein()
    expected = contacts(esm, "eager", ids)[0]
    esm.set_attn_implementation("regard")
    with torch.no_grad():
        read = esm(ids, output_attentions=True).attentions
    inner = slice(1, -1)  # without the tokens of begin and end
    parts = [layer.weights.part(inner, inner) for layer in read]
    sums = [part.sum(-1) + part.sum(-2) for part in parts]
    regression = esm.contact_head.regression
    for i in range(len(expected)):
        features = []
        for part, both in zip(parts, sums):
            row = part[0, :, i] + part[0, :, :, i]
            features.append(row - both[0, :, i : i + 1] * both[0] / both[0].sum(-1, keepdim=True))
        found = regression(torch.cat(features).T).squeeze(-1).sigmoid()
        torch.testing.assert_close(found, expected[i], atol=1e-6, rtol=1e-5)


def test_every_head_of_a_long_text_is_summed_up_without_a_matrix(no_matrix):
    ids = torch.randint(4, 97, (1, 600))
    found = attentions("gpt2", "regard", input_ids=ids)
    summary = found[0].weights.summary(topk=4, strongest=0)
    assert summary.entropy.shape == (1, 4, 600)
    torch.testing.assert_close(summary.received.sum(-1), torch.full((1, 4), 600.0))

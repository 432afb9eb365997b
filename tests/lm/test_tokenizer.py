"""Words and byte pairs: what goes in comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.lm import BytePairTokenizer, WordTokenizer, tokenizer

# Seed 004 tokenizes this sentence; its set of words has no order, ours is that of appearance.
SEED_004 = "How are you doing ? I am good and you ? I am fine, thank you ."


def test_seed_004_vocabulary_counts_bos_and_eos():
    words = WordTokenizer(SEED_004)
    assert len(words) == 14
    printed = "how thank ? are and doing good fine, am you i ."
    assert sorted(words.words[2:]) == sorted(printed.split())


def test_seed_004_sentence_comes_back_capitalised():
    words = WordTokenizer(SEED_004)
    assert words.decode(words.encode("How are you doing ?")) == "How are you doing ?"
    assert words.decode(words.encode("YOU AM GOOD")) == "You am good"


def test_words_are_numbered_in_order_of_first_appearance():
    words = WordTokenizer(SEED_004)
    assert words.encode("how are you doing ?") == [2, 3, 4, 5, 6]
    assert WordTokenizer(SEED_004).words == words.words


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_bos_and_eos_are_added_where_asked_and_left_out_of_sentences(bos, eos):
    words = WordTokenizer(SEED_004)
    ids = words.encode("i am fine,", bos=bos, eos=eos)
    assert ids == [0] * bos + [7, 8, 11] + [1] * eos
    assert words.decode(ids) == "I am fine,"


def test_words_named_bos_and_eos_are_words():
    words = WordTokenizer("bos eos BOS")
    assert words.encode("BOS eos", bos=True) == [0, 2, 3]
    assert words.decode([2, 3]) == "Bos eos"


def test_spaces_in_a_row_separate_once():
    words = WordTokenizer("  a   b ")
    assert words.encode(" b  a") == [3, 2]


@given(st.lists(st.text("abcxyz.,!?", min_size=1), min_size=1))
def test_any_sentence_of_known_words_comes_back(sentence):
    words = WordTokenizer(" ".join(sentence))
    assert words.decode(words.encode(" ".join(sentence))) == " ".join(sentence).capitalize()


def test_an_unknown_word_is_named_with_the_nearest_known_ones():
    with pytest.raises(ValueError, match=r"unknown word 'thanks'; nearest known words: thank"):
        WordTokenizer(SEED_004).encode("thanks you")
    with pytest.raises(ValueError, match=r"'qqq'; no known word is near.*knows the 12 words"):
        WordTokenizer(SEED_004).encode("qqq")


@pytest.mark.parametrize("i", [-1, 14])
def test_a_word_id_outside_the_vocabulary_is_an_error(i):
    with pytest.raises(ValueError, match=f"id {i} is outside the vocabulary, 0 to 13"):
        WordTokenizer(SEED_004).decode([i])


@pytest.mark.parametrize("i", [2.0, True, "a"])
def test_a_word_id_that_is_no_int_is_an_error(i):
    with pytest.raises(TypeError, match=f"WordTokenizer: id {i!r} is a .*; an int is needed"):
        WordTokenizer(SEED_004).decode([i])


@pytest.mark.parametrize("text", [None, ["how"], b"how are you"], ids=str)
def test_words_are_read_from_a_str_alone(text):
    said = f"WordTokenizer: the text is of type {type(text).__name__}; a str is needed"
    with pytest.raises(TypeError, match=said):
        WordTokenizer(text)
    with pytest.raises(TypeError, match=said):
        WordTokenizer(SEED_004).encode(text)


@pytest.mark.parametrize("text", ["", "   "])
def test_no_word_to_know_is_an_error(text):
    with pytest.raises(ValueError, match="holds no word; give at least one"):
        WordTokenizer(text)


@pytest.fixture(scope="module")
def pairs():
    return BytePairTokenizer.train(["the cat sat on the mat, the cat sat"] * 3, 265)


def text(**options):
    return st.text(st.characters(exclude_categories=["Cs"]), **options)


@given(text=text())
def test_byte_pairs_give_any_text_back_byte_for_byte(pairs, text):
    assert pairs.decode(pairs.encode(text)) == text
    assert b"".join(map(pairs.bytes, pairs.encode(text))) == text.encode()


@pytest.mark.parametrize(
    "text", ["", "\0", " the cat", "a\r\nb\r\n", "\t\t", "<bos>", "BOS", "é\u0301", "🙂", "\ufeffx"]
)
def test_byte_pairs_keep_what_other_tokenizers_lose(pairs, text):
    assert pairs.decode(pairs.encode(text, bos=True)) == text
    assert pairs.bos not in pairs.encode(text)


@given(text=text(min_size=1))
def test_builtin_tokenizer_gives_any_text_back(builtin, text):
    assert builtin.tokenizer.decode(builtin.tokenizer.encode(text)) == text


def test_byte_pairs_merge_what_is_frequent(pairs):
    assert pairs.tokens(pairs.encode("the cat")) == ["the", " cat"]
    assert len(pairs) == 265


def test_training_byte_pairs_twice_gives_the_same_ids():
    texts = [f"{a} {b}{a}" for a in "abcdefgh" for b in "stuvwxyz"]
    first, second = (BytePairTokenizer.train(texts, 300) for _ in range(2))
    assert [first.encode(t) for t in texts] == [second.encode(t) for t in texts]


@pytest.mark.parametrize("sign", ["a", " ", "\u3000"])
def test_a_run_without_a_word_is_trained_on_in_parts(sign):
    found = BytePairTokenizer.train([sign * 20_000, "def " * 100], 300)
    lengths = {len(found.bytes(i)) // len(sign.encode()) for i in range(len(found))}
    assert 500 <= max(lengths) <= 1000
    assert b"def" in {found.bytes(i).strip() for i in range(len(found))}
    assert found.decode(found.encode(sign * 5000)) == sign * 5000


def test_texts_without_such_runs_are_trained_on_as_they_are():
    texts = ["x" * 1000 + " " * 1000 + "y" * 1000, "a\n\n b", ""]
    assert [list(tokenizer._parts(text)) for text in texts] == [[text] for text in texts]
    longer = "a b " + "x" * 2500 + "\t" * 1001 + "y"
    parts = list(tokenizer._parts(longer))
    assert "".join(parts) == longer
    assert [len(part) for part in parts] == [1004, 1000, 1500, 2]


def test_byte_pairs_are_saved_and_loaded(pairs, tmp_path):
    pairs.save(tmp_path / "tokenizer.json")
    loaded = BytePairTokenizer.load(tmp_path / "tokenizer.json")
    assert len(loaded) == len(pairs)
    assert loaded.encode("the mat é") == pairs.encode("the mat é")


def test_tokens_show_their_text_and_parts_of_characters_as_bytes(pairs):
    ids = pairs.encode("the é", bos=True)
    assert pairs.tokens(ids) == ["<bos>", "the", " ", r"\xc3", r"\xa9"]


def test_decoding_half_a_character_shows_a_replacement(pairs):
    assert pairs.decode(pairs.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("i", [-1, 265])
def test_an_id_outside_the_vocabulary_is_an_error(pairs, i):
    with pytest.raises(ValueError, match=f"id {i} is outside the vocabulary, 0 to 264"):
        pairs.decode([i])


@pytest.mark.parametrize("i", [2.0, True, "a"])
def test_an_id_that_is_no_int_is_an_error(pairs, i):
    with pytest.raises(TypeError, match=f"BytePairTokenizer: id {i!r} is a .*; an int is needed"):
        pairs.decode([i])


@pytest.mark.parametrize("text", [3, b"the cat"], ids=str)
def test_byte_pairs_are_read_from_a_str_alone(pairs, text):
    with pytest.raises(TypeError, match=f"the text is of type {type(text).__name__}; a str is"):
        pairs.encode(text)


def test_one_text_to_train_on_is_told_from_several():
    with pytest.raises(TypeError, match=r"texts is one str; a list of texts is needed: \[text\]"):
        BytePairTokenizer.train("the cat sat", 300)
    with pytest.raises(TypeError, match="the text is of type int; a str is needed"):
        BytePairTokenizer.train([3], 300)
    with pytest.raises(TypeError, match=r"vocab_size 300\.0 is a float; an int is needed"):
        BytePairTokenizer.train(["the cat sat"], 300.0)


def test_a_vocabulary_without_room_for_the_bytes_is_an_error():
    with pytest.raises(ValueError, match="256 bytes and BOS need at least 257"):
        BytePairTokenizer.train(["a"], 256)


def test_a_vocabulary_that_no_memory_holds_is_an_error():
    with pytest.raises(ValueError, match="vocab_size 1000000000 is too large; at most 4194304 ids"):
        BytePairTokenizer.train(["a"], 10**9)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "EOF while parsing"),
        (b"{}", "Model missing"),
        (b"\xff\x00", "expected value"),
        (b"[1, 2]", "invalid type: sequence"),
        (None, "EOF while parsing"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error_with_the_way_out(pairs, tmp_path, content, reason):
    path = tmp_path / "tokenizer.json"
    if content is None:  # it is cut off
        pairs.save(path)
        content = path.read_bytes()[:-100]
    path.write_bytes(content)
    message = (
        rf"tokenizer.json: not a byte-pair tokenizer \({reason}.*\)\. Put back the file .*install"
    )
    with pytest.raises(ValueError, match=message):
        BytePairTokenizer.load(path)


def test_a_tokenizer_whose_tokens_stand_for_no_bytes_is_an_error(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"two words": 0}, unk_token="two words")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"a token has the character ' ', which stands for no"):
        BytePairTokenizer.load(tmp_path / "tokenizer.json")


def test_words_are_split_at_any_white_space():
    words = WordTokenizer("one two\nthree\ttwo")
    assert words.words[2:] == ["one", "two", "three"]
    assert words.decode(words.encode("three\n one")) == "Three one"
    with pytest.raises(ValueError, match="holds no word"):
        WordTokenizer(" \n")


def test_a_lone_surrogate_is_told():
    pairs = BytePairTokenizer.train(["some text"], 257)
    with pytest.raises(ValueError, match=r"character 1 is '\\ud800', half of a surrogate pair"):
        pairs.encode("a\ud800")
    with pytest.raises(ValueError, match=r"character 1 is '\\ud800'"):
        BytePairTokenizer.train(["a\ud800"], 257)


def test_no_piece_is_of_two_words():
    text = "the end of the day, and the end of the road. " * 50
    trained = BytePairTokenizer.train([text], 300)
    pieces = trained.tokens(range(256, len(trained) - 1))
    assert " the" in pieces
    assert not [piece for piece in pieces if " " in piece.strip() or piece != piece.rstrip(" ")]


def test_indentation_is_one_piece_and_the_word_after_it_the_same_as_in_a_line():
    text = "def run(self):\n        return self\n    x = 1; return x\n" * 50
    trained = BytePairTokenizer.train([text], 320)
    indented = trained.tokens(trained.encode(":\n        return self"))
    assert indented == [":", "\n       ", " return", " self"]


def test_a_tokenizer_of_words_prints_its_words():
    assert repr(WordTokenizer("a b")) == "WordTokenizer(4 ids: 0 'BOS', 1 'EOS', 2 'a', 3 'b')"
    shown = repr(WordTokenizer(" ".join(map(str, range(30)))))
    assert shown.startswith("WordTokenizer(32 ids: 0 'BOS', 1 'EOS', 2 '0', ")
    assert shown.endswith(", 11 '9', … 31 '29')")
    assert repr(WordTokenizer("a b c d e f g h i j")).endswith(", 10 'i', 11 'j')")


def test_a_tokenizer_of_byte_pairs_prints_its_size(pairs):
    assert repr(pairs) == "BytePairTokenizer(265 ids: 256 bytes, merges of them, <bos>)"

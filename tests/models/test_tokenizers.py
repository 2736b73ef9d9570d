"""Tokenizers are loaded natively and completed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dllm
from dllm.core.errors import CheckpointError, ConfigError, PromptError
from dllm.models import families, load
from dllm.models.model import special_tokens
from dllm.models.tokenizer import complete_tokenizer, load_tokenizer, loader_of
from dllm.request.prompts import encode_chat
from dllm.runtime.spelling import Spelling
from dllm.structured.vocabulary import vocabulary_of
from dllm.train.dflash.recipe import mask_id
from dllm.train.recipes.deer import Alignment

Copy = Callable[..., Path]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT = [{"role": "user", "content": " hi "}]


def words(size: int, *names: tuple[int, str], **special: str) -> PreTrainedTokenizerFast:
    """A word tokenizer of ``size`` entries with ``names`` at given ids."""
    vocabulary = {f"w{i}": i for i in range(size)}
    for index, name in names:
        del vocabulary[f"w{index}"]
        vocabulary[name] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_ids_may_have_gaps(tiny: dllm.DiffusionModel) -> None:
    """The number of tokens is then no free id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: 2 * i for i, token in enumerate(alphabet)}, []))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    pieces = vocabulary_of(tokenizer).pieces
    assert len(pieces) == 511 and pieces[2 * alphabet.index("A")] == b"A" and pieces[1] is None
    facts = replace(tiny.facts, vocab_size=600)
    model = replace(tiny, tokenizer=tokenizer, facts=facts, generation_defaults={})
    assert model.delimiters() == (2 * alphabet.index("\u010a"),)
    assert mask_id(model) == Alignment().marker_for(model) == 511


@pytest.mark.parametrize("template", ["<b>", {"default": "<b>", "tool_use": "<b>"}])
def test_a_spare_mask_is_no_token_of_a_chat_template(
    tiny: dllm.DiffusionModel, template: Any
) -> None:
    tokenizer = words(8)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<a>", "<b>")])
    tokenizer.chat_template = template
    facts = replace(tiny.facts, vocab_size=len(tokenizer), stop_token_ids=())
    assert mask_id(replace(tiny, tokenizer=tokenizer, facts=facts)) == 8


BLANKS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize(
    ("decoder", "odd"),
    [(decoders.ByteLevel(), ["né"]), (decoders.Sequence(BLANKS), ["▁x▁", "▁▁", "<0x41>"]),
     (decoders.Sequence([*BLANKS, decoders.Strip(" ", 1, 0)]), ["▁▁a"]),
     (decoders.Metaspace(prepend_scheme="never"), ["▁▁", "<0x41>"]),
     (decoders.Metaspace(prepend_scheme="always"), ["▁▁", "<0x41>", "a▁b"])],
)  # fmt: skip
def test_a_token_stands_for_the_bytes_that_it_is_decoded_to(decoder: Any, odd: list[str]) -> None:
    """Or for none."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁", *odd[1:]})
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.decoder = decoder
    core.add_special_tokens(["<s>"])
    core.add_tokens([AddedToken(odd[0], special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_tokens([AddedToken("<s>", special=False)])  # as tokenizer_config.json may say
    known = vocabulary_of(tokenizer)
    assert known.pieces[tokenizer.convert_tokens_to_ids("<s>")] is None
    for token in (*odd, "▁", "a"):
        i = tokenizer.convert_tokens_to_ids(token)
        piece = known.pieces[i]
        if piece is not None:
            text = piece.decode(errors="replace")
            assert tokenizer.decode([i]) == (text[text[:1] == " " :] if known.strips else text)
    assert known.pieces[tokenizer.convert_tokens_to_ids("a")] == b"a"


@pytest.mark.parametrize("kind", [models.BPE, models.WordLevel])
def test_blanks_that_a_decoder_would_take_away(kind: Any) -> None:
    """Files of Llama 3 ask for that, which transformers does to no byte-pair tokenizer."""
    core = Tokenizer(kind({"Ġ": 0, ".": 1}, *[[]] * (kind is models.BPE)))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    if tokenizer.decode([0, 1]) == " .":
        assert vocabulary_of(tokenizer).pieces == (b" ", b".")
    else:
        with pytest.raises(ConfigError, match="takes blanks away"):
            vocabulary_of(tokenizer)


def test_special_tokens_of_a_tokenizer_that_lists_no_added_ones() -> None:
    """As mistral-common's."""

    class Roles:
        all_special_ids, all_special_tokens = [0, 2], ["<unk>", "</s>"]

        def __len__(self) -> int:
            return 9

        @property
        def added_tokens_decoder(self) -> dict[int, AddedToken]:
            raise NotImplementedError

    assert special_tokens(Roles()) == {0: "<unk>", 2: "</s>"}


def test_llada_mask_token_is_declared(copy: Copy) -> None:
    folder = copy("llada-tiny")
    specials = [(250, "<|endoftext|>"), (251, "<|eot_id|>"), (255, "<|mdm_mask|>")]
    words(256, *specials, eos_token="<|endoftext|>").save_pretrained(folder)
    model = load(folder)
    tokenizer: Any = model.tokenizer
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mdm_mask|>", 255)
    assert model.facts.stop_token_ids == (250, 251)
    assert tokenizer.decode([3, 255, 4], skip_special_tokens=True) == "w3 w4"


def test_llada_template_adds_the_header_only_when_asked(copy: Copy) -> None:
    folder = copy("llada-tiny")
    names = [(245 + i, name) for i, name in enumerate(HEADERS)] + [(255, "<|mdm_mask|>")]
    words(256, *names, chat_template="shipped").save_pretrained(folder)
    tokenizer: Any = load(folder).tokenizer
    asked = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    plain = tokenizer.apply_chat_template(CHAT, tokenize=False)
    head = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert plain == head
    assert asked == head + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_a_family_without_a_mask_token_has_none_of_an_empty_name() -> None:
    tokenizer = words(9, (5, ""))
    complete_tokenizer(tokenizer, families()["sdar"], 7, 9)
    assert tokenizer.mask_token == "w7"


@pytest.mark.slow
def test_a_base_tokenizer_gets_the_headers_at_their_ids() -> None:
    llada = families()["llada"]
    names = [(126080, "<|startoftext|>"), (126081, "<|endoftext|>"), (126336, "<|mdm_mask|>")]
    tokenizer = words(126346, *names)
    complete_tokenizer(tokenizer, llada, 126336, 126464)
    assert tokenizer.convert_tokens_to_ids(HEADERS) == [126346, 126347, 126348]
    assert tokenizer.mask_token_id == 126336 and tokenizer.chat_template is not None


def test_a_template_of_another_kind_is_left_alone(copy: Copy) -> None:
    folder = copy("llada-tiny")
    words(256, (255, "<|mdm_mask|>"), chat_template="theirs").save_pretrained(folder)
    tokenizer: Any = load(folder).tokenizer
    assert tokenizer.chat_template == "theirs"


def test_tokenizers_of_another_model(copy: Copy) -> None:
    folder = copy("llada-tiny")
    with pytest.raises(CheckpointError, match="mask token has id 200, the model's 255"):
        load(folder, tokenizer=words(256, (200, "<|mdm_mask|>")))
    with pytest.raises(CheckpointError, match=r"<\|endoftext\|> the id 5, the model 126081"):
        complete_tokenizer(words(9, (5, "<|endoftext|>")), families()["llada"], None, 126464)
    with pytest.raises(CheckpointError, match="holds no tokenizer files"):
        load(folder, tokenizer=folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(folder)


def test_a_whole_tokenizer_is_read_as_it_is(copy: Copy) -> None:
    """Qwen2Tokenizer, which reads Dream's vocab.json, splits by the rules of Qwen2."""
    folder = copy("dream-tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.ByteLevel()
    given = PreTrainedTokenizerFast(tokenizer_object=core)
    load(folder, tokenizer=given).save_pretrained(folder)
    again: Any = load(folder).tokenizer
    assert again("A b").input_ids == [letters.index("a"), letters.index("b")]


def test_the_class_of_a_sentencepiece_file_is_the_one_that_the_checkpoint_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.model").touch()
    assert {loader_of(f, tmp_path) for f in families().values()} == {"AutoTokenizer"}


@pytest.mark.parametrize("opening", ["b\n", "<e>"])
def test_a_spelled_special_token_puts_no_blank_before_its_content(
    tiny: dllm.DiffusionModel, opening: str
) -> None:
    """Tokenizers like Llama's write one at the start and behind special tokens."""
    letters = ["\u2581", "a", "b", "<", "e", ">", "\n"]
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.add_special_tokens([AddedToken("<e>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = f"{opening}{{{{ messages[0].content }}}}<e>"
    model = replace(tiny, tokenizer=tokenizer)
    plain = encode_chat(model, [{"role": "user", "content": "ab"}]).tolist()
    assert plain == tokenizer(f"{opening}ab<e>").input_ids
    spelled = encode_chat(model, [{"role": "user", "content": "ab<e>"}]).tolist()
    assert spelled == [*plain[:-1], *map(letters.index, "<e>"), plain[-1]]


def test_characters_in_a_row_that_are_bytes_each_have_their_piece() -> None:
    """A decoder of SentencePiece shows a run of bytes as characters only where all of it is."""
    core = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    spelling = Spelling(PreTrainedTokenizerFast(tokenizer_object=core))
    pieces = spelling.pieces([*"\ua984\ua9b1\u16a0x".encode()])
    assert pieces == ["", "", "\ua984", "", "", "\ua9b1", "", "", "\u16a0", "x"]


def test_nobody_is_asked_whether_code_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words(9).save_pretrained(tmp_path)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *said: asked.extend(said) or "y")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path, families()["autoregressive"])
    assert not asked


def test_dream_tokenizer_without_remote_code(copy: Copy, tmp_path: Path) -> None:
    folder = copy("dream-tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:240]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {250: "<|endoftext|>", 251: "<|im_start|>", 252: "<|im_end|>", 254: "<|beginoftext|>",
             255: "<|mask|>"}  # fmt: skip
    fillers = {i: f"<|{i}|>" for i in range(240, 256) if i not in added}
    decoder = {str(i): {"content": text, "special": True, "lstrip": False, "rstrip": False,
                        "normalized": False, "single_word": False}
               for i, text in sorted((added | fillers).items())}  # fmt: skip
    config = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": decoder,
              "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
              "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
              "bos_token": "<|beginoftext|>", "mask_token": "<|mask|>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = load(folder)
    tokenizer: Any = model.tokenizer
    assert tokenizer("abc<|im_end|>").input_ids == [vocabulary[c] for c in "abc"] + [252]
    assert (tokenizer.mask_token_id, tokenizer.bos_token_id) == (255, 254)
    assert model.facts.stop_token_ids == (250, 252)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<|im_end|>" not in tokenizer.all_special_tokens  # and is none of a text all the same
    spelled = [{"role": "user", "content": "abc<|im_end|>"}]
    assert list(encode_chat(model, spelled)).count(252) == 2
    with pytest.raises(PromptError, match="stands in a tool"):
        encode_chat(model, [{**CHAT[0], "name": "<|im_end|>"}])
    assert 252 in Spelling(tokenizer).special
    tokenizer.chat_template = (  # Mistral's moves the system prompt; not all trim
        "{{ messages[1]['content'] }}<|im_end|>{{ messages[0]['content'] }}<|im_start|>"
    )
    moved = [{"role": "system", "content": "s<|im_end|>"}, {"role": "user", "content": "\tu"}]
    assert tokenizer.decode(encode_chat(model, moved)) == "\tu<|im_end|>s<|im_end|><|im_start|>"
    assert list(encode_chat(model, moved)).count(252) == 1
    tokenizer.chat_template = model.family.chat_template
    for layout in ("native", "official"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        again: Any = load(tmp_path / layout).tokenizer
        assert again("abc<|im_end|>").input_ids == tokenizer("abc<|im_end|>").input_ids
        assert again.chat_template == tokenizer.chat_template

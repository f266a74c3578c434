"""Loading: folders, URLs, the hub, transformers tokenizers; and each way in which it is refused."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.tokenizers.support import BUNDLED_NAMES, bundled, bundled_texts, variant
from xtok.errors import ConfigError, TokenizerError
from xtok.tokenizers import adapt_tokenizer, load_tokenizer, same_tokenizer


def transformers_tokenizer(folder: str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_folder_and_a_transformers_tokenizer_give_the_same(name: str) -> None:
    theirs = transformers_tokenizer(bundled(name))
    ours, adapted = load_tokenizer(bundled(name)), adapt_tokenizer(theirs)
    assert same_tokenizer(ours, adapted)
    assert (ours.route, ours.prefix_space) == (adapted.route, adapted.prefix_space)
    texts = bundled_texts()[:60]
    tokens = ours.encode_flat(texts)
    wrapped = tokens.with_specials(ours.prefix_ids, ours.suffix_ids)
    for row, text in enumerate(texts):
        assert tokens.row(row).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert wrapped.row(row).tolist() == theirs(text)["input_ids"]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.num_tokens == len(theirs)
    assert (ours.bos_token_id, ours.unk_token_id) == (theirs.bos_token_id or theirs.cls_token_id, theirs.unk_token_id)
    assert ours.eos_token_id == (theirs.eos_token_id or theirs.sep_token_id)
    assert ours.pad_token_id == (theirs.eos_token_id if theirs.pad_token_id is None else theirs.pad_token_id)
    assert ours.chat_template == theirs.chat_template


def configure(document: dict[str, Any], config: dict[str, Any]) -> None:
    """A configuration that adds what tokenizer.json lacks, as old folders do."""
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<|im_end|>"]
    config["bos_token"] = {"__type": "AddedToken", "content": "<|begin|>", "special": True, "rstrip": True, "normalized": False}
    config["bos_token"] |= {"lstrip": False, "single_word": False}
    config["additional_special_tokens"] = ["<|extra|>"]
    config["add_bos_token"] = True
    config["add_eos_token"] = True
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {"strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    document["padding"] |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
def test_the_configuration_is_applied_as_transformers_applies_it(backend: Any, tmp_path: Path) -> None:
    folder = variant(tmp_path / "tokenizer", "chatml_bpe", configure)
    ours, theirs = load_tokenizer(folder, backend=backend), transformers_tokenizer(folder)
    text = "hello <|begin|> world <|extra|> of many words<|im_end|>"
    content = theirs(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    assert ours.encode_flat([text]).ids.tolist() == content
    assert len(content) > 7
    assert ours.prefix_ids.tolist() == [theirs.convert_tokens_to_ids("<|begin|>")]
    assert ours.suffix_ids.tolist() == [theirs.convert_tokens_to_ids("<|im_end|>")]
    extra = theirs.convert_tokens_to_ids("<|extra|>")
    assert ours.table.special_content[extra] == b"<|extra|>"
    assert ours.num_tokens == len(theirs)


@pytest.mark.parametrize("backend", ["tokenizers", "fastokens"])
def test_split_special_tokens_is_obeyed(backend: Any, tmp_path: Path) -> None:
    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        config["split_special_tokens"] = True

    folder = variant(tmp_path / "tokenizer", "chatml_bpe", edit)
    text = "a<|im_end|>b<think>c"
    expected = transformers_tokenizer(folder)(text)["input_ids"]
    adapter = load_tokenizer(folder, backend=backend)
    assert adapter.encode_flat([text]).ids.tolist() == expected
    assert adapter.token_bytes(adapter.encode_flat([text]).ids)[0].tobytes() == text.encode()
    assert not same_tokenizer(adapter, load_tokenizer(bundled("chatml_bpe")))


def test_a_url_is_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in Path(bundled("spm_bpe")).iterdir():
        memory.pipe_file(f"/models/spm/{path.name}", path.read_bytes())
    assert same_tokenizer(load_tokenizer("memory://models/spm"), load_tokenizer(bundled("spm_bpe")))


def test_the_hub_is_asked_for_what_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    asked = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, revision))
        path = Path(bundled("chatml_bpe")) / name
        if not path.exists():
            raise EntryNotFoundError(name)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    adapter = load_tokenizer("some-team/some-model", revision="abc")
    assert same_tokenizer(adapter, load_tokenizer(bundled("chatml_bpe")))
    assert set(asked) == {("some-team/some-model", "abc")}


def test_a_missing_folder_is_named_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"out/nowhere.*looked at /.*out/nowhere"):
        load_tokenizer("out/nowhere")
    with pytest.raises(TokenizerError, match="no tokenizer folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(TokenizerError, match="is a file"):
        load_tokenizer(str(Path(bundled("spm_bpe")) / "tokenizer.json"))


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_a_slow_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\na\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer"}), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"slow tokenizer BertJapaneseTokenizer \(vocab\.txt\)"):
        load_tokenizer(str(tmp_path))


def test_a_slow_transformers_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(TokenizerError, match=r"ByT5Tokenizer.*slow tokenizer"):
        adapt_tokenizer(ByT5Tokenizer())
    with pytest.raises(TypeError, match="not a list"):
        adapt_tokenizer([])  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    for backend in ("tokenizers", "auto"):
        with pytest.raises(TokenizerError, match="cannot be loaded"):
            load_tokenizer(str(tmp_path), backend=backend)  # type: ignore[arg-type]


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    shutil.copytree(bundled("spm_bpe"), tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{nonsense", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(str(tmp_path / "tokenizer"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "nested"])
def test_ids_beyond_the_declared_vocabulary_are_refused(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(bundled("chatml_bpe"), folder)
    target = folder / ("config.json" if file == "nested" else file)
    known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    declared = {"text_config": {"vocab_size": 4004}} if file == "nested" else {"vocab_size": 4004}
    target.write_text(json.dumps(known | declared), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"3 ids exceed.*vocab_size 4004.*4006"):
        load_tokenizer(str(folder))
    target.write_text(json.dumps(known | {"vocab_size": 4096}), encoding="utf-8")
    adapter = load_tokenizer(str(folder))
    assert (adapter.vocab_size, adapter.num_tokens, adapter.declared_vocab_size) == (4007, 4007, 4096)


def test_holes_are_allowed_only_within_reason(tmp_path: Path) -> None:
    def hole(at: int) -> Any:
        def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
            vocabulary = document["model"]["vocab"]
            vocabulary["Ġunusual"] = at

        return edit

    adapter = load_tokenizer(variant(tmp_path / "small", "chatml_bpe", hole(4100)))
    assert (adapter.vocab_size, adapter.num_tokens) == (4101, 4008)
    assert adapter.table.lengths[4050] == 0
    with pytest.raises(TokenizerError, match=r"id 900000000 \('Ġunusual'\) in a vocabulary of 4008"):
        load_tokenizer(variant(tmp_path / "large", "chatml_bpe", hole(900_000_000)))


def test_random_merges_are_refused(tmp_path: Path) -> None:
    def edit(document: dict[str, Any], config: dict[str, Any]) -> None:
        document["model"]["dropout"] = 0.1

    with pytest.raises(TokenizerError, match=r"at random \(model\.dropout 0\.1"):
        load_tokenizer(variant(tmp_path / "tokenizer", "chatml_bpe", edit))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rust'.*auto, fastokens, tokenizers"):
        load_tokenizer(bundled("spm_bpe"), backend="rust")  # type: ignore[arg-type]


def test_adapting_changes_nothing_and_is_remembered() -> None:
    theirs = transformers_tokenizer(bundled("spm_bpe"))
    theirs.backend_tokenizer.enable_truncation(2)
    before = theirs.backend_tokenizer.to_str()
    adapter = adapt_tokenizer(theirs)
    assert len(adapter.encode_flat(["a text of several words"]).ids) > 2
    assert theirs.backend_tokenizer.to_str() == before
    assert adapt_tokenizer(theirs) is adapter
    theirs.add_tokens(["<new>"])
    again = adapt_tokenizer(theirs)
    assert again is not adapter
    assert again.num_tokens == adapter.num_tokens + 1
    theirs.add_eos_token = True
    assert adapt_tokenizer(theirs).suffix_ids.tolist() == [theirs.eos_token_id]
    alive = weakref.ref(theirs)
    del theirs
    gc.collect()
    assert alive() is None, "the cache must not keep a tokenizer alive"


def test_transformers_tokenizer_renders_and_encodes_the_same() -> None:
    adapter = load_tokenizer(bundled("chatml_bpe"))
    theirs = adapter.transformers_tokenizer
    assert theirs is adapter.transformers_tokenizer
    rendered = theirs.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n"
    assert theirs(rendered)["input_ids"] == adapter.encode_flat([rendered]).ids.tolist()


def test_a_worker_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from xtok.tokenizers import load_tokenizer, ProvenEncoder\n"
        f"a = load_tokenizer({bundled('chatml_bpe')!r}, backend='auto')\n"
        "ProvenEncoder(a).encode_flat(['one', 'two']); a.content_fingerprint\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("wrap", "message"), [("length", "special tokens around"), ("inside", "changes the ids of the text")])
def test_specials_that_depend_on_the_text_are_refused(wrap: str, message: str) -> None:
    """No processor of today's library does so; if one ever does, adding prefix and suffix ourselves would be wrong."""
    from types import SimpleNamespace

    from xtok.tokenizers.adapter import _added_specials

    class Odd:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
            return [SimpleNamespace(ids=self.encode(text, add_special_tokens)) for text in texts]

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            ids = [10 + ord(character) % 50 for character in text]
            if not add_special_tokens:
                return ids
            return [*ids, len(ids) % 3] if wrap == "length" else [number for token in ids for number in (token, 0)]

    with pytest.raises(TokenizerError, match=message):
        _added_specials(Odd(), "odd")  # type: ignore[arg-type]

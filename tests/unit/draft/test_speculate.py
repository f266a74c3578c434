"""`speculate` from folders on disk: prompts, report, and the check against plain greedy decoding."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.unit.draft.tiny import VOCAB, tiny_dflash
from xtok.draft.baselines import most_frequent_token, untrained
from xtok.draft.command import add_arguments, run
from xtok.draft.decoding import DecodingResult
from xtok.draft.export import export_draft
from xtok.draft.prompts import read_prompts
from xtok.draft.speculate import SpeculationReport, speculate, stop_token_ids
from xtok.errors import ConfigError, StorageError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


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
        folders["target"],
        folders["draft"],
        folders[prompts],
        max_new_tokens=12,
        progress=lambda number, result: seen.append(number),
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
    ("line", "message"),
    [
        (b'{"id": 1}', r"none of messages, prompt, text: \['id'\]"),
        (b'{"messages": [{"role": "assistant", "content": "w1"}]}', "needs a message before"),
        (b'{"messages": "w1"}', "messages must be a list of objects with a role, got 'w1'"),
        (b'{"messages": [{"content": "w1"}]}', "messages must be a list of objects with a role"),
        (b'{"messages": [{"role": "user"}], "chat_template_kwargs": [1]}', "chat_template_kwargs must be an object"),
        (
            b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"conversation": 1}}',
            "template cannot render it: TypeError",
        ),
        (b'{"prompt": 3}', "a prompt must be a string, got 3"),
        (b'{"prompt": [{"role": "user"}]}', "a prompt must be a string"),
        (b'{"prompt": ""}', "has no tokens"),
        (b'{"prompt": "w1 \\ud800"}', "surrogates not allowed"),
        (b"[1]", r"must be an object with messages, prompt or text, got \[1\]"),
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_mistakes_are_named_with_their_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "w1"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"p\.jsonl:3: .*{message}"):
        read_prompts(str(path), word_tokenizer())
    assert len(read_prompts(str(path), word_tokenizer(), limit=1)) == 1


@pytest.mark.parametrize("name", ["none.jsonl", "blank.txt"])
def test_files_without_prompts_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b" \n\n")
    with pytest.raises(ConfigError, match=f"{name} holds no prompt"):
        read_prompts(str(tmp_path / name), word_tokenizer())
    with pytest.raises(ConfigError, match=r"read from JSON Lines \(.jsonl\) or plain text"):
        read_prompts(str(tmp_path / "rows.json"), word_tokenizer())
    with pytest.raises(StorageError):
        read_prompts(str(tmp_path / "absent.txt"), word_tokenizer())


def test_lines_end_where_json_lines_end(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    (tmp_path / "p.jsonl").write_bytes('\ufeff{"prompt": "w1\u2028w2"}\r\n{"text": "w3"}'.encode())
    (tmp_path / "p.txt").write_bytes(b"w1 w2\r\n\r\nw3\r\n")
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in read_prompts(str(tmp_path / "p.txt"), tokenizer)] == [
        ["w1", "w2"],
        ["w3"],
    ]
    assert len(read_prompts(str(tmp_path / "p.jsonl"), tokenizer)) == 2


def test_tools_and_template_settings_reach_the_template(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }} {% for t in tools %}{{ t.function.name }}{% endfor %} {{ tone }}"
    row = {
        "messages": [{"role": "user", "content": "w1"}],
        "tools": [{"type": "function", "function": {"name": "w2", "parameters": {}}}],
        "chat_template_kwargs": {"tone": "w3"},
    }
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    assert tokenizer.convert_ids_to_tokens(read_prompts(str(tmp_path / "p.jsonl"), tokenizer)[0]) == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"limit": -1}, "limit must be at least 1, got -1"),
        ({"max_prompt_tokens": -3}, "max_tokens must be at least 1, got -3"),
        ({"seed": -1}, "seed must be within"),
        ({"seed": 2**70}, "seed must be within"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"draft": ""}, "empty name"),
        ({"confidence_threshold": 0.5}, "needs a draft with a confidence head"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str, folders: dict[str, str]) -> None:
    arguments = {"target": folders["target"], "draft": folders["draft"], "prompts": folders["prompts.txt"], **settings}
    with pytest.raises(ConfigError, match=message):
        speculate(**arguments)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"lacks weights .*layers\.1\.mlp\.up_proj"),
        (lambda tensors: tensors.clear(), "lacks weights"),
        (None, "cannot load the target"),
    ],
)
def test_a_target_with_random_weights_is_no_target(damage: Any, message: str, folders: dict[str, str], tmp_path: Path) -> None:
    """transformers fills what is missing with random numbers, and would measure a draft against those."""
    folder = tmp_path / "target"
    shutil.copytree(folders["target"], folder)
    weights = folder / "model.safetensors"
    if damage is None:
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        tensors = safetensors.torch.load_file(weights)
        damage(tensors)
        safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        speculate(str(folder), folders["draft"], folders["prompts.txt"])


def test_stop_ids() -> None:
    class Model:
        def __init__(self, generation: Any, plain: Any) -> None:
            self.generation_config = type("G", (), {"eos_token_id": generation})()
            self.config = type("C", (), {"eos_token_id": plain})()

    assert stop_token_ids(Model([1, 2], 3)) == {1, 2}
    assert stop_token_ids(Model(None, 3)) == {3}
    assert stop_token_ids(Model(None, None)) == set()


def test_baselines_stand_beside_the_draft(folders: dict[str, str]) -> None:
    prompts = folders["prompts.txt"]
    report = speculate(folders["target"], folders["draft"], prompts, max_new_tokens=12, check=False, baselines=True)
    fresh, guess = report.baselines.values()
    answers = [result.tokens for result in report.results]
    token = most_frequent_token(answers)
    assert fresh >= 1.0
    # By hand: a round accepts the run of that token at its place, at most as often as it is drafted, and one token of the target's own.
    num_drafts, rounds, length = tiny_dflash().config.num_draft_slots, 0, 0
    for answer in answers:
        place = 1  # the prompt's own forward gives the first token
        while place < len(answer):
            run_length = next((k for k, found in enumerate(answer[place : place + num_drafts]) if found != token), num_drafts)
            accepted = min(run_length + 1, len(answer) - place)
            rounds, length, place = rounds + 1, length + accepted, place + accepted
    assert guess == pytest.approx(length / rounds)
    assert all(f"tau {value:.3f} with {name}" in report.text() for name, value in report.baselines.items())
    assert not speculate(folders["target"], folders["draft"], prompts, max_new_tokens=4, check=False).baselines


def test_an_untrained_draft_has_the_configuration_alone() -> None:
    model = tiny_dflash()
    fresh = untrained(model, seed=3)
    assert fresh.config == model.config
    assert not torch.equal(fresh.fc.weight, model.fc.weight)
    assert torch.equal(fresh.fc.weight, untrained(model, seed=3).fc.weight)

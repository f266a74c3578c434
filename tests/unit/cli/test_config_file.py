"""From a file, an object or nothing to a checked configuration; mistakes are told field by field, paths in both forms."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from xtok.cli.config_file import load_config
from xtok.errors import ConfigError


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A right configuration, in a directory of its own that is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "models" / "tok").mkdir(parents=True)
    return {
        "sources": ["texts.jsonl"],
        "student": {"tokenizer": "models/tok"},
        "teachers": [{"tokenizer": "models/tok", "context_length": 128}],
        "output": "out",
    }


def test_file_and_object_mean_the_same(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    config = load_config("c.yaml")
    assert config == load_config(content) == load_config(str(tmp_path / "c.yaml"))
    assert config.sources == ("texts.jsonl",)
    assert config.teachers[0].context_length == 128


def test_a_missing_file_is_named_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("no/such.yaml")
    assert "'no/such.yaml'" in str(caught.value)
    assert str(tmp_path / "no/such.yaml") in str(caught.value)


def test_a_source_that_matches_nothing_is_named_in_both_forms(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources: 'data/\*\.jsonl'") as caught:
        load_config(content | {"sources": ["data/*.jsonl"]})
    assert os.path.join(os.getcwd(), "data/*.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sourcse": []}, "sourcse: there is no such field; did you mean sources?"),
        ({"student": {"tokeniser": "x", "tokenizer": "y"}}, "student.tokeniser: there is no such field; did you mean tokenizer?"),
        ({"workers": 0}, "workers: Input should be greater than or equal to 1 (given: 0)"),
        ({"overlength": "drop"}, "(given: 'drop')"),
        ({"teachers": []}, "teachers: "),
        ({"student": {"tokenizer": "./gone"}}, "student.tokenizer: './gone' (that is "),
        ({"student": {"tokenizer": "models/tok", "chat_template": "t.jinja"}}, "student.chat_template: 't.jinja' (that is "),
    ],
)
def test_mistakes_name_the_field_and_the_value(content: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(content | change)
    assert said in str(caught.value)


def test_all_mistakes_at_once(content: dict[str, Any]) -> None:
    del content["output"]
    with pytest.raises(ConfigError, match="has 2 mistakes") as caught:
        load_config(content | {"workers": -1})
    assert "output: required, but missing" in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "a: [", "\xff"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="configuration"):
        load_config(str(path))

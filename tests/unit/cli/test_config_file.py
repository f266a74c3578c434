"""From a file, an object or nothing to a checked configuration; mistakes are told field by field, paths in both forms."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from xtok.cli.config_file import load_config
from xtok.errors import ConfigError
from xtok.train.config_file import load_train_config


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
        ({"workers": True}, "workers: Input should be a number, not true or false (given: True)"),
        ({"min_coverage": True}, "min_coverage: Input should be a number, not true or false (given: True)"),
        (
            {"student": {"tokenizer": "y", "context_length": 10**30}},
            "student.context_length: Input should be less than or equal to",
        ),
        ({"part_bytes": 10**30}, "part_bytes: Input should be less than or equal to"),
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


def test_a_wrong_item_is_told_once(content: dict[str, Any]) -> None:
    """pydantic leaves a wrong item out, and then calls the list too short."""
    with pytest.raises(ConfigError, match=r"has 1 mistake:\n  teachers\.0\.context_len: there is no such field"):
        load_config(content | {"teachers": [{"tokenizer": "models/tok", "context_len": 3}]})
    with pytest.raises(ConfigError, match=r"teachers: .* at least 1 item"):
        load_config(content | {"teachers": []})


@pytest.mark.parametrize(
    ("twice", "place"),
    [("output: other", "line 2"), ("'sources': [b.jsonl]", "line 3"), ("more: {a: 1, b: 2, a: 3}", "line 1")],
)
def test_a_field_given_twice_is_refused_with_both_places(tmp_path: Path, twice: str, place: str) -> None:
    """YAML readers take the last and drop the first without a word."""
    (tmp_path / "c.yaml").write_text(f"{twice}\noutput: out\nsources: [a.jsonl]\n")
    for load in (load_config, load_train_config):
        with pytest.raises(ConfigError, match="and again here: keep one of them") as caught:
            load(str(tmp_path / "c.yaml"))
        assert "line 1" in str(caught.value)
        assert place in str(caught.value)


def test_what_is_merged_into_a_mapping_may_be_overridden(content: dict[str, Any], tmp_path: Path) -> None:
    content.pop("teachers")
    more = "student: &side {tokenizer: models/tok}\nteachers: [{<<: *side, tokenizer: models/tok, context_length: 9}]\n"
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"sources": content["sources"], "output": "out"}) + more)
    assert load_config("c.yaml").teachers[0].context_length == 9

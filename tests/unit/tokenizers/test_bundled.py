"""The bundled tokenizers: small, reproducible from their script, and with templates that render."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tokenizers.support import BUNDLED, BUNDLED_NAMES, REPOSITORY, bundled
from xtok.tokenizers import load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "8"},
]


def test_the_script_gives_the_committed_bytes(tmp_path: Path) -> None:
    script = REPOSITORY / "infra" / "train_bundled_tokenizers.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    for name in BUNDLED_NAMES:
        committed, trained = Path(bundled(name)), tmp_path / name
        names = sorted(path.name for path in committed.iterdir())
        assert sorted(path.name for path in trained.iterdir()) == names
        assert filecmp.cmpfiles(committed, trained, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_each_is_small(name: str) -> None:
    assert sum(path.stat().st_size for path in Path(bundled(name)).iterdir()) < 400_000
    assert 2000 <= load_tokenizer(bundled(name)).num_tokens <= 4100


def test_the_texts_are_whole() -> None:
    lines = (BUNDLED / "udhr.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 500


@pytest.mark.parametrize("name", ["chatml_bpe", "spm_bpe", "unigram_nfkc"])
def test_templates_render_the_conversation(name: str) -> None:
    adapter = load_tokenizer(bundled(name))
    rendered = adapter.transformers_tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    positions = [rendered.index(message["content"]) for message in MESSAGES]
    assert positions == sorted(positions)
    eos = adapter.special_tokens["eos_token"]
    assert rendered.rstrip().endswith(f"8{eos}")
    assert adapter.eos_token_id in adapter.encode_flat([rendered]).ids.tolist()


def test_chatml_renders_tools_reasoning_and_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "exact": True, "note": None}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    render = load_tokenizer(bundled("chatml_bpe")).transformers_tokenizer.apply_chat_template
    text = render(messages, tools=tools, tokenize=False)
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert "<|im_start|>assistant\n<think>\nI add.\n</think>\n\n<tool_call>\n" in text
    assert '{"name": "add", "arguments": {"a": 1, "exact": true, "note": null}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert render(messages[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False).endswith("</think>\n\n")
    other = load_tokenizer(bundled("unigram_nfkc")).transformers_tokenizer.apply_chat_template(messages, tokenize=False)
    assert '{"name": "add", "arguments": {"a": 1, "exact": True, "note": None}}\n</tool_call><|im_end|>\n' in other

"""Chats that are refused, and what is counted and said about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.chat.support import assistant, user
from tests.unit.shards.chat_support import CHAT, CHATS, chats
from tests.unit.shards.support import config_for, frozen_files, side, write_lines
from xtok.chat.fast_render import FastRenderer
from xtok.errors import PublicationRefusedError
from xtok.shards.inspect import rejects_frame, side_frame
from xtok.shards.pipeline import rebuild_part
from xtok.shards.pool import SerialRunner
from xtok.shards.read import open_dataset
from xtok.tokenizers import FastokensBackend, FlatTokens


def test_an_overlong_chat_is_a_reject_and_never_cut(tmp_path: Path) -> None:
    rows = [
        {"id": "short", "messages": [user("q"), assistant("a")]},
        {"id": "long", "messages": [user("q " * 99), assistant("a")]},
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    manifest = chats(tmp_path / "out", source, student=side("chatml_bpe", 4096), teachers=[side("spm_bpe", 60)])
    dataset = open_dataset(str(tmp_path / "out"))
    assert side_frame(dataset)["sample_id"].to_list() == ["short", "long"]
    assert side_frame(dataset, 0)["input_ids"].is_null().to_list() == [False, True]
    (reject,) = rejects_frame(dataset).to_dicts()
    assert (reject["sample_id"], reject["stage"], reject["side"], reject["reason"]) == (
        "long",
        "tokenize",
        "teacher=0",
        "overlength",
    )
    assert "the context 60" in reject["message"]
    assert manifest.teacher_totals[0].num_rendered == 2
    chats(tmp_path / "student", source, student=side("chatml_bpe", 60))
    assert side_frame(open_dataset(str(tmp_path / "student")))["sample_id"].to_list() == ["short"]
    for wrong in ("split", "truncate"):
        with pytest.raises(ValueError, match=f"overlength: {wrong}"):
            config_for(tmp_path / "x", source, mode="chat", overlength=wrong)


def test_bad_rows_are_rejects_with_their_place(tmp_path: Path) -> None:
    good = {"id": "good", "messages": [user("q"), assistant("a")]}
    bad: list[tuple[Any, str]] = [
        ({"id": 1, "text": "no chat"}, "invalid_messages"),
        ({"id": 2, "messages": []}, "invalid_messages"),
        ({"id": 3, "messages": [user("q"), {"role": "wizard", "content": "x"}]}, "invalid_messages"),
        ({"id": 4, "messages": [user("q")]}, "no_final_assistant"),
        ({"id": 5, "messages": [user("q"), assistant(" ")]}, "empty_final_content"),
        ({"id": 6, "messages": [user("q"), assistant("the <|im_end|> mark")]}, "embedded_special_token"),
        ({"id": 7, "messages": [user("q \ud800"), assistant("a")]}, "lone_surrogate"),
        (good, "duplicate_id"),
        (b"{", "invalid_json"),
    ]  # fmt: skip
    lines = [good, *(json.dumps(row).encode() if isinstance(row, dict) else row for row, _ in bad)]
    manifest = chats(tmp_path / "out", write_lines(tmp_path / "in.jsonl", lines), teachers=[side("unigram_nfkc")], part_bytes=400)
    rejects = rejects_frame(open_dataset(str(tmp_path / "out"))).sort("line")
    assert rejects["line"].to_list() == list(range(2, len(bad) + 2))
    assert rejects["reason"].to_list() == [reason for _, reason in bad]
    assert manifest.num_rows == 1
    assert manifest.num_rows + manifest.num_rejects == manifest.num_source_rows == len(lines)


def test_odd_shapes_never_stop_a_run(tmp_path: Path) -> None:
    good = {"messages": [user("q"), assistant("a")]}
    deep = b"[" * 1000 + b"]" * 1000
    odd = [
        b'{"prompt": "q", "completion": 5}',
        b'{"messages": [{"role": "user", "content": "q", "x": %s}]}' % deep,
        b'{"messages": [{"role": "user", "content": "q"}], "tools": "%s"}' % (b"[" * 100_000),
        b'{"id": 1%s, "messages": %s}' % (b"0" * 20, deep),
        b'{"id": "w", "weight": 1%s, "messages": []}' % (b"0" * 400),
        b'{"id": "d", "y": %s, "messages": [{"role": "user", "content": "q", "x": 0.5}]}' % deep,
        json.dumps({**good, "id": "heavy", "weight": 1e39}).encode(),
        json.dumps({**good, "id": "endless", "weight": 10**400}).encode(),
    ]  # fmt: skip
    source = write_lines(tmp_path / "in.jsonl", [good, *odd, {**good, "id": "last", "weight": 0.5}])
    manifest = chats(tmp_path / "out", source, loss_multiplier_field="weight")
    rejects = rejects_frame(open_dataset(str(tmp_path / "out")))
    assert rejects["line"].to_list() == list(range(2, len(odd) + 2))
    assert manifest.source_rejects == {"invalid_json": 2, "invalid_loss_multiplier": 2, "invalid_messages": 4}
    assert side_frame(open_dataset(str(tmp_path / "out")))["loss_multiplier"].to_list() == [1.0, 0.5]


def test_values_out_of_parquet_without_a_python_object_are_rejects(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("ns"))])
    times = [0, 1, 1_700_000_000_123_456_000]  # one nanosecond is no time of Python's
    rows = [[{"role": role, "content": f"{at}", "at": at} for role in ("user", "assistant")] for at in times]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), tmp_path / "in.parquet")
    chats(tmp_path / "out", tmp_path / "in.parquet")
    (reject,) = rejects_frame(open_dataset(str(tmp_path / "out"))).to_dicts()
    assert (reject["line"], reject["reason"]) == (2, "invalid_json")
    assert side_frame(open_dataset(str(tmp_path / "out")))["idx"].to_list() == [0, 2]


def test_limits_stop_publication_with_the_figures_and_examples(tmp_path: Path) -> None:
    with pytest.raises(PublicationRefusedError) as refused:
        chats(tmp_path / "out", max_reject_fraction=0.01)
    message = str(refused.value)
    assert "max_reject_fraction is 1.00%" in message
    assert "rows thinking" in message
    assert "chats.jsonl:49 (bundled-48): the final assistant message has no visible content" in message
    assert "refused by teacher=0, dropped_reasoning, for example:" in message
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert chats(tmp_path / "out", max_reject_fraction=0.1).num_rows == 52


def test_tokens_left_out_on_request_do_not_count_against_the_limit(tmp_path: Path) -> None:
    native = {"include_thinking_in_loss": True, "native_thinking_alignment": True, "kd_alignment_regions": ("close",)}
    manifest = chats(tmp_path / "out", teachers=["unigram_nfkc"], min_coverage=0.99, **native)
    (totals,) = manifest.teacher_totals
    assert totals.coverage < 0.1 < 0.99 <= totals.reachable_coverage <= 1.0
    assert totals.num_covered + totals.num_left_out <= totals.num_supervised
    assert 0 < manifest.student_totals.num_thinking_tokens < manifest.student_totals.num_mask_tokens
    assert manifest.student_totals.num_thinking_rows == totals.num_thinking_rows > 0


def test_figures_count_what_the_tables_hold(tmp_path: Path) -> None:
    manifest = chats(tmp_path / "out", include_thinking_in_loss=True)
    dataset = open_dataset(str(tmp_path / "out"))
    student, teacher = side_frame(dataset), side_frame(dataset, 0)
    for totals, frame in ((manifest.student_totals, student), (manifest.teacher_totals[0], teacher)):
        assert totals.num_mask_tokens == frame["token_mask"].explode().sum()
        assert totals.num_tokens == frame["input_ids"].explode().drop_nulls().len()
        thinking = 0
        for mask, regions in frame.drop_nulls("regions").select("token_mask", "regions").iter_rows():
            spans = [region for region in regions if region["name"] in ("reasoning", "close")]
            thinking += sum(mask[spans[0]["start"] : spans[-1]["end"]]) if spans else 0
        assert totals.num_thinking_tokens == thinking > 0
    rejects = rejects_frame(dataset)
    assert manifest.teacher_totals[0].rejects == dict(
        rejects.filter(pl.col("side") == "teacher=0").group_by("reason").len().sort("reason").iter_rows()
    )


def test_a_renderer_that_differs_makes_the_part_anew_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = chats(tmp_path / "honest", proof_every=1)
    assert honest.student.renderer == "minijinja"
    real = FastRenderer.render

    def lies(renderer: FastRenderer, messages: Any, tools: Any, kwargs: Any) -> str:
        text = real(renderer, messages, tools, kwargs)
        return text.replace("Welterusten", "Gute Nacht") if renderer.special_tokens.get("bos_token") is None else text

    monkeypatch.setattr(FastRenderer, "render", lies)
    monkeypatch.setattr("xtok.shards.plan._SAMPLE_ROWS", 1)  # planning does not meet the row
    manifest = chats(tmp_path / "out", proof_every=1)
    assert manifest.student.renderer == "minijinja"
    assert manifest.student_totals.num_renderer_fallbacks == 1
    assert "minijinja" in str(manifest.student_totals.renderer_difference)
    assert [part.student_file for part in manifest.parts] == [part.student_file for part in honest.parts]
    assert [part.rendered_files for part in manifest.parts] == [part.rendered_files for part in honest.parts]
    # The note survives a rebuild from what was rendered.
    noted = next(part.index for part in manifest.parts if part.student.num_renderer_fallbacks)
    (tmp_path / "out" / "student" / f"part-{noted:05d}.parquet").unlink()
    before = frozen_files(tmp_path / "out")
    rebuild_part(config_for(tmp_path / "out", CHATS, **(CHAT | {"proof_every": 1})), noted, runner=SerialRunner())
    assert set(frozen_files(tmp_path / "out")) == {*before, f"student/part-{noted:05d}.parquet"}


def test_wrong_ids_of_a_fast_backend_are_found_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = chats(tmp_path / "honest")
    real = FastokensBackend.encode_flat

    def lies(backend: FastokensBackend, batch: list[str]) -> FlatTokens:
        tokens = real(backend, batch)
        ids = tokens.ids.copy()
        for row, text in enumerate(batch):
            if "Welterusten" in text:
                ids[tokens.offsets[row + 1] - 4] ^= 1
        return FlatTokens(ids, tokens.offsets)

    monkeypatch.setattr(FastokensBackend, "encode_flat", lies)
    monkeypatch.setattr("xtok.shards.plan._SAMPLE_ROWS", 1)  # planning does not meet the row
    manifest = chats(tmp_path / "out")
    assert manifest.student.backend == FastokensBackend.name
    assert manifest.student_totals.num_backend_fallbacks == 1
    assert [part.student_file for part in manifest.parts] == [part.student_file for part in honest.parts]
    assert [part.teacher_files for part in manifest.parts] == [part.teacher_files for part in honest.parts]

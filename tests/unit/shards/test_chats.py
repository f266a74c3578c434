"""Chats offline: what a run leaves, what a relaunch does again, what is refused and said about it."""

from __future__ import annotations

import datetime
import json
import types
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults.harness import Died, count_steps
from tests.unit.chat.support import CLOCK, NO_END_MARK, PLAIN, assistant, bundled_template, user
from tests.unit.shards.chat_support import CHAT, CHATS, chats, with_template
from tests.unit.shards.support import config_for, frozen_files, side, write_lines
from xtok.chat import ChatRenderer
from xtok.chat.conversation import Conversation
from xtok.chat.rendered import RenderedChat
from xtok.errors import ConfigError, DatasetError, DatasetMismatchError
from xtok.shards.inspect import rendered_frame, side_frame
from xtok.shards.pipeline import preprocess, rebuild_part
from xtok.shards.pool import SerialRunner, WorkerPool
from xtok.shards.read import open_dataset
from xtok.shards.verify import damaged_parts, verify_dataset


def a_day(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    """The planner's clock shows this day."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(day.year, day.month, day.day, 23, 59, tzinfo=tz)

    fake = types.SimpleNamespace(datetime=Clock, UTC=datetime.UTC, date=datetime.date)
    monkeypatch.setattr("xtok.shards.plan.datetime", fake)


def test_the_rendered_text_can_be_read_with_polars(tmp_path: Path) -> None:
    manifest = chats(tmp_path / "out")
    names = sorted({path.parent.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.parquet")})
    assert names == ["rejects", "rendered/student", "rendered/teacher=0", "student", "teacher=0"]
    shown = pl.read_parquet(tmp_path / "out" / "rendered" / "student" / "*.parquet")
    assert shown.height == manifest.num_rows
    for row in shown.iter_rows(named=True):
        data = row["text"].encode()
        regions = {region["name"]: data[region["start"] : region["end"]].decode() for region in row["regions"]}
        assert regions == {"answer": data[row["content_start"] : row["content_end"]].decode(), "eot": "<|im_end|>"}
    assert "Yeast eats the sugars" in shown["text"][0]
    dataset = open_dataset(str(tmp_path / "out"))
    teacher = rendered_frame(dataset, 0)
    assert teacher["idx"].to_list() == shown["idx"].to_list()
    assert teacher["text"].is_null().to_list() == side_frame(dataset, 0)["input_ids"].is_null().to_list()
    assert verify_dataset(dataset) == []


def test_two_days_and_any_workers_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = with_template(tmp_path, CLOCK)
    for name, day in (("one", date(2031, 3, 4)), ("two", date(2032, 5, 6))):
        a_day(monkeypatch, day)
        chats(tmp_path / name, student=clock)
    with WorkerPool(2) as pool:
        preprocess(config_for(tmp_path / "pool", CHATS, student=clock, **CHAT), runner=pool)
    assert frozen_files(tmp_path / "one") == frozen_files(tmp_path / "two") == frozen_files(tmp_path / "pool")
    assert rendered_frame(open_dataset(str(tmp_path / "one")))["text"].str.starts_with("02 Jan 2025").all()


def test_without_a_date_the_plan_keeps_the_day_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = with_template(tmp_path, CLOCK)
    a_day(monkeypatch, date(2031, 3, 4))
    assert chats(tmp_path / "out", student=clock, render_date=None).render_date == date(2031, 3, 4)
    before = frozen_files(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "student" / "part-00001.parquet").unlink()
    a_day(monkeypatch, date(2031, 3, 5))
    chats(tmp_path / "out", student=clock, render_date=None)
    assert frozen_files(tmp_path / "out") == before
    assert chats(tmp_path / "later", student=clock, render_date=None).render_date == date(2031, 3, 5)
    with pytest.raises(DatasetMismatchError, match="render_date"):
        chats(tmp_path / "out", student=clock, render_date=date(2031, 3, 6))


class Rendered:
    """Counts rows that were rendered, by side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, int] = {}
        real = ChatRenderer.render_row

        def counted(renderer: ChatRenderer, conversation: Conversation) -> RenderedChat:
            self.rows[renderer.side.name] = self.rows.get(renderer.side.name, 0) + 1
            return real(renderer, conversation)

        monkeypatch.setattr(ChatRenderer, "render_row", counted)

    def taken(self) -> dict[str, int]:
        """The rows since the last call, the sample rows of planning left out."""
        rows, self.rows = self.rows, {}
        return {name: count for name, count in rows.items() if "=" in name or name == "student"}


def test_a_later_teacher_renders_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = side("spm_bpe", 200), side("unigram_nfkc")
    both_dropped = {"drop_first_assistant_chunk_kl_by_teacher": (False, True)}
    chats(tmp_path / "whole", teachers=[first, second], **both_dropped)
    rendered = Rendered(monkeypatch)
    chats(tmp_path / "out", teachers=[first])
    alone = rendered.taken()
    chats(tmp_path / "out", teachers=[first, second], **both_dropped)
    both = rendered.taken()
    assert frozen_files(tmp_path / "out") == frozen_files(tmp_path / "whole")
    assert set(alone) == {"student", "teacher=0"}
    assert both["teacher=1"] == 52
    assert "teacher=0" not in both
    assert both["student"] < alone["student"]  # the sample of planning, no part
    with pytest.raises(DatasetMismatchError, match=r"teachers\[1\].*drop_first_chunk"):
        chats(tmp_path / "out", teachers=[first, second])


def test_a_run_that_dies_between_two_files_is_finished_by_the_next(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in CHATS.read_text().splitlines()[:6]]
    source = write_lines(tmp_path / "in.jsonl", [rows[0], b"junk", *rows[1:], rows[0]])
    with count_steps() as steps:
        chats(tmp_path / "whole", source, part_bytes=10**6)
    whole = frozen_files(tmp_path / "whole")
    tables = [
        number for number, name in enumerate(steps.done) if name.startswith(("student/", "teacher=0/", "rejects/", "records/"))
    ]
    assert len(tables) == 6  # a rendered one of each side too
    for number in tables:
        output = tmp_path / f"out-{number}"
        with count_steps(number, "before"), pytest.raises(Died):
            chats(output, source, part_bytes=10**6)
        assert not (output / "manifest.json").exists()
        chats(output, source, part_bytes=10**6)
        assert frozen_files(output) == whole


@pytest.mark.parametrize("damage", ["cut", "delete"])
@pytest.mark.parametrize("table", ["student", "teacher=0", "rejects", "rendered/student", "rendered/teacher=0"])
def test_damage_is_found_and_rebuilt_alone(tmp_path: Path, table: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chats(tmp_path / "out")
    sound = frozen_files(tmp_path / "out")
    file = tmp_path / "out" / table / "part-00001.parquet"
    data = file.read_bytes()
    file.unlink() if damage == "delete" else file.write_bytes(data[:-9])
    findings = verify_dataset(open_dataset(str(tmp_path / "out")))
    assert damaged_parts(findings) == [1]
    assert {finding.path for finding in findings} == {f"{table}/part-00001.parquet"}
    rendered = Rendered(monkeypatch)
    rebuild_part(config_for(tmp_path / "out", CHATS, **CHAT), 1, runner=SerialRunner())
    assert frozen_files(tmp_path / "out") == sound
    if table in ("student", "teacher=0"):  # tokenized again from what was rendered
        assert "teacher=0" not in rendered.taken()


def test_every_form_of_a_source_gives_the_same_rows(tmp_path: Path) -> None:
    pairs = [("Why does bread rise?", "Yeast."), ("Un río", "Loira"), ("7", "eight")]
    forms = {
        "messages": [{"messages": [user(ask), assistant(answer)]} for ask, answer in pairs],
        "parts": [{"messages": [user([{"type": "text", "text": ask}]), assistant(answer)]} for ask, answer in pairs],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]} for ask, answer in pairs
        ],
        "pair": [{"prompt": ask, "completion": answer} for ask, answer in pairs],
        "messages in pairs": [{"prompt": [user(ask)], "completion": [assistant(answer)]} for ask, answer in pairs],
    }
    frames = []
    for name, rows in forms.items():
        source = write_lines(tmp_path / f"{name}.jsonl", rows)
        chats(tmp_path / name, source)
        frames.append(side_frame(open_dataset(str(tmp_path / name))).drop("source"))
    pq.write_table(pa.Table.from_pylist(forms["messages"]), tmp_path / "in.parquet")
    chats(tmp_path / "parquet", tmp_path / "in.parquet")
    frames.append(side_frame(open_dataset(str(tmp_path / "parquet"))).drop("source"))
    named = [{"talk": row["messages"], "key": n} for n, row in enumerate(forms["messages"])]
    chats(tmp_path / "named", write_lines(tmp_path / "named.jsonl", named), messages_field="talk", id_field="key")
    own = side_frame(open_dataset(str(tmp_path / "named"))).drop("source")
    assert own["sample_id"].to_list() == ["0", "1", "2"]
    frames.append(own.with_columns(sample_id=frames[0]["sample_id"], document_id=frames[0]["document_id"]))
    assert frames[0].height == 3
    assert all(frame.equals(frames[0]) for frame in frames)


def test_tool_calls_out_of_parquet_hold_no_arguments_of_other_tools(tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {key: {"type": "x"} for key in arguments}}},
        }
        turns = [user("q"), assistant("", tool_calls=[call]), {"role": "tool", "content": "r"}, assistant("done")]
        return {"messages": turns, "tools": [tool]}

    rows = [row("wait", {"minutes": 3}), row("look", {"at": "sky", "zoom": {"by": 2}})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    texts = []
    for source in (tmp_path / "in.parquet", write_lines(tmp_path / "in.jsonl", rows)):
        chats(tmp_path / source.suffix, source)
        texts.append(rendered_frame(open_dataset(str(tmp_path / source.suffix)))["text"].to_list())
    assert sorted(map(sorted, texts[0])) == sorted(map(sorted, texts[1]))
    assert "null" not in "".join(texts[0])
    assert [text.count("zoom") for text in texts[0]] == [0, 2]


def test_tools_and_template_arguments_come_from_the_row(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
    rows = [
        {"messages": [user("q"), assistant("a")], "tools": [tool], "chat_template_kwargs": {"mood": "calm"}},
        {"messages": [user("q"), assistant("a")], "tools": json.dumps([tool])},
        {"messages": [user("q"), assistant("a")]},
        {"messages": [user("q"), assistant("a", tool_calls=[{"name": "add", "arguments": {"n": 10**29}}]), assistant("b")]},
    ]
    calls = "{{ messages[1].tool_calls | tojson if messages[1].tool_calls }}"
    template = "{{ mood }}|{{ tools[0].function.name if tools else '' }}|" + calls + "|" + PLAIN
    student = with_template(tmp_path, template, chat_template_kwargs={"mood": "gay"})
    source = write_lines(tmp_path / "in.jsonl", rows)
    chats(tmp_path / "out", source, student=student)
    texts = rendered_frame(open_dataset(str(tmp_path / "out")))["text"].to_list()
    assert [text.split("|")[:2] for text in texts] == [["calm", "wait"], ["gay", "wait"], ["gay", ""], ["gay", ""]]
    assert str(10**29) in texts[3]
    chats(tmp_path / "without", source, student=student, tools_field=None, chat_template_kwargs_field=None)
    texts = rendered_frame(open_dataset(str(tmp_path / "without")))["text"].to_list()
    assert {tuple(text.split("|")[:2]) for text in texts} == {("gay", "")}


def test_a_same_tokenizer_teacher_has_the_same_template_and_arguments_too(tmp_path: Path) -> None:
    other = with_template(tmp_path, NO_END_MARK)
    quiet = side("chatml_bpe", chat_template_kwargs={"enable_thinking": False})
    wide = side("chatml_bpe", accept_dropped_reasoning=True)
    manifest = chats(tmp_path / "out", teachers=["chatml_bpe", other, quiet, wide])
    assert [teacher.same_as_student for teacher in manifest.teachers] == [True, False, False, True]
    assert sorted(path.name for path in (tmp_path / "out" / "rendered").iterdir()) == ["student", "teacher=1", "teacher=2"]
    dataset = open_dataset(str(tmp_path / "out"))
    with pytest.raises(DatasetError, match="student's tokenizer"):
        dataset.read_rendered(dataset.row_groups()[0], 0)


def test_a_side_without_a_template_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        chats(tmp_path / "out", teachers=["wordpiece_lower"])
    template = with_template(tmp_path, bundled_template("instruct"), "wordpiece_lower")
    assert chats(tmp_path / "out", teachers=[template]).num_rows == 52

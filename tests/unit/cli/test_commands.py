"""The console command as a user meets it: one small dataset, made, verified, looked at, damaged and mended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from xtok.cli import COMMANDS, main

NUM_ROWS = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A dataset of thirty bundled texts and one broken line; its second teacher has the student's own tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    lines = (repository / "infra" / "bundled" / "udhr.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
    (folder / "texts.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n", encoding="utf-8")
    tokenizers = repository / "infra" / "bundled" / "tokenizers"
    config = {
        "sources": [str(folder / "texts.jsonl")],
        "student": {"tokenizer": str(tokenizers / "chatml_bpe")},
        "teachers": [{"tokenizer": str(tokenizers / "spm_bpe")}, {"tokenizer": str(tokenizers / "chatml_bpe")}],
        "part_bytes": 8000,
        "output": str(folder / "aligned"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["preprocess", str(folder / "config.yaml"), "--workers", "1"]) == 0
    return folder / "aligned"


def test_preprocess_prints_the_figures_and_leaves_a_report(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preprocess", str(made.parent / "config.yaml"), "--workers", "1"]) == 0
    assert f"published {made}" in capsys.readouterr().out
    report = sorted(made.glob("runs/*/report.md"))[-1].read_text()
    assert f"{NUM_ROWS} rows from {NUM_ROWS + 1} read" in report
    assert "| teacher 0 | spm_bpe | byte |" in report
    assert "| teacher 1 | same as the student |" in report
    assert "| source | invalid_json | 1 |" in report


def test_inspect_shows_a_row_against_every_teacher(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(made), "--row", "udhr-eng-3", "--full"]) == 0
    text = capsys.readouterr().out
    assert text.count("udhr-eng-3  texts.jsonl:4") == 2
    assert "coverage 1.0000" in text
    assert "same tokenizer as the student" in text
    assert "·right" in text
    assert "[<s>]" in text, "the teacher's BOS has no counterpart"


def test_inspect_draws_the_same_rows_for_a_seed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(seed: int) -> list[str]:
        assert main(["inspect", str(made), "--random", "3", "--seed", str(seed), "--teacher", "0", "--lines", "1"]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("udhr-")]

    assert draw(1) == draw(1) != draw(2)
    assert len(set(draw(1))) == 3


def test_inspect_writes_html(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "rows.html"
    assert main(["inspect", str(made), "--random", "100", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == 2 * NUM_ROWS
    assert "·right" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--row", "no-such"], "no row of"),
        (["--teacher", "2"], "has teachers 0 to 1"),
        (["--tokenizer", "5=x"], "the sides of"),
    ],
)
def test_inspect_refuses_what_is_not_there(
    made: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["inspect", str(made), *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", ["student", "=out", "0="])
def test_a_tokenizer_without_its_side_is_wrong_usage(made: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", str(made), "--tokenizer", given])
    assert f"{given!r} is not SIDE=FOLDER" in capsys.readouterr().err


def test_inspect_refuses_another_tokenizer(made: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = repository / "infra" / "bundled" / "tokenizers" / "unigram_nfkc"
    assert main(["inspect", str(made), "--teacher", "0", "--tokenizer", f"0={other}"]) == 1
    assert "FingerprintMismatchError" in capsys.readouterr().err


def test_damage_is_named_and_mended(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "moved"
    shutil.copytree(made, copy)
    assert main(["verify", str(copy)]) == 0
    assert "are sound" in capsys.readouterr().out
    whole = (copy / "teacher=0" / "part-00001.parquet").read_bytes()
    (copy / "teacher=0" / "part-00001.parquet").write_bytes(whole[:-1])

    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "WRONG teacher=0/part-00001.parquet" in said
    assert f"to mend: xtok repair {copy}  (parts 1)" in said
    assert main(["repair", str(copy), "--part", "1"]) == 0
    assert (copy / "teacher=0" / "part-00001.parquet").read_bytes() == whole
    assert main(["verify", str(copy)]) == 0


def test_an_unpublished_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "verify", "repair"):
        assert main([command, str(tmp_path)]) == 1
        assert "UnpublishedDatasetError" in capsys.readouterr().err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: xtok {command}")
        assert f"  xtok {command} " in text, "the help shows an example"

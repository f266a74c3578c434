"""`xtok export`: where it may write, and what names a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.train_config import TrainConfig
from xtok.errors import ConfigError
from xtok.train.export import _chosen, _replace, export_checkpoint


def config_of(folder: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {"student": {"model": "s"}, "teachers": [{"model": "t"}], "dataset": "d", "output": str(folder), "steps": 1}
    )


@pytest.mark.parametrize("folder", ["", "s3://bucket/run"])
def test_only_local_folders_are_written(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot export to .*: give a local or mounted folder"):
        export_checkpoint(config_of(tmp_path), folder=folder)


def test_nothing_but_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    def save(folder: str) -> None:
        (Path(folder) / "config.json").write_text("new")

    (tmp_path / "student").mkdir()
    _replace(str(tmp_path / "student"), save)
    _replace(str(tmp_path / "student"), save)
    assert [path.name for path in (tmp_path / "student").iterdir()] == ["config.json"]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "chapter1.txt").write_text("a draft of another kind")
    with pytest.raises(ConfigError, match="holds something that is no exported model"):
        _replace(str(tmp_path / "draft"), save)
    assert (tmp_path / "draft" / "chapter1.txt").exists()


@pytest.mark.parametrize("name", ["first", "-1", "²", "1.0", ""])
def test_a_checkpoint_is_named_by_its_step(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint should be latest, best or a step's number"):
        _chosen(None, config_of(tmp_path), name)

"""Reading a YAML file in which nothing is said twice."""

from __future__ import annotations

from typing import Any

import yaml

from xtok.storage.files import read_bytes

__all__ = ["read_yaml"]


def read_yaml(url: str) -> Any:
    """What a YAML (or JSON) file holds. StorageError where it cannot be read; yaml.YAMLError or UnicodeDecodeError where it is no
    YAML, or has a field twice in one mapping, of which YAML readers silently take the last."""
    return yaml.load(read_bytes(url), _EachKeyOnce)


class _EachKeyOnce(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """The mapping as it stands in the file, before `<<` merges others into it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.ScalarNode] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                first = seen.setdefault((key.tag, key.value), key)
                if first is not key:
                    raise yaml.composer.ComposerError(
                        f"{key.value!r} stands here", first.start_mark, "and again here: keep one of them", key.start_mark
                    )
        return node

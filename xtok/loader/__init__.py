"""Published shards back as training batches: `AlignedShardLoader`."""

from __future__ import annotations

from xtok.loader.loader import AlignedShardLoader

__all__ = ["AlignedShardLoader"]

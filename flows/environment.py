"""What every process of ours that starts Prefect sets before it imports Prefect.

Prefect reads its settings, and reports its first use, while it is being imported; so this module imports nothing of Prefect and
is imported first. It only fills in what the user has not set.
"""

from __future__ import annotations

import os

__all__ = ["DEFAULTS", "SET_BY_USER"]

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # The plugin is for the `prefect` command alone; a server that imports Prefect inside its event loop only stumbles over it.
    "PREFECT_PLUGINS_ENABLED": "false",
    # Tokenizers' own threads would fight the worker processes for the same cores.
    "TOKENIZERS_PARALLELISM": "false",
}

SET_BY_USER = frozenset(name for name in DEFAULTS if name in os.environ)

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

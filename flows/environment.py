"""What every process of ours that starts Prefect sets before it imports Prefect.

Prefect reads its settings, and reports its first use, while it is being imported; so this module imports nothing of Prefect and
is imported first. It only fills in what the user has not set.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from pathlib import Path

from flows.lifetime import is_alive

__all__ = ["DEFAULTS", "SET_BY_USER", "clean_private_homes", "home_variables", "use_private_home"]

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

# The machine's name: containers that share a temporary folder number their processes each for itself.
_HOMES = f"xtok-prefect-{socket.gethostname()}-"

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def home_variables(home: Path) -> dict[str, str]:
    """The variables that keep Prefect's settings, profile and SQLite file inside `home`."""
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
    }


def clean_private_homes(folder: Path) -> None:
    """Remove the homes in `folder` that dead processes of this machine left."""
    for home in folder.glob(f"{_HOMES}*"):
        process = home.name.removeprefix(_HOMES).split("-")[0]
        if process.isdecimal() and not is_alive(int(process)):
            shutil.rmtree(home, ignore_errors=True)


def use_private_home() -> None:
    """Unless PREFECT_API_URL names a server, give this process a temporary Prefect home of its own.

    Prefect makes its home when it is imported, so this comes before. The home goes with this process, or after `kill -9` with the
    server in it (`flows.server.private_server`); where that had not started yet, with the next run.
    """
    if not os.environ.get("PREFECT_API_URL"):
        clean_private_homes(Path(tempfile.gettempdir()))
        home = Path(tempfile.mkdtemp(prefix=f"{_HOMES}{os.getpid()}-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        os.environ.update(home_variables(home))

"""Lets `prefect deployment run preprocess` mean `preprocess/preprocess`: our flows and their deployments share one name.

Prefect's command takes FLOW/DEPLOYMENT only. It loads this module (entry-point group `prefect.plugins`) while it is being
imported and calls the hook before it reads its arguments. `[tool.prefect.plugins]` of pyproject.toml switches plugins on in the
repository, PREFECT_PLUGINS_ENABLED=1 elsewhere. Where `infra/up` is serving from this directory and no server is configured, the
command is pointed at it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prefect.plugins import HookContext, SetupResult, register_hook

__all__ = ["rewrite", "setup_environment"]

# Options of `prefect` and of `prefect deployment run` that stand alone: every other one is followed by its value.
FLAGS = {"--watch", "--no-watch", "--prompt", "--no-prompt", "--help", "-h"}


# Where `infra/up` leaves the address of its server while it runs.
SERVED_API_URL = Path(".prefect/served_api_url")


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """In the `prefect` command: rewrite a bare NAME after `deployment run` to NAME/NAME, and find the server of `infra/up`."""
    if not (os.path.basename(sys.argv[0]).startswith("prefect") or sys.orig_argv[1:3] == ["-m", "prefect"]):
        return None
    rewrite(sys.argv)
    if ctx.api_url or not SERVED_API_URL.is_file():
        return None
    return SetupResult(env={"PREFECT_API_URL": SERVED_API_URL.read_text().strip()})


def rewrite(argv: list[str]) -> None:
    """Change the deployment's name in the arguments of a `prefect deployment run`, in place; leave any other command alone."""
    words: list[str] = []
    is_value = False
    for at, word in enumerate(argv[1:], start=1):
        if is_value or word.startswith("-"):
            is_value = not is_value and word not in FLAGS and "=" not in word
        elif words in (["deployment", "run"], ["deployments", "run"]):
            argv[at] = word if "/" in word else f"{word}/{word}"
            return
        else:
            words.append(word)

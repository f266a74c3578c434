#!/usr/bin/env bash
# Run the tests: makes .venv if needed, installs the dev extra, builds the real tokenizers, runs pytest with the given arguments.
#   bash infra/test.sh [pytest arguments]         XTOK_SHARED=../shared adds the larger sets of data
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. infra/environment.sh
ensure_environment dev
python -m tests.real_tokenizers >&2
# Two at a time, the tests of a file together (see tests/conftest.py); `bash infra/test.sh -n 0` runs one after the other.
exec python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder "$@"

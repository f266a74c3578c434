# Sourced by quickstart.sh and test.sh: makes .venv in the repository and installs into it, once for each state of pyproject.toml.

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "xtok needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2
    return 1
}

# ensure_environment EXTRA: an extra of pyproject.toml. Afterwards `python` is the environment's.
ensure_environment() {
    local extra=$1 venv=$root/.venv python stamp digest
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || return 1
        "$python" -m venv --clear "$venv" || { echo "python -m venv failed (Debian: apt-get install python3-venv)" >&2; return 1; }
    fi
    . "$venv/bin/activate"
    digest=$(python -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:16])' "$root/pyproject.toml")
    stamp=$venv/.xtok-$extra-$digest
    # The dev extra holds all of the others.
    if [ -e "$stamp" ] || [ -e "$venv/.xtok-dev-$digest" ]; then
        return
    fi
    echo "installing xtok ($extra) into $venv; the first time takes a few minutes" >&2
    install_xtok "$extra"
    touch "$stamp"
}

install_xtok() {
    local pip=(python -m pip install -qq --disable-pip-version-check --no-input) torch
    if [ "$1" = dev ]; then
        "${pip[@]}" -e "$root[dev]"
        return
    fi
    # Left open, torch resolves to its newest build, often with gigabytes of GPU libraries; the version that the dev extra pins is
    # the tested one. A torch that is already there stays.
    torch=$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' "$root/pyproject.toml")
    if python -c 'import torch' 2>/dev/null; then
        "${pip[@]}" -e "$root[$1]"
    else
        "${pip[@]}" -e "$root[$1]" "$torch" || "${pip[@]}" -e "$root[$1]"
    fi
}

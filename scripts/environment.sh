# Sourced by other scripts: a virtual environment in .venv with this checkout installed.

# pip would compile every file of every package, one after another, for a minute. Python compiles what
# is imported, and keeps it unless this variable is set.
export PYTHONDONTWRITEBYTECODE=

# make_environment WHAT: WHAT is pip's name for this checkout, ".[suite,megatron]" or ".[dev]".
make_environment() {
    local what=$1 python=${PYTHON:-python3} stamp
    stamp=.venv/.installed-$(printf '%s' "$what" | cat - pyproject.toml | sha256sum | cut -c1-16)
    [ -e "$stamp" ] && return
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed (set PYTHON)" >&2
        return 2
    }
    echo "Installing into .venv (once; torch is large) ..." >&2
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -e "$what"
    touch "$stamp"
}

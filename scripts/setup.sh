# Sourced by launch.sh and tests/run.sh. `setup_python` sets PYTHON to an interpreter that runs this checkout:
# the active one when it has this checkout and all it needs, else that of .venv here, made from the lock files
# on first use. A set-up that did not finish is done anew next time; two at once take turns.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
STAMP=$VENV/.shardwise  # what .venv was made from, or "unfinished"; a .venv without it is somebody else's
NEEDED=(torch transformers accelerate deepspeed datasets peft wandb ruamel.yaml)

# setup_python             what training needs
# setup_python dev         and what the tests need
setup_python() {
    local tools=() candidate
    [ "${1:-}" != dev ] || tools=(pytest pytest_timeout xdist hypothesis ruff mypy)
    for candidate in python python3; do
        if _has "$candidate" "${tools[@]}"; then
            PYTHON=$(command -v "$candidate")
            return
        fi
    done
    PYTHON=$VENV/bin/python
    _ready "$@" && return
    if [ -d "$VENV" ] && [ ! -e "$STAMP" ]; then
        _has "$PYTHON" "${tools[@]}" && return
        _fail "$VENV was not made by this script and lacks what is needed; remove it, or activate it and run" \
            "pip install -r requirements.lock -r requirements-dev.lock && pip install --no-deps -e ."
    fi
    (
        # The checkout's folder is the lock; it is let go when this subshell ends.
        if command -v flock >/dev/null 2>&1; then
            exec 9<"$ROOT"
            flock -n 9 || { _say "waiting for another set-up of $VENV"; flock 9; }
        fi
        _ready "$@" || _make "$@"
    ) || exit 1
}

# Whether an interpreter finds shardwise in this checkout, and the rest anywhere. Imports none of it: 0.05 s.
_has() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c '
import sys
from importlib.util import find_spec
spec = find_spec("shardwise")
here = spec is not None and (spec.origin or "").startswith(sys.argv[1] + "/")
sys.exit(not (here and all(map(find_spec, sys.argv[2:]))))' "$ROOT" "${NEEDED[@]}" "${@:2}" >/dev/null 2>&1
}

_print_of() { { echo "$ROOT"; cat "$@"; } | cksum; }
_main_print() { _print_of "$ROOT/requirements.lock" "$ROOT/requirements-demo.lock" "$ROOT/pyproject.toml"; }
_dev_print() { _print_of "$ROOT/requirements-dev.lock"; }

_ready() {
    [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(_main_print)" ] || return 1
    [ "${1:-}" != dev ] || [ "$(cat "$STAMP-dev" 2>/dev/null)" = "$(_dev_print)" ]
}

_make() {
    local old
    old=$(cat "$STAMP" 2>/dev/null)
    if [ ! -x "$VENV/bin/python" ] || [ "$old" = unfinished ]; then
        local base
        base=$(_base_python) || exit 1
        _say "making $VENV with $base ($("$base" -V 2>&1)); a minute or two"
        mkdir -p "$VENV" && echo unfinished >"$STAMP"
        # Without --clear what an interrupted pip left half-written would stay.
        _quietly "$base" -m venv --clear "$VENV" || _fail "could not make $VENV"
        old=
    fi
    echo unfinished >"$STAMP"
    if [ "$old" != "$(_main_print)" ]; then
        _say "installing requirements.lock"
        _pip -r "$ROOT/requirements.lock"
        _pip --no-deps -r "$ROOT/requirements-demo.lock"
        _pip --no-deps --no-build-isolation -e "$ROOT"
        _say "compiling DeepSpeed's kernels for a machine without a GPU (nothing to do on one with)"
        "$VENV/bin/python" -m shardwise.train.ops >&2 || _say "going on without them: ZeRO will need them"
    fi
    if [ "${1:-}" = dev ]; then
        _say "installing requirements-dev.lock"
        _pip -r "$ROOT/requirements-dev.lock"
        _dev_print >"$STAMP-dev"
    fi
    _main_print >"$STAMP"
}

_pip() {
    _quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
        _fail "pip install $* did not work (see above); it is tried again at the next start"
}

# Output only of what fails. Variables that would lead pip elsewhere than into .venv are taken away.
_quietly() {
    local output
    if ! output=$(env -u PYTHONPATH -u PYTHONHOME -u PIP_TARGET -u PIP_PREFIX PIP_USER=0 "$@" 2>&1); then
        printf '%s\n' "$output" >&2
        return 1
    fi
}

_base_python() {
    local candidate seen=
    for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            { command -v "$candidate"; return; }
        seen="$seen $candidate is $("$candidate" -V 2>&1 | head -n 1);"
    done
    _fail "Python 3.11 or newer with its venv module is needed;${seen:- none was found;} install one" \
        "(python3.12 and python3.12-venv, say), or activate an environment that has it"
}

_say() { printf 'shardwise: %s\n' "$*" >&2; }
_fail() {
    _say "$@"
    exit 1
}

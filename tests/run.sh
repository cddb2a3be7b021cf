#!/usr/bin/env bash
# Lint, types, tests:  ./tests/run.sh [pytest arguments]
# Sets up as launch.sh does, plus requirements-dev.lock. No network and no GPU is needed once that is done.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
setup_python dev
cd "$ROOT"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
PATH=$(dirname "$PYTHON"):$PATH
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy src/shardwise
PYTHONPATH=tests:src "$PYTHON" -m pairs  # real tokenizers and chat templates, fetched once
[ $# -eq 0 ] || exec "$PYTHON" -m pytest "$@"
# What starts no ranks runs on two cores at once; what does needs them both for itself.
APART=(tests/unit tests/contracts tests/cases/test_export.py tests/cases/test_theme3_templates.py
    tests/cases/test_theme9_order.py tests/cases/test_theme9_reading.py tests/e2e/test_data_commands.py)
"$PYTHON" -m pytest -n 2 --dist loadfile "${APART[@]}"
exec "$PYTHON" -m pytest "${APART[@]/#/--ignore=}"

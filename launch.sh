#!/usr/bin/env bash
# Train a recipe:  ./launch.sh recipes/demo.yaml [section.key=value ...] [--dry-run]
# Sets up .venv first if shardwise is not importable (scripts/setup.sh), then is `shardwise train` with the same words.
# Paths are meant from where you are; a recipe that is only found from the checkout (recipes/tiny.yaml) runs there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
setup_python
for word in "$@"; do
    case $word in
        -*) ;;
        *) if [ ! -e "$word" ] && [ -e "$ROOT/$word" ]; then cd "$ROOT"; fi; break ;;
    esac
done
exec "$PYTHON" -m shardwise train "$@"

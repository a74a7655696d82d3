#!/usr/bin/env bash
# launch/serve.sh [ARGUMENT ...]: the HTTP server on http://127.0.0.1:8321, the embedded model on up to two ranks. The
# arguments are those of `tpllama serve` and come last, so they win over the ones here: launch/serve.sh --config run.yaml
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
make_environment serve

exec "$venv/bin/tpllama" serve --tp "$(ranks)" "$@"

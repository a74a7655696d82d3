#!/usr/bin/env bash
# launch/generate.sh PROMPT [ARGUMENT ...]: the embedded model, int8 weights, on up to two ranks. The arguments are
# those of `tpllama generate` and come last, so they win over the ones here.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
make_environment

exec "$venv/bin/tpllama" generate --tp "$(ranks)" --torchao-config int8wo "$@"

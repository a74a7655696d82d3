#!/usr/bin/env bash
# launch/bench.sh NAME [ARGUMENT ...]: one of bench/, as in: launch/bench.sh latency --tp 2 --torchao-config none int8dq
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
names=$(cd "$root/bench" && grep -l '__main__' -- *.py | sed 's/\.py$//' | tr '\n' ' ')
[[ " $names" == *" ${1:-} "* ]] || { say "error: found '${1:-}', expected one of: $names"; exit 2; }
make_environment dev

name=$1
shift
export PATH=$venv/bin:$PATH # benches start torchrun and each other by name
exec "$venv/bin/python" "$root/bench/$name.py" "$@"

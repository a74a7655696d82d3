#!/usr/bin/env bash
# launch/test.sh [ARGUMENT ...]: style, types and tests; the arguments are pytest's, e.g. -m gpu or tests/model.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
have_compiler || fail "found no C++ compiler, which the tests of torch.compile need, do: apt install g++"
make_environment dev

cd "$root"
export PATH=$venv/bin:$PATH # tests start tpllama and torchrun by name
status=0 # every check runs: one that fails does not hide the next
ruff check . || status=1
ruff format --check . || status=1
mypy || status=1
pytest -m "not slow and not gpu" -n 2 --dist loadfile "$@" || status=1 # a file's tests in one process: fixtures are dear
exit $status

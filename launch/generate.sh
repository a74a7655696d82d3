#!/usr/bin/env bash
# launch/generate.sh PROMPT [ARGUMENT ...]: the embedded model, int8 weights, on up to two ranks. The arguments are
# those of `tpllama generate` and come last, so they win over the ones here.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
make_environment

gpus=0
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
fi
case ${CUDA_VISIBLE_DEVICES-0,1} in # torch sees no more than these
    '' | -1*) gpus=0 ;;
    *,*) ;;
    *) gpus=$((gpus > 0)) ;;
esac
# nproc would report OMP_NUM_THREADS where that is set
ranks=$((gpus > 0 ? gpus : $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)))
exec "$venv/bin/tpllama" generate --tp $((ranks < 2 ? ranks : 2)) --torchao-config int8wo "$@"

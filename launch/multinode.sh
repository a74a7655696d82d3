#!/usr/bin/env bash
# launch/multinode.sh ARGUMENT ...: `tpllama ARGUMENT ...` on the ranks of several hosts. Run on each of them with
#   NNODES          how many hosts (1)
#   NODE_RANK       which of them this one is, from 0 (under SLURM: its node's)
#   NPROC_PER_NODE  ranks on each: its GPUs, or as many as share its memory's bandwidth (1)
#   MASTER_ADDR     host 0, by a name or address that the others reach (127.0.0.1)
#   MASTER_PORT     a free port there (29500)
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
make_environment

case ${NPROC_PER_NODE:-1} in # what torchrun sets too, with a warning; a rank takes this 1 for torchrun's (place.py)
    1 | *[!0-9]*) ;;
    *) export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ;;
esac
exec "$venv/bin/torchrun" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}" \
    --nproc-per-node "${NPROC_PER_NODE:-1}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" -m tpllama "$@"

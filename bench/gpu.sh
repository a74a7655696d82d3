#!/usr/bin/env bash
# All that needs a GPU, on one: the tests marked gpu, then the latency of the 1B and the 8B shape with random weights.
#
#   bash bench/gpu.sh [flags of bench/latency.py]      PYTHON, RESULTS and BUDGET_S may be set
#
# Made for one H200 with torch 2.11 or later for CUDA, in under 9 minutes: what is not measured by then is left out and
# said. torchao is taken from a wheel in wheels/ where it isn't installed. Exit code: 3 without a GPU, 1 if a test or
# a measurement failed. Written without a GPU: it has only been run to where it finds none.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=${PYTHON:-python3}
results=${RESULTS:-bench/results/gpu.jsonl}
end=$((SECONDS + ${BUDGET_S:-520}))
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    echo "gpu.sh: found no GPU that torch can use, expected one, nothing was tested or measured" >&2
    exit 3
fi
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())'
"$python" -c 'import torchao' 2> /dev/null || "$python" -m pip install --no-index --no-deps --quiet wheels/torchao-*.whl ||
    exit 1

status=0
# The first failures say most; what is slow is not for this budget.
timeout 200 "$python" -m pytest -m "gpu and not slow" --maxfail 20 --tb short tests || status=1

measure() {  # shape, recipe, more flags
    local left=$((end - SECONDS))
    if ((left < 20)); then
        echo "gpu.sh: no time left for $*" >&2
        status=1
        return
    fi
    timeout "$left" "$python" bench/latency.py --device cuda --shape "$1" --torchao-config "$2" --run-name gpu \
        --batch-size 1 8 32 --input-len 128 --output-len 32 --repeat 1 --max-seq-len 1024 \
        --result-filename "$results" "${@:3}" || status=1
}

# What is aimed at comes first: 1B bf16 at most 0.85 ms a token, 8B int4wo-128 at most 3.0 ms.
for compile in on auto; do
    measure 1b none --compile $compile "$@"
    measure 8b int4wo-128 --compile $compile "$@"
done
for recipe in int8wo fp8wo fp8dq-per_row int4wo-128; do
    measure 1b $recipe --compile on "$@"
done
for recipe in none int8wo fp8wo fp8dq-per_row; do
    measure 8b $recipe --compile on "$@"
done
exit $status

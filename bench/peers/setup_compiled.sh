#!/usr/bin/env bash
# What gpt-fast does, from PyPI's packages alone: transformers' StaticCache, and torch.compile of the whole forward.
PEER=compiled
. "$(dirname "$0")/common.sh"

make_venv
install torch==2.13.0 torchao==0.18.0 transformers==5.24.0 accelerate safetensors numpy
say "looking for a C++ compiler, which torch.compile needs"
command -v g++ >>"$log" 2>&1
finish "transformers $(version_of transformers), torchao $(version_of torchao), torch $(version_of torch)"

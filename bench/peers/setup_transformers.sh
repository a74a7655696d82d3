#!/usr/bin/env bash
# transformers on torch, with torchao for its quantized forms.
PEER=transformers
. "$(dirname "$0")/common.sh"

make_venv
install torch==2.13.0 torchao==0.18.0 transformers==5.24.0 accelerate safetensors numpy
finish "transformers $(version_of transformers), torchao $(version_of torchao), torch $(version_of torch)"

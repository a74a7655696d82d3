#!/usr/bin/env bash
# OpenVINO GenAI, and optimum-intel to export checkpoints to it. torchvision is not needed and of another torch.
PEER=openvino
. "$(dirname "$0")/common.sh"

make_venv
install torch==2.13.0 "optimum-intel[openvino]" openvino-genai
say "removing torchvision"
"$home/venv/bin/pip" uninstall -q -y torchvision torchaudio >>"$log" 2>&1 || true
say "importing openvino_genai and optimum.intel"
"$home/venv/bin/python" -c "import openvino_genai, optimum.intel" >>"$log" 2>&1
finish "openvino-genai $(version_of openvino-genai), optimum-intel $(version_of optimum-intel)"

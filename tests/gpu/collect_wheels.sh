#!/usr/bin/env bash
# Collects what tests/gpu/run.sh needs beside torch, as wheels, for a machine without a network.
#
#   tests/gpu/collect_wheels.sh DIRECTORY     # needs pip and a package index; about 620 MB
#
# For another Python than the one here: PYTHON_VERSION=3.12. For another CUDA than 13.0, whose compiler FlashInfer uses
# where the GPU machine has none: CUDA=13.2; nothing of it: CUDA=none. torch itself is not collected: the GPU machine has
# the build that suits its driver.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${1:?a directory is needed}"
python="${PYTHON:-python3}"
cuda="${CUDA:-13.0}"
mkdir -p "$target"
platforms=()
if [ -n "${PYTHON_VERSION:-}" ]; then
    platforms=(--python-version "$PYTHON_VERSION" --implementation cp)
    # pip takes a wheel for the very version of the C library that is named.
    for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
fi
pip=("$python" -m pip --disable-pip-version-check)
get=("${pip[@]}" download --quiet --dest "$target" --only-binary :all: ${platforms[@]+"${platforms[@]}"})

# FlashInfer without what it takes for devices and formats that we do not use, so that nothing pulls torch in.
"${get[@]}" --no-deps 'flashinfer-python>=0.7.2,<0.8' triton
"${get[@]}" 'apache-tvm-ffi<0.2,>=0.1.11' 'cuda-python>=12,<14' einops ninja nvidia-ml-py packaging requests tabulate tqdm click
"${get[@]}" 'nvidia-cudnn-frontend>=1.31' 'nvidia-cutlass-dsl>=4.6.2a0' 'cuda-tile>=1.4' --no-deps
if [ "$cuda" != none ]; then
    "${get[@]}" --no-deps "nvidia-cuda-nvcc==$cuda.*" "nvidia-nvvm==$cuda.*" "nvidia-cuda-crt==$cuda.*" \
        "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-cccl==$cuda.*" 'nvidia-curand>=10.4'
fi
# Our library with all that it needs; the worker itself is run from the repository.
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$target" ./shared
"${get[@]}" --find-links "$target" tercet-shared 'safetensors>=0.6' 'uvloop>=0.22'
du -sh "$target"

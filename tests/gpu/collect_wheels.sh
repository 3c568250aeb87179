#!/usr/bin/env bash
# Collects what tests/gpu/run.sh needs beside torch, as wheels, for a machine without a network.
#
#   tests/gpu/collect_wheels.sh DIRECTORY     # needs pip and a package index; about 400 MB
#
# torch itself is not collected: the GPU machine has the build that suits its driver.
set -euo pipefail
cd "$(dirname "$0")/../.."
target="${1:?a directory is needed}"
python="${PYTHON:-python3}"
mkdir -p "$target"
pip=("$python" -m pip --disable-pip-version-check download --quiet --dest "$target" --only-binary :all:)

# FlashInfer without what it takes for devices and formats that we do not use, so that nothing pulls torch in.
"${pip[@]}" --no-deps 'flashinfer-python>=0.7.2,<0.8' triton
"${pip[@]}" 'apache-tvm-ffi<0.2,>=0.1.11' 'cuda-python>=12,<14' einops ninja nvidia-ml-py packaging requests tabulate tqdm click
"${pip[@]}" 'nvidia-cudnn-frontend>=1.31' 'nvidia-cutlass-dsl>=4.6.2a0' 'cuda-tile>=1.4' --no-deps
# Our library with all that it needs; the worker itself is run from the repository.
"$python" -m pip --disable-pip-version-check wheel --quiet --wheel-dir "$target" ./shared 'safetensors>=0.6' 'uvloop>=0.22'
du -sh "$target"

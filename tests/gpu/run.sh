#!/usr/bin/env bash
# Checks the CUDA worker on a machine with NVIDIA GPUs, and measures it; ends with a table.
#
#   tests/gpu/collect_wheels.sh wheels        # where there is a package index; then bring the repository along
#   tests/gpu/run.sh [wheels]                 # on the GPU machine: torch 2.11 or later for CUDA, and no network
#
# FlashInfer compiles its kernels here: a C++ compiler is needed, and CUDA's, which is taken from the machine or else from
# the wheels. What was compiled is kept in $TERCET_CACHE (~/.cache/tercet) for the next time.
#
# Exit status: 0 all well, 1 something is wrong, 3 there is no GPU (or no torch for it), which is said in one line.
# It takes less than eight minutes: at TERCET_GPU_BUDGET (465) seconds it ends with what it has, whatever is under way.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="${1:-}"
python="${PYTHON:-python3}"
start=$(date +%s)

if ! reason=$("$python" - <<'PY' 2>&1
import sys
try:
    import torch
except ImportError:
    sys.exit("torch is not installed")
if torch.version.cuda is None:
    sys.exit(f"this torch ({torch.__version__}) is built without CUDA")
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
PY
); then
    echo "No GPU to check: ${reason##*$'\n'}."
    exit 3
fi

fail() {
    echo "The CUDA worker cannot be checked: $1" >&2
    exit 1
}

packages="$(mktemp -d)"   # beside the machine's own, which stay as they are
trap 'rm -rf "$packages"' EXIT
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || fail "there is no directory $wheels."
    # The machine's torch brings the Triton that suits it; ours is for machines whose torch has none.
    found=()
    for wheel in "$wheels"/*.whl; do
        case "$(basename "$wheel")" in
            triton-*) "$python" -c 'import triton' 2>/dev/null || found+=("$wheel") ;;
            *) found+=("$wheel") ;;
        esac
    done
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-index --no-compile \
        --target "$packages" "${found[@]}" \
        || fail "the wheels do not suit this machine ($("$python" --version); collect_wheels.sh says how to choose)."
fi
export PYTHONPATH="$PWD:$PWD/shared:$PWD/services/worker:$packages${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$packages/bin:$PATH"   # ninja
export HF_HUB_OFFLINE=1
"$python" -c 'import flashinfer, triton, tests.gpu.check' || fail "a package is missing, or does not fit (see above)."
command -v ninja >/dev/null || fail "FlashInfer compiles its kernels with ninja, which is not there."
command -v "${CXX:-c++}" >/dev/null || fail "FlashInfer compiles its kernels with a C++ compiler, which is not there."

# CUDA's compiler: what the environment says, on the path, in the usual place, or in the wheels.
toolkit="${CUDA_HOME:-${CUDA_PATH:-}}"
nvcc="$(readlink -f "$(command -v nvcc || true)")"
for each in "${nvcc%/bin/nvcc}" /usr/local/cuda /usr/local/cuda-* "$packages"/nvidia/cu*; do
    # (What runs nvcc from elsewhere has no headers beside it.)
    if [ -z "$toolkit" ] && [ -x "$each/bin/nvcc" ] && [ -e "$each/include/cuda_runtime.h" ]; then toolkit="$each"; fi
done
[ -x "$toolkit/bin/nvcc" ] || fail "FlashInfer compiles its kernels with nvcc, which is not there."
export CUDA_HOME="$toolkit"
case "$toolkit" in
    "$packages"/*)
        # Wheels have no names to link by, and the driver's library has its own place.
        links="$packages/links"
        mkdir -p "$links"
        ln -sf "$(echo "$toolkit"/lib/libcudart.so.*)" "$links/libcudart.so"
        driver="$(ldconfig -p | sed -n 's/.*libcuda\.so\.1.* => //p' | head -n 1)"
        ln -sf "${driver:-/usr/lib/x86_64-linux-gnu/libcuda.so.1}" "$links/libcuda.so"
        export FLASHINFER_EXTRA_LDFLAGS="-L$links -Wl,-rpath,$toolkit/lib ${FLASHINFER_EXTRA_LDFLAGS:-}"
        ;;
esac
# Headers that a small toolkit lacks (cuRAND's) are with the wheels that torch needs, or with ours.
for each in "$packages"/nvidia/cu*/include "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"/nvidia/c*/include; do
    if [ ! -e "$toolkit/include/curand_kernel.h" ] && [ -e "$each/curand_kernel.h" ]; then
        export FLASHINFER_EXTRA_CUDAFLAGS="-isystem $each ${FLASHINFER_EXTRA_CUDAFLAGS:-}"
        break
    fi
done
echo "prepared in $(( $(date +%s) - start )) s; nvcc of $toolkit"
status=75   # a process whose GPU is of no use any more: the next one goes on
while [ "$status" -eq 75 ]; do
    status=0
    "$python" -m tests.gpu.check --started "$start" --budget "${TERCET_GPU_BUDGET:-465}" --state "$packages/state" \
        || status=$?
done
exit "$status"

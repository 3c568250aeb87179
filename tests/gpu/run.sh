#!/usr/bin/env bash
# Checks the CUDA worker on a machine with NVIDIA GPUs, and measures it; ends with a table.
#
#   tests/gpu/collect_wheels.sh wheels        # where there is a package index; then bring the repository along
#   tests/gpu/run.sh [wheels]                 # on the GPU machine: torch 2.11 or later for CUDA, and no network
#
# Exit status: 0 all well, 1 something is wrong, 3 there is no GPU (or no torch for it), which is said in one line.
# It takes less than eight minutes; TERCET_GPU_BUDGET (seconds, 440) is when measuring ends.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="${1:-}"
python="${PYTHON:-python3}"

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

start=$(date +%s)
packages="$(mktemp -d)"   # beside the machine's own, which stay as they are
trap 'rm -rf "$packages"' EXIT
if [ -n "$wheels" ]; then
    # The machine's torch brings the Triton that suits it; ours is for machines whose torch has none.
    found=()
    for wheel in "$wheels"/*.whl; do
        case "$(basename "$wheel")" in
            triton-*) "$python" -c 'import triton' 2>/dev/null || found+=("$wheel") ;;
            *) found+=("$wheel") ;;
        esac
    done
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-index --target "$packages" "${found[@]}"
fi
export PYTHONPATH="$PWD:$PWD/shared:$PWD/services/worker:$packages${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
echo "prepared in $(( $(date +%s) - start )) s"
status=0
"$python" -m tests.gpu.check --started "$start" --budget "${TERCET_GPU_BUDGET:-440}" || status=$?
exit "$status"

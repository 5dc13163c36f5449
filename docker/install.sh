#!/bin/sh
# install.sh <requirements> <environment>: packages with their hashes checked, then PyTorch from the index $TORCH_INDEX.
# Which wheels those are, CPU or CUDA, is the builder's choice; the versions are those of requirements.txt.
set -eu
: "${TORCH_INDEX:?give --build-arg TORCH_INDEX=<address of an index of PyTorch wheels, for CPU or CUDA>}"
python -m venv "$2"
"$2/bin/pip" install --no-cache-dir --require-hashes --no-deps -r "$1"
pinned=$(sed -nE 's/^(torch|torchvision)==([^ ]+).*/\1==\2/p' requirements.txt)
# shellcheck disable=SC2086  # one word a package
"$2/bin/pip" install --no-cache-dir --index-url "$TORCH_INDEX" $pinned
"$2/bin/python" -c "import flwr, torch, torchvision; print('torch', torch.__version__)"

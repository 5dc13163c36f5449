#!/bin/sh
# install.sh <requirements> <environment>: packages, PyTorch among them, each with its hash checked.
# Without $TORCH_INDEX PyTorch is the one of requirements.txt (CUDA on x86-64, CPU on arm64). An index of other wheels
# needs their hashes in requirements-torch.txt: make torch-hashes TORCH_INDEX=<index>.
set -eu
checked="$2/bin/pip install --no-cache-dir --require-hashes --no-deps"
torch=requirements-torch.txt
if [ -n "${TORCH_INDEX:-}" ]; then
  for pin in $(sed -nE 's/^(torch|torchvision)==([^ ]+).*/\1==\2/p' requirements.txt); do
    grep -q "^$pin" "$torch" 2>/dev/null ||
      { echo "$torch has no hashes of $pin: make torch-hashes TORCH_INDEX=$TORCH_INDEX" >&2; exit 1; }
  done
  from="--index-url $TORCH_INDEX"
else
  torch=$(mktemp)
  awk '/^[a-z0-9]/ { keep = /^(torch|torchvision|triton|(nvidia|cuda)-[a-z0-9-]+)==/ } keep' requirements.txt > "$torch"
  from=
fi
python -m venv "$2"
$checked -r "$1"
# shellcheck disable=SC2086  # two words, or none
$checked $from -r "$torch"
"$2/bin/python" -c "import flwr, torch, torchvision; print('torch', torch.__version__)"

#!/bin/sh
# install.sh <requirements> <environment>: packages, PyTorch among them, each with its hash checked.
# By default PyTorch is the one of requirements.txt (CUDA on x86-64). $TORCH_INDEX, an index or a folder of wheels, has
# others, whose hashes are in requirements-torch.txt: make torch-hashes TORCH_INDEX=<index>. $TORCH_FILE is another file
# of hashes, and may pin other versions.
set -eu
checked="$2/bin/pip install --no-cache-dir --require-hashes --no-deps"
index=${TORCH_INDEX:-} torch=${TORCH_FILE:-}
if [ -z "$index$torch" ]; then
  torch=$(mktemp)
  awk '/^[a-z0-9]/ { keep = /^(torch|torchvision|triton|(nvidia|cuda)-[a-z0-9-]+)==/ } keep' requirements.txt > "$torch"
elif [ -z "$torch" ]; then
  torch=requirements-torch.txt
  for pin in $(sed -nE 's/^(torch|torchvision)==([^ ]+).*/\1==\2/p' requirements.txt); do
    grep -q "^$pin" "$torch" 2>/dev/null ||
      { echo "$torch has no hashes of $pin: make torch-hashes TORCH_INDEX=$index" >&2; exit 1; }
  done
fi
if [ -d "$index" ]; then from="--no-index --find-links $index"; else from=${index:+"--index-url $index"}; fi
python -m venv "$2"
$checked -r "$1"
# shellcheck disable=SC2086  # some words, or none
$checked $from -r "$torch"
"$2/bin/python" -c "import flwr, $(sed -nE 's/^(torch|torchvision)==.*/\1/p' "$torch" | paste -sd,); print('torch', torch.__version__)"

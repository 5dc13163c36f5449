#!/bin/sh
# install.sh <requirements> <environment>: packages, each with its hash checked; PyTorch among them, unless the
# requirements are requirements-light.txt alone. They may be several files' names, divided by spaces.
# By default PyTorch is the one of requirements.txt (CUDA on x86-64). $TORCH_INDEX, an index or a folder of wheels, has
# others, whose hashes are in requirements-torch.txt: make torch-hashes TORCH_INDEX=<index>. $TORCH_FILE is another file
# of hashes, and may pin other versions. $TARGETARCH is an image's architecture, where it may be another one.
set -eu
packages=$1 environment=$2
index=${TORCH_INDEX:-} torch=${TORCH_FILE:-}
if [ "$packages" = requirements-light.txt ]; then
  torch=
elif [ -z "$index$torch" ]; then
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

python -m venv "$environment"
case ${TARGETARCH:-native}-$(uname -m) in
  arm64-x86_64) machine=aarch64 ;;
  amd64-aarch64) machine=x86_64 ;;
  *) machine= ;;
esac
other= programs=
if [ -n "$machine" ]; then # pip must be told where, and every kind of wheel that fits
  programs=$(echo "$environment"/lib/python3*/site-packages)/bin
  other="--target ${programs%/bin} --upgrade --only-binary=:all: --platform manylinux2014_$machine"
  for minor in $(seq 17 28); do other="$other --platform manylinux_2_${minor}_$machine"; done
fi

install() { # <pip's arguments> ...
  # shellcheck disable=SC2086  # some words, or none
  "$environment/bin/pip" install --no-cache-dir --require-hashes --no-deps $other "$@"
  [ -z "$programs" ] || { mv "$programs"/* "$environment/bin" && rmdir "$programs"; }
}

# shellcheck disable=SC2046,SC2086  # words
install $(printf -- '-r %s ' $packages)
# shellcheck disable=SC2086  # some words, or none
[ -z "$torch" ] || install $from -r "$torch"
# shellcheck disable=SC2086,SC2046  # words
[ -n "$machine" ] || "$environment/bin/python" -c "
import importlib, importlib.metadata, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, importlib.metadata.version(name))" $(sed -nE 's/^(flwr|onnxruntime|torch|torchvision)==.*/\1/p' $packages $torch)

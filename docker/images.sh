#!/bin/sh
# images.sh <part> ...: build images, and hold each one's size to a bound: server, client, edge, edge-light (an agent
# without PyTorch), edge-onnx (agents of both runtimes).
# BASE, BUILD_BASE, TORCH_INDEX, TORCH_FILE, UID, GID: build arguments, where they are set. PLATFORM: another architecture, SUFFIX:
# its images' names. Package indexes are reached as on this machine: pip.conf and certificates enter the steps as
# secrets, and no image.
set -eu
cd "$(dirname "$0")/.."
builder=$(sh docker/builder.sh)
case $(uname -m) in aarch64 | arm64) here=linux/arm64 ;; *) here=linux/amd64 ;; esac
options="--platform ${PLATFORM:-$here}"
[ "$builder" = docker ] || options="$options --isolation chroot --network host --build-arg BUILDPLATFORM=$here"
for name in BASE BUILD_BASE TORCH_INDEX TORCH_FILE UID GID; do
  value=$(printenv $name || true)
  [ -z "$value" ] || options="$options --build-arg $name=$value"
done
for secret in pip.conf=/etc/pip.conf ca.crt=/etc/ssl/certs/ca-certificates.crt; do
  [ ! -f "${secret#*=}" ] || options="$options --secret id=${secret%%=*},src=${secret#*=}"
done
# MB, unpacked. Without another index or file PyTorch of x86-64 is for CUDA, whose libraries are some 5 GB.
cuda=0
[ -n "${TORCH_INDEX:-}${TORCH_FILE:-}" ] || [ "$(uname -m)" != x86_64 ] || cuda=6000

for part; do
  requirements=
  case $part in
    edge) bound=900 ;;
    edge-light) bound=320 requirements=requirements-light.txt ;;
    edge-onnx) bound=960 requirements="requirements-edge.txt requirements-light.txt" ;;
    client) bound=$((1600 + cuda)) ;;
    server) bound=$((1700 + cuda)) ;;
  esac
  image=fedtta-$part${SUFFIX:-}
  # shellcheck disable=SC2086  # words
  $builder build $options ${requirements:+--build-arg "REQUIREMENTS=$requirements"} \
    --file "docker/Dockerfile.${part%%-*}" --tag "$image" .
  if [ "$builder" = docker ]; then
    bytes=$(docker image inspect --format '{{.Size}}' "$image")
  else
    bytes=$($builder images --format '{{.Size}}' "$image" | awk '{ print $1 * ($2 == "GB" ? 1e9 : 1e6) }')
  fi
  size=$((${bytes%%.*} / 1000000))
  echo "$image: $size MB, at most $bound MB"
  [ "$size" -le "$bound" ] || { echo "$image is larger than its bound" >&2; exit 1; }
done

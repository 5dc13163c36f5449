#!/bin/sh
# builder.sh: print the program that builds images, with its options: docker where there is one, otherwise buildah.
# STORAGE is the folder of buildah's images, which takes some 12 GB: the driver vfs needs nothing of the kernel, but
# copies every layer.
set -eu
if docker info >/dev/null 2>&1; then
  echo docker
elif command -v buildah >/dev/null; then
  storage=${STORAGE:-/var/lib/fedtta-images}
  echo buildah --storage-driver vfs --root "$storage/root" --runroot "$storage/run"
else
  echo "neither docker nor buildah is here: apt-get install buildah" >&2
  exit 1
fi

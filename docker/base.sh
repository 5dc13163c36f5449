#!/bin/sh
# base.sh <image> [<architecture>]: Debian's Python as a base image, where no registry can be reached.
# Needs root, debootstrap, and docker or buildah; for another architecture also qemu-user-static.
# MIRROR is Debian's by default.
set -eu
here=$(dirname "$0")
image=$1
architecture=${2:-$(dpkg --print-architecture)}
[ "$architecture" = "$(dpkg --print-architecture)" ] || sh "$here/qemu.sh"
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 1' INT TERM
debootstrap --arch="$architecture" --variant=minbase --include=python3,python3-venv,ca-certificates \
  bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >&2
ln -s python3 "$root/usr/bin/python"
rm -rf --one-file-system "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/debootstrap \
  "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/* "$root"/usr/share/info/*
builder=$("$here/builder.sh")
if [ "$builder" = docker ]; then
  tar -C "$root" -c . | docker import --platform "linux/$architecture" - "$image"
else
  container=$($builder from scratch)
  $builder add --quiet "$container" "$root" /
  # arm64 without its variant is not found as linux/arm64
  [ "$architecture" = arm64 ] && variant=v8 || variant=
  $builder config --os linux --arch "$architecture" --variant "$variant" "$container"
  $builder commit --quiet --rm "$container" "$image"
fi

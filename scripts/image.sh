#!/usr/bin/env bash
# Builds the sidecar's image, lookaside:VERSION, from the static binary with what is here: podman, buildah or docker.
# Usage: scripts/image.sh [ARCH]      ARCH is x86_64 or aarch64, without one this machine's
# BUILDER names the program, IMAGE the image's name without a tag. With podman and buildah the same sources give the
# same image: its times are those of the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
	printf 'image: %s\n' "$@" >&2
	exit 1
}
arch=${1:-$(uname -m)}
case $arch in
x86_64) platform=amd64 ;;
aarch64) platform=arm64 ;;
*) fail "there is no architecture $arch: x86_64 or aarch64" ;;
esac
builder=${BUILDER:-}
for program in podman buildah docker; do
	[[ $builder ]] || ! command -v "$program" >/dev/null || builder=$program
done
[[ $builder ]] || fail "none of podman, buildah and docker is here" "Install one, for example: apt-get install buildah"
version=$(sed -n 's/^const Version = "\(.*\)"$/\1/p' sidecar/*.go)
[[ $version ]] || fail "sidecar.Version is not where it was"
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
revision=$(git describe --always --dirty --abbrev=12 --exclude='*')

context=build/image
rm -rf "$context"
mkdir -p "$context/$platform" "$context/root/run"
mkdir -m 0700 "$context/root/run/lookaside" # the volume's owner and mode come from here
scripts/static "$arch" "$context/$platform/lookaside"

options=(--platform "linux/$platform" --build-arg "TARGETARCH=$platform" --build-arg "VERSION=$version"
	--build-arg "REVISION=$revision" --build-arg "CREATED=$(date -u -d "@$epoch" +%FT%TZ)"
	--tag "${IMAGE:-lookaside}:$version" --file Containerfile)
# The format of OCI has no health check.
[[ $builder == docker ]] || options+=(--format docker --timestamp "$epoch" --no-cache)
scripts/step "building the image ${IMAGE:-lookaside}:$version for $platform with $builder" "$builder" build "${options[@]}" "$context"

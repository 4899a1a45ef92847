#!/usr/bin/env bash
# Builds the wheels: connector, native module and sidecar in one file for each architecture.
# Usage: scripts/wheel.sh [ARCH...]           into dist/; ARCH is x86_64 or aarch64, without one both
#        scripts/wheel.sh --install PYTHON    builds the one of this machine and installs it, alone, for that Python
# Built for glibc 2.28 and later by zig, from pinned sources; the same sources give the same bytes.
# .cache/wheel keeps what was built: a second run only compares the sources.
set -euo pipefail
shopt -s inherit_errexit
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
tools=$root/.cache/tools/bin
glibc=2.28
dist=$root/dist

fail() {
	printf 'wheel: %s\n' "$@" >&2
	exit 1
}
go=$(command -v "$tools/go" || command -v go) || fail "Go is not here" "Run scripts/setup.sh wheel."
zig=$("$tools/python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")' 2>/dev/null) ||
	fail "zig is not in .cache/tools" "Run scripts/setup.sh wheel."
export ZIG_GLOBAL_CACHE_DIR=$root/.cache/static/zig ZIG_LOCAL_CACHE_DIR=$root/.cache/static/zig
# Of what is built, in the wheel's file times: the last commit's, so that a build can be repeated.
if [[ ! ${SOURCE_DATE_EPOCH:-} ]]; then
	SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null) || SOURCE_DATE_EPOCH=1704067200
fi
export SOURCE_DATE_EPOCH

# Python's headers without what Debian adds to them: one pyconfig.h that names others, for each architecture.
headers() {
	"$tools/python" - "$1" <<-'PY'
		import pathlib, shutil, sys, sysconfig

		include, out = pathlib.Path(sysconfig.get_path("include")), pathlib.Path(sys.argv[1])
		shutil.copytree(include, out, dirs_exist_ok=True)
		config = include / "pyconfig.h"
		if "unknown multiarch" in config.read_text():
		    config = include.parent / sysconfig.get_config_var("MULTIARCH") / include.name / "pyconfig.h"
		    shutil.copy(config, out / "pyconfig.h")
	PY
}

# build ARCH: into .cache/wheel/ARCH/dist. Only what git knows is taken, from a directory of its own.
build() {
	local arch=$1 work=$root/.cache/wheel/$1 stage
	stage=$work/stage
	mkdir -p "$work"
	rm -rf "$work"/{stage,tree,include,dist}
	mkdir -p "$stage"/{bin,share/man/man1,sboms} "$work"/{tree,dist}
	scripts/static "$arch" "$stage/bin/lookaside"
	# A page says the same on every machine.
	local here=$stage/bin/lookaside
	if [[ $arch != $(uname -m) ]]; then
		here=$root/.cache/wheel/lookaside
		scripts/static "$(uname -m)" "$here"
	fi
	"$here" man "$stage/share/man/man1"
	"$tools/python" packaging/sbom.py "$go" "$stage/bin/lookaside" "$arch" >"$stage/sboms/lookaside.cdx.json"
	git ls-files -z --cached --others --exclude-standard pyclient | tar --null -T - -c | tar -x -C "$work/tree"
	cp LICENSE "$work/tree/pyclient/"
	headers "$work/include"
	printf '#!/bin/sh\nexec %q cc -target %s-linux-gnu.%s -fno-sanitize=undefined -I%q "$@"\n' "$zig" "$arch" "$glibc" "$work/include" >"$work/cc"
	chmod +x "$work/cc"
	scripts/step "building the wheel for $arch" env -C "$work/tree/pyclient" LOOKASIDE_CC="$work/cc" LOOKASIDE_STAGE="$stage" \
		"$tools/python" setup.py -q bdist_wheel --plat-name "manylinux_${glibc/./_}_$arch" --dist-dir "$work/dist"
	rm -rf "$work"/{tree,include,cc}
}
# The sources of a wheel.
sources() { git ls-files -z --cached --others --exclude-standard -- '*.go' go.mod go.sum sidecar packaging pyclient scripts/static scripts/wheel.sh LICENSE; }
# latest ARCH: builds if a source has changed, and prints the wheel's path.
latest() {
	local arch=$1 work=$root/.cache/wheel/$1 want
	mkdir -p "$work"
	exec 8>"$work/lock"
	flock 8
	# The sidecar names its commit, too.
	want=$({ sources | xargs -0 sha256sum; "$go" version; "$zig" version; git describe --always --dirty; } 2>&1 | sha256sum)
	if [[ $(cat "$work/stamp" 2>/dev/null) != "$want" ]] || ! compgen -G "$work/dist/*.whl" >/dev/null; then
		rm -f "$work/stamp"
		build "$arch"
		echo "$want" >"$work/stamp"
	fi
	exec 8>&-
	echo "$work"/dist/*.whl
}

if [[ ${1:-} == --install ]]; then
	(($# == 2)) || fail "usage: scripts/wheel.sh --install PYTHON"
	wheel=$(latest "$(uname -m)")
	scripts/step "installing ${wheel##*/}" "$tools/uv" pip install -q -p "$2" --no-deps --reinstall-package lookaside-kv "$wheel"
	exit
fi
archs=("$@")
((${#archs[@]})) || archs=(x86_64 aarch64)
mkdir -p "$dist"
for arch in "${archs[@]}"; do
	[[ $arch == x86_64 || $arch == aarch64 ]] || fail "there is no architecture $arch: x86_64 or aarch64"
	wheel=$(latest "$arch")
	rm -f "$dist"/lookaside_kv-*_"$arch".whl
	cp "$wheel" "$dist/"
	echo "dist/${wheel##*/}"
done
# The module light_mem, for code that was written for LightMem.
rm -rf "$dist"/lookaside_light_mem-*.whl "$root/.cache/wheel/light_mem"
cp -r packaging/light_mem "$root/.cache/wheel/light_mem"
scripts/step "building the wheel of light_mem" "$tools/python" -m pip wheel -q --disable-pip-version-check --no-deps \
	--no-build-isolation -w "$dist" "$root/.cache/wheel/light_mem"
echo "$dist"/lookaside_light_mem-*.whl | sed "s#^$root/##"

#!/usr/bin/env bash
# Builds Lookaside for arm64 and runs its tests under qemu-user, with pages of 4, 16 and 64 KiB. docs/arm.md has what that shows.
# Usage: scripts/arm.sh [PART...]
#   build   cross-compile bin/lookaside and the native part of the Python package, into .cache/arm
#   go      the Go tests of the packages that touch memory, media, the wire or the engine
#   native  the tests of the native part, in an arm64 Python
#   trip    a page there and back: an arm64 sidecar with an arm64 client, and with this machine's
# Without a part: all of them. PAGES='4096 65536' names the page sizes.
# What it needs comes from Debian: qemu and a compiler as packages of this machine, all of arm64 unpacked below .cache/arm. Nothing of arm64 is
# installed here. Emulation is set up in a user namespace of its own and ends with it.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=bookworm
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
packages=(libc6-dev libzmq3-dev libpython3-dev python3 libasan8 libubsan1)
wheels=(numpy msgspec pyzmq setuptools pytest pytest-timeout iniconfig pluggy packaging pygments psutil)
arm=$PWD/.cache/arm
root=$arm/root
python=$root/usr/bin/python3.11
# qemu keeps a record of each page of an address range that is only reserved: the 1 TiB for a file that may grow would take 6 GB.
most_kib=$((63 << 20))

say() { printf 'arm: %s\n' "$*" >&2; }
step() { scripts/step "arm: $1" "${@:2}"; }
fail() {
	printf 'arm: %s\n' "$1" >&2
	shift
	for line in "$@"; do printf '     %s\n' "$line" >&2; done
	exit 1
}

# --- Setting up.
host_packages() {
	local missing=() as=()
	command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
	command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	[[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
	if ((${#missing[@]})); then
		command -v apt-get >/dev/null || fail "apt-get is not here" "Install what Debian calls ${missing[*]} and run this again."
		if ((EUID != 0)); then
			command -v sudo >/dev/null || fail "not root, and sudo is not here" "Run as root: apt-get install -y ${missing[*]}"
			as=(sudo)
		fi
		step "installing ${missing[*]}" "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
			fail "apt-get failed" "Run it by hand to see why: apt-get update && apt-get install ${missing[*]}"
	fi
	# Later versions have no -p: there the guest's pages are as large as this machine's.
	qemu-aarch64-static --version | grep -q 'version [67]\.' ||
		fail "this qemu cannot emulate other page sizes: $(qemu-aarch64-static --version | head -1)" "Use the one of Debian 12, 7.2."
}

# Unpacks Debian's packages for arm64, by an apt that has lists, state and cache of its own and knows no package of this machine.
fetch_root() {
	local apt=$arm/apt new=$arm/new deb
	rm -rf "$apt" "$new"
	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$new"
	: >"$apt/status"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$apt/sources.list"
	cat >"$apt/apt.conf" <<-CONF
		APT::Architecture "arm64";
		APT::Architectures { "arm64"; };
		APT::Install-Recommends "false";
		APT::Sandbox::User "";
		Dir::State "$apt";
		Dir::State::status "$apt/status";
		Dir::Cache "$apt/cache";
		Dir::Etc::sourcelist "$apt/sources.list";
		Dir::Etc::sourceparts "-";
	CONF
	export APT_CONFIG=$apt/apt.conf
	apt-get -qq update
	apt-get -qq install -y --download-only "${packages[@]}"
	for deb in "$apt"/cache/archives/*.deb; do
		dpkg-deb -x "$deb" "$new"
		dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb" >>"$new/packages"
	done
	rm -rf "$apt" "$root"
	mv "$new" "$root"
}
# The versions that .venv has.
wheel_versions() {
	local name
	for name in "${wheels[@]}"; do
		grep -hiE "^$name==" requirements.lock requirements-test.lock || fail "no version of $name is in requirements.lock or requirements-test.lock"
	done | sort -u
}
fetch_wheels() {
	wheel_versions >"$arm/wheels.txt"
	.cache/tools/bin/uv pip install -q -p .venv/bin/python --python-platform aarch64-manylinux_2_36 --no-deps --only-binary :all: \
		--target "$root/usr/lib/python3/dist-packages" -r "$arm/wheels.txt"
}
# A compiler that finds what is below root, under the names by which Python and the tests look for one.
compilers() {
	local name
	mkdir -p "$arm/cc"
	for name in aarch64-linux-gnu-gcc gcc; do
		printf '#!/bin/sh\nexec %q --sysroot=%q -I%q "$@"\n' "$(PATH=${PATH//$arm\/cc:/} command -v aarch64-linux-gnu-gcc)" "$root" \
			"$root/usr/include/python3.11" >"$arm/cc/$name"
		chmod +x "$arm/cc/$name"
	done
}
setup() {
	[[ $(uname -m) == x86_64 ]] || fail "this machine is $(uname -m)" "Run 'make test' there: it tests what it builds."
	host_packages
	mkdir -p "$arm"
	exec 8>"$arm/lock"
	flock 8
	local want
	want=$({ echo "$mirror $suite ${packages[*]}"; wheel_versions; } | sha256sum)
	if [[ $(cat "$arm/stamp" 2>/dev/null) != "$want" ]]; then
		step "unpacking Debian's arm64 libraries and Python below .cache/arm" "$0" fetch-root ||
			fail "Debian's packages could not be fetched" "Check that $mirror is reached, or set DEBIAN_MIRROR to a mirror that is."
		step "unpacking Python's arm64 wheels there" "$0" fetch-wheels || fail "the wheels could not be fetched" "Check that uv reaches a PyPI index."
		echo "$want" >"$arm/stamp"
	fi
	compilers
	flock -u 8
	emulated 4096 "$python" -c '' || fail "arm64 programs cannot be started here" \
		"That needs Linux 6.7 or later, where a user namespace has a binfmt_misc of its own, and the right to make such a namespace." \
		"Else let root install Debian's binfmt-support, which starts them for everybody, and run this again."
}

# --- Running. In the namespace the kernel hands arm64 programs, and all that they start, to qemu. There they are of an ordinary user.
enter='
if ! grep -qs enabled /proc/sys/fs/binfmt_misc/qemu-aarch64; then
	mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
	printf %s ":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:$1:FP" >/proc/sys/fs/binfmt_misc/register
fi
shift
exec unshare --user --map-user=1000 --map-group=1000 -- "$@"'
# emulated PAGE COMMAND...
emulated() (
	ulimit -v "$most_kib"
	export QEMU_PAGESIZE=$1 QEMU_LD_PREFIX=$root PATH=$arm/cc:$PATH PYTHONDONTWRITEBYTECODE=1
	shift
	exec unshare --user --map-root-user --mount -- bash -euc "$enter" enter "$(command -v qemu-aarch64-static)" "$@"
)
# cross COMMAND...: with what Go needs to build for arm64
cross() {
	env GOARCH=arm64 CGO_ENABLED=1 CC="$arm/cc/aarch64-linux-gnu-gcc" PKG_CONFIG_SYSROOT_DIR="$root" \
		PKG_CONFIG_LIBDIR="$root/usr/lib/aarch64-linux-gnu/pkgconfig:$root/usr/share/pkgconfig" "$@"
}
# unable PAGE PACKAGE: the tests of a package that emulation cannot run with these pages, of the table in docs/arm.md, as a regular expression.
unable() {
	awk -F'|' -v page="$(($1 / 1024))" -v package="$2" '
		/^## What emulation cannot do/ { on = 1 }
		on && $2 ~ "^ `" package "` *$" && ($4 ~ /all/ || $4 ~ "(^|[ ,])" page "([ ,]|$)") {
			while (match($3, /`[^`]+`/)) { print substr($3, RSTART + 1, RLENGTH - 2); $3 = substr($3, RSTART + RLENGTH) }
		}' docs/arm.md | paste -sd'|'
}

# --- The parts.
build() {
	step 'building .cache/arm/bin/lookaside' "$0" binary
	step 'building the native part' "$0" native-part
}
native_part() {
	rm -rf "$arm/pyclient"
	mkdir -p "$arm/pyclient"
	git ls-files -z --cached --others --exclude-standard pyclient | tar --null -T - -c | tar -x -C "$arm"
	(cd "$arm/pyclient" && emulated 65536 "$python" setup.py -q build_ext --inplace)
}

# What pages matter to, and with pages of 4 KiB what else stores and finds chunks.
paged=(dax dax/memcopy ipc/wire tiers/daxtier/mapped tiers/directory tiers/slab/media tiers/vfs tiers/vfs/vfstest)
unpaged=(connector ipc/handover sidecar/settings sidecar/systemd tiers/engine tiers/peer tiers/policy tiers/serde tiers/slab tiers/tiertest)
go_tests() {
	local page=$1 all=("${paged[@]}") package skip plain=() status=0
	[[ $page != 4096 ]] || all+=("${unpaged[@]}")
	for package in "${all[@]}"; do
		skip=$(unable "$page" "$package")
		if [[ $skip ]]; then
			go_test "$page" -skip "^($skip)\$" "./$package" || status=1
		else
			plain+=("./$package")
		fi
	done
	go_test "$page" "${plain[@]}" || status=1
	return $status
}
go_test() { emulated "$1" "$0" cross-go test -p 2 -short -timeout 20m "${@:2}"; }

# pytest_in PAGE PYTHON FILE...
pytest_in() {
	local skip
	skip=$(unable "$1" pyclient/tests | sed 's/|/ or /g')
	(
		cd "$arm/pyclient"
		PYTHONPATH=$arm/pyclient emulated "$1" "$2" -m pytest -q --timeout=500 -p no:cacheprovider ${skip:+-k "not ($skip)"} "${@:3}"
	)
}
# The sweep of the copy core, with the sanitizer that runs under emulation.
sweep() {
	local program=$arm/bin/native_sweep
	"$arm/cc/gcc" -g -O1 -std=gnu11 -Wall -Wextra -Werror -ffp-contract=off -fsanitize=undefined -fno-sanitize-recover=all -Ipyclient/lookaside pyclient/tests/native_sweep.c \
		-o "$program" -ldl -pthread
	emulated "$1" "$program" 20260 100
}

run_go() { go_tests "$1"; }
run_native() { step "the copy core, pages of $(($1 / 1024)) KiB" "$0" sweep "$1" && pytest_in "$1" "$python" tests/test_native.py tests/test_regions.py; }
run_trip() {
	LOOKASIDE_TEST_BINARY=$arm/bin/lookaside pytest_in "$1" "$python" tests/test_round_trip.py || return
	# This machine's client, with the same sidecar.
	PYTHONPATH=$PWD/pyclient LOOKASIDE_TEST_BINARY=$arm/bin/lookaside \
		emulated "$1" "$PWD/.venv/bin/python" -m pytest -q --timeout=500 -p no:cacheprovider "$PWD/pyclient/tests/test_round_trip.py"
}

go=$(command -v "$PWD/.cache/tools/bin/go" || command -v go) || fail "Go is not here" "Run 'make setup' first."
case ${1:-} in
fetch-root | fetch-wheels | native-part)
	"${1//-/_}"
	exit
	;;
binary)
	cross "$go" build -trimpath -o "$arm/bin/lookaside" ./sidecar/cmd/lookaside
	exit
	;;
cross-go)
	cross "$go" "${@:2}"
	exit
	;;
sweep)
	sweep "$2"
	exit
	;;
esac

parts=("$@")
((${#parts[@]})) || parts=(build go native trip)
for part in "${parts[@]}"; do
	[[ $part == build || $part == go || $part == native || $part == trip ]] || fail "there is no part called $part: build, go, native or trip"
done
setup
failed=()
for part in "${parts[@]}"; do
	if [[ $part == build ]]; then
		build
		continue
	fi
	for page in ${PAGES:-4096 16384 65536}; do
		say "$part, with pages of $((page / 1024)) KiB"
		"run_$part" "$page" || failed+=("$part with pages of $((page / 1024)) KiB")
	done
done
if ((${#failed[@]})); then
	for one in "${failed[@]}"; do say "failed: $one"; done
	exit 1
fi

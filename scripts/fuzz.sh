#!/usr/bin/env bash
# Fuzzes every Go fuzz target for the given time each (default 20s). New finds land in the package's testdata/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."

go=go
[[ -x .cache/tools/bin/go ]] && go=.cache/tools/bin/go
found=0
while read -r file; do
	package=./$(dirname "$file")
	for target in $(grep -hoE '^func (Fuzz[A-Za-z0-9_]+)' "$file" | cut -d' ' -f2); do
		found=1
		echo "fuzz: $package $target" >&2
		"$go" test -run '^$' -fuzz "^$target\$" -fuzztime "${1:-20s}" -fuzzminimizetime 5x "$package"
	done
done < <(git ls-files --cached --others --exclude-standard '*_test.go' | sort)
((found)) || { echo 'fuzz: there is no fuzz target' >&2; exit 1; }

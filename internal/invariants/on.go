//go:build race || invariants

package invariants

// Enabled reports whether this is a debug build: one with the tag invariants or with -race.
const Enabled = true

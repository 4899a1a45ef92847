// Package invariants tells a debug build from a release build.
//
// A debug build checks what costs too much in a release: legal state transitions, whole structures
// at the end of a call, and double ends of leases. A failed check is a bug and panics with values.
// Builds with the tag invariants are debug builds, and so are all builds with -race.
//
// Write checks as
//
//	if invariants.Enabled { ... }
//
// Enabled is a constant, so that the compiler leaves the check out of a release build.
package invariants

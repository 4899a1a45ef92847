package tiers

import "errors"

// Reasons for which the engine or a tier refuses a call. Callers compare with errors.Is; the
// wrapped text has the values.
var (
	// ErrCorrupt: a chunk's bytes did not match their checksum. The tier has dropped the chunk, so
	// the caller treats it as a miss.
	ErrCorrupt = errors.New("corrupt")

	ErrNotFound = errors.New("not found") // never issued, or issued to somebody else
	// once valid, but released, expired, trimmed away or dropped since
	ErrStale        = errors.New("stale")
	ErrIncompatible = errors.New("incompatible") // another space or geometry
	ErrBusy         = errors.New("busy")         // a limit is reached
	ErrClosed       = errors.New("closed")       // after Close
	ErrInvalid      = errors.New("invalid")      // arguments that no well-behaved caller sends
)

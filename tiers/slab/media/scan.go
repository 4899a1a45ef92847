package media

import (
	"fmt"
	"io"
)

// ScanUnit is the least number of slots that a scan reads: their entries are whole blocks, whatever
// the size of one.
const ScanUnit = BlockBytes / entryAlign

// ScanBytes returns the size of a buffer for scans, about want: whole units of entries, and a
// multiple of BlockBytes.
func (l *Layout) ScanBytes(want int) int {
	unit := ScanUnit * l.EntryBytes
	return max(1, want/unit) * unit
}

// Scan decodes the entries of slots [from, to) in order and calls f for each; from is a multiple of
// ScanUnit. It reads pieces into buf, which has ScanBytes, and is aligned for a file that bypasses
// the page cache. Slices of entries are valid until after is called, which happens after each
// piece. after may be nil. Scan returns the error of r, f or after.
func (l *Layout) Scan(r io.ReaderAt, id Identity, from, to int, buf []byte,
	f func(slot int, state State, e *Entry) error, after func() error) error {
	if from%ScanUnit != 0 || from < 0 || to > l.Slots {
		return fmt.Errorf("scan of slots %d to %d of %d", from, to, l.Slots)
	}
	var e Entry
	step := len(buf) / l.EntryBytes
	for ; from < to; from += step {
		n := min(step, to-from)
		piece := buf[:roundUp(int64(n*l.EntryBytes), BlockBytes)]
		if _, err := r.ReadAt(piece, l.EntryOffset(from)); err != nil {
			return err
		}
		for i := range n {
			state := l.DecodeEntry(piece[i*l.EntryBytes:], id, from+i, &e)
			if err := f(from+i, state, &e); err != nil {
				return err
			}
		}
		if after != nil {
			if err := after(); err != nil {
				return err
			}
		}
	}
	return nil
}

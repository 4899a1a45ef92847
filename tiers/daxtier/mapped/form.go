package mapped

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"

	"lookaside/internal/frame"
)

// The form of a partition:
//
//	0       header, two copies of 4 KiB each; of the intact ones that of the higher epoch counts
//	8 KiB   the files, each in one piece that begins and ends at a multiple of 4 KiB
//
// A header: magic 0, version 8, owner's process id 12, identity 16, offset of the partition in its
// device 32, its size 40, epoch 48, number of files 56; from 64 on the files, 48 bytes each: name 0
// (padded with zeros), where it begins 24, bytes that it has room for 32, its length 40; its
// checksum is the last 8 bytes, XXH3-64 of all before. Numbers are little-endian, what is not
// described is zero.

const (
	// blockBytes is the size of a header; pieces are multiples of it.
	blockBytes = 4096
	// headBytes is the room of both headers.
	headBytes = 2 * blockBytes

	entriesAt  = 64
	entryBytes = 48
	maxName    = 24
	// MaxFiles is the most files in a partition.
	MaxFiles = 64
)

var (
	// ErrVersion means that another version of this program wrote the partition.
	ErrVersion = errors.New("another version of the form of a DAX partition")
	// ErrForeign means that the partition holds something that is not ours.
	ErrForeign = errors.New("it holds something else")

	errBlank   = errors.New("blank")
	errCorrupt = errors.New("no intact header")
)

var headerForm = frame.Form{Magic: "LookPool", Version: 1, Foreign: ErrForeign, Other: ErrVersion,
	Corrupt: errCorrupt}

// header is a decoded header.
type header struct {
	pid      uint32 // of the process that has it open; 0: it was closed
	identity [16]byte
	offset   int64
	size     int64
	epoch    uint64
	files    []entry // by where they begin
}

// entry is a file.
type entry struct {
	name     string
	at       int64 // 0: the file has no piece and is empty
	capacity int64
	size     int64
}

func (h *header) clone() *header {
	c := *h
	c.files = slices.Clone(h.files)
	return &c
}

// find returns the index of a file, or -1.
func (h *header) find(name string) int {
	return slices.IndexFunc(h.files, func(e entry) bool { return e.name == name })
}

// slot returns the offset of the header with this epoch.
func (h *header) slot() int64 { return int64(h.epoch%2) * blockBytes }

func (h *header) encode() []byte {
	b := make([]byte, blockBytes)
	headerForm.Begin(b)
	le := binary.LittleEndian
	le.PutUint32(b[12:], h.pid)
	copy(b[16:], h.identity[:])
	le.PutUint64(b[32:], uint64(h.offset))
	le.PutUint64(b[40:], uint64(h.size))
	le.PutUint64(b[48:], h.epoch)
	le.PutUint32(b[56:], uint32(len(h.files)))
	for i := range h.files {
		e, at := &h.files[i], b[entriesAt+i*entryBytes:]
		copy(at[:maxName], e.name)
		le.PutUint64(at[24:], uint64(e.at))
		le.PutUint64(at[32:], uint64(e.capacity))
		le.PutUint64(at[40:], uint64(e.size))
	}
	headerForm.Seal(b)
	return b
}

// decodeHeader decodes a partition's first headBytes. offset is the partition's place in its
// device. It returns errBlank, errCorrupt (ours but damaged), ErrForeign or ErrVersion.
func decodeHeader(b []byte, offset int64) (*header, error) {
	var best *header
	var why error
	worst := func(err error) {
		if why == nil || errors.Is(why, ErrForeign) || errors.Is(err, ErrVersion) {
			why = err
		}
	}
	for i := range int64(2) {
		h, err := decodeCopy(b[i*blockBytes : (i+1)*blockBytes])
		switch {
		case err != nil:
			worst(err)
		case h.offset != offset || h.slot() != i*blockBytes:
			worst(errCorrupt) // written for another place
		case best == nil || h.epoch > best.epoch:
			best = h
		}
	}
	switch {
	case best != nil:
		return best, nil
	case bytes.Equal(b, make([]byte, len(b))):
		return nil, errBlank
	}
	return nil, why
}

func decodeCopy(b []byte) (*header, error) {
	if err := headerForm.Check(b); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	const most = 1 << 60
	h := &header{pid: le.Uint32(b[12:]), identity: [16]byte(b[16:]), epoch: le.Uint64(b[48:])}
	offset, size, n := le.Uint64(b[32:]), le.Uint64(b[40:]), le.Uint32(b[56:])
	if offset > most || size > most || n > MaxFiles {
		return nil, errCorrupt
	}
	h.offset, h.size = int64(offset), int64(size)
	for i := range int(n) {
		x := b[entriesAt+i*entryBytes:]
		at, capacity, length := le.Uint64(x[24:]), le.Uint64(x[32:]), le.Uint64(x[40:])
		name := string(bytes.TrimRight(x[:maxName], "\x00"))
		if !validName(name) || at > most || capacity > most || length > capacity ||
			h.find(name) >= 0 {
			return nil, errCorrupt
		}
		h.files = append(h.files, entry{name, int64(at), int64(capacity), int64(length)})
	}
	end := int64(headBytes)
	for _, e := range h.pieces() {
		if e.at < end || e.at%blockBytes != 0 || e.capacity%blockBytes != 0 {
			return nil, errCorrupt
		}
		end = e.at + e.capacity
	}
	for _, e := range h.files {
		if (e.capacity == 0) != (e.at == 0) {
			return nil, errCorrupt
		}
	}
	return h, nil
}

func validName(name string) bool {
	if name == "" || len(name) > maxName || name == "." || name == ".." {
		return false
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || c == '/' {
			return false
		}
	}
	return true
}

// pieces returns the files that have a piece, by offset.
func (h *header) pieces() []entry {
	out := slices.DeleteFunc(slices.Clone(h.files), func(e entry) bool { return e.capacity == 0 })
	slices.SortFunc(out, func(a, b entry) int {
		switch {
		case a.at < b.at:
			return -1
		case a.at > b.at:
			return 1
		}
		return 0
	})
	return out
}

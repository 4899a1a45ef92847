package client

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/wire"
)

// Memory is the regions of a worker, which outlive its sessions. What a session has announced stays
// mapped when it ends, and goes to the next sidecar with the next Hello (Held). If that sidecar
// announces the same memory, it is not mapped again. One goroutine at a time may use a Memory.
// Bytes that Bytes has returned are valid until the region is removed, or dropped by Settle or
// Close.
type Memory struct {
	now   map[uint32]*region // of the present session, by number
	kept  map[place]*region  // all that is mapped
	claim *os.File           // of the session before; nil while there is a session

	// MappedBytes and KeptBytes are the sizes of the regions that sessions have announced: those
	// that were mapped for them, and those that were mapped already.
	MappedBytes, KeptBytes int64
}

// place is what makes two regions the same memory.
type place struct {
	device, inode uint64
	offset, size  int64
	readOnly      bool
}

type region struct {
	place
	mem  *dax.Attached
	file *os.File
}

// NewMemory returns a Memory without a region.
func NewMemory() *Memory {
	return &Memory{now: map[uint32]*region{}, kept: map[place]*region{}}
}

// Held returns the descriptors to send with a Hello. They stay the Memory's.
func (m *Memory) Held() []int {
	var held []int
	for _, r := range m.kept {
		if !r.readOnly {
			held = append(held, int(r.file.Fd()))
		}
	}
	return held
}

// Add maps the region of a RegionAdded, or takes it over from an earlier session. The Memory owns
// the file from then on.
func (m *Memory) Add(added *wire.RegionAdded, file *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		file.Close()
		return fmt.Errorf("region %d: %w", added.Region, err)
	}
	r := &region{file: file, place: place{device: st.Dev, inode: st.Ino,
		offset: int64(added.Offset), size: int64(added.SizeBytes), readOnly: added.ReadOnly}}
	if was := m.kept[r.place]; was != nil {
		file.Close()
		m.now[added.Region] = was
		m.KeptBytes += was.size
		return nil
	}
	var err error
	if r.readOnly {
		r.mem, err = dax.AttachReadOnly(int(file.Fd()), r.offset, r.size, int64(added.PageSize))
	} else {
		r.mem, err = dax.Attach(file, r.offset, r.size, int64(added.PageSize))
	}
	if err != nil {
		file.Close()
		return fmt.Errorf("region %d: %w", added.Region, err)
	}
	m.now[added.Region], m.kept[r.place] = r, r
	m.MappedBytes += r.size
	return nil
}

// Bytes returns a region of the present session; nil if there is none of that number.
func (m *Memory) Bytes(id uint32) []byte {
	if r := m.now[id]; r != nil {
		return r.mem.Bytes()
	}
	return nil
}

// Remove unmaps a region that the sidecar removes. It returns an error if there is none.
func (m *Memory) Remove(id uint32) error {
	r := m.now[id]
	if r == nil {
		return fmt.Errorf("region %d is removed, but was never added", id)
	}
	delete(m.now, id)
	for _, other := range m.now {
		if other == r { // of a peer that was restarted, and has the same memory
			return nil
		}
	}
	return m.drop(r)
}

func (m *Memory) drop(r *region) error {
	delete(m.kept, r.place)
	return errors.Join(r.mem.Close(), r.file.Close())
}

// EndSession takes the claim of a session that is about to be closed, and forgets the numbers of
// its regions. No copy of the session may be under way. With the claim the next sidecar knows that
// there is a worker with memory to give back. Memory that is for reading only belongs to another
// sidecar, and is unmapped.
func (m *Memory) EndSession(s *Session) error {
	err := m.BeginSession()
	m.claim, s.Claim = s.Claim, nil
	clear(m.now)
	return errors.Join(err, m.dropIf(func(r *region) bool { return r.readOnly }))
}

// BeginSession gives up the claim of the session before. Call it after the next handshake.
func (m *Memory) BeginSession() error {
	claim := m.claim
	if m.claim = nil; claim == nil {
		return nil
	}
	return claim.Close()
}

// Settle unmaps what the present session has not announced. Call it when all its regions are there.
func (m *Memory) Settle() error {
	used := map[*region]bool{}
	for _, r := range m.now {
		used[r] = true
	}
	return m.dropIf(func(r *region) bool { return !used[r] })
}

// Close unmaps everything. The Memory is empty then, and may be used again.
func (m *Memory) Close() error {
	clear(m.now)
	return errors.Join(m.BeginSession(), m.dropIf(func(*region) bool { return true }))
}

func (m *Memory) dropIf(unwanted func(r *region) bool) (err error) {
	for _, r := range slices.Collect(maps.Values(m.kept)) {
		if unwanted(r) {
			err = errors.Join(err, m.drop(r))
		}
	}
	return err
}

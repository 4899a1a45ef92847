package slab

import (
	"errors"

	"go.uber.org/zap"

	"lookaside/tiers/vfs"
)

// spoiledShare is which part of a slab's slots may be spoiled before the slab is given up: one in
// so many.
const spoiledShare = 4

// spoil has a slot whose bytes or entry cannot be used, while the rest of the slab can, not be
// granted again. The chunk that it held is its user's to drop. false: the failure is of another
// kind, or of too many slots.
func (d *Disk) spoil(s *slab, err error) bool {
	var bad *vfs.BadPlaceError
	if !errors.As(err, &bad) {
		return false
	}
	l, slot := s.layout, -1
	switch {
	case bad.Off >= l.DataOffset:
		slot = int((bad.Off - l.DataOffset) / l.StrideBytes)
	case bad.Off >= l.EntryOffset(0):
		slot = int((bad.Off - l.EntryOffset(0)) / int64(l.EntryBytes))
	}
	if slot < 0 || slot >= l.Slots || int(s.spoiled.Load()) >= max(l.Slots/spoiledShare, 1) {
		return false
	}
	if d.engine.Spoil(s.region, uint32(slot)) {
		s.spoiled.Add(1)
		d.log.Warn("a slot is not used any more, as its memory is bad",
			zap.String("slab", s.place.name()), zap.Int("slot", slot), zap.Error(err))
	}
	return true
}

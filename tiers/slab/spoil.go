package slab

import (
	"errors"

	"go.uber.org/zap"

	"lookaside/tiers/vfs"
)

// spoiledShare limits the spoiled slots of a slab: once one in spoiledShare is spoiled, the slab is
// given up.
const spoiledShare = 4

// spoil takes a slot out of use whose bytes or entry cannot be used, while the rest of the slab
// can. The caller drops the slot's chunk. It returns false if the failure is of another kind, or if
// too many slots are spoiled.
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

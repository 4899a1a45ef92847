package media

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// sealBlock makes a block's checksum right, so that what it says is looked at.
func sealBlock(b []byte) {
	binary.LittleEndian.PutUint64(b[headerSum:], xxh3.HashSeed(b[:headerSum], headerSeed))
}

func sealEntry(l *Layout, id Identity, slot int, b []byte) {
	binary.LittleEndian.PutUint64(b, xxh3.HashSeed(b[8:l.EntryBytes], id.entrySeed(slot)))
}

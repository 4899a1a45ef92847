package media

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

func sealEntry(l *Layout, id Identity, slot int, b []byte) {
	binary.LittleEndian.PutUint64(b, xxh3.HashSeed(b[8:l.EntryBytes], id.entrySeed(slot)))
}

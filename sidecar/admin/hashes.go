package admin

import (
	"encoding/hex"
	"errors"
	"fmt"

	"lookaside/ipc/wire"
)

// ParseHashes packs page hashes in hexadecimal, all of one length.
func ParseHashes(words []string) (packed []byte, digestBytes int, err error) {
	if len(words) == 0 {
		return nil, 0, errors.New("no page hashes given")
	}
	for i, w := range words {
		b, err := hex.DecodeString(w)
		if err != nil {
			return nil, 0, fmt.Errorf("hash %d, %q: %w", i+1, w, err)
		}
		if i == 0 {
			digestBytes = len(b)
		}
		if len(b) != digestBytes || len(b) == 0 || len(b) > wire.MaxDigestBytes {
			return nil, 0, fmt.Errorf(
				"hash %d has %d bytes: want 1 to %d, as many as the first one's %d", i+1, len(b),
				wire.MaxDigestBytes, digestBytes)
		}
		packed = append(packed, b...)
	}
	return packed, digestBytes, nil
}

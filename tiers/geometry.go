package tiers

import (
	"fmt"
	"math"
)

// Geometry is how a space's pages lie in slots and how they are named.
type Geometry struct {
	PageBytes     int64 // bytes of one page
	PagesPerChunk int   // pages of one slot
	PageTokens    int   // tokens of one page; not used by the engine
	DigestBytes   int   // length of a page hash: 8, 16 or 32
}

// MaxPagesPerChunk bounds the pages of a slot.
const MaxPagesPerChunk = 4096

// Validate returns ErrInvalid, with the field and what is allowed, if the engine would refuse the
// geometry. minPageBytes is the smallest allowed PageBytes.
func (g Geometry) Validate(minPageBytes int64) error {
	switch {
	case g.PageBytes < minPageBytes || g.PageBytes > math.MaxInt64/MaxPagesPerChunk:
		return fmt.Errorf("%w: PageBytes is %d, want %d or more", ErrInvalid, g.PageBytes,
			minPageBytes)
	case g.PagesPerChunk < 1 || g.PagesPerChunk > MaxPagesPerChunk:
		return fmt.Errorf("%w: PagesPerChunk is %d, want 1 to %d", ErrInvalid, g.PagesPerChunk,
			MaxPagesPerChunk)
	case g.PageTokens < 1:
		return fmt.Errorf("%w: PageTokens is %d", ErrInvalid, g.PageTokens)
	case g.DigestBytes != 8 && g.DigestBytes != 16 && g.DigestBytes != 32:
		return fmt.Errorf("%w: DigestBytes is %d, want 8, 16 or 32", ErrInvalid, g.DigestBytes)
	}
	return nil
}

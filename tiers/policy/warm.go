package policy

// UseAll is Use for each of some resident slots, in their order. It first reads all their notes in a loop of its own, so that the cache misses overlap: a
// long prefix lies anywhere.
func UseAll(p Policy, refs []uint32) {
	if b, ok := p.(interface{ warm([]uint32) }); ok {
		b.warm(refs)
	}
	for _, ref := range refs {
		p.Use(ref)
	}
}

func (b *books) warm(refs []uint32) {
	sum := uint32(0)
	for _, ref := range refs {
		sum += b.note(ref).pos
	}
	b.warmed = sum
}

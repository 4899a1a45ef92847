package policy

// warmGroup is how many notes UseAll reads ahead: they fit into the nearest cache.
const warmGroup = 256

// UseAll is Use for each of some resident slots, in their order. It first reads their notes in a loop of its own, so that the cache misses overlap: a
// long prefix lies anywhere.
func UseAll(p Policy, refs []uint32) {
	for len(refs) > 0 {
		some := refs[:min(warmGroup, len(refs))]
		refs = refs[len(some):]
		Read(p, some)
		for _, ref := range some {
			p.Use(ref)
		}
	}
}

// Read reads what a policy has of some slots, in a loop of its own, for calls of it that are about to be made for each of them.
func Read(p Policy, refs []uint32) {
	if b, ok := p.(interface{ warm([]uint32) }); ok {
		b.warm(refs)
	}
}

func (b *books) warm(refs []uint32) {
	sum := uint32(0)
	for _, ref := range refs {
		sum += b.note(ref).pos
	}
	b.warmed = sum
}

package policy

// warmGroup is how many notes UseAll reads ahead: they fit into the nearest cache.
const warmGroup = 256

// UseAll is Use for each of some resident slots, in their order. It first reads their notes in a
// loop of its own, so that the cache misses overlap: a long prefix lies anywhere.
func UseAll(p Policy, refs []uint32) {
	for len(refs) > 0 {
		some := refs[:min(warmGroup, len(refs))]
		refs = refs[len(some):]
		p.Read(some)
		for _, ref := range some {
			p.Use(ref)
		}
	}
}

// Read implements Policy.
func (b *books) Read(refs []uint32) {
	sum := uint32(0)
	for _, ref := range refs {
		sum += b.note(ref).pos
	}
	b.read = sum
}

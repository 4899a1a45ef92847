package engine

// The index of what is restored. It is filled in parts, by all processors: each has a part of the
// table to itself at a time.

// batch is the index entries of many pages. Those of part i of the index are together, and end at
// ends[i].
type batch struct {
	entries []uint64
	ends    *[parts]uint16
}

// The index is filled in parts, by the upper bits of the tags, each of which fits into a core's
// cache.
const (
	partBits = 10
	parts    = 1 << partBits
	// batchEntries are ordered by parts at a time. That fits as well. Less than minBatch are not
	// worth it.
	batchEntries = 1 << 15
	minBatch     = 4 * parts
)

func partOf(entry uint64) int { return int(entry >> (64 - partBits)) }

// file orders the open entries by parts.
func (of *stagedRegion) file() {
	sorted := of.rooms[0][:len(of.open)]
	of.rooms = of.rooms[1:]
	var ends [parts]uint16
	for _, w := range of.open {
		ends[partOf(w)]++
	}
	at := uint16(0)
	for i, n := range ends {
		ends[i] = at // where the part begins, until all are in their places
		at += n
	}
	for _, w := range of.open {
		p := partOf(w)
		sorted[ends[p]] = w
		ends[p]++
	}
	of.filed = append(of.filed, batch{sorted, &ends})
	of.open = of.open[:0]
}

// indexStaged indexes the pages of staged slots. It returns the slots that it left for restoreOdd:
// those with a page that another slot has indexed already. Each processor has a part of the index
// to itself at a time.
func (e *Engine) indexStaged(all []*stagedRegion) *slotSet {
	odd := &slotSet{}
	t := &e.idx.cur
	if e.idx.migrating() { // never before the engine is used
		for _, of := range all {
			of.each(func(x *staged) { odd.add(e, x.ref) })
		}
		return odd
	}
	inParallel(len(all), func(_, i int) {
		if len(all[i].open) >= minBatch {
			all[i].file()
		}
	})
	var batches []batch
	for _, of := range all {
		batches = append(batches, of.filed...)
	}
	tallies := e.enterParts(batches)
	for _, of := range all {
		n, left := e.enterAll(of.open, uint32(len(t.words)), tallies[0].left)
		tallies[0].entered, tallies[0].left = tallies[0].entered+n, left
	}
	for i := range tallies {
		t.used += tallies[i].entered
		e.scratch.touched |= tallies[i].seen // keeps the loops that only read
	}
	for i := range tallies {
		for _, w := range tallies[i].left {
			if ref, _ := e.slotOf(uint32(w)); !odd.has(ref) {
				odd.add(e, ref)
				_, s := e.slot(ref)
				e.unindex(misfit{ref, int(s.granted), e.spaces[s.space]})
			}
		}
	}
	return odd
}

// entering is what one worker has entered into the index, and what it could not.
type entering struct {
	entered int
	seen    uint64 // keeps the loops that only read
	left    []uint64
}

// enterParts enters batches part by part, on all processors. It returns what each worker did, of
// which there is at least one.
func (e *Engine) enterParts(batches []batch) []entering {
	workers := make([]entering, workers())
	if len(batches) == 0 {
		return workers
	}
	t, entries := &e.idx.cur, 0
	for i := range batches {
		entries += len(batches[i].entries)
	}
	dense := entries > len(t.words)/lineWords
	inParallel(parts, func(worker, part int) {
		x := &workers[worker]
		from, end := part*len(t.words)/parts, (part+1)*len(t.words)/parts
		for i := range batches {
			for run := batches[i].part(part); len(run) > 0; run = run[min(len(run), lineWords):] {
				x.seen |= run[0]
			}
		}
		for i := range batches {
			n, left := e.enterAll(batches[i].part(part), uint32(end), x.left)
			x.entered, x.left = x.entered+n, left
			if i == 0 && dense {
				// read the words that will be written to first, except those whose page fault the
				// first entries take
				for i := from; i < end; i += lineWords {
					x.seen |= t.words[i]
				}
			}
		}
	})
	return workers
}

// lineWords are in a cache line.
const lineWords = 8

func (b *batch) part(i int) []uint64 {
	from := uint16(0)
	if i > 0 {
		from = b.ends[i-1]
	}
	return b.entries[from:b.ends[i]]
}

// enterAll enters pages whose places are below end. It appends pages that are already indexed, or
// that find no place below end, to left.
func (e *Engine) enterAll(pages []uint64, end uint32, left []uint64) (entered int, _ []uint64) {
	t := &e.idx.cur
	words := t.words
	for _, w := range pages {
		at := t.home(uint32(w >> 32))
		for at < end && words[at] != 0 && (uint32(words[at]>>32) != uint32(w>>32) ||
			!e.alike(uint32(words[at]), uint32(w))) {
			at++
		}
		if at == end || words[at] != 0 {
			left = append(left, w)
			continue
		}
		words[at] = w
		entered++
	}
	return entered, left
}

// unindex removes the pages of a slot from the index, as far as they are there.
func (e *Engine) unindex(x misfit) {
	r, _ := e.slot(x.ref)
	for pos := range x.pages {
		e.idx.cur.removeIf(entry(x.space.tagOfRecord(r.digest(x.ref&recordMask, pos)),
			r.record(x.ref, pos)))
	}
}

package policy

import "math/bits"

// ghosts remembers chunks that are no longer resident, by key, in lists by the order of their
// leaving. It is bounded: the caller drops one before it adds to a full one.
type ghosts struct {
	nodes []ghost  // nodes[0] is not used
	table []uint32 // open addressing, at most two thirds full: nodes by key
	shift uint
	seed  uint64
	limit int
	fresh uint32 // nodes[fresh:] were never used
	free  uint32 // other unused nodes, chained by next
	lists [2]ghostList
}

type ghostList struct {
	oldest, newest uint32
	n              int
}

// ghost is what is remembered of a chunk: its last note.
type ghost struct {
	key        uint64
	rank       uint64
	prev, next uint32
	list       uint8
}

// resize makes room for limit ghosts. It forgets all ghosts if it has to make new tables. That is
// rare: a store mostly grows before it is full, when nothing is remembered.
func (g *ghosts) resize(limit int) {
	limit = max(limit, 1)
	g.limit = limit
	if room := len(g.nodes) - 1; room < limit || room > 4*limit {
		if room > 0 && room < limit {
			limit = max(limit, room+room/2)
		}
		size := 1 << bits.Len(uint(limit+limit/2))
		*g = ghosts{seed: g.seed, limit: g.limit, nodes: make([]ghost, limit+1),
			table: make([]uint32, size), fresh: 1,
			shift: uint(64 - bits.Len(uint(size-1)))}
	}
	for g.n() > g.limit {
		if g.lists[0].n > g.lists[1].n {
			g.drop(0)
		} else {
			g.drop(1)
		}
	}
}

// n returns the number of ghosts.
func (g *ghosts) n() int { return g.lists[0].n + g.lists[1].n }

func (g *ghosts) full() bool { return g.n() >= g.limit }

func (g *ghosts) home(key uint64) uint32 {
	return uint32((key ^ g.seed) * 0x9E3779B97F4A7C15 >> g.shift)
}

// find returns a key's node, or 0.
func (g *ghosts) find(key uint64) uint32 {
	if key == 0 || g.n() == 0 {
		// always so for chunks restored at the start: the table is not even read
		return 0
	}
	mask := uint32(len(g.table) - 1)
	for i := g.home(key); ; i = (i + 1) & mask {
		if n := g.table[i]; n == 0 || g.nodes[n].key == key {
			return n
		}
	}
}

// add remembers a key, which is not 0, as the newest of a list. The caller has made room.
func (g *ghosts) add(list uint8, key uint64) *ghost {
	if n := g.find(key); n != 0 { // two chunks of one key were resident: one of them is remembered
		g.remove(n)
	}
	n := g.free
	if n != 0 {
		g.free = g.nodes[n].next
	} else {
		n = g.fresh
		g.fresh++
	}
	l := &g.lists[list]
	g.nodes[n] = ghost{key: key, list: list, prev: l.newest}
	if l.newest != 0 {
		g.nodes[l.newest].next = n
	} else {
		l.oldest = n
	}
	l.newest = n
	l.n++
	mask := uint32(len(g.table) - 1)
	i := g.home(key)
	for g.table[i] != 0 {
		i = (i + 1) & mask
	}
	g.table[i] = n
	return &g.nodes[n]
}

// remove forgets a node.
func (g *ghosts) remove(n uint32) {
	x := &g.nodes[n]
	mask := uint32(len(g.table) - 1)
	i := g.home(x.key)
	for g.table[i] != n {
		i = (i + 1) & mask
	}
	g.table[i] = 0
	for j := (i + 1) & mask; g.table[j] != 0; j = (j + 1) & mask {
		if (j-g.home(g.nodes[g.table[j]].key))&mask >= (j-i)&mask {
			g.table[i], g.table[j] = g.table[j], 0
			i = j
		}
	}
	l := &g.lists[x.list]
	if x.prev != 0 {
		g.nodes[x.prev].next = x.next
	} else {
		l.oldest = x.next
	}
	if x.next != 0 {
		g.nodes[x.next].prev = x.prev
	} else {
		l.newest = x.prev
	}
	l.n--
	*x = ghost{next: g.free}
	g.free = n
}

// drop forgets the oldest of a list, if there is one.
func (g *ghosts) drop(list uint8) {
	if n := g.lists[list].oldest; n != 0 {
		g.remove(n)
	}
}

package policy

import "math/bits"

// ghosts remembers chunks that are resident no more, by key, in lists by the order of their leaving. It is bounded: who adds makes room first.
type ghosts struct {
	nodes []ghost  // nodes[0] is none; the free ones are chained by next
	table []uint32 // open addressing, at most half full: nodes by key
	shift uint
	seed  uint64
	free  uint32
	lists [2]struct {
		oldest, newest uint32
		n              int
	}
}

type ghost struct {
	key        uint64
	prev, next uint32
	list       uint32
	_          uint32
}

// resize forgets all and makes room for limit ghosts. Stores grow before they are full, so there is seldom anything to forget.
func (g *ghosts) resize(limit int) {
	size := 1 << bits.Len(uint(2*limit+1))
	*g = ghosts{seed: g.seed, nodes: make([]ghost, limit+1), table: make([]uint32, size), shift: uint(64 - bits.Len(uint(size-1)))}
	for i := 1; i < limit; i++ {
		g.nodes[i].next = uint32(i + 1)
	}
	if limit > 0 {
		g.free = 1
	}
}

func (g *ghosts) home(key uint64) uint32 {
	return uint32((key ^ g.seed) * 0x9E3779B97F4A7C15 >> g.shift)
}

// find answers a key's node, 0 if it is not remembered.
func (g *ghosts) find(key uint64) uint32 {
	if key == 0 {
		return 0
	}
	mask := uint32(len(g.table) - 1)
	for i := g.home(key); ; i = (i + 1) & mask {
		if n := g.table[i]; n == 0 || g.nodes[n].key == key {
			return n
		}
	}
}

// full says that nothing can be added.
func (g *ghosts) full() bool { return g.free == 0 }

// add remembers a key as the newest of a list, from which it is moved if it was remembered already. There must be room.
func (g *ghosts) add(list uint32, key uint64) {
	if key == 0 {
		return
	}
	if n := g.find(key); n != 0 {
		g.remove(n)
	}
	n := g.free
	g.free = g.nodes[n].next
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
func (g *ghosts) drop(list uint32) {
	if n := g.lists[list].oldest; n != 0 {
		g.remove(n)
	}
}

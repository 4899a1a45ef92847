package directory

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// lockInode is the inode of the lock file in tests.
const lockInode = 77

// machine has memory that outlives its processes.
type machine struct {
	t      testing.TB
	path   string
	boot   string
	memory map[uint32][]byte
	spaces []*tiers.Space
}

func newMachine(t testing.TB, gs ...tiers.Geometry) *machine {
	m := &machine{t: t, path: filepath.Join(t.TempDir(), "directory"), boot: "boot 1",
		memory: map[uint32][]byte{}}
	for _, g := range gs {
		m.spaces = append(m.spaces, tiertest.NewSpace("of a directory", g))
	}
	return m
}

// options are those of a directory, with changes.
func (m *machine) options(edit func(*Options)) Options {
	o := Options{Path: m.path, LockDev: 7, LockInode: lockInode, Log: zap.NewNop(), boot: m.boot}
	if edit != nil {
		edit(&o)
	}
	return o
}

// process is a sidecar that has the directory and the memory.
type process struct {
	m      *machine
	d      *Directory
	e      *engine.Engine
	ids    []engine.SpaceID
	found  Found
	closed bool
}

func (m *machine) open(edit func(*Options)) *Directory {
	m.t.Helper()
	d, err := Open(m.options(edit))
	if err != nil {
		m.t.Fatal(err)
	}
	return d
}

// start starts a process: it finds what the one before has left, and has nothing in the background.
func (m *machine) start(c engine.Config, edit func(*Options)) *process {
	m.t.Helper()
	p, err := m.tryStart(m.open(edit), c)
	if err != nil {
		m.t.Fatal(err)
	}
	return p
}

func (m *machine) tryStart(d *Directory, c engine.Config) (_ *process, err error) {
	d.Hooks(&c)
	if c.MinPageBytes == 0 {
		c.MinPageBytes = 256
	}
	c.OwnerShare = 1
	for _, mem := range m.memory {
		c.ArenaLimitBytes += int64(len(mem))
	}
	p := &process{m: m, d: d}
	if p.e, err = engine.New(c); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	d.checks = make(chan struct{}, 1) // one at a time
	d.engine, d.bytes = p.e, func(region uint32) []byte { return m.memory[region] }
	for _, r := range d.Regions() {
		if int64(len(m.memory[r.ID])) != r.SizeBytes {
			m.t.Fatalf("region %d of %d bytes", r.ID, r.SizeBytes)
		}
		if err := p.e.AddDrainedRegion(r.ID, r.SizeBytes); err != nil {
			return nil, err
		}
	}
	if p.found, err = d.Restore(); err != nil {
		return nil, err
	}
	for _, r := range d.Regions() {
		if err := p.e.Undrain(r.ID); err != nil {
			return nil, err
		}
	}
	for i, sp := range m.spaces {
		id, err := p.e.OpenSpace(sp.Fingerprint, sp.Geometry)
		if err != nil {
			return nil, err
		}
		p.ids = append(p.ids, id)
		if err := p.e.AddOwner(engine.Owner(i+1), id); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// addRegion makes memory.
func (p *process) addRegion(size int) {
	p.m.t.Helper()
	id := p.d.Next()
	p.m.memory[id] = make([]byte, size)
	err := p.d.AddRegion(Region{ID: id, Kind: "memfd", Dev: 1, Inode: uint64(100 + id),
		SizeBytes: int64(size), PageSize: 4096, Seals: 7})
	if err == nil {
		err = p.e.AddRegion(id, int64(size))
	}
	if err != nil {
		p.m.t.Fatal(err)
	}
}

// close ends a process. What it leaves does not depend on how it ends.
func (p *process) close() {
	if p.closed {
		return
	}
	p.closed = true
	p.e.Close()
	if err := p.d.Close(); err != nil {
		p.m.t.Error(err)
	}
}

// owner is the session of a space.
func owner(space int) engine.Owner { return engine.Owner(space + 1) }

// grants are what a store was granted.
type grants struct {
	space int
	store uint64
	all   []engine.Grant
	run   tiers.Run
}

// prepare begins to store pages of a prefix. It returns nil if there is nothing to store.
func (p *process) prepare(space int, prefix tiertest.Prefix, from, to int) *grants {
	p.m.t.Helper()
	run := prefix.Run(p.m.spaces[space], from, to)
	res, all, err := p.e.PrepareStore(owner(space), from, run.Prev, run.Hashes, nil)
	if err != nil {
		p.m.t.Fatal(err)
	}
	if len(all) == 0 {
		return nil
	}
	return &grants{space, res.Store, all, run}
}

// fill writes what was granted, as a worker does.
func (p *process) fill(g *grants) {
	geometry := g.run.Space.Geometry
	for _, x := range g.all {
		part := g.run
		part.First = int(x.Page)
		part.Hashes = g.run.Hashes[(int(x.Page)-g.run.First)*geometry.DigestBytes:][:int(
			x.Pages)*geometry.DigestBytes]
		tiertest.FillRun(p.m.memory[x.Region][x.Offset:][:int64(x.Pages)*geometry.PageBytes], part)
	}
}

// store stores pages of a prefix.
func (p *process) store(space int, prefix tiertest.Prefix, from, to int) {
	p.m.t.Helper()
	if g := p.prepare(space, prefix, from, to); g != nil {
		p.fill(g)
		p.commit(g)
	}
}

func (p *process) commit(g *grants, failed ...uint32) {
	p.m.t.Helper()
	if err := p.e.CommitStore(owner(g.space), g.store, failed); err != nil {
		p.m.t.Fatal(err)
	}
}

// keepAll keeps all that waits.
func (p *process) keepAll() {
	k := newScratch()
	for p.d.keepNext(k) || p.d.keepLost(k) {
	}
}

// held returns how many pages are held of a prefix.
func (p *process) held(space int, prefix tiertest.Prefix) (pages int) {
	p.m.t.Helper()
	run := prefix.Run(p.m.spaces[space], 0, len(prefix))
	held := make([]uint16, run.Chunks())
	if err := p.e.Contains(p.ids[space], 0, run.Hashes, held); err != nil {
		p.m.t.Fatal(err)
	}
	for _, n := range held {
		pages += int(n)
	}
	return pages
}

// readable returns how many pages from the first on a lookup finds, and checks their bytes.
func (p *process) readable(space int, prefix tiertest.Prefix) (pages int) {
	p.m.t.Helper()
	run := prefix.Run(p.m.spaces[space], 0, len(prefix))
	n, err := p.e.Lookup(owner(space), 1, 0, run.Hashes)
	if err != nil {
		p.m.t.Fatal(err)
	}
	defer func() {
		if err := p.e.Cancel(owner(space), 1); err != nil && n > 0 {
			p.m.t.Fatal(err)
		}
	}()
	return n
}

// verifyAll checks all that was found of a prefix.
func (p *process) verifyAll(space int, prefix tiertest.Prefix) {
	p.m.t.Helper()
	run := prefix.Run(p.m.spaces[space], 0, len(prefix))
	for {
		list, _, err := p.e.NextVerify(owner(space), 0, run.Hashes, nil, nil)
		if err != nil {
			p.m.t.Fatal(err)
		}
		if len(list) == 0 {
			return
		}
		p.d.Verify(p.m.t.Context(), list)
	}
}

func randomPrefix(rnd *rand.Rand, pages, tokens int) tiertest.Prefix {
	p := make(tiertest.Prefix, pages)
	for i := range p {
		p[i] = byte(rnd.IntN(tokens))
	}
	return p
}

func copyFile(t testing.TB, from *os.File, to string) {
	t.Helper()
	st, err := from.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, st.Size())
	if _, err := from.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

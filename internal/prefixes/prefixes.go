// Package prefixes runs one engine with one prefix over a sidecar's sockets as vLLM does: a worker
// that stores the prefix and checks every byte of it, and a scheduler that looks it up. Benches and
// tests of the sidecar use it. Of the sidecar it imports only the messages and their client.
package prefixes

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// Patience is how long a sidecar has for a reply, however busy the machine is.
const Patience = time.Minute

// DigestBytes is the size of the hash of a page.
const DigestBytes = sha256.Size

// Digest returns the hash of a page of the prefix with this number: SHA-256 of both numbers, each
// as 8 bytes, little-endian. bench/lookup.py computes the same.
func Digest(prefix, page int) [DigestBytes]byte {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(prefix))
	binary.LittleEndian.PutUint64(b[8:], uint64(page))
	return sha256.Sum256(b[:])
}

// Digests returns the hashes of the first pages of a prefix, packed.
func Digests(prefix, pages int) []byte {
	hashes := make([]byte, 0, pages*DigestBytes)
	for page := range pages {
		d := Digest(prefix, page)
		hashes = append(hashes, d[:]...)
	}
	return hashes
}

// Content writes the content of a page to p. It depends only on the page's number.
func Content(page int, p []byte) {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(page))
	_, _ = rand.NewChaCha8(seed).Read(p) // never fails
}

// A Prefix is a prefix with the two sessions that store it and look it up. One goroutine at a time
// may use it.
type Prefix struct {
	hashes []byte
	worker *Worker

	scheduler *client.Session
	lookups   *client.Lookups
	lookup    uint64 // the last lookup's id; 0 before the first
}

// Dial connects a worker and a scheduler to the sidecar that owns the endpoint dir. number selects
// their prefix. Nothing is stored yet.
func Dial(dir string, shape Shape, number, pages int) (_ *Prefix, err error) {
	p := &Prefix{hashes: Digests(number, pages)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.worker, err = DialWorker(dir, shape); err != nil {
		return nil, err
	}
	return p, p.connectScheduler(dir)
}

func (p *Prefix) connectScheduler(dir string) (err error) {
	hello := p.worker.shape.hello()
	hello.Role, hello.PageBytes, hello.Direct = wire.RoleScheduler, 0, p.worker.shape.Direct
	if p.scheduler, err = client.Dial(dir, &hello, Patience); err != nil {
		return err
	}
	p.lookups, err = p.scheduler.Lookups()
	return err
}

// Reconnect opens both sessions anew, after those before have ended. The worker keeps its memory,
// and offers it to the sidecar.
func (p *Prefix) Reconnect(dir string) error {
	if err := errors.Join(p.leaveScheduler(), p.worker.Reconnect(dir)); err != nil {
		return err
	}
	return p.connectScheduler(dir)
}

func (p *Prefix) leaveScheduler() error {
	var errs []error
	if p.lookups != nil {
		errs = append(errs, p.lookups.Close())
	}
	if p.scheduler != nil {
		errs = append(errs, p.scheduler.Close())
	}
	p.lookups, p.scheduler, p.lookup = nil, nil, 0
	return errors.Join(errs...)
}

// Close ends the sessions. It is idempotent.
func (p *Prefix) Close() error {
	err := p.leaveScheduler()
	if p.worker != nil {
		err = errors.Join(err, p.worker.Close())
	}
	p.worker = nil
	return err
}

// Select changes which prefix is stored, looked up and verified from now on, and how many of its
// pages. The leases of the last lookup end.
func (p *Prefix) Select(number, pages int) error {
	err := p.Cancel()
	p.hashes = Digests(number, pages)
	return err
}

// Memory is Worker.Memory.
func (p *Prefix) Memory() (mapped, kept int64) { return p.worker.Memory() }

// Pages returns the number of pages.
func (p *Prefix) Pages() int { return len(p.hashes) / DigestBytes }

// Words returns the hashes in hexadecimal, one a page.
func (p *Prefix) Words() []string {
	words := make([]string, p.Pages())
	for i := range words {
		words[i] = fmt.Sprintf("%x", p.hashes[DigestBytes*i:DigestBytes*(i+1)])
	}
	return words
}

// Store writes the prefix into the arena. It returns after all of it is committed.
func (p *Prefix) Store() error { return p.worker.Store(p.hashes, Content) }

// Lookup looks the whole prefix up and returns how long that took. It returns an error unless every
// page hits. It first frees the leases of the lookup before.
func (p *Prefix) Lookup() (time.Duration, error) {
	pages, took, err := p.find()
	if err == nil && pages != p.Pages() {
		err = fmt.Errorf("hit %d of %d pages", pages, p.Pages())
	}
	return took, err
}

// Find looks the prefix up and returns how many of its pages hit. It first frees the leases of the
// lookup before.
func (p *Prefix) Find() (pages int, err error) {
	pages, _, err = p.find()
	return pages, err
}

func (p *Prefix) find() (pages int, took time.Duration, err error) {
	if err := p.Cancel(); err != nil {
		return 0, 0, err
	}
	p.lookup++
	m := wire.Lookup{Session: p.scheduler.Welcome.Session, Secret: p.scheduler.Welcome.Secret,
		Lookup: p.lookup, Hashes: p.hashes, DeadlineMs: uint32(Patience.Milliseconds()),
		Tenant: wire.Label(p.worker.shape.Tenant)}
	start := time.Now()
	r, err := p.lookups.Lookup(&m, Patience+10*time.Second)
	return int(r.HitPages), time.Since(start), err
}

// Cancel frees the leases of the last lookup. It has no effect if there are none.
func (p *Prefix) Cancel() error {
	if p.lookup == 0 {
		return nil
	}
	return p.lookups.Send((&wire.Cancel{Session: p.scheduler.Welcome.Session,
		Secret: p.scheduler.Welcome.Secret, Lookup: p.lookup}).Append(nil))
}

// Verify loads the hits of the last lookup, compares every byte and releases the leases.
func (p *Prefix) Verify() error {
	shape, session := p.worker.shape, p.worker.session
	names := wire.NamesOf(p.hashes, DigestBytes, 0, shape.PagesPerChunk)
	m := wire.PrepareLoad{
		ID: session.NextID(), Session: p.scheduler.Welcome.Session, Lookup: p.lookup,
		Ticket: p.scheduler.Ticket(p.lookup), Pages: uint32(p.Pages()), Names: names[:],
	}
	var g wire.LoadGrant
	if err := p.worker.call(&m, &g); err != nil {
		return err
	}
	want := make([]byte, shape.PageBytes)
	loaded := 0
	err := p.worker.each(g.Extents, func(page int, got []byte) error {
		if Content(page, want); !bytes.Equal(want, got) {
			return fmt.Errorf("page %d came back wrong", page)
		}
		loaded++
		return nil
	})
	if err != nil {
		return err
	}
	if loaded != p.Pages() {
		return fmt.Errorf("%d pages of %d were loaded", loaded, p.Pages())
	}
	if err := session.Send(&wire.Release{Load: g.Load}); err != nil {
		return err
	}
	return p.worker.sync()
}

package prefixes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// A Shape describes the pages that an engine stores.
type Shape struct {
	PageBytes     int64
	PagesPerChunk int
}

// EngineID is the engine that every worker and scheduler of this package belongs to.
const EngineID = "bench"

// PageTokens is how many tokens a page holds.
const PageTokens = 16

// hello returns a worker's first message. A scheduler's has another role and no page size.
func (s Shape) hello() wire.Hello {
	return wire.Hello{
		Role: wire.RoleWorker, EngineID: EngineID, PageTokens: PageTokens,
		PageBytes: uint64(s.PageBytes), PagesPerChunk: uint32(s.PagesPerChunk),
		DigestBytes: DigestBytes,
	}
}

// A Worker is an engine's worker: a session, and the sidecar's regions, mapped as vLLM's worker
// maps them. One goroutine at a time may use it.
type Worker struct {
	shape   Shape
	session *client.Session
	answers chan []byte // replies to requests; closed when the session has ended
	ended   error       // why the session ended; read only after answers is closed

	mu      sync.RWMutex // read-held while the bytes of a region are used
	regions map[uint32]*dax.Attached
}

// DialWorker connects a worker to the sidecar that owns the endpoint dir.
func DialWorker(dir string, shape Shape) (*Worker, error) {
	hello := shape.hello()
	session, err := client.Dial(dir, &hello, Patience)
	if err != nil {
		return nil, err
	}
	w := &Worker{shape: shape, session: session, answers: make(chan []byte, 1),
		regions: map[uint32]*dax.Attached{}}
	go w.receive()
	return w, nil
}

// Close ends the session and unmaps the regions.
func (w *Worker) Close() error {
	err := w.session.Close()
	for range w.answers { // until the receiver has ended
		continue
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.regions {
		err = errors.Join(err, r.Close())
	}
	clear(w.regions)
	return err
}

// receive maps and unmaps regions at the sidecar's request, and passes all other messages on, until
// the session ends.
func (w *Worker) receive() {
	defer close(w.answers)
	for {
		m, files, err := w.session.Recv(time.Hour)
		if err == nil {
			switch t, _ := wire.Peek(m); t {
			case wire.TypeRegionAdded:
				err = w.attach(m, files)
			case wire.TypeRegionRemoved:
				err = w.detach(m)
			default:
				w.answers <- bytes.Clone(m)
			}
		}
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			w.ended = err
			return
		}
	}
}

// attach maps the region of a RegionAdded. It maps another sidecar's region read-only.
func (w *Worker) attach(m []byte, files []*os.File) error {
	var added wire.RegionAdded
	if err := added.Decode(m, &wire.DefaultLimits); err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("region %d came with %d files", added.Region, len(files))
	}
	var region *dax.Attached
	var err error
	offset, size, page := int64(added.Offset), int64(added.SizeBytes), int64(added.PageSize)
	if added.ReadOnly {
		region, err = dax.AttachReadOnly(int(files[0].Fd()), offset, size, page)
	} else {
		region, err = dax.Attach(files[0], offset, size, page)
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.regions[added.Region] = region
	w.mu.Unlock()
	return w.session.Send(&wire.RegionMapped{Region: added.Region})
}

// detach unmaps the region of a RegionRemoved once its bytes are not in use.
func (w *Worker) detach(m []byte) error {
	var removed wire.RegionRemoved
	if err := removed.Decode(m, &wire.DefaultLimits); err != nil {
		return err
	}
	w.mu.Lock()
	region := w.regions[removed.Region]
	delete(w.regions, removed.Region)
	w.mu.Unlock()
	if region == nil {
		return fmt.Errorf("region %d is removed, but was never added", removed.Region)
	}
	return errors.Join(region.Close(),
		w.session.Send(&wire.RegionUnmapped{Region: removed.Region}))
}

// each calls do with every page of the extents and its bytes, until do fails.
func (w *Worker) each(extents []wire.Extent, do func(page int, p []byte) error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	for _, e := range extents {
		region := w.regions[e.Region]
		if region == nil {
			return fmt.Errorf("extent %+v is in no mapped region", e)
		}
		mem, size := region.Bytes(), uint64(w.shape.PageBytes)
		if e.Offset > uint64(len(mem)) || (uint64(len(mem))-e.Offset)/size < uint64(e.Pages) {
			return fmt.Errorf("extent %+v is outside its region of %d bytes", e, len(mem))
		}
		for i := range uint64(e.Pages) {
			at := e.Offset + i*size
			if err := do(int(e.Page)+int(i), mem[at:at+size]); err != nil {
				return err
			}
		}
	}
	return nil
}

// call sends a request and waits for its reply.
func (w *Worker) call(request, reply wire.Message) error {
	if err := w.session.Send(request); err != nil {
		return err
	}
	select {
	case m, ok := <-w.answers:
		if !ok {
			return fmt.Errorf("the worker's session has ended: %w", w.ended)
		}
		if t, _ := wire.Peek(m); t == wire.TypeError {
			var e wire.Error
			if err := e.Decode(m, &wire.DefaultLimits); err != nil {
				return err
			}
			return (*client.CallError)(&e)
		}
		return reply.Decode(m, &wire.DefaultLimits)
	case <-time.After(Patience):
		return fmt.Errorf("a worker's request: %w", os.ErrDeadlineExceeded)
	}
}

// sync returns after the sidecar has handled everything that the worker has sent.
func (w *Worker) sync() error {
	return w.call(&wire.Ping{ID: w.session.NextID()}, new(wire.Pong))
}

// maxStorePages bounds a store, because the sidecar limits how much of the arena may be in flight.
const maxStorePages = 1024

// Store stores the pages of a whole prefix, given by their hashes. It returns after all of them are
// committed. It returns an error if a page found no room or is held already. fill writes the
// content of a page; if it is nil, the pages keep the earlier bytes of their slots.
func (w *Worker) Store(hashes []byte, fill func(page int, p []byte)) error {
	pages := len(hashes) / DigestBytes
	step := min(wire.MaxStorePages(DigestBytes), maxStorePages) /
		w.shape.PagesPerChunk * w.shape.PagesPerChunk
	if step == 0 {
		return fmt.Errorf("%d pages a chunk are too many for one message", w.shape.PagesPerChunk)
	}
	for from := 0; from < pages; from += step {
		to := min(from+step, pages)
		m := wire.PrepareStore{ID: w.session.NextID(), FirstPage: uint32(from),
			Hashes: hashes[DigestBytes*from : DigestBytes*to]}
		if from > 0 {
			m.Prev = hashes[DigestBytes*(from-1) : DigestBytes*from]
		}
		var g wire.StoreGrant
		if err := w.call(&m, &g); err != nil {
			return err
		}
		if g.Shed > 0 || g.Held > 0 {
			return fmt.Errorf("of %d pages, %d found no room and %d were held", to-from, g.Shed,
				g.Held)
		}
		if fill != nil {
			if err := w.each(g.Grants, func(page int, p []byte) error {
				fill(page, p)
				return nil
			}); err != nil {
				return err
			}
		}
		if err := w.session.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			return err
		}
	}
	return w.sync()
}

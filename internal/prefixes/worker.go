package prefixes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// A Shape describes the pages that an engine stores.
type Shape struct {
	PageBytes     int64
	PagesPerChunk int
	// Direct has schedulers use direct sockets, as vLLM's do, instead of ZMQ.
	Direct bool
	// Tenant is the name that requests carry. Default: none.
	Tenant string
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

	mu     sync.RWMutex // read-held while the bytes of a region are used
	memory *client.Memory
}

// DialWorker connects a worker to the sidecar that owns the endpoint dir.
func DialWorker(dir string, shape Shape) (*Worker, error) {
	w := &Worker{shape: shape, memory: client.NewMemory()}
	if err := w.connect(dir); err != nil {
		return nil, err
	}
	return w, nil
}

// connect opens a session on the memory of the ones before.
func (w *Worker) connect(dir string) error {
	hello, held := w.shape.hello(), w.memory.Held()
	hello.Held = uint32(len(held))
	session, err := client.Dial(dir, &hello, Patience, held...)
	if err != nil {
		return err
	}
	w.session, w.answers = session, make(chan []byte, 1)
	go w.receive()
	return w.memory.BeginSession()
}

// Reconnect opens another session, after the one before has ended. The worker keeps its memory, and
// offers it to the sidecar.
func (w *Worker) Reconnect(dir string) error {
	if err := w.leave(); err != nil {
		return err
	}
	return w.connect(dir)
}

// leave ends the session.
func (w *Worker) leave() error {
	if w.session == nil { // the last attempt to connect has failed
		return nil
	}
	w.mu.Lock()
	err := w.memory.EndSession(w.session)
	w.mu.Unlock()
	err = errors.Join(err, w.session.Close())
	for range w.answers { // until the receiver has ended
		continue
	}
	w.session = nil
	return err
}

// Close ends the session and unmaps the regions.
func (w *Worker) Close() error {
	err := w.leave()
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(err, w.memory.Close())
}

// Memory returns the sizes of the regions that sidecars have announced, in bytes: of those that
// were mapped for it, and of those that the worker had kept.
func (w *Worker) Memory() (mapped, kept int64) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.memory.MappedBytes, w.memory.KeptBytes
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
				files = nil
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
	err := added.Decode(m, &wire.DefaultLimits)
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("region %d came with %d files", added.Region, len(files))
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return err
	}
	w.mu.Lock()
	err = w.memory.Add(&added, files[0])
	w.mu.Unlock()
	if err != nil {
		return err
	}
	return w.session.Send(&wire.RegionMapped{Region: added.Region})
}

// detach unmaps the region of a RegionRemoved once its bytes are not in use.
func (w *Worker) detach(m []byte) error {
	var removed wire.RegionRemoved
	if err := removed.Decode(m, &wire.DefaultLimits); err != nil {
		return err
	}
	w.mu.Lock()
	err := w.memory.Remove(removed.Region)
	w.mu.Unlock()
	return errors.Join(err, w.session.Send(&wire.RegionUnmapped{Region: removed.Region}))
}

// each calls do with every page of the extents and its bytes, until do fails.
func (w *Worker) each(extents []wire.Extent, do func(page int, p []byte) error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	for _, e := range extents {
		mem, size := w.memory.Bytes(e.Region), uint64(w.shape.PageBytes)
		if mem == nil {
			return fmt.Errorf("extent %+v is in no mapped region", e)
		}
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
			Hashes: hashes[DigestBytes*from : DigestBytes*to],
			Tenant: wire.Label(w.shape.Tenant)}
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

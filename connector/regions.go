package connector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/ipc/wire"
)

// Region is a part of the arena, or with ReadOnly of another sidecar's, as workers are told of it:
// SizeBytes at OffsetBytes of FD, which is its owner's and stays open until [Server.RetractRegion]
// returns or the Server is closed. The offset and the address that it is mapped at are multiples of
// PageSize. No two regions of a run have the same ID, also one after the other.
type Region struct {
	ID                               uint32
	Kind                             string // a dax.Kind or dax.DeviceKind
	FD                               int
	OffsetBytes, SizeBytes, PageSize int64
	ReadOnly                         bool // loads may name it, stores do not
}

// errRegionKept is why a worker is given up that does not let go of a region.
var errRegionKept = errors.New("it does not unmap a region that is removed")

func (r *Region) message(generation uint64) []byte {
	m := wire.RegionAdded{
		Region: r.ID, Generation: generation, Kind: r.Kind, Offset: uint64(r.OffsetBytes),
		SizeBytes: uint64(r.SizeBytes), PageSize: uint64(r.PageSize),
		ReadOnly: r.ReadOnly,
	}
	return m.Append(nil)
}

// AddRegion makes r part of the arena as region id: it announces it, waits for workers to map it,
// at most for the patience, and then adds it to the engine.
func (s *Server) AddRegion(id uint32, r *dax.Region, patience time.Duration) error {
	s.AnnounceRegion(Region{ID: id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize()})
	s.AwaitRegion(id, patience)
	return s.engine.AddRegion(id, r.Size())
}

// AnnounceRegion tells workers of a region, before the first grant can name it: those that are
// connected have its fd when it returns, later ones get it with their handshake. A worker that does
// not take it within the socket's patience is given up and cannot delay this further. It panics if
// there is or was a region of that id.
func (s *Server) AnnounceRegion(r Region) {
	s.mu.Lock()
	if _, was := s.retracted[r.ID]; was ||
		slices.ContainsFunc(s.regions, func(o Region) bool { return o.ID == r.ID }) {
		s.mu.Unlock()
		panic(fmt.Sprintf("connector: region %d announced again", r.ID))
	}
	// From here on a new worker finds it among its first regions.
	s.regions = append(s.regions, r)
	workers := s.workers()
	for _, w := range workers {
		w.mapping[r.ID] = make(chan struct{})
	}
	s.mu.Unlock()

	message := r.message(s.cfg.Generation)
	eachOf(workers, func(w *session) {
		if err := w.push(message, r.FD); err != nil {
			s.giveUp(w, "giving up a worker that does not take a new region", r.ID, err)
		}
	})
}

// AwaitRegion returns when the workers that were connected when the region was announced have
// mapped it, or have found that they cannot, or after the patience: until then a store that is
// granted room in it may find it unmapped, and be lost. Mapping can take long, where a device's
// driver pins every page. A worker that was late with a region before, and is still, is not waited
// for, and nobody is once the server drains.
func (s *Server) AwaitRegion(id uint32, patience time.Duration) {
	s.mu.Lock()
	mapped := make(map[*session]chan struct{})
	for _, w := range s.workers() {
		if c := w.mapping[id]; c != nil && !w.late {
			mapped[w] = c
		}
	}
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for w, c := range mapped {
		select {
		case <-c:
		case <-w.struck:
		case <-s.drains:
			return
		case <-ctx.Done():
			s.mu.Lock()
			late := w.mapping[id] == c // it may have mapped it while another was waited for
			w.late = w.late || late
			s.mu.Unlock()
			if late {
				w.log.Warn("a worker takes long to map a region; what it stores there meanwhile is lost", zap.Uint32("region", id), zap.Duration("waited", patience))
			}
		}
	}
}

// mapped notes that a worker has mapped a region, or cannot.
func (s *Server) mapped(ses *session, id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ses.late = false
	done(ses.mapping, id)
}

// done has nobody wait any longer for what is to become of a region, and says whether anybody
// could. Server.mu is held.
func done(waiting map[uint32]chan struct{}, id uint32) bool {
	c := waiting[id]
	if c == nil {
		return false
	}
	delete(waiting, id)
	close(c)
	return true
}

// RetractRegion has workers unmap a region that was announced. It returns when all that are
// connected have said so: one that does not within the patience, from now on, is given up. Workers
// that connect from now on never hear of the region. Nobody may have a lease in it or be granted
// one: then a worker that lives on, lingering or given up, has no copy under way there. A region
// that is not announced, or is being retracted already, is not waited for.
func (s *Server) RetractRegion(id uint32, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s.retractRegion(ctx, id)
}

// retractRegion is RetractRegion with patience until ctx is done.
func (s *Server) retractRegion(ctx context.Context, id uint32) {
	s.mu.Lock()
	i := slices.IndexFunc(s.regions, func(r Region) bool { return r.ID == id })
	if i < 0 {
		s.mu.Unlock()
		return
	}
	s.regions = slices.Delete(s.regions, i, i+1)
	s.retracted[id] = struct{}{}
	// Each of these has heard of the region or will, by its handshake, before it hears of its end:
	// push comes after both.
	workers := s.workers()
	unmapped := make(map[*session]chan struct{}, len(workers))
	for _, w := range workers {
		unmapped[w] = make(chan struct{})
		w.unmapping[id] = unmapped[w]
		done(w.mapping, id)
	}
	s.mu.Unlock()

	message := (&wire.RegionRemoved{Region: id}).Append(nil)
	eachOf(workers, func(w *session) {
		if err := w.push(message); err != nil {
			s.giveUp(w, "giving up a worker that does not take the end of a region", id, err)
			return
		}
		select {
		case <-unmapped[w]:
		case <-w.struck:
		case <-ctx.Done():
			select {
			case <-unmapped[w]: // it may be we who are late
			default:
				s.giveUp(w, "giving up a worker that does not unmap a region", id, errRegionKept)
			}
		}
	})
}

// unmapped notes that a worker has let go of a region. The error is for one that nobody asked for.
func (s *Server) unmapped(ses *session, id uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !done(ses.unmapping, id) {
		return fmt.Errorf("%w: region %d is not to be unmapped", wire.ErrMalformed, id)
	}
	return nil
}

// workers are the workers that are welcomed, or about to be. s.mu is held.
func (s *Server) workers() []*session {
	var workers []*session
	for _, ses := range s.sessions {
		if ses.role == wire.RoleWorker {
			workers = append(workers, ses)
		}
	}
	return workers
}

// eachOf calls f for each of the workers at a time, and returns when all calls have.
func eachOf(workers []*session, f func(w *session)) {
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { f(w) })
	}
	wg.Wait()
}

// giveUp wants no more of a worker that does not keep up with the regions, or has gone. Its own
// goroutine ends it.
func (s *Server) giveUp(w *session, why string, region uint32, err error) {
	if errors.Is(err, ipc.ErrPeerStuck) || errors.Is(err, errRegionKept) {
		s.count.fail(KindSend)
		w.log.Warn(why, zap.Uint32("region", region), zap.Error(err))
	}
	w.conn.GiveUp(err)
}

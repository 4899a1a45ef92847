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

// Region is a region of the arena, or with ReadOnly of another sidecar's arena, as workers map it:
// SizeBytes at OffsetBytes of FD. The caller owns FD, and keeps it open until
// [Server.RetractRegion] returns or the Server is closed. The offset and the address that the
// region is mapped at are multiples of PageSize. An ID is used once in a run of the sidecar.
type Region struct {
	ID                               uint32
	Kind                             string // a dax.Kind or dax.DeviceKind
	FD                               int
	OffsetBytes, SizeBytes, PageSize int64
	ReadOnly                         bool // loads may name it, stores do not
}

// mayFail reports whether the region is of the arena and on a device or in a file. Reading memory
// cannot fail so, and takes as long as copying it.
func (r *Region) mayFail() bool {
	switch dax.Kind(r.Kind) {
	case dax.KindMemfd, dax.KindHugetlb, dax.KindTHP:
		return false
	}
	return !r.ReadOnly
}

// errRegionKept is the cause for giving up a worker that does not unmap a region.
var errRegionKept = errors.New("it does not unmap a region that is removed")

func (r *Region) message(generation uint64) []byte {
	m := wire.RegionAdded{
		Region: r.ID, Generation: generation, Kind: r.Kind, Offset: uint64(r.OffsetBytes),
		SizeBytes: uint64(r.SizeBytes), PageSize: uint64(r.PageSize),
		ReadOnly: r.ReadOnly,
	}
	return m.Append(nil)
}

// AddRegion makes r part of the arena as region id. It announces the region, waits until workers
// have mapped it, at most for patience, and then adds it to the engine.
func (s *Server) AddRegion(id uint32, r *dax.Region, patience time.Duration) error {
	s.AnnounceRegion(Region{ID: id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize()})
	s.AwaitRegion(id, patience)
	return s.engine.AddRegion(id, r.Size())
}

// AnnounceRegion sends a region to the workers. It must return before a grant names the region:
// connected workers then have been sent its fd, and later ones get it with their handshake. A
// worker that does not take it within the socket's patience is given up. It panics if there is or
// was a region of that id.
func (s *Server) AnnounceRegion(r Region) {
	s.mu.Lock()
	if _, was := s.retracted[r.ID]; was ||
		slices.ContainsFunc(s.regions, func(o Region) bool { return o.ID == r.ID }) {
		s.mu.Unlock()
		panic(fmt.Sprintf("connector: region %d announced again", r.ID))
	}
	// From here on a new worker gets it with its handshake.
	s.regions = append(s.regions, r)
	if r.mayFail() {
		s.frail.Add(1)
	}
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

// RegionsReady tells workers that all regions that the arena begins with are announced. It must be
// called once, with [Config].Preparing. Workers then unmap what they have kept of earlier sessions
// and was not announced. A worker that does not take the message is given up.
func (s *Server) RegionsReady() {
	s.mu.Lock()
	s.preparing = false // a worker that connects from now on has all regions with its handshake
	workers := s.workers()
	message := (&wire.RegionsReady{Regions: uint32(len(s.regions))}).Append(nil)
	s.mu.Unlock()
	eachOf(workers, func(w *session) {
		if err := w.push(message); err != nil {
			s.giveUp(w, "giving up a worker that does not take the end of the regions", 0, err)
		}
	})
}

// AwaitRegion waits until the workers that were connected when the region was announced have mapped
// it or have found that they cannot, at most for patience. Before that a worker may lose a store
// that is granted slots in the region. Mapping takes long where a device's driver pins every page.
// It does not wait for a worker that was late with a region and has mapped none since, nor for any
// once the server drains.
func (s *Server) AwaitRegion(id uint32, patience time.Duration) {
	s.mu.Lock()
	mapped := make(map[*session]chan struct{})
	for _, w := range s.workers() {
		if c := w.mapping[id]; c != nil && !w.late {
			mapped[w] = c
		}
	}
	changed, handing := s.modeChanged, s.mode.Load() != modeServing
	s.mu.Unlock()
	if handing { // another process serves soon, with this region or without it
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for w, c := range mapped {
		select {
		case <-c:
		case <-w.struck:
		case <-s.drains:
			return
		case <-changed:
			return
		case <-ctx.Done():
			s.mu.Lock()
			late := w.mapping[id] == c // w may have mapped it while the loop waited for another
			w.late = w.late || late
			s.mu.Unlock()
			if late {
				w.log.Warn("a worker takes long to map a region; what it stores there meanwhile is lost", zap.Uint32("region", id), zap.Duration("waited", patience))
			}
		}
	}
}

// mapped handles a worker's report that it has mapped a region, or cannot.
func (s *Server) mapped(ses *session, id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ses.late = false
	done(ses.mapping, id)
}

// done ends the waits for a worker's report about a region, and reports whether one was due. The
// caller holds Server.mu.
func done(waiting map[uint32]chan struct{}, id uint32) bool {
	c := waiting[id]
	if c == nil {
		return false
	}
	delete(waiting, id)
	close(c)
	return true
}

// RetractRegion makes workers unmap a region. It returns when all connected workers have reported
// that they have. A worker that does not within patience is given up. Workers that connect later
// are not sent the region. There must be no lease in the region, and none may be granted from now
// on. Then no worker copies there, not even one that lingers or was given up. RetractRegion returns
// at once if the region is not announced or is being retracted already.
func (s *Server) RetractRegion(id uint32, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s.retractRegion(ctx, id)
}

// retractRegion is RetractRegion with ctx in place of the patience.
func (s *Server) retractRegion(ctx context.Context, id uint32) {
	s.mu.Lock()
	i := slices.IndexFunc(s.regions, func(r Region) bool { return r.ID == id })
	if i < 0 {
		s.mu.Unlock()
		return
	}
	if s.regions[i].mayFail() {
		s.frail.Add(-1)
	}
	s.regions = slices.Delete(s.regions, i, i+1)
	s.retracted[id] = struct{}{}
	// Each of these workers is sent the region before its end, because push sends after the
	// handshake and after the region's announcement.
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
			case <-unmapped[w]: // reported in time, and this goroutine is late
			default:
				s.giveUp(w, "giving up a worker that does not unmap a region", id, errRegionKept)
			}
		}
	})
}

// unmapped handles a worker's report that it has unmapped a region. It returns an error if the
// worker was not told to.
func (s *Server) unmapped(ses *session, id uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !done(ses.unmapping, id) {
		return fmt.Errorf("%w: region %d was not announced as going", wire.ErrMalformed, id)
	}
	return nil
}

// workers returns the sessions of workers. The caller holds s.mu.
func (s *Server) workers() []*session {
	var workers []*session
	for _, ses := range s.sessions {
		if ses.role == wire.RoleWorker {
			workers = append(workers, ses)
		}
	}
	return workers
}

// eachOf calls f for all workers at the same time, and returns when all calls have returned.
func eachOf(workers []*session, f func(w *session)) {
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { f(w) })
	}
	wg.Wait()
}

// giveUp gives up the connection of a worker that does not follow the regions or is gone. The
// worker's goroutine then ends the session.
func (s *Server) giveUp(w *session, why string, region uint32, err error) {
	if errors.Is(err, ipc.ErrPeerStuck) || errors.Is(err, errRegionKept) {
		s.count.fail(KindSend)
		w.log.Warn(why, zap.Uint32("region", region), zap.Error(err))
	}
	w.conn.GiveUp(err)
}

package arena

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/daxtier"
)

const (
	// drainEvery is how often devices that are drained are looked at.
	drainEvery = 250 * time.Millisecond
	// drainAttempt bounds one attempt to empty one, which waits for leases: other devices want
	// their turn.
	drainAttempt = 5 * time.Second
	// drainPause is how long there is none after one that did not come to its end.
	drainPause = time.Second
)

// A drainer empties the devices of the arena that are drained, one at a time, until they are gone
// or in use again. Changes that somebody asks for go first.
type drainer struct {
	turn sync.RWMutex // held for reading by a change that was asked for, for writing by an attempt

	mu     sync.Mutex
	asked  int                // changes that were asked for and have not ended
	stop   context.CancelFunc // ends the attempt under way; nil: there is none
	device string             // whose it is
}

// change lets a change begin that was asked for; the caller calls done.
func (q *drainer) change() (done func()) {
	q.mu.Lock()
	q.asked++
	if q.stop != nil {
		q.stop()
	}
	q.mu.Unlock()
	q.turn.RLock()
	return func() {
		q.turn.RUnlock()
		q.mu.Lock()
		q.asked--
		q.mu.Unlock()
	}
}

// emptying is the device that is being emptied because it is drained, or "".
func (q *drainer) emptying() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.device
}

// attempt calls try unless somebody asks for a change, which ends it.
func (q *drainer) attempt(ctx context.Context, device string,
	try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, drainAttempt)
	defer cancel()
	q.mu.Lock()
	if q.asked > 0 {
		q.mu.Unlock()
		return tiers.ErrBusy
	}
	q.stop, q.device = cancel, device
	q.mu.Unlock()
	defer func() {
		q.mu.Lock()
		q.stop, q.device = nil, ""
		q.mu.Unlock()
	}()
	q.turn.Lock()
	defer q.turn.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return try(ctx)
}

// drain empties the devices that are drained, until ctx is done: their chunks are moved to the
// others, or dropped where there is no room for them.
func (a *DAX) drain(ctx context.Context) {
	t := time.NewTimer(drainEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		wait := drainEvery
		for _, dev := range a.pool.Status().Devices {
			if dev.State == stateDrained && a.emptyDevice(ctx, dev.Path) != nil {
				wait = drainPause
			}
		}
		t.Reset(wait)
	}
}

// emptyDevice tries to empty and remove a device that is drained.
func (a *DAX) emptyDevice(ctx context.Context, path string) error {
	how := daxtier.Migrate
	err := a.drains.attempt(ctx, path, func(ctx context.Context) error {
		if st := deviceOf(a.pool.Status(), path); st == nil || st.State != stateDrained {
			// meanwhile somebody wanted it otherwise
			return nil
		}
		err := a.Remove(ctx, path, daxtier.Migrate, true)
		if errors.Is(err, daxtier.ErrNoRoom) {
			how = daxtier.Evict
			err = a.Remove(ctx, path, daxtier.Evict, true)
		}
		if err == nil {
			a.Log.Info("DAX device drained and removed from the arena: take it out of the settings too", zap.String("device", path), zap.String("chunks", map[daxtier.Mode]string{
				daxtier.Migrate: "moved to the other devices",
				daxtier.Evict:   "dropped: there was no room for them elsewhere",
			}[how]))
		}
		return err
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, context.Canceled) && !errors.Is(err, tiers.ErrBusy) &&
		!errors.Is(err, daxtier.ErrNotFound) {
		a.Log.Warn("a drained DAX device cannot be emptied yet; it is tried again",
			zap.String("device", path), zap.Error(err))
	}
	return err
}

// stateDrained is the state of a device that is drained.
const stateDrained = "draining"

// deviceOf is a device of a pool, or nil.
func deviceOf(st daxtier.Status, path string) *daxtier.DeviceStatus {
	path = filepath.Clean(path)
	i := slices.IndexFunc(st.Devices, func(d daxtier.DeviceStatus) bool { return d.Path == path })
	if i < 0 {
		return nil
	}
	return &st.Devices[i]
}

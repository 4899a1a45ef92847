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
	// drainEvery is the interval of attempts to empty drained devices.
	drainEvery = 250 * time.Millisecond
	// drainAttempt bounds one attempt, which waits for leases, so that all drained devices get
	// their turn.
	drainAttempt = 5 * time.Second
	// drainPause is the pause after an attempt that did not finish.
	drainPause = time.Second
)

// A drainer empties the drained devices of the arena, one at a time, until they are gone or in use
// again. Requested changes go first.
type drainer struct {
	turn sync.RWMutex // read-held by a requested change, write-held by an attempt

	mu     sync.Mutex
	asked  int                // requested changes that have not ended
	stop   context.CancelFunc // ends the present attempt; nil: there is none
	device string             // of the present attempt
}

// change begins a requested change. The caller must call done.
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

// emptying returns the drained device that is being emptied, or "".
func (q *drainer) emptying() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.device
}

// attempt calls try unless a change is requested. A change that is requested later ends try.
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

// drain empties the drained devices until ctx is done. It moves their chunks to other devices, or
// drops them if there is no room.
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

// emptyDevice tries to empty and remove a drained device.
func (a *DAX) emptyDevice(ctx context.Context, path string) error {
	how := daxtier.Migrate
	err := a.drains.attempt(ctx, path, func(ctx context.Context) error {
		if st := deviceOf(a.pool.Status(), path); st == nil || st.State != stateDrained {
			// another request changed the device's state
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

// stateDrained is the state of a drained device.
const stateDrained = "draining"

// deviceOf returns a device of a pool, or nil.
func deviceOf(st daxtier.Status, path string) *daxtier.DeviceStatus {
	path = filepath.Clean(path)
	i := slices.IndexFunc(st.Devices, func(d daxtier.DeviceStatus) bool { return d.Path == path })
	if i < 0 {
		return nil
	}
	return &st.Devices[i]
}

package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/ipc"
	"lookaside/ipc/handover"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/tiers/directory"
)

// A sidecar hands over to a new process under traffic (lookaside serve --takeover):
//
//	new process                        old process
//	Begin ───────────────────────────▶ checks that the new one can take what it holds, or refuses
//	                                   holds stores back, lets open ones end, or goes on and refuses
//	          ◀─────────────────────── Held: nothing under way needs this process any more
//	Go ──────────────────────────────▶ from here on there is no way back
//	                                   ends tiers, peers and admin; goes on with lookups and loads
//	          ◀─────────────────────── Memory: lock, session socket, regions
//	restores what the arena holds
//	Ready ───────────────────────────▶ stops
//	          ◀─────────────────────── State: sessions, lookups and leases, with their sockets
//	serves
//	Done ────────────────────────────▶ exits
//
// Clients wait from Ready to Done, however much the arena holds.
//
// # If a process dies
//
// Before Go the old process goes on as if nothing had been asked. After Go it cannot: its tiers are
// closed, and after State the new process may have granted what the old one takes for free. So it
// ends, as if it had been killed: sessions end, clients connect to the next sidecar and give the
// memory back to it. If the old process dies, the new one ends with an error, for the same reason:
// what the old one did after its last word is not known.

const (
	// beginPatience bounds the wait for the other process where it has nothing to do.
	beginPatience = 5 * time.Second
	// readyPatience bounds the wait for the new process to open its tiers and to restore.
	readyPatience = 2 * time.Minute
	// settlePatience is how long lookups that wait for tiers are waited for.
	settlePatience = 250 * time.Millisecond
	// freezePatience bounds the wait for sessions to stop.
	freezePatience = 2 * time.Second
)

// serveHandovers answers processes that want to take over, one at a time, until the listener is
// closed.
func (d *Daemon) serveHandovers() {
	defer close(d.handoversEnded)
	log := d.log.Named("handover")
	for {
		h, err := d.handovers.Accept()
		if err != nil {
			if !errors.Is(err, ipc.ErrClosed) {
				log.Warn("no process can take over any more", zap.Error(err))
			}
			return
		}
		err = d.handOver(h, log)
		h.Close()
		switch {
		case err == nil:
			log.Info("handed over", zap.Int32("to_pid", h.Peer().PID))
			d.finish(nil)
			return
		case d.leaving.Load():
			log.Error("the process that takes over has failed; this one cannot go on either",
				zap.Int32("pid", h.Peer().PID), zap.Error(err))
			d.finish(fmt.Errorf("hand over to pid %d: %w", h.Peer().PID, err))
			return
		}
		log.Warn("not handed over; goes on", zap.Int32("to_pid", h.Peer().PID), zap.Error(err))
	}
}

// handOver hands over to one process. It sets d.leaving once there is no way back, and d.given once
// the other process may have what clients share with this one. Without an error the other process
// serves.
func (d *Daemon) handOver(h *ipc.Handover, log *zap.Logger) error {
	ctx := d.handovering
	refuse := func(err error) error {
		m := handover.Refuse{Reason: err.Error()}
		_ = h.Send(handover.TypeRefuse, handover.Encode(m.Fields))
		return err
	}
	var begin handover.Begin
	if err := receiveAlone(ctx, h, beginPatience, handover.TypeBegin, begin.Fields); err != nil {
		return err
	}
	if err := d.canHandOver(&begin); err != nil {
		return refuse(err)
	}
	log.Info("another process takes over", zap.Int32("pid", h.Peer().PID),
		zap.String("release", begin.Release))
	d.flushAll(ctx, log) // most of it, while everything goes on

	select {
	case d.handing <- struct{}{}:
		defer func() { <-d.handing }()
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return refuse(errors.New("it is shutting down"))
	}
	if err := d.hold(ctx); err != nil {
		d.server.Resume()
		return refuse(err)
	}
	err := h.Send(handover.TypeHeld, nil)
	if err == nil {
		err = receiveAlone(ctx, h, beginPatience, handover.TypeGo, nil)
	}
	if err != nil {
		d.server.Resume()
		return err
	}
	d.leaving.Store(true)
	return d.leave(h, log)
}

// flushAll writes what waits for tiers and for the directory, at most for lifecycle.flush.
func (d *Daemon) flushAll(ctx context.Context, log *zap.Logger) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Lifecycle.Flush)
	defer cancel()
	if err := errors.Join(d.stack.Flush(ctx), d.arena.Flush(ctx)); err != nil && ctx.Err() == nil {
		log.Warn("not all could be written before the handover", zap.Error(err))
	}
}

// canHandOver returns why the process that has sent begin cannot take over, or nil.
func (d *Daemon) canHandOver(begin *handover.Begin) error {
	own := beginOf(&d.cfg)
	st := d.engine.Stats()
	a := d.arena.Status(&st)
	switch {
	case begin.Handover != own.Handover:
		return fmt.Errorf("it hands over in version %d, and the new process in version %d: stop this one and start the new one", own.Handover, begin.Handover)
	case begin.Protocol != own.Protocol:
		return fmt.Errorf("its clients speak version %d of the protocol, and the new process version %d: restart vLLM with the new release", own.Protocol, begin.Protocol)
	case begin.Directory != own.Directory:
		return fmt.Errorf("the directory of its arena has version %d, and the new process reads version %d: the new process has to start empty, so stop this one first", own.Directory, begin.Directory)
	case d.onDAX != nil:
		return errors.New("its arena is on DAX, which is found again by a plain restart: stop it, and start the new one")
	case a.CapacityBytes == 0:
		return errors.New("its arena has no memory yet: try again")
	case a.Reuse.Waiting:
		return fmt.Errorf("processes of an earlier run may still copy in its arena: wait for them, or end them (pids %v)", a.Reuse.PIDs)
	case begin.ArenaKind != string(dax.KindAuto) && begin.ArenaKind != string(a.Kind):
		return fmt.Errorf("its arena is of kind %s, and the new process wants arena.kind %s",
			a.Kind, begin.ArenaKind)
	case begin.ArenaPath != own.ArenaPath && a.Kind == dax.KindFile:
		return fmt.Errorf("its arena is at %s, and the new process wants arena.path %s",
			own.ArenaPath, begin.ArenaPath)
	case begin.LimitBytes < a.CapacityBytes:
		return fmt.Errorf("its arena has %s, and the new process may have only %s (arena.limit)",
			bytesize.Format(a.CapacityBytes), bytesize.Format(begin.LimitBytes))
	case begin.MaxSessions < d.server.Sessions():
		return fmt.Errorf(
			"it has %d sessions, and the new process may have only %d (sessions.limit)", d.server.Sessions(), begin.MaxSessions)
	case begin.MaxSpaces < len(d.engine.Spaces()):
		return fmt.Errorf("it has %d spaces, and the new process may have only %d (spaces.limit)",
			len(d.engine.Spaces()), begin.MaxSpaces)
	case begin.MaxPages < own.MaxPages:
		return fmt.Errorf("its clients may name %d pages at once, and the new process allows only %d (lookup.max_pages)", own.MaxPages, begin.MaxPages)
	case begin.Lossy != own.Lossy:
		return fmt.Errorf("its tiers change what they keep by %q, those of the new process by %q, so that none of it could be used", own.Lossy, begin.Lossy)
	}
	_, err := d.arena.Handover()
	return err
}

// beginOf returns the Begin of a process with these settings.
func beginOf(cfg *settings.Config) handover.Begin {
	lossy := ""
	for _, f := range lossyFields(cfg.Tiers) {
		lossy = f.Value
	}
	return handover.Begin{
		Handover: handover.Version, Protocol: wire.Version, Directory: directory.Version,
		Release: VersionLine(), PID: os.Getpid(), ArenaKind: string(cfg.Arena.Kind),
		ArenaPath: cfg.Arena.Path, LimitBytes: cfg.Arena.Limit, MaxSessions: cfg.Sessions.Limit,
		MaxSpaces: cfg.Spaces.Limit, MaxPages: cfg.Lookup.MaxPages, Lossy: lossy,
	}
}

// hold waits until nothing under way needs this process: stores are held back, and lookups that
// need a tier or a peer. It waits at most for lifecycle.drain. With an error, the caller must
// resume.
func (d *Daemon) hold(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.Lifecycle.Drain, fmt.Errorf(
		"not done within lifecycle.drain (%v)", d.cfg.Lifecycle.Drain))
	defer cancel()
	if err := d.server.Hold(ctx); err != nil {
		return err
	}
	d.server.Quiet(len(d.tiers) > 0 || d.peers.lend())
	if err := d.server.AwaitChanges(ctx); err != nil {
		return err
	}
	d.stack.Settle(settlePatience)
	if d.peers == nil {
		return nil
	}
	// A copy from another sidecar's memory must end before the loan does.
	d.engine.DropPeer(0)
	for tick := time.NewTicker(time.Millisecond); d.stack.PeerStats().Leased > 0; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			tick.Stop()
			return fmt.Errorf("%w: pages that other sidecars lend are in use", context.Cause(ctx))
		}
	}
	return nil
}

// leave is the part of handOver without a way back.
func (d *Daemon) leave(h *ipc.Handover, log *zap.Logger) error {
	began := time.Now()
	ctx := context.Background()
	// Sessions with other hosts end, because TLS connections cannot be handed over. Their
	// schedulers connect to the other process.
	if err := d.closeHosts(); err != nil {
		log.Warn("ending the sessions with other hosts", zap.Error(err))
	}
	_ = d.handovers.Close() // the path is the other process's from now on
	d.handovers = nil
	// Nothing may change in the arena any more, except by lookups and loads.
	d.stop()
	d.wg.Wait()
	pins := d.operations.Pins()
	err := d.admin.Close()
	d.admin = nil
	d.operations.Close()
	d.stack.Close()
	peerRegion := d.peers.nextRegion()
	err = errors.Join(err, d.peers.close(), closeTiers(d.tiers))
	d.tiers = nil
	if d.events != nil {
		err = errors.Join(err, d.events.close())
		d.events = nil
	}
	if err != nil {
		log.Warn("closing for the handover", zap.Error(err))
	}
	flush, cancel := context.WithTimeout(ctx, d.cfg.Lifecycle.Flush)
	defer cancel()
	if err := d.arena.Flush(flush); err != nil {
		log.Warn("what was stored last is forgotten", zap.Error(err))
	}
	m := handover.Memory{Generation: d.generation, PeerRegion: peerRegion}
	if m.Pins, err = json.Marshal(pins); err != nil {
		return err
	}
	lock, sock, err := d.listener.FDs()
	if err != nil {
		return err
	}
	regions, err := d.arena.Handover()
	if err != nil {
		return err
	}
	if err := h.Send(handover.TypeMemory, handover.Encode(m.Fields),
		append([]int{lock, sock}, regions...)...); err != nil {
		return err
	}
	if err := receiveAlone(ctx, h, readyPatience, handover.TypeReady, nil); err != nil {
		return err
	}

	paused := time.Now()
	freeze, cancelFreeze := context.WithTimeout(ctx, freezePatience)
	defer cancelFreeze()
	if err := d.server.Freeze(freeze); err != nil {
		return err
	}
	state, fds, err := d.server.Export(d.lookups.Detach())
	if err != nil {
		return err
	}
	d.given.Store(true)
	d.arena.Leave()
	err = h.Send(handover.TypeState, state, fds...)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err == nil {
		err = receiveAlone(ctx, h, readyPatience, handover.TypeDone, nil)
	}
	if err != nil {
		return err
	}
	log.Info("the new process serves", zap.Duration("pause", time.Since(paused)),
		zap.Duration("in", time.Since(began).Round(time.Millisecond)), zap.Int("sockets", len(fds)),
		zap.Int("bytes", len(state)))
	return nil
}

// receiveAlone receives one message without files.
func receiveAlone(ctx context.Context, h *ipc.Handover, patience time.Duration, want uint32,
	fields func(*handover.Coder)) error {
	body, files, err := receive(ctx, h, patience, want)
	ipc.CloseFiles(files)
	if err != nil || fields == nil {
		return err
	}
	return handover.Decode(body, fields)
}

// receive receives one message of a type. It returns a *RefusedError for a Refuse.
func receive(ctx context.Context, h *ipc.Handover, patience time.Duration,
	want uint32) (body []byte, files []*os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer h.Until(ctx)()
	t, body, files, err := h.Recv()
	switch {
	case errors.Is(err, io.EOF):
		return nil, nil, fmt.Errorf("pid %d has ended: %w", h.Peer().PID, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, fmt.Errorf("pid %d does not answer: %w", h.Peer().PID,
			context.Cause(ctx))
	case err != nil:
		return nil, nil, err
	case t == handover.TypeRefuse:
		ipc.CloseFiles(files)
		var m handover.Refuse
		if err := handover.Decode(body, m.Fields); err != nil {
			return nil, nil, err
		}
		return nil, nil, &RefusedError{int(h.Peer().PID), m.Reason}
	case t != want:
		ipc.CloseFiles(files)
		return nil, nil, fmt.Errorf("%w: type %d, want %d", handover.ErrMalformed, t, want)
	}
	return body, files, nil
}

// ErrNoSidecar means that there is no sidecar to take over from.
var ErrNoSidecar = errors.New("no sidecar serves")

// RefusedError is the refusal of the sidecar that serves to hand over. It goes on serving.
type RefusedError struct {
	PID    int
	Reason string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the sidecar of pid %d does not hand over and goes on: %s", e.PID, e.Reason)
}

// A Takeover is what a sidecar has handed over to this process, as Origin.Takeover of its Start.
type Takeover struct {
	h      *ipc.Handover
	log    *zap.Logger
	memory handover.Memory
	files  []*os.File // lock, session socket, regions; nil once they are taken
	paused time.Time
}

// TakeOver asks the sidecar that serves in cfg.Runtime.Dir to hand over. When it returns, that one
// has held back all stores and waits: Start must follow at once, with the result as
// Origin.Takeover, or Close. A *RefusedError says that the other sidecar goes on.
func TakeOver(ctx context.Context, cfg *settings.Config, log *zap.Logger) (_ *Takeover, err error) {
	log = log.Named("takeover")
	if err := listenOptions(cfg, log).Check(); err != nil {
		return nil, err
	}
	h, err := ipc.DialHandover(cfg.Runtime.Dir)
	if errors.Is(err, ipc.ErrNoHandover) {
		if pid := ipc.Owner(cfg.Runtime.Dir); pid != 0 {
			return nil, &RefusedError{pid, "it is too old to hand over, or has not started yet"}
		}
		return nil, fmt.Errorf("%w in %s: start one without --takeover", ErrNoSidecar,
			cfg.Runtime.Dir)
	}
	if err != nil {
		return nil, err
	}
	t := &Takeover{h: h, log: log}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	log.Info("taking over; open stores end first", zap.Int32("from_pid", h.Peer().PID),
		zap.Duration("at_most", cfg.Lifecycle.Drain+cfg.Lifecycle.Flush))
	begin := beginOf(cfg)
	if err := h.Send(handover.TypeBegin, handover.Encode(begin.Fields)); err != nil {
		return nil, err
	}
	// The other process has its own settings, and bounds the wait by these.
	if _, _, err := receive(ctx, h, readyPatience, handover.TypeHeld); err != nil {
		return nil, err
	}
	if err := h.Send(handover.TypeGo, nil); err != nil {
		return nil, err
	}
	body, files, err := receive(ctx, h, readyPatience, handover.TypeMemory)
	if err != nil {
		return nil, err
	}
	t.files = files
	if err := handover.Decode(body, t.memory.Fields); err != nil {
		return nil, err
	}
	if len(files) < 2 {
		return nil, fmt.Errorf("%w: %d files with the memory", handover.ErrMalformed, len(files))
	}
	log.Info("memory taken over; restoring", zap.Int("regions", len(files)-2))
	return t, nil
}

// Close gives a takeover up that Start was not called with, or ends what Start has left of it.
func (t *Takeover) Close() {
	_ = t.h.Close()
	ipc.CloseFiles(t.files)
	t.files = nil
}

// listen makes the Listener.
func (t *Takeover) listen(dir string, opt ipc.Options) (*ipc.Listener, error) {
	lock, sock := t.files[0], t.files[1]
	t.files[0], t.files[1] = nil, nil
	return ipc.AdoptListener(dir, lock, sock, opt)
}

// regions returns the descriptors of the regions, which the caller owns.
func (t *Takeover) regions() (fds []int, err error) {
	for i, f := range t.files[2:] {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
			return nil, fmt.Errorf("a region: %w", err)
		}
		fds = append(fds, fd)
		ipc.CloseFiles([]*os.File{f})
		t.files[2+i] = nil
	}
	return fds, nil
}

// finishTakeover takes the sessions over, once all that the arena holds is restored.
func (d *Daemon) finishTakeover(ctx context.Context, t *Takeover, workers arena.Workers) error {
	if err := t.h.Send(handover.TypeReady, nil); err != nil {
		return err
	}
	t.paused = time.Now()
	body, files, err := receive(ctx, t.h, readyPatience, handover.TypeState)
	if err != nil {
		return err
	}
	adoption, err := d.server.Adopt(body, files, d.listener)
	if adoption != nil {
		defer adoption.Close() // what Start has not taken
	}
	if err != nil {
		return fmt.Errorf("take over the sessions: %w", err)
	}
	d.arena.Reuse(workers) // before stores that waited
	if err := d.openLookups(); err != nil {
		return err
	}
	sessions := adoption.Sessions()
	if err := adoption.Start(); err != nil {
		return err
	}
	// The other process ends when it reads this, or when this process dies.
	if err := t.h.Send(handover.TypeDone, nil); err != nil {
		return err
	}
	t.log.Info("sessions taken over", zap.Int("sessions", sessions),
		zap.Duration("pause", time.Since(t.paused)))
	return nil
}

// pins restores the pins of the process before.
func (t *Takeover) pins(o *admin.Operations) {
	var pins []admin.PinStatus
	if err := json.Unmarshal(t.memory.Pins, &pins); err != nil {
		t.log.Warn("pins are forgotten", zap.Error(err))
		return
	}
	o.AdoptPins(pins)
}

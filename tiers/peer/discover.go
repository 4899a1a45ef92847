package peer

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc"
)

// discover polls the directory until Close.
func (p *Peers) discover() {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
			p.poll()
		}
	}
}

// poll makes sure that the directory and our socket in it exist, and connects to new sidecars. Only
// one goroutine calls it at a time.
func (p *Peers) poll() {
	var id uint64
	err := p.beThere()
	if err == nil {
		id, err = p.dir.ID()
	}
	p.group.Store(id)
	if err != nil {
		if p.ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		news := p.off != err.Error()
		p.off = err.Error()
		p.mu.Unlock()
		if news {
			p.log.Warn("no other sidecars are looked for", zap.Error(err))
		}
		return
	}
	p.mu.Lock()
	if p.off != "" {
		p.log.Info("other sidecars are looked for", zap.String("dir", p.cfg.Dir))
	}
	p.off = ""
	p.mu.Unlock()
	found, err := p.dir.Peers(nil, 4*maxPeers)
	if err != nil {
		return // the sidecar has just ended
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	there := map[uint64]bool{}
	for _, gen := range found {
		there[gen] = true
		if gen == p.cfg.Generation || p.peers[gen] != nil || p.troubles[gen].again.After(now) {
			continue
		}
		if len(p.peers) == maxPeers {
			p.troubles[gen] = trouble{why: fmt.Sprintf("%d peers are the most", maxPeers),
				again: now.Add(retryAfter)}
			continue
		}
		conn, err := p.dir.Dial(gen, time.Second)
		switch {
		case errors.Is(err, ipc.ErrPeerGone), errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			p.note(gen, trouble{why: err.Error()})
			continue
		}
		b := newBorrower(p, gen, conn)
		p.peers[gen] = b
		p.wg.Go(b.run)
	}
	for gen := range p.troubles {
		if !there[gen] {
			delete(p.troubles, gen)
		}
	}
}

// note records why a sidecar is not borrowed from, and logs each reason once. The caller holds
// p.mu.
func (p *Peers) note(gen uint64, t trouble) {
	if p.troubles[gen].why != t.why {
		p.log.Warn("a sidecar is not borrowed from", zap.Uint64("peer", gen),
			zap.Int32("pid", t.pid), zap.String("why", t.why))
	}
	t.again = time.Now().Add(retryAfter)
	p.troubles[gen] = t
}

// beThere opens the directory and makes our socket in it, unless both still exist.
func (p *Peers) beThere() error {
	if p.dir != nil {
		p.mu.Lock()
		l := p.listening // Close sets it to nil
		p.mu.Unlock()
		err := p.dir.Current()
		if err == nil && l != nil && l.Present() {
			return nil
		}
		p.leave(err != nil)
	}
	if p.dir == nil {
		dir, err := ipc.OpenPeerDir(p.cfg.Dir)
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.dir = dir
		p.mu.Unlock()
	}
	l, err := p.dir.Listen(p.cfg.Generation, ipc.Options{MaxSessions: maxPeers, Limit: "peers",
		Log: p.log})
	if err != nil {
		return err
	}
	p.mu.Lock()
	if p.ctx.Err() != nil {
		p.mu.Unlock()
		_ = l.Close()
		return ErrClosed
	}
	p.listening = l
	p.wg.Go(func() { p.accept(l) })
	p.mu.Unlock()
	return nil
}

// leave closes our socket; if dir is set, the directory too, as it was replaced. Connections stay.
func (p *Peers) leave(dir bool) {
	p.mu.Lock()
	l, d := p.listening, p.dir
	p.listening = nil
	p.mu.Unlock()
	if l != nil {
		_ = l.Close()
	}
	if dir {
		p.mu.Lock()
		p.dir = nil
		p.mu.Unlock()
		_ = d.Close()
	}
}

// accept serves borrowers until the listener is closed.
func (p *Peers) accept(l *ipc.Listener) {
	for {
		conn, err := l.Accept(p.ctx)
		if err != nil {
			return
		}
		b := newLender(p, conn)
		p.mu.Lock()
		if p.ctx.Err() != nil {
			p.mu.Unlock()
			_ = conn.Close()
			return
		}
		p.lenders[b] = struct{}{}
		p.wg.Go(b.run)
		p.mu.Unlock()
	}
}

package connector_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// A stranger is a process of the same user that reads file names and the status: it knows the
// numbers of all sessions, engines and lookups, and no secret.
type stranger struct {
	t       *testing.T
	lookups *client.Lookups
	victim  *scheduler
}

func (r *rig) stranger(t *testing.T, victim *scheduler) *stranger {
	// It listens under the victim's number: without a secret there is no better name.
	w := victim.ses.Welcome
	l, err := client.NewLookups(w.LookupEndpoint, w.ReplyEndpoint, fmt.Appendf(nil, "%016x",
		w.Session))
	check(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return &stranger{t, l, victim}
}

// guesses are what a stranger may take for a session's secret.
func (s *stranger) guesses() [][]byte {
	w := s.victim.ses.Welcome
	number := fmt.Appendf(nil, "%016x", w.Session)
	near := slices.Clone(w.Secret)
	near[len(near)-1] ^= 1
	return [][]byte{number, make([]byte, wire.SecretBytes), near, bytes.Repeat([]byte{0xff},
		wire.SecretBytes)}
}

func (s *stranger) send(m wire.Message) { check(s.t, s.lookups.Send(m.Append(nil))) }

// TestStrangersDoNotTouchLookups: a lookup that was answered stays as it is until its worker loads
// it, whatever a process without the session's secret says in the session's name. Without the
// secret the stranger's lookup took the place of the victim's, and the victim loaded 16 wrong pages
// of 16.
func TestStrangersDoNotTouchLookups(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	mine, other := onePrefix(1), onePrefix(2)
	w.store(mine, 0, 16)
	w.store(other, 0, 16)
	bad := r.stranger(t, s)
	session := s.ses.Welcome.Session

	sent := uint64(0)
	for _, secret := range bad.guesses() {
		id, hit := s.lookup(mine, 0, 16)
		if hit != 16 {
			t.Fatalf("%d pages hit", hit)
		}
		bad.send(&wire.Lookup{Session: session, Secret: secret, Lookup: id,
			Hashes: other.hashes(0, 16)})
		bad.send(&wire.Trim{Session: session, Secret: secret, Lookup: id, FirstPage: 16})
		bad.send(&wire.Cancel{Session: session, Secret: secret, Lookup: id})
		sent += 3
		r.eventually("the stranger is heard", func() bool { return r.errorCount("forged") == sent })
		g, err := w.load(s, id, mine, 0, 16)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		w.sync()
	}
	if _, err := bad.lookups.Recv(0); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the stranger is answered: %v", err)
	}
	// A secret opens its own session, and no other.
	second := r.scheduler(schedulerHello("e"))
	id, _ := s.lookup(mine, 0, 16)
	bad.send(&wire.Cancel{Session: session, Secret: second.ses.Welcome.Secret, Lookup: id})
	bad.send(&wire.Cancel{Session: second.ses.Welcome.Session, Secret: s.ses.Welcome.Secret,
		Lookup: id})
	r.eventually("the stranger is heard", func() bool { return r.errorCount("forged") == sent+2 })
	if st := r.engine.Stats(); st.OpenLookups != 1 {
		t.Errorf("%d lookups are open", st.OpenLookups)
	}
	s.cancel(id)
	r.eventually("its own session cancels it",
		func() bool { return r.engine.Stats().OpenLookups == 0 })
}

// TestStrangersDoNotTouchLMCache: LMCache's lookups are held under a number that is no session's.
// No native message reaches them by it.
func TestStrangersDoNotTouchLMCache(t *testing.T) {
	r := newRig(t, rigOptions{lmcache: true})
	w := r.worker(lmHello("lm"))
	storeLM(t, w, 1, 4)
	h := lmHello("lm")
	h.Role, h.PageBytes = wire.RoleScheduler, 0
	s := r.scheduler(h)
	l, err := client.NewLookups(r.lmcache[0], r.lmcache[1], nil)
	check(t, err)
	defer func() {
		check(t, l.Close())
		_ = os.Remove(strings.TrimPrefix(r.lmcache[1], "ipc://")) // libzmq leaves it
	}()
	hashes := []int64{lmHash(1, 0), lmHash(1, 1), lmHash(1, 2), lmHash(1, 3)}
	ask, err := msgpack.Marshal(map[string]any{
		"type": "LookupRequestMsg", "lookup_id": "victim", "hashes": hashes,
		"offsets": []uint32{256, 256, 256, 256}, "request_configs": nil,
	})
	check(t, err)
	check(t, l.Send(ask))
	_, err = l.Recv(patience)
	check(t, err)
	if st := r.engine.Stats(); st.OpenLookups != 1 || st.Leases != 4 {
		t.Fatalf("%d lookups with %d leases", st.OpenLookups, st.Leases)
	}
	bad := r.stranger(t, s)
	for _, secret := range append(bad.guesses(), s.ses.Welcome.Secret) {
		id := xxhash.Sum64String("victim") // by which the sidecar knows it
		bad.send(&wire.Trim{Session: math.MaxUint64, Secret: secret, Lookup: id, FirstPage: 4})
		bad.send(&wire.Cancel{Session: math.MaxUint64, Secret: secret, Lookup: id})
		bad.send(&wire.Lookup{Session: math.MaxUint64, Secret: secret, Lookup: id,
			Hashes: make([]byte, 8)})
	}
	r.eventually("the stranger is heard",
		func() bool { return r.errorCount("unknown_session") == 15 })
	if st := r.engine.Stats(); st.OpenLookups != 1 || st.Leases != 4 {
		t.Errorf("%d lookups with %d leases are left", st.OpenLookups, st.Leases)
	}
}

// TestWorkersOfTheSameNameLoadNothing: who calls itself a worker of an engine takes over none of
// its scheduler's lookups without the ticket, and what it tries leaves them as they are. A ticket
// is of one lookup.
func TestWorkersOfTheSameNameLoadNothing(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	impostor := r.worker(workerHello("e"))
	own := r.scheduler(schedulerHello("e"))
	id, hit := s.lookup(p, 0, 16)
	spent, _ := s.lookup(p, 0, 16)
	if hit != 16 {
		t.Fatalf("%d pages hit", hit)
	}
	names := wire.NamesOf(p.hashes(0, 16), 32, 0, perChunk)
	forged := r.errorCount("forged")
	tickets := [][]byte{make([]byte, wire.TicketBytes), own.ses.Ticket(id), s.ses.Ticket(spent),
		s.ses.Ticket(id + 1), impostor.ses.Ticket(id)}
	for _, ticket := range tickets {
		var g wire.LoadGrant
		err := impostor.call(&wire.PrepareLoad{
			ID: 1, Session: s.ses.Welcome.Session, Lookup: id, Ticket: ticket, Pages: 16,
			Names: names[:],
		}, &g)
		wantCode(t, err, wire.CodeNotFound)
	}
	if n := r.errorCount("forged") - forged; n != uint64(len(tickets)) {
		t.Errorf("%d forgeries counted of %d", n, len(tickets))
	}
	g, err := w.load(s, id, p, 0, 16)
	check(t, err)
	// Nor does it end the load.
	check(t, impostor.ses.Send(&wire.Release{Load: g.Load, Bad: []uint32{0}}))
	impostor.sync()
	if st := r.engine.Stats(); st.OpenLoads != 1 {
		t.Errorf("%d loads are open", st.OpenLoads)
	}
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
}

// TestOtherPagesAreNotGranted: a load is granted only what it names, whatever the lookup of that
// number holds by now: whole chunks, parts of them, and what begins or ends in the middle of one.
func TestOtherPagesAreNotGranted(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	mine, other := onePrefix(1), onePrefix(2)
	w.store(mine, 0, 14)
	w.store(other, 0, 14)
	for _, part := range [][2]int{{0, 14}, {0, 12}, {0, 1}, {3, 1}, {3, 2}, {4, 4}, {5, 8},
		{13, 1}} {
		first, pages := part[0], part[1]
		id, _ := s.lookup(other, 0, 14)
		_, err := w.load(s, id, mine, first, pages)
		wantCode(t, err, wire.CodeStale)
		r.eventually("nothing is kept of it",
			func() bool { st := r.engine.Stats(); return st.OpenLoads == 0 && st.OpenLookups == 0 })
		id, _ = s.lookup(mine, 0, 14)
		g, err := w.load(s, id, mine, first, pages)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		w.sync()
	}
}

// TestSecretsAreToldToTheirSessionsAlone: a session's secret is in its Welcome and nowhere else:
// neither in the status nor in the log or the names of files, and no two are the same.
func TestSecretsAreToldToTheirSessionsAlone(t *testing.T) {
	var log bytes.Buffer
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewDevelopmentEncoderConfig()),
		zapcore.Lock(zapcore.AddSync(&log)), zap.DebugLevel)
	r := newRig(t, rigOptions{log: zap.New(core)})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 8)
	id, _ := s.lookup(p, 0, 8)
	bad := r.stranger(t, s)
	bad.send(&wire.Cancel{Session: s.ses.Welcome.Session, Secret: make([]byte, wire.SecretBytes),
		Lookup: id})
	g, err := w.load(s, id, p, 0, 8)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
	status, err := json.Marshal(r.server.Status())
	check(t, err)
	files, err := os.ReadDir(r.dir)
	check(t, err)
	s.close()
	r.eventually("the session's end is logged", func() bool { return r.server.Sessions() == 1 })
	w.close()
	r.eventually("all have gone", func() bool { return r.server.Sessions() == 0 })
	r.cancel() // whoever logs has ended
	r.server.Close()
	told := append(status, log.Bytes()...)
	for _, f := range files {
		told = append(told, f.Name()...)
	}
	if !bytes.Contains(told, []byte("session ended")) ||
		!bytes.Contains(told, fmt.Appendf(nil, "%016x", s.ses.Welcome.Session)) {
		t.Fatalf("the log or the status is missing: %s", told)
	}
	secrets := [][]byte{w.ses.Welcome.Secret, s.ses.Welcome.Secret, s.ses.Ticket(id)}
	for i, secret := range secrets {
		for _, form := range []string{string(secret), hex.EncodeToString(secret),
			base64.StdEncoding.EncodeToString(secret), fmt.Sprint(secret)} {
			if bytes.Contains(told, []byte(form)) {
				t.Errorf("secret %d is told as %q", i, form)
			}
		}
		for _, another := range secrets[:i] {
			if bytes.Equal(secret, another) {
				t.Error("two are the same")
			}
		}
	}
}

package sidecar

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lookaside/internal/freeport"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

const remotePassword = "correct horse battery staple"

// A remoteServer is a process that serves on a port of this machine. What it needs is installed by
// scripts/setup.sh.
type remoteServer struct {
	addr string
	args []string
	env  []string
	cmd  *exec.Cmd
}

func (s *remoteServer) start(t *testing.T) {
	t.Helper()
	s.cmd = exec.Command(s.args[0], s.args[1:]...)
	s.cmd.Env = append(os.Environ(), s.env...)
	if err := s.cmd.Start(); err != nil {
		t.Fatalf("%v: run scripts/setup.sh", err)
	}
	cmd := s.cmd
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	until(t, func() any { return s.addr }, func() bool {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// freeAddr is an address on which nobody listens.
func freeAddr(t *testing.T) (addr, port string) {
	t.Helper()
	n, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	port = fmt.Sprint(n)
	return "127.0.0.1:" + port, port
}

// newRedis is a server that is not started yet, and what to name it by. It keeps nothing on disk.
func newRedis(t *testing.T) (s *remoteServer, flag string) {
	t.Helper()
	addr, port := freeAddr(t)
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte(remotePassword+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return &remoteServer{addr: addr, args: []string{"redis-server", "--bind", "127.0.0.1", "--port",
			port, "--save", "", "--dir", t.TempDir(), "--requirepass", remotePassword}},
		"--redis=redis://" + addr + "?password_file=" + file
}

// What one sidecar stored another one finds, on another machine for all that it knows.
func TestAPrefixIsSharedOverRemoteTiers(t *testing.T) {
	redis, redisFlag := newRedis(t)
	addr, _ := freeAddr(t)
	versity, err := filepath.Abs("../.cache/tools/bin/versitygw")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "kv-cache"), 0o700); err != nil {
		t.Fatal(err)
	}
	bucket := &remoteServer{addr: addr, args: []string{versity, "--port", addr, "--quiet", "posix",
		dir},
		env: []string{"ROOT_ACCESS_KEY=somebody", "ROOT_SECRET_KEY=" + remotePassword}}
	t.Setenv("AWS_ACCESS_KEY_ID", "somebody")
	t.Setenv("AWS_SECRET_ACCESS_KEY", remotePassword)
	redis.start(t)
	bucket.start(t)
	for _, tc := range []struct{ name, flag string }{
		{"redis", redisFlag},
		{"redis, lossless", redisFlag + "&serde=lossless&prefix=other"},
		{"s3", "--s3=s3://kv-cache/here?region=us-east-1&endpoint=http://" + addr},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const pages = 42
			one, log := startDaemon(t, withTiers(t, tc.flag))
			storedPrefix(t, one, pages).Close()
			if err := one.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
			two, _ := startDaemon(t, withTiers(t, tc.flag))
			newPrefix(t, two, pages).hits(t)
			r := newAdminRig(t, two.AdminAddr(), "")
			var list admin.TiersResult
			r.get("/v1/tiers", &list)
			if st := list.Tiers[0]; st.HitPages != pages || st.LoadedChunks != 11 ||
				st.CapacityBytes != -1 || st.State != "closed" ||
				!strings.Contains(st.Detail, "127.0.0.1") {
				t.Errorf("%+v\n%s", st, log)
			}
			if strings.Contains(metricsOf(t, two), "lookaside_tier_capacity_bytes{") {
				t.Error("a capacity that is not known is in the metrics")
			}
			var c admin.ClearResult
			r.post("/v1/clear", admin.ClearRequest{All: true}, &c)
			if !c.Complete || len(c.Cleared) != 2 {
				t.Errorf("%+v", c)
			}
			for _, d := range []string{fmt.Sprint(list), log.String()} {
				if strings.Contains(d, remotePassword) {
					t.Errorf("the password is shown: %s", d)
				}
			}
		})
	}
}

// A server that is away keeps nobody: the sidecar starts, says so, lookups are misses, the breaker
// opens; when it is there it is used.
func TestARemoteTierThatIsAway(t *testing.T) {
	redis, flag := newRedis(t)
	edit := withTiers(t, flag+"&name=far")
	d, log := startDaemon(t, func(c *settings.Config) {
		edit(c)
		c.Tiers[0].LookupTimeout = 200 * time.Millisecond
	})
	until(t, func() any { return log.String() }, func() bool {
		return strings.Contains(log.String(),
			"tier cannot be used now")
	})
	b := newPrefix(t, d, 8)
	start := time.Now()
	for range 5 {
		if _, err := b.Lookup(); err == nil || !strings.Contains(err.Error(), "hit 0 of 8") {
			t.Fatalf("got %v", err)
		}
	}
	r := newAdminRig(t, d.AdminAddr(), "")
	var list admin.TiersResult
	if r.get("/v1/tiers", &list); list.Tiers[0].State == "closed" || list.Tiers[0].Error == "" ||
		list.Tiers[0].Opened != 1 || list.Tiers[0].LookupFailures < 3 {
		t.Errorf("%+v", list)
	}
	if !strings.Contains(metricsOf(t, d), `lookaside_tier_up{kind="redis",tier="far"} 0`) {
		t.Error("the metrics say that it is up")
	}
	// Nobody waits for what is off: it is asked again when its pause is over, by one lookup at a
	// time.
	before := list.Tiers[0].LookupFailures
	for range 5 {
		if _, err := b.Lookup(); err == nil {
			t.Error("a hit")
		}
	}
	tries := uint64(1)
	for left, pause := time.Since(start), time.Second; left > pause; left, pause = left-pause,
		2*pause {
		tries++
	}
	if r.get("/v1/tiers", &list); list.Tiers[0].LookupFailures > before+tries {
		t.Errorf("asked %d times while it was off: %+v", list.Tiers[0].LookupFailures-before, list)
	}
	if strings.Contains(log.String()+fmt.Sprint(list), remotePassword) {
		t.Errorf("the password is shown:\n%s", log)
	}

	redis.start(t)
	if err := b.Store(); err != nil {
		t.Fatal(err)
	}
	until(t, func() any { return d.operations.Tiers() }, func() bool {
		st := d.operations.Tiers()[0]
		return st.State == "closed" && st.StoredChunks == 2
	})
	d.engine.ClearSpace(d.engine.Spaces()[0].ID)
	var err error
	until(t, func() any { return err }, func() bool { // an answer may still be late
		_, err = b.Lookup()
		return err == nil
	})
	if err := b.Verify(); err != nil {
		t.Fatal(err)
	}
}

// A codec that changes pages makes the space another one, and says so.
func TestLossyCodecsHaveSpacesOfTheirOwn(t *testing.T) {
	plain, _ := startDaemon(t, nil)
	newPrefix(t, plain, 1)
	flag := "--redis=redis://127.0.0.1:1?serde="
	lossy, _ := startDaemon(t, withTiers(t, flag+"int8", flag+"fp8", flag+"raw"))
	newPrefix(t, lossy, 1)
	p, l := plain.Status().Spaces[0], lossy.Status().Spaces[0]
	if p.Fingerprint == l.Fingerprint || l.Fields["remote_serde"] != "fp8+int8" ||
		p.Fields["remote_serde"] != "" {
		t.Errorf("%+v, %+v", p, l)
	}
	if st := lossy.operations.Tiers(); !st[0].Lossy || !st[1].Lossy || st[2].Lossy {
		t.Errorf("%+v", st)
	}
	// Further workers of the engine are of the same space.
	newPrefix(t, lossy, 1)
	if n := len(lossy.Status().Spaces); n != 1 {
		t.Errorf("%d spaces", n)
	}
}

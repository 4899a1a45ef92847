package remote

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	"lookaside/internal/freeport"
	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/elsewhere/elsewheretest"
	"lookaside/tiers/tiertest"
)

func TestMain(m *testing.M) {
	elsewheretest.Main()
	leak.Main(m)
}

// unhurried is for what the servers of this machine do at once, however slow it is. It is less than
// the time after which the tier suite gives a call up for hung.
const unhurried = 30 * time.Second

const password = "correct horse battery staple"

// freePort is a port that nobody listens on, or will.
func freePort(t testing.TB) int {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// server is a process that serves on a port of this machine.
type server struct {
	t    testing.TB
	path string
	args []string
	env  []string
	addr string
	cmd  *exec.Cmd
	out  *bytes.Buffer
}

// start starts it, also again, and waits until it listens. What it needs is installed by
// scripts/setup.sh.
func (s *server) start() {
	s.t.Helper()
	s.out = &bytes.Buffer{}
	s.cmd = exec.Command(s.path, s.args...)
	s.cmd.Env = append(os.Environ(), s.env...)
	s.cmd.Stdout, s.cmd.Stderr = s.out, s.out
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatalf("%v: run scripts/setup.sh", err)
	}
	for deadline := time.Now().Add(unhurried); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			conn.Close()
			return
		}
		if time.Now().After(deadline) {
			s.kill()
			s.t.Fatalf("%s does not listen on %s: %v\n%s", s.path, s.addr, err, s.out)
		}
	}
}

// signal sends a signal; after SIGSTOP, it waits until all threads have stopped: it could still
// answer until then.
func (s *server) signal(sig syscall.Signal) {
	_ = s.cmd.Process.Signal(sig)
	if sig == syscall.SIGSTOP {
		for unix.Waitid(unix.P_PID, s.cmd.Process.Pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT,
			nil) == unix.EINTR {
		}
	}
}

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// launch starts a server that ends with the test.
func launch(t testing.TB, s *server) *server {
	t.Helper()
	s.t = t
	s.start()
	t.Cleanup(s.kill)
	return s
}

// redisServer starts a redis-server. It keeps nothing on disk.
func redisServer(t testing.TB, args ...string) *server {
	t.Helper()
	port := freePort(t)
	return redisServerOn(t, port, append([]string{"--port", fmt.Sprint(port)}, args...)...)
}

func redisServerOn(t testing.TB, port int, args ...string) *server {
	t.Helper()
	return launch(t, &server{path: "redis-server", addr: fmt.Sprintf("127.0.0.1:%d", port),
		args: append([]string{"--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir(),
			"--requirepass", password, "--masterauth", password}, args...)})
}

// passwordFile is a file with the servers' password.
func passwordFile(t testing.TB) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func openRedis(t testing.TB, o RedisOptions) *Tier {
	t.Helper()
	if o.DialTimeout == 0 {
		o.DialTimeout = unhurried
	}
	tier, err := OpenRedis(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tier.Close() })
	return tier
}

// awaitReady waits until a tier's server is up.
func awaitReady(t testing.TB, tier *Tier) {
	t.Helper()
	for deadline := time.Now().Add(unhurried); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		err := tier.Check(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// factory runs the suite on a tier of its own prefix for each medium. Of Redis, the Nth operation
// can be made to fail.
func factory(open func(prefix string) (*Tier, error), rot func(prefix string),
	stall func() func()) tiertest.Factory {
	var n atomic.Int64
	return tiertest.Factory{Persistent: true,
		New: func(t testing.TB, o tiertest.MediumOptions) *tiertest.Medium {
			prefix := fmt.Sprintf("test%d", n.Add(1))
			f := &failNth{nth: o.FailNth}
			m := &tiertest.Medium{
				Open: func() (tiers.Tier, error) {
					tier, err := open(prefix)
					if err != nil {
						return nil, err
					}
					if r, ok := tier.objects.(*redisObjects); ok {
						r.client.AddHook(f)
					}
					return tier, nil
				},
				Rot:   func() { rot(prefix) },
				Stall: stall,
			}
			if tier, err := open(prefix); err == nil {
				if _, ok := tier.objects.(*redisObjects); ok {
					m.Failed = func() bool { return f.ops.Load() >= f.nth }
				}
				tier.Close()
			}
			return m
		}}
}

var errInjected = errors.New("injected")

// failNth is a hook in a Redis client that makes the Nth operation fail: before it is sent or,
// every other N, after the server has done it.
type failNth struct {
	nth int64
	ops atomic.Int64
}

func (f *failNth) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *failNth) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return f.do([]redis.Cmder{cmd}, func() error { return next(ctx, cmd) })
	}
}

func (f *failNth) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		return f.do(cmds, func() error { return next(ctx, cmds) })
	}
}

func (f *failNth) do(cmds []redis.Cmder, do func() error) error {
	fail := f.ops.Add(1) == f.nth
	if !fail || f.nth%2 == 0 {
		if err := do(); err != nil || !fail {
			return err
		}
	}
	for _, c := range cmds {
		c.SetErr(errInjected)
	}
	return errInjected
}

// certificates writes an authority's certificate, and one for 127.0.0.1 with its key, good for
// servers and clients.
func certificates(t testing.TB) TLSFiles {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}),
			0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	ca := &x509.Certificate{SerialNumber: big.NewInt(1),
		Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "test"},
		NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	must(err)
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	must(err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must(err)
	return TLSFiles{CA: write("ca.pem", "CERTIFICATE", caDER),
		Cert: write("cert.pem", "CERTIFICATE", leafDER), Key: write("key.pem", "PRIVATE KEY",
			keyDER)}
}

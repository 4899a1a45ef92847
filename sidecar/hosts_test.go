package sidecar

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
)

// startHost starts a sidecar of another host, as far as sockets go: it accepts schedulers on TCP.
func startHost(t *testing.T, edit func(*settings.HostsConfig)) (*Daemon, *logBuffer) {
	t.Helper()
	return startDaemon(t, func(c *settings.Config) {
		c.Hosts.Listen = "127.0.0.1:0"
		if edit != nil {
			edit(&c.Hosts)
		}
	})
}

// schedulerOf is the Hello of a scheduler whose worker dialPeerWorker has connected.
func schedulerOf() *wire.Hello {
	return &wire.Hello{Role: wire.RoleScheduler, EngineID: "e", PageTokens: 16, PagesPerChunk: 4,
		DigestBytes: 32, Direct: true}
}

// reach opens a scheduler's session with b through a.
func reach(t *testing.T, a, b *Daemon) *client.Session {
	t.Helper()
	s, err := client.Reach(a.cfg.Runtime.Dir, b.hosts.Addr(), schedulerOf(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// refusalOf tries to reach an address through a, and returns the refusal.
func refusalOf(t *testing.T, a *Daemon, address string) *client.Refused {
	t.Helper()
	s, err := client.Reach(a.cfg.Runtime.Dir, address, schedulerOf(), patience)
	var r *client.Refused
	if !errors.As(err, &r) {
		if s != nil {
			s.Close()
		}
		t.Fatalf("reaching %s: %v", address, err)
	}
	return r
}

func askOver(t *testing.T, s *client.Session, id uint64, hashes []byte) wire.LookupResult {
	t.Helper()
	l, err := s.Lookups()
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.Lookup(&wire.Lookup{Session: s.Welcome.Session, Secret: s.Welcome.Secret,
		Lookup: id, Hashes: hashes}, patience)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A scheduler finds what the sidecar of another host holds, the worker there loads it, and leases
// end with the session.
func TestSchedulerOfAnotherHost(t *testing.T) {
	a, _ := startHost(t, nil)
	b, _ := startHost(t, nil)
	worker := dialPeerWorker(t, b)
	hashes := peerHashes(1, 8)
	store(t, worker, hashes)

	s := reach(t, a, b)
	w := &s.Welcome
	if w.LookupEndpoint != "" || w.ReplyEndpoint != "" || w.MaxPages > 8192 ||
		w.Generation != b.generation {
		t.Fatalf("welcomed with %+v", w)
	}
	if r := askOver(t, s, 7, hashes); r.HitPages != 8 || !r.InMemory {
		t.Fatalf("answered %+v", r)
	}
	names := wire.NamesOf(hashes, 32, 0, 4)
	var g wire.LoadGrant
	if err := worker.Call(&wire.PrepareLoad{ID: 2, Session: w.Session, Lookup: 7,
		Ticket: s.Ticket(7), Pages: 8, Names: names[:]}, &g, patience); err != nil {
		t.Fatal(err)
	}
	if err := worker.Send(&wire.Release{Load: g.Load}); err != nil {
		t.Fatal(err)
	}

	var pong wire.Pong
	if err := s.Call(&wire.Ping{ID: 3}, &pong, patience); err != nil || pong.ID != 3 {
		t.Fatal(pong, err)
	}
	for _, d := range []*Daemon{a, b} {
		st := d.Status().Hosts
		if len(st.Carried) != 1 || st.Carried[0].EngineID != "e" ||
			st.Carried[0].Session != b.Status().Sessions[1].Session {
			t.Fatalf("the status has %+v", st)
		}
	}
	var text bytes.Buffer
	if err := b.Status().WriteTable(&text); err != nil || !strings.Contains(text.String(),
		b.Status().Hosts.Carried[0].Address) {
		t.Fatalf("%v\n%s", err, text.String())
	}

	askOver(t, s, 8, hashes)
	if b.engine.Stats().Leases == 0 {
		t.Fatal("nothing is leased")
	}
	s.Close()
	await(t, "the leases are free", func() bool { return b.engine.Stats().Leases == 0 })
	await(t, "no session is carried", func() bool {
		return len(a.Status().Hosts.Carried)+len(b.Status().Hosts.Carried) == 0
	})
}

// Either sidecar's end ends the session, which can be had again, also at the moment when the
// scheduler has just been welcomed.
func TestSessionEndsWithEitherHost(t *testing.T) {
	for range 20 {
		endEitherHost(t)
	}
}

func endEitherHost(t *testing.T) {
	t.Helper()
	a, _ := startHost(t, nil)
	b, _ := startHost(t, nil)
	dialPeerWorker(t, b)
	s := reach(t, a, b)
	if err := b.closeHosts(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Recv(patience); !errors.Is(err, io.EOF) {
		t.Fatalf("the scheduler sees %v", err)
	}
	if r := refusalOf(t, a, "127.0.0.1:1"); r.Code != wire.RefuseUnreachable ||
		!strings.Contains(r.Message, "hosts.listen") {
		t.Fatal(r)
	}
	if err := b.openHosts(); err != nil {
		t.Fatal(err)
	}
	s = reach(t, a, b)
	if err := a.closeHosts(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Recv(patience); !errors.Is(err, io.EOF) {
		t.Fatalf("the scheduler sees %v", err)
	}
	await(t, "the session has ended", func() bool { return len(b.Status().Sessions) == 1 })
}

func TestOnlySchedulersComeFromAnotherHost(t *testing.T) {
	a, _ := startHost(t, nil)
	b, _ := startHost(t, nil)
	address := b.hosts.Addr()
	if r := refusalOf(t, a, address); r.Code != wire.RefuseNoWorker {
		t.Fatal(r)
	}
	worker := &wire.Hello{Role: wire.RoleWorker, EngineID: "e", PageTokens: 16, PageBytes: 4096,
		PagesPerChunk: 4, DigestBytes: 32}
	var r *client.Refused
	if _, err := client.Reach(a.cfg.Runtime.Dir, address, worker, patience); !errors.As(err, &r) ||
		r.Field != "role" {
		t.Fatal(err)
	}
	dialPeerWorker(t, b)
	other := schedulerOf()
	other.PageTokens = 32
	if _, err := client.Reach(a.cfg.Runtime.Dir, address, other, patience); !errors.As(err, &r) ||
		r.Code != wire.RefuseIncompatible || r.Field != "page_tokens" {
		t.Fatal(err)
	}
}

func tokenFile(t *testing.T, token string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Each refusal names the setting that is wrong, and no log has the token.
func TestTokensOfHosts(t *testing.T) {
	token := func(v string) func(*settings.HostsConfig) {
		return func(c *settings.HostsConfig) {
			if v != "" {
				c.TokenFile = tokenFile(t, v)
			}
		}
	}
	b, log := startHost(t, token("a long secret"))
	dialPeerWorker(t, b)
	open, _ := startHost(t, nil)
	dialPeerWorker(t, open)

	same, sameLog := startHost(t, token("a long secret"))
	if r := askOver(t, reach(t, same, b), 1, peerHashes(1, 4)); r.HitPages != 0 {
		t.Fatal(r)
	}
	for _, tc := range []struct{ name, token, to, says string }{
		{"none", "", b.hosts.Addr(), "demands a token"},
		{"another", "another secret", b.hosts.Addr(), "has another token"},
		{"none there", "a long secret", open.hosts.Addr(), "has no token"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, alog := startHost(t, token(tc.token))
			r := refusalOf(t, a, tc.to)
			if r.Code != wire.RefuseDenied || r.Field != "hosts.token_file" ||
				!strings.Contains(r.Message, tc.says) {
				t.Fatal(r)
			}
			if a.Status().Hosts.Failed != 1 || strings.Contains(alog.String(), "secret") {
				t.Fatalf("status %+v, log:\n%s", a.Status().Hosts, alog)
			}
		})
	}
	if b.Status().Hosts.Refused != 2 || strings.Contains(log.String()+sameLog.String(), "secret") {
		t.Fatalf("status %+v, log:\n%s", b.Status().Hosts, log)
	}
}

// authority signs certificates of a test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key, a.file, _ = a.sign("authority", true)
	return a
}

// sign makes a certificate for a name or an address, and returns its file and its key's.
func (a *authority) sign(name string, isCA bool) (cert *x509.Certificate, key *ecdsa.PrivateKey,
	certFile, keyFile string) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
	form := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: isCA,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature}
	if isCA {
		form.KeyUsage = x509.KeyUsageCertSign
	} else if ip := net.ParseIP(name); ip != nil {
		form.IPAddresses = []net.IP{ip}
	} else {
		form.DNSNames = []string{name}
	}
	parent, by := a.cert, a.key
	if isCA {
		parent, by = form, key
	}
	der, err := x509.CreateCertificate(rand.Reader, form, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	if cert, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	write := func(suffix, kind string, b []byte) string {
		file := filepath.Join(a.dir, name+suffix)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}),
			0o600); err != nil {
			a.t.Fatal(err)
		}
		return file
	}
	return cert, key, write(".crt", "CERTIFICATE", der), write(".key", "PRIVATE KEY", private)
}

func TestTLSOfHosts(t *testing.T) {
	ca, stranger := newAuthority(t), newAuthority(t)
	with := func(by *authority, name string, edit func(*settings.HostsConfig)) func(
		*settings.HostsConfig) {
		return func(c *settings.HostsConfig) {
			c.CAFile = ca.file
			if by != nil {
				_, _, c.CertFile, c.KeyFile = by.sign(name, false)
			}
			if edit != nil {
				edit(c)
			}
		}
	}
	mutual := func(c *settings.HostsConfig) { c.ClientCAFile = ca.file }
	b, _ := startHost(t, with(ca, "127.0.0.1", mutual))
	dialPeerWorker(t, b)
	named, _ := startHost(t, with(ca, "lookaside", func(c *settings.HostsConfig) {
		c.ServerName, c.TokenFile = "lookaside", tokenFile(t, "shared")
	}))
	dialPeerWorker(t, named)
	plain, _ := startHost(t, nil)
	dialPeerWorker(t, plain)

	good, _ := startHost(t, with(ca, "127.0.0.1", nil))
	if r := askOver(t, reach(t, good, b), 1, peerHashes(1, 4)); r.HitPages != 0 {
		t.Fatal(r)
	}
	both, _ := startHost(t, with(nil, "", func(c *settings.HostsConfig) {
		c.ServerName, c.TokenFile = "lookaside", tokenFile(t, "shared")
	}))
	reach(t, both, named)

	for _, tc := range []struct {
		name        string
		edit        func(*settings.HostsConfig)
		to          *Daemon
		field, says string
	}{
		{"no certificate", with(nil, "", nil), b, "hosts.cert_file", "does not accept"},
		{"certificate of a stranger", with(stranger, "127.0.0.1", nil), b, "hosts.cert_file",
			"does not accept"},
		{"unknown authority", with(ca, "127.0.0.1", func(c *settings.HostsConfig) {
			c.CAFile = stranger.file
		}), b, "hosts.ca_file", "authority that is not in hosts.ca_file"},
		{"another name", with(ca, "127.0.0.1", nil), named, "hosts.server_name", "another name"},
		{"TLS here alone", with(ca, "127.0.0.1", nil), plain, "hosts.cert_file",
			"does not speak TLS"},
		{"TLS there alone", nil, b, "hosts.ca_file", "demands TLS"},
		{"a relayed token", with(nil, "", func(c *settings.HostsConfig) {
			c.ServerName, c.TokenFile = "lookaside", tokenFile(t, "another")
		}), named, "hosts.token_file", "another token"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, _ := startHost(t, tc.edit)
			r := refusalOf(t, a, tc.to.hosts.Addr())
			if r.Code != wire.RefuseDenied || r.Field != tc.field ||
				!strings.Contains(r.Message, tc.says) {
				t.Fatal(r)
			}
		})
	}
}

// An address that others can reach is not served to anybody.
func TestOpenListenersAreRefused(t *testing.T) {
	for _, tc := range []struct{ text, says string }{
		{"hosts: {listen: '0.0.0.0:7411'}", "set hosts.token_file"},
		{"hosts: {listen: ':7411'}", "set hosts.token_file"},
		{"hosts: {listen: 'node-1:7411', cert_file: c, key_file: k}", "set hosts.token_file"},
		{"hosts: {listen: '127.0.0.1:7411', cert_file: c}", "set both or neither"},
		{"hosts: {listen: '127.0.0.1:7411', client_ca_file: c}", "hosts.cert_file is not"},
		{"hosts: {listen: '127.0.0.1:7411', server_name: c}", "without TLS"},
		{"hosts: {listen: '7411'}", "hosts.listen"},
		{"hosts: {listen: 'a:b'}", "not a port"},
	} {
		if _, err := load(t, tc.text, nil); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", tc.text, err)
		}
	}
	for _, text := range []string{
		"hosts: {listen: '127.0.0.1:0'}", "hosts: {listen: '[::1]:7411'}",
		"hosts: {listen: ':7411', token_file: t}",
		"hosts: {listen: ':7411', cert_file: c, key_file: k, client_ca_file: a}",
	} {
		if _, err := load(t, text, nil); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Workers learn from a file where schedulers of other hosts are accepted.
func TestAddressOfHostsIsInAFile(t *testing.T) {
	d, _ := startHost(t, nil)
	file := filepath.Join(d.cfg.Runtime.Dir, hostsAddr)
	if b, err := os.ReadFile(file); err != nil || string(b) != d.hosts.Addr()+"\n" {
		t.Fatalf("%q, %v", b, err)
	}
	if err := d.closeHosts(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

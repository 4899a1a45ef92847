package sidecar

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// A heldConn is a connection to the admin server.
type heldConn struct {
	net.Conn
	in *bufio.Reader
}

func holdConn(t *testing.T, addr, first string) *heldConn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	h := &heldConn{c, bufio.NewReader(c)}
	h.send(t, first)
	return h
}

func (h *heldConn) send(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(h, text); err != nil {
		t.Fatal(err)
	}
}

// status receives an answer.
func (h *heldConn) status(t *testing.T) int {
	t.Helper()
	if err := h.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(h.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return resp.StatusCode
}

// isClosed reports whether the server closes the connection, which is surely under way or never
// comes.
func (h *heldConn) isClosed(t *testing.T) bool {
	t.Helper()
	if err := h.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_, err := h.in.ReadByte()
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

func get(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" }

// TestGate: connections without a request make room, requests that hang leave room for probes. The
// server has no timeouts, so nothing else can.
func TestGate(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hang := make(chan struct{})
	began := make(chan struct{}, 100)
	g := &gate{Listener: ln}
	srv := &http.Server{ConnContext: connContext,
		Handler: g.handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/hang" {
				began <- struct{}{}
				<-hang
			}
		}))}
	done := make(chan error)
	go func() { done <- srv.Serve(g) }()
	defer func() {
		srv.Close()
		<-done
		if len(g.conns) != 0 || g.serving != 0 || g.requests != 0 {
			t.Errorf("left behind: %d, %d, %d", len(g.conns), g.serving, g.requests)
		}
	}()
	addr := ln.Addr().String()

	idle := holdConn(t, addr, get("/"))
	if got := idle.status(t); got != http.StatusOK {
		t.Fatal(got)
	}
	for i := range 3 * adminConnections {
		holdConn(t, addr, []string{"", "GET / HTTP/1.1\r\nHost: x\r\nA"}[i%2])
	}
	if got := holdConn(t, addr, get("/healthz")).status(t); got != http.StatusOK {
		t.Fatal(got)
	}
	if !idle.isClosed(t) {
		t.Fatal("the connection that was idle for the longest is still there")
	}

	var hanging []*heldConn
	for range adminRequests {
		hanging = append(hanging, holdConn(t, addr, get("/hang")))
		<-began
	}
	if got := holdConn(t, addr, get("/")).status(t); got != http.StatusServiceUnavailable {
		t.Fatalf("one request too many: %d", got)
	}
	for range 2 * adminConnections {
		holdConn(t, addr, "")
	}
	for _, probe := range []string{"/healthz", "/readyz"} {
		c := holdConn(t, addr, get(probe))
		if got := c.status(t); got != http.StatusOK {
			t.Fatalf("%s: %d", probe, got)
		}
		c.send(t, get(probe)) // over the same connection
		if got := c.status(t); got != http.StatusOK {
			t.Fatalf("%s: %d", probe, got)
		}
	}
	close(hang)
	for _, c := range hanging {
		if got := c.status(t); got != http.StatusOK {
			t.Fatal(got)
		}
	}
	if got := holdConn(t, addr, get("/")).status(t); got != http.StatusOK {
		t.Fatal(got)
	}
}

// TestForeignNames: a page of another site can do nothing, whether it is bound to our address or
// not.
func TestForeignNames(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	token := t.TempDir() + "/token"
	if err := os.WriteFile(token, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	open, _ := startDaemon(t, func(c *Config) { c.Admin.Hosts = []string{"lookaside.svc"} })
	closed, _ := startDaemon(t, func(c *Config) { c.Admin.TokenFile = token })
	const clear = "POST /v1/clear"
	for _, c := range []struct {
		d                   *Daemon
		request, host, more string
		want                int
	}{
		{open, clear, open.AdminAddr(), "", 200},
		{open, clear, "localhost:8400", "", 200},
		{open, clear, "LOCALHOST.", "", 200},
		{open, clear, "lookaside.localhost", "", 200},
		{open, clear, "[::1]:8400", "", 200},
		{open, clear, "10.1.2.3", "", 200}, // a pod's address
		{open, clear, "lookaside.SVC:80", "", 200},
		{open, clear, host, "", 200},
		{open, clear, "rebound.example", "", 421},
		{open, clear, "rebound.example:80", "Origin: http://rebound.example:80\r\n", 421},
		{open, clear, "127.0.0.1.rebound.example", "", 421},
		{open, clear, "localhost.rebound.example", "", 421},
		{open, "GET /v1/status", "rebound.example", "", 421},
		{open, "GET /metrics", "rebound.example", "", 421},
		{open, "GET /healthz", "rebound.example", "", 200},
		{open, "GET /readyz", "rebound.example", "Origin: http://other.example\r\n", 200},
		{open, clear, open.AdminAddr(), "Origin: http://" + open.AdminAddr() + "\r\n", 200},
		{open, clear, open.AdminAddr(), "Origin: http://other.example\r\n", 403},
		{open, clear, open.AdminAddr(), "Origin: http://127.0.0.1:1\r\n", 403},
		{open, clear, open.AdminAddr(), "Origin: null\r\n", 403},
		{open, "GET /v1/status", open.AdminAddr(), "Origin: http://other.example\r\n", 403},
		{open, clear, open.AdminAddr(), "Sec-Fetch-Site: cross-site\r\n", 403},
		{closed, clear, "rebound.example", "", 401},
		{closed, clear, "lookaside.ns.svc", "Authorization: Bearer secret\r\n", 200},
		{closed, clear, "lookaside.ns.svc",
			"Authorization: Bearer secret\r\nOrigin: http://other.example\r\n", 403},
	} {
		const body = `{"all":true}`
		conn := holdConn(t, c.d.AdminAddr(),
			fmt.Sprintf("%s HTTP/1.1\r\nHost: %s\r\n%sConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
				c.request, c.host, c.more, len(body), body))
		if got := conn.status(t); got != c.want {
			t.Errorf("%s to %s, %q: %d, want %d", c.request, c.host, strings.TrimSpace(c.more), got,
				c.want)
		}
	}
	for _, bad := range []string{"a:1", "a/b", "a,,b", " "} {
		if _, err := Parse("test", []byte("admin: {hosts: '"+bad+"'}"), nil); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

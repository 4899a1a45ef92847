package admin

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// patience is how long something may take that surely comes.
const patience = 2 * time.Minute

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
	for i := range 3 * maxConnections {
		holdConn(t, addr, []string{"", "GET / HTTP/1.1\r\nHost: x\r\nA"}[i%2])
	}
	if got := holdConn(t, addr, get("/healthz")).status(t); got != http.StatusOK {
		t.Fatal(got)
	}
	if !idle.isClosed(t) {
		t.Fatal("the connection that was idle for the longest is still there")
	}

	var hanging []*heldConn
	for range maxRequests {
		hanging = append(hanging, holdConn(t, addr, get("/hang")))
		<-began
	}
	if got := holdConn(t, addr, get("/")).status(t); got != http.StatusServiceUnavailable {
		t.Fatalf("one request too many: %d", got)
	}
	for range 2 * maxConnections {
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

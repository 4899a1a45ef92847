package sidecar

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"lookaside/sidecar/settings"
)

// dialSaying connects to an address and sends the first bytes.
func dialSaying(t *testing.T, addr, first string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, first); err != nil {
		t.Fatal(err)
	}
	return c
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
	open, _ := startDaemon(t,
		func(c *settings.Config) { c.Admin.Hosts = []string{"lookaside.svc"} })
	closed, _ := startDaemon(t, func(c *settings.Config) { c.Admin.TokenFile = token })
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
		conn := dialSaying(t, c.d.AdminAddr(),
			fmt.Sprintf("%s HTTP/1.1\r\nHost: %s\r\n%sConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
				c.request, c.host, c.more, len(body), body))
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s to %s, %q: %d, want %d", c.request, c.host, strings.TrimSpace(c.more),
				resp.StatusCode, c.want)
		}
	}
	for _, bad := range []string{"a:1", "a/b", "a,,b", " "} {
		if _, err := settings.Parse("test", []byte("admin: {hosts: '"+bad+"'}"), nil); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

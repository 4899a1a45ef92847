package admin

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync"

	"lookaside/sidecar/settings"
)

const (
	// maxConnections bounds the admin server's connections. Without it one client could take the
	// file descriptors that sessions need, and libzmq aborts the process when accept fails with
	// EMFILE.
	maxConnections = 40
	// maxRequests bounds the concurrent requests. The connections beyond it are for probes.
	maxRequests = 32
)

// isProbe reports whether a request is for a probe route.
func isProbe(r *http.Request) bool { return r.URL.Path == "/healthz" || r.URL.Path == "/readyz" }

// gate is the admin server's listener. When there are too many connections, it closes the one that
// has been without a request for the longest time. So a client that opens connections and sends
// nothing blocks no other client.
type gate struct {
	net.Listener

	mu       sync.Mutex
	conns    []*gateConn // without a request, longest idle first; then those in serving
	serving  int
	requests int // connections in serving whose request is no probe
}

type gateConn struct {
	net.Conn
	g       *gate
	serving bool // guarded by g.mu
	closed  bool // guarded by g.mu
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	for {
		conn, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &gateConn{Conn: conn, g: g}
		g.mu.Lock()
		g.conns = append(g.conns, c)
		var out *gateConn
		if len(g.conns)+g.serving > maxConnections {
			out = g.conns[0]
		}
		g.mu.Unlock()
		if out != nil {
			out.Close()
		}
		if out != c {
			return c, nil
		}
	}
}

// Close implements net.Conn.
func (c *gateConn) Close() error {
	c.g.mu.Lock()
	if !c.closed {
		c.closed = true
		if c.serving {
			c.g.serving--
		} else {
			c.g.remove(c)
		}
	}
	c.g.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite shuts down the sending side, so that a response arrives although the rest of the
// request was not read.
func (c *gateConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// remove removes a connection without a request. The caller holds g.mu.
func (g *gate) remove(c *gateConn) {
	for i, other := range g.conns {
		if other == c {
			g.conns = append(g.conns[:i], g.conns[i+1:]...)
			return
		}
	}
}

// begin marks a connection as serving a request.
func (g *gate) begin(c *gateConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !c.closed && !c.serving {
		c.serving = true
		g.remove(c)
		g.serving++
	}
}

// end marks the end of a connection's request.
func (g *gate) end(c *gateConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !c.closed && c.serving {
		c.serving = false
		g.serving--
		g.conns = append(g.conns, c)
	}
}

// admit reports whether one more request that is no probe may be handled. If so, the caller must
// call leave.
func (g *gate) admit() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.requests == maxRequests {
		return false
	}
	g.requests++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.requests--
}

// connKey is the key of the gateConn in a request's context.
type connKey struct{}

// connContext is an http.Server.ConnContext.
func connContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// handler returns h with its requests counted by the gate.
func (g *gate) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*gateConn); ok {
			g.begin(c)
			defer g.end(c)
		}
		if !isProbe(r) {
			if !g.admit() {
				apiError(http.StatusServiceUnavailable, "try again when one of them has ended",
					"%d requests are under way", maxRequests).write(w)
				return
			}
			defer g.leave()
		}
		h.ServeHTTP(w, r)
	})
}

// hostNames holds the names by which clients may address the admin server.
type hostNames map[string]bool

// newHostNames returns the names of this machine, of admin.listen, and of admin.hosts.
func newHostNames(cfg settings.AdminConfig) hostNames {
	names := hostNames{}
	if host, _, err := net.SplitHostPort(cfg.Listen); err == nil {
		names[strings.ToLower(host)] = true
	}
	if host, err := os.Hostname(); err == nil {
		names[strings.ToLower(host)] = true
	}
	for _, host := range cfg.Hosts {
		names[strings.ToLower(host)] = true
	}
	return names
}

// has reports whether a request's Host header names this server. A page of another site that a
// browser was made to rebind to this address sends that site's name. An address cannot be rebound.
func (n hostNames) has(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if _, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		return true
	}
	return name == "" || name == "localhost" || strings.HasSuffix(name, ".localhost") || n[name]
}

// ownOrigin reports whether a request comes from a program or from a page that this server served.
func ownOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

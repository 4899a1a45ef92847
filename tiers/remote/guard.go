package remote

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
)

// Limits of one reply of a Redis server, beside the largest value that we request. go-redis trusts
// announced lengths and allocates that much before it reads on. So guard checks lengths before
// go-redis sees them.
const (
	maxReplyLine  = 64 << 10
	maxReplyDepth = 8
	// of all aggregates in a reply; CLUSTER SLOTS of the largest cluster fits
	maxReplyElements = 1 << 18
	maxReplyRest     = 16 << 20
	// maxReplies bounds the aggregates that all connections of a tier are receiving. An element
	// counts its bytes and elementBytes more.
	maxReplies   = 32 << 20
	elementBytes = 48
)

// guard is a connection to a Redis server. It ends when the server sends something that is not
// RESP, attributes, or more than allowed. It is the connection's reading side, so one goroutine at
// a time uses it.
type guard struct {
	net.Conn
	maxValue int64         // largest bulk string
	all      *atomic.Int64 // shared by all connections: the size of aggregates being received
	err      error         // what was wrong; nothing more is read after it

	line     []byte  // the line being read, up to lineKept bytes
	lineLen  int     // its length
	skip     int64   // rest of a bulk string and its end
	open     []int64 // elements to come of the open aggregates
	elements int64   // of the reply so far
	rest     int64   // bytes of the reply so far

	mu     sync.Mutex // Close may be called while the connection is read
	closed bool
	taken  int64 // the reply's part of all
}

const lineKept = 32 // longer than any length

// Read implements net.Conn.
func (g *guard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.Conn.Read(p)
	if g.err = g.scan(p[:n]); g.err != nil {
		return 0, g.err
	}
	return n, err
}

// Close implements net.Conn.
func (g *guard) Close() error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.give()
	return g.Conn.Close()
}

// take adds n bytes to the reply's size and reports whether the tier's connections have room for
// them.
func (g *guard) take(n int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.taken += n
	return g.all.Add(n) <= maxReplies
}

// give returns the reply's part of the room.
func (g *guard) give() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all.Add(-g.taken)
	g.taken = 0
}

// SyscallConn implements syscall.Conn. go-redis uses it to check that an idle connection is alive.
func (g *guard) SyscallConn() (syscall.RawConn, error) {
	if c, ok := g.Conn.(syscall.Conn); ok {
		return c.SyscallConn()
	}
	if c, ok := g.Conn.(interface{ NetConn() net.Conn }); ok { // TLS
		if c, ok := c.NetConn().(syscall.Conn); ok {
			return c.SyscallConn()
		}
	}
	return nil, errors.ErrUnsupported
}

func (g *guard) scan(p []byte) error {
	for len(p) > 0 {
		if g.skip > 0 {
			n := min(g.skip, int64(len(p)))
			p, g.skip = p[n:], g.skip-n
			if g.skip == 0 {
				g.ended()
			}
			continue
		}
		c := p[0]
		p = p[1:]
		if g.lineLen++; g.lineLen > maxReplyLine {
			return errors.New("the server sent a line that is too long: it is not a Redis server, or it is broken")
		}
		if c != '\n' {
			if len(g.line) < lineKept {
				g.line = append(g.line, c)
			}
			continue
		}
		if err := g.lineEnded(); err != nil {
			return err
		}
		g.line, g.lineLen = g.line[:0], 0
	}
	return nil
}

func (g *guard) lineEnded() error {
	if g.rest += int64(g.lineLen); g.rest > maxReplyRest+g.maxValue {
		return errors.New("the server's reply is too long")
	}
	if len(g.line) < 2 || g.lineLen-1 <= lineKept && g.line[len(g.line)-1] != '\r' {
		return errNoRESP
	}
	if len(g.open) > 0 && !g.take(int64(g.lineLen)) {
		return errTooMuch
	}
	kind := g.line[0]
	switch kind {
	case '+', '-', ':', '_', '#', ',', '(':
		g.ended()
		return nil
	case '$', '=', '!', '*', '~', '>', '%':
	default:
		return errNoRESP
	}
	n, ok := replyLength(g.line[1 : len(g.line)-1])
	if kind == '%' {
		n *= 2
	}
	switch {
	case !ok || g.lineLen-1 > lineKept:
		return errNoRESP
	case n < 0: // a nil reply
		g.ended()
	case kind == '$', kind == '=', kind == '!':
		if g.rest += n; n > g.maxValue || g.rest > maxReplyRest+g.maxValue {
			return fmt.Errorf("the server announces %d bytes, and at most %d were requested", n,
				g.maxValue)
		}
		if len(g.open) > 0 && !g.take(n) { // others are read straight to their place
			return errTooMuch
		}
		g.skip = n + 2
	case n == 0:
		g.ended()
	default:
		if g.elements += n; g.elements > maxReplyElements || len(g.open) == maxReplyDepth {
			return errors.New("the server's reply has too many parts")
		}
		if !g.take(n * elementBytes) {
			return errTooMuch
		}
		g.open = append(g.open, n)
	}
	return nil
}

var errTooMuch = errors.New("the server's replies are too long for so many requests at a time")

var errNoRESP = errors.New("the server does not speak the Redis protocol")

// ended ends an element, and the aggregates that it completes.
func (g *guard) ended() {
	for len(g.open) > 0 {
		last := len(g.open) - 1
		if g.open[last]--; g.open[last] > 0 {
			return
		}
		g.open = g.open[:last]
	}
	g.elements, g.rest = 0, 0
	g.give()
}

// replyLength parses a decimal length, or -1.
func replyLength(b []byte) (int64, bool) {
	if string(b) == "-1" {
		return -1, true
	}
	if len(b) == 0 || len(b) > 15 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}

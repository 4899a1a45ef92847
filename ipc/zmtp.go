package ipc

import (
	"bufio"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// This file has the part of ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) that a publisher needs: the
// handshake without security (NULL) or with a password (PLAIN), and frames.
//
// libzmq is not used for events. It bounds neither the subscriptions of one peer nor the parts of
// an unfinished message, cannot tell which peer has sent them, and keeps them in the heap of the
// lookups' messages.

const (
	flagMore    = 1
	flagLong    = 2 // the length has 8 bytes, not 1
	flagCommand = 4

	greetingBytes = 64
	// maxCommandBytes bounds a command of the handshake. Those of libzmq have a few dozen bytes.
	maxCommandBytes = 1024

	mechanismNull  = "NULL"
	mechanismPlain = "PLAIN"

	propertySocketType = "Socket-Type"
)

var errZMTP = errors.New("not ZMTP 3")

// zmtp is the receiving half of a connection. One goroutine uses it.
type zmtp struct {
	net.Conn
	in  *bufio.Reader
	buf []byte    // holds the last frame
	may allowance // bounds what the peer sends after the handshake
}

// frame is a received frame. Its body is valid until the next one is received.
type frame struct {
	body    []byte
	more    bool
	command bool
}

func newZMTP(c net.Conn, maxBytes int) *zmtp {
	return &zmtp{
		Conn: c, in: bufio.NewReaderSize(c, 2048),
		buf: make([]byte, max(maxBytes, maxCommandBytes)),
		may: allowance{most: peerBurstBytes, perSecond: peerBytesPerSecond},
	}
}

// next receives a frame of at most limit bytes.
func (z *zmtp) next(limit int) (frame, error) {
	flags, err := z.in.ReadByte()
	if err != nil {
		return frame{}, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 ||
		flags&flagCommand != 0 && flags&flagMore != 0 {
		return frame{}, fmt.Errorf("%w: a frame with flags %#x", errZMTP, flags)
	}
	var size [8]byte
	n := size[7:]
	if flags&flagLong != 0 {
		n = size[:]
	}
	if _, err := io.ReadFull(z.in, n); err != nil {
		return frame{}, err
	}
	length := binary.BigEndian.Uint64(size[:])
	if length > uint64(limit) {
		return frame{}, fmt.Errorf("a frame of %d bytes, and %d is the most", length, limit)
	}
	f := frame{body: z.buf[:length], more: flags&flagMore != 0, command: flags&flagCommand != 0}
	_, err = io.ReadFull(z.in, f.body)
	return f, err
}

// appendFrame appends the header of a frame of size bytes.
func appendFrame(b []byte, flags byte, size int) []byte {
	if size < 256 {
		return append(b, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(size))
}

func appendCommand(b []byte, name string, body []byte) []byte {
	b = appendFrame(b, flagCommand, 1+len(name)+len(body))
	b = append(append(b, byte(len(name))), name...)
	return append(b, body...)
}

// splitCommand returns a command's name and its body.
func splitCommand(b []byte) (name string, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > len(b)-1 {
		return "", nil, false
	}
	return string(b[1 : 1+b[0]]), b[1+b[0]:], true
}

func appendProperty(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// property returns the value of the property named want in the metadata b.
func property(b []byte, want string) (value string, err error) {
	for len(b) > 0 {
		name, rest, ok := splitCommand(b) // a property's name has the form of a command's
		if !ok || len(rest) < 4 {
			return "", fmt.Errorf("%w: metadata", errZMTP)
		}
		n := binary.BigEndian.Uint32(rest)
		if uint64(n) > uint64(len(rest)-4) {
			return "", fmt.Errorf("%w: metadata", errZMTP)
		}
		if name == want {
			return string(rest[4 : 4+n]), nil
		}
		b = rest[4+n:]
	}
	return "", fmt.Errorf("%w: no %s", errZMTP, want)
}

// shake does the handshake as a socket of the type own. The peer's type must be one of peers. If
// token is empty, the peer must use the mechanism NULL; otherwise PLAIN, with token as the
// password. The caller sets a deadline.
func (z *zmtp) shake(own string, peers []string, token string) error {
	mechanism := mechanismNull
	if token != "" {
		mechanism = mechanismPlain
	}
	var greeting [greetingBytes]byte
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:32], mechanism)
	if token != "" {
		greeting[32] = 1 // as-server: we check passwords
	}
	if _, err := z.Write(greeting[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(z.in, greeting[:]); err != nil {
		return err
	}
	if greeting[0] != 0xff || greeting[9]&1 == 0 || greeting[10] < 3 {
		return errZMTP
	}
	if got := cString(greeting[12:32]); got != mechanism {
		return fmt.Errorf("security mechanism %q, and here it is %s", got, mechanism)
	}
	ours := appendProperty(nil, propertySocketType, own)
	metadata := "READY"
	if token == "" {
		if _, err := z.Write(appendCommand(nil, "READY", ours)); err != nil {
			return err
		}
	} else {
		if err := z.checkPassword(token); err != nil {
			return err
		}
		metadata = "INITIATE"
	}
	b, err := z.command(metadata)
	if err != nil {
		return err
	}
	kind, err := property(b, propertySocketType)
	if err != nil {
		return err
	}
	if !slices.Contains(peers, kind) {
		return fmt.Errorf("a socket of type %.16q, which cannot talk to %s", kind, own)
	}
	if token != "" {
		_, err = z.Write(appendCommand(nil, "READY", ours))
	}
	return err
}

// command receives a command, which must be named want, and returns its body.
func (z *zmtp) command(want string) ([]byte, error) {
	f, err := z.next(maxCommandBytes)
	if err != nil {
		return nil, err
	}
	name, rest, ok := splitCommand(f.body)
	if !ok || !f.command || name != want {
		return nil, fmt.Errorf("%w: no %s", errZMTP, want)
	}
	return rest, nil
}

var errToken = errors.New("the wrong token")

func (z *zmtp) checkPassword(token string) error {
	b, err := z.command("HELLO")
	if err != nil {
		return err
	}
	_, rest, ok := splitCommand(b) // any user name will do
	if !ok {
		return fmt.Errorf("%w: HELLO", errZMTP)
	}
	password, rest, ok := splitCommand(rest)
	if !ok || len(rest) > 0 {
		return fmt.Errorf("%w: HELLO", errZMTP)
	}
	if subtle.ConstantTimeCompare([]byte(password), []byte(token)) != 1 {
		_, _ = z.Write(appendCommand(nil, "ERROR", []byte("\x03400"))) // the code that libzmq uses
		return errToken
	}
	_, err = z.Write(appendCommand(nil, "WELCOME", nil))
	return err
}

// cString returns b up to its first zero byte.
func cString(b []byte) string {
	if i := slices.Index(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// allowance is a token bucket. It holds at most most tokens and gains perSecond each second. It
// starts full.
type allowance struct {
	most, perSecond float64
	used            float64
	at              time.Time // of the last update of used
}

// take takes n tokens and reports whether the bucket had them; if not, it takes none.
func (a *allowance) take(n int, now time.Time) bool {
	a.used = max(a.used-now.Sub(a.at).Seconds()*a.perSecond, 0)
	a.at = now
	if a.used+float64(n) > a.most {
		return false
	}
	a.used += float64(n)
	return true
}

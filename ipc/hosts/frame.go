package hosts

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"lookaside/ipc/wire"
)

// The TCP stream, each way, is a sequence of frames: 4 bytes, little-endian, the length of the
// packet; 1 byte, its channel; the packet. The caller sends preamble before its first frame, so
// that both ends notice at once if only one of them speaks TLS.

const (
	preamble    = "LKSDHOST"
	headerBytes = 5
	// greetingBytes is the longest packet of a greeting: a Refuse with the longest texts.
	greetingBytes = 8 << 10
)

// A channel says what a packet of the stream belongs to.
type channel uint8

const (
	onSession  channel = 0 // the session socket
	onDirect   channel = 1 // the direct socket
	onGreeting channel = 2 // the handshake of the TCP connection
)

// errFrame means that the other end has sent something that is no frame, or not one for now.
var errFrame = errors.New("malformed frame")

// appendFrame appends a packet as a frame.
func appendFrame(dst []byte, ch channel, packet []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(packet)))
	return append(append(dst, byte(ch)), packet...)
}

// frames reads frames. One goroutine may use it.
type frames struct {
	in  *bufio.Reader
	buf []byte
}

func newFrames(in io.Reader) *frames { return &frames{in: bufio.NewReaderSize(in, 4<<10)} }

// next returns the next packet, valid until the call after. A packet is 1 to limit bytes long.
// Memory is taken only for what has come, at most twice that.
func (f *frames) next(limit int) (channel, []byte, error) {
	header, err := f.in.Peek(headerBytes)
	if err != nil {
		if errors.Is(err, io.EOF) && len(header) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	n, ch := binary.LittleEndian.Uint32(header), channel(header[4])
	if n == 0 || uint64(n) > uint64(limit) || ch > onGreeting {
		return 0, nil, fmt.Errorf("%w: %d bytes on channel %d, at most %d", errFrame, n, ch, limit)
	}
	_, _ = f.in.Discard(headerBytes)
	for f.buf = f.buf[:0]; len(f.buf) < int(n); {
		have := len(f.buf)
		piece := min(int(n)-have, max(have, 4<<10))
		if cap(f.buf)-have < piece {
			grown := make([]byte, have, have+piece)
			copy(grown, f.buf)
			f.buf = grown
		}
		f.buf = f.buf[:have+piece]
		if _, err := io.ReadFull(f.in, f.buf[have:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, nil, err
		}
	}
	return ch, f.buf, nil
}

// on returns the next packet, which must be on a channel.
func (f *frames) on(want channel, limit int) ([]byte, error) {
	ch, packet, err := f.next(limit)
	if err == nil && ch != want {
		err = fmt.Errorf("%w: channel %d, want %d", errFrame, ch, want)
	}
	return packet, err
}

// maxPages returns how many pages a lookup may name that must fit one packet.
func maxPages(digestBytes uint8) uint32 {
	return uint32((wire.MaxPacketBytes - lookupOverhead) / max(1, int(digestBytes)))
}

// lookupOverhead bounds the bytes of a Lookup without its hashes.
const lookupOverhead = 1 << 10

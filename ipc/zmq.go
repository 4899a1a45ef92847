package ipc

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <zmq.h>

// Each helper makes one crossing from Go and returns -errno for a failure. None
// writes through a pointer to a Go variable, which would have to be allocated.

// The size of the frame times two, plus one if more frames follow.
static long long la_recv(void *sock, void *buf, size_t cap) {
	int n = zmq_recv(sock, buf, cap, ZMQ_DONTWAIT);
	if (n < 0) return -zmq_errno();
	int more = 0;
	size_t size = sizeof more;
	if (zmq_getsockopt(sock, ZMQ_RCVMORE, &more, &size) != 0) return -zmq_errno();
	return 2LL * n + (more != 0);
}

static int la_send(void *sock, void *buf, size_t n, int more) {
	int rc = zmq_send(sock, buf, n, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0));
	return rc < 0 ? -zmq_errno() : rc;
}

static int la_route(void *sock, void *to, size_t len, void *buf, size_t n) {
	if (zmq_send(sock, to, len, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) {
		// A send takes note of new peers only now and then; asking for the events always does.
		int events;
		size_t size = sizeof events;
		if (zmq_errno() != EHOSTUNREACH) return -zmq_errno();
		if (zmq_getsockopt(sock, ZMQ_EVENTS, &events, &size) < 0) return -zmq_errno();
		if (zmq_send(sock, to, len, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) return -zmq_errno();
	}
	return zmq_send(sock, buf, n, ZMQ_DONTWAIT) < 0 ? -zmq_errno() : 0;
}

static int la_poll(zmq_pollitem_t *items, int n, long timeout_ms) {
	int rc = zmq_poll(items, n, timeout_ms);
	return rc < 0 ? -zmq_errno() : rc;
}

static int la_filter_uid(void *sock, uid_t uid) {
#ifdef ZMQ_IPC_FILTER_UID
	return zmq_setsockopt(sock, ZMQ_IPC_FILTER_UID, &uid, sizeof uid) == 0 ? 0 : -zmq_errno();
#else
	return -ENOSYS;
#endif
}

// Bytes that the C heap has handed out, or 0 where it cannot tell.
static size_t la_heap(void) {
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33)
	struct mallinfo2 m = mallinfo2();
	return m.uordblks + m.hblkhd;
#else
	return 0;
#endif
}
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"github.com/pebbe/zmq4"
)

// This file is the only one that calls libzmq other than through pebbe/zmq4,
// whose receiving calls allocate for every message. A zsock is owned by one
// thread, as any ZMQ socket is.

// zsock is a pebbe socket together with the libzmq socket inside.
type zsock struct {
	*zmq4.Socket
	ptr unsafe.Pointer
}

var errZMQLayout = errors.New("zmq4.Socket has no field soc of the expected type")

func newZsock(ctx *zmq4.Context, t zmq4.Type) (*zsock, error) {
	f, ok := reflect.TypeFor[zmq4.Socket]().FieldByName("soc")
	if !ok || f.Type.Kind() != reflect.UnsafePointer {
		return nil, errZMQLayout
	}
	s, err := ctx.NewSocket(t)
	if err != nil {
		return nil, fmt.Errorf("zmq socket: %w", err)
	}
	return &zsock{Socket: s, ptr: *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(s), f.Offset))}, nil
}

// recv receives one frame into buf without waiting: its full size, which may
// exceed len(buf) (the rest is lost), and whether more frames of the message
// follow. syscall.EAGAIN means that there is none.
func (s *zsock) recv(buf []byte) (size int, more bool, errno syscall.Errno) {
	n := int64(C.la_recv(s.ptr, unsafe.Pointer(unsafe.SliceData(buf)), C.size_t(len(buf))))
	if n < 0 {
		return 0, false, syscall.Errno(-n)
	}
	return int(n / 2), n%2 != 0, 0
}

// send queues one frame without waiting; libzmq copies it.
func (s *zsock) send(b []byte, more bool) syscall.Errno {
	var m C.int
	if more {
		m = 1
	}
	if n := C.la_send(s.ptr, unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b)), m); n < 0 {
		return syscall.Errno(-n)
	}
	return 0
}

// route queues one frame for the peer of a ROUTER that has the routing id without waiting; libzmq
// copies it. Without such a peer it fails with syscall.EHOSTUNREACH.
func (s *zsock) route(to, b []byte) syscall.Errno {
	n := C.la_route(s.ptr, unsafe.Pointer(unsafe.SliceData(to)), C.size_t(len(to)),
		unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b)))
	return syscall.Errno(-n)
}

// event receives one event of a monitor without waiting.
func (s *zsock) event() (event zmq4.Event, ok bool) {
	// Two frames: the event's number (16 bits) and its value (32 bits) in the
	// machine's order, and the endpoint, which we know.
	var head [6]byte
	n, more, errno := s.recv(head[:])
	for more && errno == 0 {
		_, more, errno = s.recv(nil)
	}
	if errno != 0 || n != len(head) {
		return 0, false
	}
	return zmq4.Event(binary.NativeEndian.Uint16(head[:])), true
}

// onlyUID makes a socket that will be bound to an ipc path refuse peers of
// other users, and says whether this libzmq can.
func (s *zsock) onlyUID(uid int) error {
	if rc := C.la_filter_uid(s.ptr, C.uid_t(uid)); rc < 0 {
		return fmt.Errorf("ZMQ_IPC_FILTER_UID: %w", syscall.Errno(-rc))
	}
	return nil
}

// poller waits for several sockets and one file descriptor. Its items live in C
// memory, so that waiting allocates nothing.
type poller struct {
	items *C.zmq_pollitem_t
	n     int
}

func newPoller(fd int, socks ...*zsock) *poller {
	p := &poller{n: 1 + len(socks)}
	p.items = (*C.zmq_pollitem_t)(C.calloc(C.size_t(p.n), C.sizeof_zmq_pollitem_t))
	items := p.slice()
	items[0].fd = C.int(fd)
	items[0].events = C.ZMQ_POLLIN
	for i, s := range socks {
		items[i+1].socket = s.ptr
		items[i+1].events = C.ZMQ_POLLIN
	}
	return p
}

func (p *poller) slice() []C.zmq_pollitem_t { return unsafe.Slice(p.items, p.n) }

// wait waits at most d, rounded up to milliseconds.
func (p *poller) wait(d time.Duration) syscall.Errno {
	ms := max((d+time.Millisecond-1)/time.Millisecond, 0)
	if rc := C.la_poll(p.items, C.int(p.n), C.long(ms)); rc < 0 {
		return syscall.Errno(-rc)
	}
	return 0
}

// ready says whether item i (0 the file descriptor, then the sockets in order)
// had something at the last wait.
func (p *poller) ready(i int) bool { return p.slice()[i].revents != 0 }

func (p *poller) close() { C.free(unsafe.Pointer(p.items)) }

// heapBytes returns how much the C heap, where libzmq keeps its messages, has
// handed out: 0 where that cannot be told.
func heapBytes() int { return int(C.la_heap()) }

// startLoop runs a loop that alone touches some ZMQ sockets on a thread of its own: open, then
// loop, then in any case shut, after which done is closed. It returns when open has; after its
// error all is over.
func startLoop(open func() error, loop, shut func(), done chan struct{}) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // until the end of the goroutine, which ends the thread too
		err := open()
		started <- err
		if err == nil {
			loop()
		}
		shut()
		close(done)
	}()
	err := <-started
	if err != nil {
		<-done
	}
	return err
}

// LibraryVersion is the version of the libzmq that the process runs with.
func LibraryVersion() string {
	major, minor, patch := zmq4.Version()
	return fmt.Sprintf("%d.%d.%d", major, minor, patch)
}

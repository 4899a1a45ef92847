package ipc

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/types.h>
#include <zmq.h>

// Each helper is one call from Go, and returns -errno for a failure. None writes through a pointer
// to a Go variable, because the variable would have to be allocated.

// Returns the size of the frame times two, plus one if more frames follow.
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

// The libzmq that scripts/static builds counts its memory itself (packaging/libzmq/heap.cpp).
extern size_t lookaside_zmq_heap(void) __attribute__((weak));

// Returns how many bytes of the C heap are in use, or 0 where that is not known.
static size_t la_heap(void) {
	if (lookaside_zmq_heap) return lookaside_zmq_heap();
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

// This file is the only one that calls libzmq directly. pebbe/zmq4 allocates for every message that
// it receives.

// zsock is a pebbe socket together with the libzmq socket inside. Only one thread may use it, as
// any ZMQ socket.
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

// recv receives one frame into buf without waiting. It returns the frame's full size and whether
// more frames of the message follow. Bytes beyond len(buf) are lost. It returns syscall.EAGAIN if
// there is no frame.
func (s *zsock) recv(buf []byte) (size int, more bool, errno syscall.Errno) {
	n := int64(C.la_recv(s.ptr, unsafe.Pointer(unsafe.SliceData(buf)), C.size_t(len(buf))))
	if n < 0 {
		return 0, false, syscall.Errno(-n)
	}
	return int(n / 2), n%2 != 0, 0
}

// send queues a copy of one frame without waiting.
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

// route queues a copy of one frame for the peer of a ROUTER that has the routing id to. It does not
// wait. It returns syscall.EHOSTUNREACH if there is no such peer.
func (s *zsock) route(to, b []byte) syscall.Errno {
	n := C.la_route(s.ptr, unsafe.Pointer(unsafe.SliceData(to)), C.size_t(len(to)),
		unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b)))
	return syscall.Errno(-n)
}

// event receives one event of a monitor without waiting.
func (s *zsock) event() (event zmq4.Event, ok bool) {
	// An event has two frames. The first has its number (16 bits) and its value (32 bits) in the
	// machine's byte order. The second has the endpoint, which is known.
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

// onlyUID makes the socket refuse peers of other users once it is bound to an ipc path. It returns
// an error if this libzmq cannot.
func (s *zsock) onlyUID(uid int) error {
	if rc := C.la_filter_uid(s.ptr, C.uid_t(uid)); rc < 0 {
		return fmt.Errorf("ZMQ_IPC_FILTER_UID: %w", syscall.Errno(-rc))
	}
	return nil
}

// poller waits for one file descriptor, several sockets, and further file descriptors. Its items
// are in C memory, so that waiting allocates nothing.
type poller struct {
	items *C.zmq_pollitem_t
	n     int
	fixed int // items before those of setFDs
}

func newPoller(fd int, socks ...*zsock) *poller {
	p := &poller{n: 1 + len(socks), fixed: 1 + len(socks)}
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

// setFDs replaces the further file descriptors. None of them is ready before the next wait.
func (p *poller) setFDs(fds []int) {
	n := p.fixed + len(fds)
	items := (*C.zmq_pollitem_t)(C.calloc(C.size_t(n), C.sizeof_zmq_pollitem_t))
	all := unsafe.Slice(items, n)
	copy(all, p.slice()[:p.fixed])
	for i, fd := range fds {
		all[p.fixed+i].fd = C.int(fd)
		all[p.fixed+i].events = C.ZMQ_POLLIN
	}
	C.free(unsafe.Pointer(p.items))
	p.items, p.n = items, n
}

// ready reports whether item i was readable at the last wait. Item 0 is the file descriptor; the
// sockets follow in their order, then the further file descriptors in theirs.
func (p *poller) ready(i int) bool { return p.slice()[i].revents != 0 }

func (p *poller) close() { C.free(unsafe.Pointer(p.items)) }

// heapBytes returns how many bytes of the C heap, where libzmq keeps its messages, are in use. It
// returns 0 where that is not known.
func heapBytes() int { return int(C.la_heap()) }

// startLoop runs open, loop and shut, in this order, on a new goroutine with its own thread, so
// that they may own ZMQ sockets. It returns when open has returned. If open fails, loop is left
// out, and startLoop returns the error after shut. done is closed after shut.
func startLoop(open func() error, loop, shut func(), done chan struct{}) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
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

// LibraryVersion returns the version of the libzmq that the process runs with.
func LibraryVersion() string {
	major, minor, patch := zmq4.Version()
	return fmt.Sprintf("%d.%d.%d", major, minor, patch)
}

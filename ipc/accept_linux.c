// libzmq ends the process when accept fails with EMFILE, which any process that
// may connect can bring about, however short the moment between the flood and
// whoever breaks it. It goes on when accept fails with ENFILE, which means the
// same of the whole machine. So what it calls here is an accept4 that says
// ENFILE for both. The linker takes a program's own definition before that of
// the C library, for shared libraries as well. TestFloodWhileLookupsStall fails
// where it does not.
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *addr, socklen_t *len, int flags) {
	int got = (int)syscall(SYS_accept4, fd, addr, len, flags);
	if (got < 0 && errno == EMFILE) {
		// The connection stays in the queue, and whoever waits for it is told again at once: not in a busy loop.
		struct timespec pause = {0, 1000 * 1000};
		nanosleep(&pause, NULL);
		errno = ENFILE;
	}
	return got;
}

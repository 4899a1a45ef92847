/* What libzmq's configure would find: Linux, with musl or a glibc from 2.28 on. Transports and
   mechanisms that need another library (ws, curve, gssapi, pgm, norm) are left out, and so are
   tipc and vmci. */
#ifndef LOOKASIDE_LIBZMQ_PLATFORM_HPP
#define LOOKASIDE_LIBZMQ_PLATFORM_HPP

#define ZMQ_HAVE_LINUX 1
#define ZMQ_CACHELINE_SIZE 64

#define ZMQ_IOTHREAD_POLLER_USE_EPOLL 1
#define ZMQ_IOTHREAD_POLLER_USE_EPOLL_CLOEXEC 1
#define ZMQ_POLL_BASED_ON_POLL 1
#define ZMQ_USE_CV_IMPL_STL11 1

#define ZMQ_HAVE_IPC 1
#define ZMQ_HAVE_UIO 1
#define ZMQ_HAVE_IFADDRS 1
#define ZMQ_HAVE_NOEXCEPT 1

#define ZMQ_HAVE_EVENTFD 1
#define ZMQ_HAVE_EVENTFD_CLOEXEC 1
#define ZMQ_HAVE_O_CLOEXEC 1
#define ZMQ_HAVE_SOCK_CLOEXEC 1
#define HAVE_ACCEPT4 1
#define HAVE_FORK 1
#define HAVE_MKDTEMP 1
#define HAVE_POSIX_MEMALIGN 1
#define HAVE_CLOCK_GETTIME 1
#define HAVE_IF_NAMETOINDEX 1
#define HAVE_STRNLEN 1
#define ZMQ_HAVE_GETRANDOM 1
#ifndef __GLIBC__ /* musl; glibc has it from 2.38 on */
#define ZMQ_HAVE_STRLCPY 1
#endif

#define ZMQ_HAVE_SO_PEERCRED 1
#define ZMQ_HAVE_SO_BINDTODEVICE 1
#define ZMQ_HAVE_SO_PRIORITY 1
#define ZMQ_HAVE_SO_KEEPALIVE 1
#define ZMQ_HAVE_TCP_KEEPCNT 1
#define ZMQ_HAVE_TCP_KEEPIDLE 1
#define ZMQ_HAVE_TCP_KEEPINTVL 1

#define ZMQ_HAVE_PTHREAD_SETNAME_2 1
#define ZMQ_HAVE_PTHREAD_SET_AFFINITY 1

#endif

/*
 * Copies that survive a bus error.
 *
 * An access to a mapped region is a bus error (SIGBUS) where the device behind it has gone, a page of it is poisoned, or its
 * file was cut short. la_copy_guarded tells of one instead of dying: a handler of SIGBUS, which is installed once, jumps out
 * of the copy that the thread is in. Nothing is allocated or locked in a copy, so nothing is left behind; what it had copied
 * stays. A SIGBUS of any other origin goes to whoever handled it before, by default the kernel, which ends the process.
 *
 * What a thread is in is found by a pthread key and not by a thread-local variable: in a library that is loaded late the first
 * use of such a variable allocates, which a handler must not.
 *
 * No Python in here, as in _copycore.h.
 */
#ifndef LOOKASIDE_GUARD_H
#define LOOKASIDE_GUARD_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <unistd.h>

#include "_copycore.h"

#ifndef BUS_MCEERR_AO
#define BUS_MCEERR_AO 5 /* a bad page that nobody has touched yet */
#endif

/* One guarded copy, on its thread's stack. */
typedef struct {
    sigjmp_buf out;
    volatile uintptr_t address; /* of the bus error */
} la_guard;

static pthread_key_t la_guard_key;
static struct sigaction la_guard_before; /* what handled SIGBUS before */
static int la_guard_installed;

static void la_guard_handle(int number, siginfo_t *info, void *context) {
    la_guard *guard = pthread_getspecific(la_guard_key);
    int access = info->si_code > 0 && info->si_code != BUS_MCEERR_AO; /* the thread's own, just now */
    /* One that was installed later, such as faulthandler's, restores this handler and raises the signal again. */
    int again = info->si_code == SI_TKILL && info->si_pid == getpid();
    if (guard != NULL && (access || again)) {
        guard->address = access ? (uintptr_t)info->si_addr : 0;
        siglongjmp(guard->out, 1);
    }
    if (la_guard_before.sa_flags & SA_SIGINFO) {
        la_guard_before.sa_sigaction(number, info, context);
    } else if (la_guard_before.sa_handler == SIG_DFL || (la_guard_before.sa_handler == SIG_IGN && access)) {
        struct sigaction fatal = {.sa_handler = SIG_DFL};
        sigaction(SIGBUS, &fatal, NULL);
        if (!access) raise(number); /* takes effect on return; an access is made again, and ends the process then */
    } else if (la_guard_before.sa_handler != SIG_IGN) {
        la_guard_before.sa_handler(number);
    }
}

/* Installs the handler, the first time that it is called. Not for two threads at once. 0, or an errno. */
static inline int la_guard_install(void) {
    if (la_guard_installed) return 0;
    int failed = pthread_key_create(&la_guard_key, NULL);
    if (failed != 0) return failed;
    struct sigaction ours = {.sa_sigaction = la_guard_handle, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    /* First as it is, so that the handler never finds nothing in it. */
    if (sigaction(SIGBUS, NULL, &la_guard_before) != 0 || sigaction(SIGBUS, &ours, NULL) != 0) {
        failed = errno;
        pthread_key_delete(la_guard_key);
        return failed;
    }
    la_guard_installed = 1;
    return 0;
}

/*
 * la_copy, or 1 if it met a bus error, at *fault (0: not known); which pairs were copied before is not known then. *failures is
 * what la_copy returned. The handler must be installed. Costs some tens of nanoseconds, once for all pairs: neither the jump's target nor its way out asks the
 * kernel for anything.
 */
static inline int la_copy_guarded(const la_plan *plan, la_kernel kernel, la_direction direction, const int64_t *blocks,
                                  const uint64_t *addresses, size_t count, unsigned char *failed, size_t *failures,
                                  uint64_t *fault) {
    la_guard guard = {.address = 0};
#if defined(__x86_64__)
    /* A signal's handler begins with the default rounding and denormal modes, and a jump out of it would keep them. */
    const unsigned modes = __builtin_ia32_stmxcsr();
#endif
    if (sigsetjmp(guard.out, 0) != 0) {
        pthread_setspecific(la_guard_key, NULL);
        /* It was blocked while it was handled. */
        sigset_t bus;
        sigemptyset(&bus);
        sigaddset(&bus, SIGBUS);
        pthread_sigmask(SIG_UNBLOCK, &bus, NULL);
#if defined(__x86_64__)
        __builtin_ia32_ldmxcsr(modes);
#endif
        *fault = guard.address;
        return 1;
    }
    (void)pthread_setspecific(la_guard_key, &guard); /* fails for want of memory alone: then the copy is unguarded */
    *failures = la_copy(plan, kernel, direction, blocks, addresses, count, failed);
    pthread_setspecific(la_guard_key, NULL);
    return 0;
}

#endif

/* The system calls of a queue, real and faulty. See faults.h. Only tests inject faults, through `_aio._inject`.
 *
 * [Note: faults are real] A block that a rule shortens or fails goes to the kernel with fewer bytes. A delayed block goes to the kernel
 * late. So bytes that the queue wrongly counts as moved are missing in the buffer or the file, where a test finds them.
 *
 * [Note: libaio at run time] The first queue opens libaio; the extension is not linked to it. So a program that uses no files runs without
 * libaio. One build serves distributions with libaio.so.1 and those with libaio.so.1t64. libaio is not linked statically either, because
 * users of an LGPL library must be able to replace that library. The build needs only the header. */
#define _GNU_SOURCE
#include "faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_RULES 16
#define MAX_BLOCKS 4096 /* blocks with a delay or an injected result */

struct touched {
    struct iocb *iocb; /* NULL: free */
    io_context_t context;
    int has_result;
    long long result;
    int64_t due_ns; /* 0: already in the kernel */
    unsigned long nbytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct aio_rule rules[MAX_RULES];
static int num_rules;
static struct touched touched[MAX_BLOCKS];
static int num_touched;

int64_t aio_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* In bytes: 4096 if the kernel reports nothing, 0 if the file takes no direct I/O. */
void aio_direct_alignment(int fd, unsigned *memory, unsigned *offset)
{
    *memory = *offset = 4096;
#ifdef STATX_DIOALIGN
    struct statx status;
    memset(&status, 0, sizeof status);
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
        *memory = status.stx_dio_mem_align;
        *offset = status.stx_dio_offset_align;
    }
#else
    (void)fd;
#endif
}

static void kernel_sleep(int eventfd, int64_t timeout_ns)
{
    uint64_t count;
    if (timeout_ns >= 0) {
        struct pollfd poller = {.fd = eventfd, .events = POLLIN};
        struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
        if (ppoll(&poller, 1, &timeout, NULL) <= 0)
            return;
    }
    ssize_t got = read(eventfd, &count, sizeof count); /* EINTR: the caller checks and calls again */
    (void)got;
}

struct aio_calls aio_kernel = {.sleep = kernel_sleep};

static char missing[256]; /* why libaio is missing; empty: found, or not searched for yet */

static void find_libaio(void)
{
    void *library = dlopen("libaio.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        snprintf(missing, sizeof missing, "%s", dlerror());
    if (!library && !(library = dlopen("libaio.so.1t64", RTLD_NOW | RTLD_LOCAL)))
        return;
    struct {
        const char *name;
        void *place;
    } calls[] = {{"io_setup", &aio_kernel.setup},
                 {"io_submit", &aio_kernel.submit},
                 {"io_getevents", &aio_kernel.getevents},
                 {"io_destroy", &aio_kernel.destroy}};
    missing[0] = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *found = dlsym(library, calls[i].name);
        if (!found)
            snprintf(missing, sizeof missing, "it has no %s", calls[i].name);
        memcpy(calls[i].place, &found, sizeof found); /* POSIX: a function pointer fits into void * */
    }
}

const char *aio_kernel_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_libaio);
    return missing[0] ? missing : NULL;
}

/* ---- the faulty table ---- */

int aio_fault_add(const struct aio_rule *rule)
{
    int added = -1;
    pthread_mutex_lock(&lock);
    if (num_rules < MAX_RULES) {
        rules[num_rules++] = *rule;
        added = 0;
    }
    pthread_mutex_unlock(&lock);
    return added;
}

long aio_fault_clear(void)
{
    long fired = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_rules; i++)
        fired += rules[i].fired;
    num_rules = 0;
    pthread_mutex_unlock(&lock);
    return fired;
}

/* Returns the rule that applies to this call, or NULL. fd: of the block, -1 if the call is none. Needs the lock held. */
static struct aio_rule *meet(enum aio_call call, int fd)
{
    struct aio_rule *met = NULL;
    for (int i = 0; i < num_rules; i++) {
        struct aio_rule *rule = &rules[i];
        if (rule->call != call || (rule->fd >= 0 && rule->fd != fd))
            continue;
        long position = rule->seen++ - rule->nth;
        if (position < 0 || position % rule->every || (rule->times >= 0 && rule->fired >= rule->times) || met)
            continue;
        rule->fired++;
        met = rule;
    }
    return met;
}

/* Returns 1 and sets *result if a rule replaces the call. */
static int refused(enum aio_call call, int *result)
{
    pthread_mutex_lock(&lock);
    struct aio_rule *rule = meet(call, -1);
    if (rule)
        *result = (int)rule->value;
    pthread_mutex_unlock(&lock);
    return rule != NULL;
}

static int faulty_setup(int depth, io_context_t *context)
{
    int result;
    return refused(AIO_SETUP, &result) ? result : aio_kernel.setup(depth, context);
}

static int faulty_destroy(io_context_t context)
{
    int result = 0, real = aio_kernel.destroy(context);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_BLOCKS && num_touched; i++)
        if (touched[i].iocb && touched[i].context == context) {
            touched[i].iocb = NULL;
            num_touched--;
        }
    pthread_mutex_unlock(&lock);
    return refused(AIO_DESTROY, &result) ? result : real;
}

static void shorten(struct touched *entry, const struct aio_rule *rule)
{
    unsigned long asked = entry->iocb->u.c.nbytes;
    entry->nbytes = asked;
    if (rule->effect == AIO_PASS)
        return;
    entry->has_result = 1;
    if (rule->effect == AIO_RESULT)
        entry->result = rule->value;
    else if (rule->effect == AIO_MISSING)
        entry->result = (unsigned long long)rule->value < asked ? (long long)asked - rule->value : 0;
    else
        entry->result = (long long)((double)asked * rule->fraction);
    unsigned memory, offset = 1;
    if (fcntl(entry->iocb->aio_fildes, F_GETFL) & O_DIRECT)
        aio_direct_alignment(entry->iocb->aio_fildes, &memory, &offset);
    unsigned long nbytes = entry->result > 0 ? (unsigned long)entry->result : 0;
    nbytes = (nbytes + offset - 1) / offset * offset; /* direct I/O moves whole units: round up, to move no less than reported */
    entry->nbytes = nbytes < asked ? nbytes : asked;
}

/* Submits the iocb with the shortened size. The kernel copies the iocb, so the size is restored at once. */
static int hand_over(io_context_t context, struct iocb *iocb, unsigned long nbytes)
{
    unsigned long asked = iocb->u.c.nbytes;
    iocb->u.c.nbytes = nbytes;
    int accepted = aio_kernel.submit(context, 1, &iocb);
    iocb->u.c.nbytes = asked;
    return accepted;
}

static int submit_one(io_context_t context, struct iocb *iocb)
{
    struct touched *entry = NULL;
    pthread_mutex_lock(&lock);
    struct aio_rule *rule = meet(iocb->aio_lio_opcode == IO_CMD_PWRITE ? AIO_WRITE : AIO_READ, iocb->aio_fildes);
    for (int i = 0; rule && i < MAX_BLOCKS && !entry; i++)
        if (!touched[i].iocb)
            entry = &touched[i];
    if (entry) {
        *entry = (struct touched){.iocb = iocb, .context = context};
        num_touched++;
        shorten(entry, rule);
        if (rule->delay_ns) {
            int64_t now = aio_now_ns(), late = now + rule->delay_ns;
            if (rule->fd >= 0)
                late = (rule->last_due_ns > now ? rule->last_due_ns : now) + (rule->delay_ns * (int64_t)entry->nbytes >> 20);
            entry->due_ns = rule->last_due_ns = late;
        }
    }
    int late = entry && entry->due_ns;
    unsigned long nbytes = entry ? entry->nbytes : iocb->u.c.nbytes;
    pthread_mutex_unlock(&lock);
    int accepted = late ? 1 : hand_over(context, iocb, nbytes);
    if (entry && accepted != 1) {
        pthread_mutex_lock(&lock);
        entry->iocb = NULL;
        num_touched--;
        pthread_mutex_unlock(&lock);
    }
    return accepted;
}

static int faulty_submit(io_context_t context, long count, struct iocb **iocbs)
{
    int result;
    if (refused(AIO_SUBMIT, &result)) {
        if (result < 0)
            return result;
        count = result < count ? result : count; /* a partial submit */
    }
    for (long i = 0; i < count; i++) {
        int accepted = submit_one(context, iocbs[i]);
        if (accepted != 1)
            return i ? (int)i : accepted;
    }
    return (int)count;
}

static int faulty_getevents(io_context_t context, long least, long most, struct io_event *events,
                            struct timespec *timeout)
{
    int result, got = 0;
    if (refused(AIO_GETEVENTS, &result))
        return result;
    pthread_mutex_lock(&lock);
    int64_t now = num_touched ? aio_now_ns() : 0;
    for (int i = 0, left = num_touched; i < MAX_BLOCKS && left && got < most; i++) {
        struct touched *entry = &touched[i];
        left -= entry->iocb != NULL;
        if (!entry->iocb || entry->context != context || !entry->due_ns || entry->due_ns > now)
            continue;
        entry->due_ns = 0;
        int accepted = hand_over(context, entry->iocb, entry->nbytes);
        if (accepted != 1) {
            events[got++] = (struct io_event){
                .data = entry->iocb->data, .obj = entry->iocb, .res = (unsigned long)(long)accepted};
            entry->iocb = NULL;
            num_touched--;
        }
    }
    pthread_mutex_unlock(&lock);
    int real = got < most ? aio_kernel.getevents(context, got ? 0 : least, most - got, events + got, timeout) : 0;
    if (real < 0)
        return got ? got : real;
    pthread_mutex_lock(&lock);
    for (int e = got; e < got + real && num_touched; e++)
        for (int i = 0; i < MAX_BLOCKS; i++)
            if (touched[i].iocb == events[e].obj && touched[i].context == context) {
                if (touched[i].has_result)
                    events[e].res = (unsigned long)touched[i].result;
                touched[i].iocb = NULL;
                num_touched--;
                break;
            }
    pthread_mutex_unlock(&lock);
    return got + real;
}

static void faulty_sleep(int eventfd, int64_t timeout_ns)
{
    pthread_mutex_lock(&lock);
    for (int i = 0, left = num_touched; i < MAX_BLOCKS && left; i++) {
        struct touched *entry = &touched[i];
        left -= entry->iocb != NULL;
        if (!entry->iocb || !entry->due_ns || (int)entry->iocb->u.c.resfd != eventfd)
            continue;
        int64_t wait = entry->due_ns - aio_now_ns();
        wait = wait > 0 ? wait : 0;
        if (timeout_ns < 0 || wait < timeout_ns)
            timeout_ns = wait;
    }
    pthread_mutex_unlock(&lock);
    kernel_sleep(eventfd, timeout_ns);
}

const struct aio_calls aio_faulty = {faulty_setup, faulty_submit, faulty_getevents, faulty_destroy, faulty_sleep};

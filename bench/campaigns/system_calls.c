/* Watches the system calls that a process makes below one folder, and interferes with one of them.

   Loaded with LD_PRELOAD, so that it sees the writes of every library (CPython, Polars, safetensors), not only Python's.
   system_calls.py compiles it and holds the other side of `struct control`.

   A watched call is counted. The call whose number is `act_at` can be the last one of the process (SIGKILL before it,
   after it, or with half of its bytes written), or fail with an error number, or write only half of its bytes.
   With a trace descriptor, each call is also written down, with its bytes, for the replay of a loss of power. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN = 1, CREATE, WRITE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, MARK };

enum action { NOTHING, KILL_BEFORE, KILL_AFTER, KILL_INSIDE, FAIL, SHORT };

/* In memory shared with the parent, which reads it after a kill. */
struct control {
    _Atomic int64_t calls;
    int64_t act_at;
    int64_t action;
    int64_t error;
    int64_t persistent; /* whether all later calls fail too; of a full disk, those that need room */
    int64_t acted;      /* the kind of the call that was interfered with, 0 if none was */
    char path[512];     /* and its path */
};

static struct control *control;
static char root[PATH_MAX];
static size_t root_length;
static int trace = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

enum { DESCRIPTORS = 4096 };
static char *paths[DESCRIPTORS];      /* of watched descriptors */
static int32_t serials[DESCRIPTORS];  /* each open has a number of its own */
static int32_t next_serial = 1;

void watch_calls(const char *folder, struct control *shared, int trace_descriptor) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    trace = trace_descriptor;
    control = shared;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below_root(const char *path) {
    return control && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static char *resolve(int folder, const char *path, char *out) {
    if (path[0] == '/' || folder == AT_FDCWD) {
        snprintf(out, PATH_MAX, "%s", path);
        return out;
    }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) length = 0;
    snprintf(out + length, PATH_MAX - length, "/%s", path);
    return out;
}

/* trace: one record for each call that succeeded */
static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = syscall(SYS_write, trace, at, size);
        if (done <= 0) abort();
        at += done;
        size -= done;
    }
}

static void record(enum kind kind, int32_t serial, int64_t offset, const char *path, const char *other,
                   const void *data, size_t size) {
    if (trace < 0) return;
    struct { int32_t kind, serial, path, other; int64_t offset, size; } head = {
        kind, serial, path ? strlen(path) : 0, other ? strlen(other) : 0, offset, size};
    put(&head, sizeof head);
    if (path) put(path, head.path);
    if (other) put(other, head.other);
    if (data) put(data, size);
}

void mark_trace(int64_t value) {
    pthread_mutex_lock(&order);
    record(MARK, 0, value, NULL, NULL, NULL, 0);
    pthread_mutex_unlock(&order);
}

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* Whether a call can meet with this: only writes are short, and a full disk refuses only what needs room. */
static int applies(enum action action, enum kind kind) {
    if (action == SHORT) return kind == WRITE;
    if (action == FAIL && control->error == ENOSPC)
        return kind == CREATE || kind == WRITE || kind == FSYNC || kind == RENAME || kind == MKDIR;
    return action != NOTHING;
}

/* What to do with this call. Calls are ordered by the lock, which is held until leave(). */
static enum action enter(enum kind kind, const char *path) {
    pthread_mutex_lock(&order);
    int64_t number = ++control->calls;
    enum action action = NOTHING;
    if (control->act_at && number == control->act_at)
        action = control->action;
    else if (control->act_at && number > control->act_at && control->persistent)
        action = control->error ? FAIL : SHORT;
    if (!applies(action, kind)) return NOTHING;
    if (!control->acted) {
        control->acted = kind;
        snprintf(control->path, sizeof control->path, "%s", path);
    }
    if (action == KILL_BEFORE || (action == KILL_INSIDE && kind != WRITE)) die();
    return action;
}

static void leave(enum action action) {
    if (action == KILL_AFTER) die();
    pthread_mutex_unlock(&order);
}

static int fail(void) {
    int error = control->error;
    pthread_mutex_unlock(&order);
    errno = error;
    return -1;
}

static int watched(int descriptor) { return control && descriptor >= 0 && descriptor < DESCRIPTORS && paths[descriptor]; }

static int open_watched(int folder, const char *path, int flags, mode_t mode) {
    int (*real)(int, const char *, int, ...) = REAL(openat64);
    char full[2 * PATH_MAX];
    if (!control || !below_root(resolve(folder, path, full))) return real(folder, path, flags, mode);
    struct stat64 known;
    int there = !fstatat64(folder, path, &known, 0);
    int creates = (flags & O_CREAT) && !there;
    enum kind kind = creates || (flags & O_TRUNC) ? CREATE : OPEN;
    enum action action = enter(kind, full);
    if (action == FAIL) return fail();
    int descriptor = real(folder, path, flags, mode);
    if (descriptor >= 0 && descriptor < DESCRIPTORS) {
        free(paths[descriptor]);
        paths[descriptor] = strdup(full);
        serials[descriptor] = next_serial++;
        /* offset: 1 if the file is new, 2 if it was emptied, 0 if it is as it was */
        record(kind, serials[descriptor], creates ? 1 : (flags & O_TRUNC) ? 2 : 0, full, NULL, NULL, 0);
    }
    leave(action);
    return descriptor;
}

#define OPENING(name)                                                  \
    int name(const char *path, int flags, ...) {                       \
        va_list given;                                                 \
        va_start(given, flags);                                        \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(given, mode_t) : 0; \
        va_end(given);                                                 \
        return open_watched(AT_FDCWD, path, flags, mode);              \
    }
#define OPENING_AT(name)                                               \
    int name(int folder, const char *path, int flags, ...) {           \
        va_list given;                                                 \
        va_start(given, flags);                                        \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(given, mode_t) : 0; \
        va_end(given);                                                 \
        return open_watched(folder, path, flags, mode);                \
    }
OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)

int close(int descriptor) {
    if (watched(descriptor)) {
        free(paths[descriptor]);
        paths[descriptor] = NULL;
    }
    return REAL(close)(descriptor);
}

/* All ways of writing end here: offset -1 is the file's present place. */
static ssize_t write_watched(int descriptor, const struct iovec *pieces, int count, int64_t offset) {
    size_t size = 0;
    for (int n = 0; n < count; n++) size += pieces[n].iov_len;
    enum action action = enter(WRITE, paths[descriptor]);
    if (action == FAIL) return fail();
    char *joined = malloc(size + 1);
    size_t at = 0;
    for (int n = 0; n < count; n++) {
        memcpy(joined + at, pieces[n].iov_base, pieces[n].iov_len);
        at += pieces[n].iov_len;
    }
    size_t wanted = action == KILL_INSIDE || action == SHORT ? (size + 1) / 2 : size;
    int64_t place = offset;
    if (place < 0) place = fcntl(descriptor, F_GETFL) & O_APPEND ? lseek64(descriptor, 0, SEEK_END) : lseek64(descriptor, 0, SEEK_CUR);
    ssize_t done;
    if (wanted == size) /* as it was asked for: direct writes depend on where the pieces are in memory */
        done = offset < 0 ? syscall(SYS_writev, descriptor, pieces, count) : syscall(SYS_pwritev, descriptor, pieces, count, offset, 0);
    else
        done = offset < 0 ? syscall(SYS_write, descriptor, joined, wanted) : syscall(SYS_pwrite64, descriptor, joined, wanted, offset);
    int error = errno;
    if (done >= 0) record(WRITE, serials[descriptor], place, NULL, NULL, joined, done);
    free(joined);
    if (action == KILL_INSIDE) die();
    leave(action);
    errno = error;
    return done;
}

ssize_t write(int descriptor, const void *data, size_t size) {
    if (!watched(descriptor)) return REAL(write)(descriptor, data, size);
    struct iovec piece = {(void *)data, size};
    return write_watched(descriptor, &piece, 1, -1);
}

ssize_t writev(int descriptor, const struct iovec *pieces, int count) {
    if (!watched(descriptor)) return REAL(writev)(descriptor, pieces, count);
    return write_watched(descriptor, pieces, count, -1);
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    if (!watched(descriptor)) return REAL(pwrite64)(descriptor, data, size, offset);
    struct iovec piece = {(void *)data, size};
    return write_watched(descriptor, &piece, 1, offset);
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) { return pwrite64(descriptor, data, size, offset); }

#define SIMPLE(kind, path, other, call)                                \
    enum action action = enter(kind, path);                            \
    if (action == FAIL) return fail();                                 \
    int found = call;                                                  \
    int error = errno;                                                 \
    if (!found) record(kind, 0, 0, path, other, NULL, 0);              \
    leave(action);                                                     \
    errno = error;                                                     \
    return found;

static int sync_watched(int descriptor, int (*real)(int)) {
    enum action action = enter(FSYNC, paths[descriptor]);
    if (action == FAIL) return fail();
    int found = real(descriptor);
    int error = errno;
    if (!found) record(FSYNC, serials[descriptor], 0, paths[descriptor], NULL, NULL, 0);
    leave(action);
    errno = error;
    return found;
}

int fsync(int descriptor) {
    return watched(descriptor) ? sync_watched(descriptor, REAL(fsync)) : REAL(fsync)(descriptor);
}

int fdatasync(int descriptor) {
    return watched(descriptor) ? sync_watched(descriptor, REAL(fdatasync)) : REAL(fdatasync)(descriptor);
}

int ftruncate64(int descriptor, off64_t size) {
    if (!watched(descriptor)) return REAL(ftruncate64)(descriptor, size);
    enum action action = enter(TRUNCATE, paths[descriptor]);
    if (action == FAIL) return fail();
    int found = REAL(ftruncate64)(descriptor, size);
    int error = errno;
    if (!found) record(TRUNCATE, serials[descriptor], size, NULL, NULL, NULL, 0);
    leave(action);
    errno = error;
    return found;
}

int ftruncate(int descriptor, off_t size) { return ftruncate64(descriptor, size); }

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    char old[2 * PATH_MAX], new[2 * PATH_MAX];
    if (!control || !below_root(resolve(to_folder, to, new))) return REAL(renameat)(from_folder, from, to_folder, to);
    resolve(from_folder, from, old);
    SIMPLE(RENAME, old, new, REAL(renameat)(from_folder, from, to_folder, to))
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int folder, const char *path, int flags) {
    char full[2 * PATH_MAX];
    if (!control || !below_root(resolve(folder, path, full))) return REAL(unlinkat)(folder, path, flags);
    SIMPLE(flags & AT_REMOVEDIR ? RMDIR : UNLINK, full, NULL, REAL(unlinkat)(folder, path, flags))
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[2 * PATH_MAX];
    if (!control || !below_root(resolve(folder, path, full))) return REAL(mkdirat)(folder, path, mode);
    SIMPLE(MKDIR, full, NULL, REAL(mkdirat)(folder, path, mode))
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

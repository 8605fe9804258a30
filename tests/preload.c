/* Fail or kill a process at one of its calls that change files; loaded with LD_PRELOAD.

   fault_arm(root, trace, point, mode) begins: from then on every such call below `root` is counted
   and described by a line in the file `trace`. Call number `point` (from 1) meets its fate:

       kill    the process is killed before the call
       torn    half of a write is done, then the process is killed
       ERRNO   a number: the call fails with this errno, and later calls work again
       full    from this call on, whatever needs room on the disk fails with ENOSPC */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL, TORN, FULL, FAIL };

static char root[PATH_MAX];
static long point;
static int mode;
static int failure;
static int trace = -1;
static _Atomic long counter;

void fault_arm(const char *folder, const char *notes, long number, const char *wish) {
    point = number;
    failure = atoi(wish);
    mode = FAIL;
    if (!strcmp(wish, "kill"))
        mode = KILL;
    if (!strcmp(wish, "torn"))
        mode = TORN;
    if (!strcmp(wish, "full")) {
        mode = FULL;
        failure = ENOSPC;
    }
    /* A system call, because the function of this name is our own. */
    trace = syscall(SYS_openat, AT_FDCWD, notes, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC,
                    0600);
    strncpy(root, folder, sizeof root - 1);
}

/* The absolute path of a name, as seen from the folder `at`. */
static void resolve(int at, const char *name, char *path) {
    char link[64];
    ssize_t length = 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (at == AT_FDCWD) {
        if (!getcwd(path, PATH_MAX))
            path[0] = 0;
        length = strlen(path);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        length = readlink(link, path, PATH_MAX - 1);
        path[length < 0 ? 0 : length] = 0;
        length = strlen(path);
    }
    if (name[0])
        snprintf(path + length, PATH_MAX - length, "/%s", name);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Count a call. Returns whether it must fail, with errno set; TORN means: write half, then die. */
static int fate(int at, const char *name, const char *call, int needs_room, size_t bytes) {
    char path[PATH_MAX], line[PATH_MAX + 64];
    int before = errno, length;
    long number;
    if (!root[0] || !name)
        return 0;
    resolve(at, name, path);
    length = strlen(root);
    errno = before;
    if (strncmp(path, root, length) || (path[length] != '/' && path[length]))
        return 0;
    number = atomic_fetch_add(&counter, 1) + 1;
    length = snprintf(line, sizeof line, "%ld %s %zu %d %s\n", number, call, bytes, needs_room, path);
    syscall(SYS_write, trace, line, (size_t)length);
    errno = before;
    if (mode == FULL) {
        if (!point || number < point || !needs_room)
            return 0;
    } else if (number != point) {
        return 0;
    }
    if (mode == KILL)
        die();
    if (mode == TORN)
        return TORN;
    errno = failure;
    return FAIL;
}

static int fate_of_file(int number, const char *call, size_t bytes) {
    if (!root[0])
        return 0;
    return fate(number, "", call, strcmp(call, "fsync") != 0, bytes);
}

#define ORIGINAL(name) \
    static __typeof__(name) *original; \
    if (!original) original = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* ------------------------------------------------------------------------------- open for writing */

static int changes(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
}

static int fate_of_open(int at, const char *path, int flags) {
    if (!root[0] || !changes(flags) || (flags & O_TMPFILE) == O_TMPFILE)
        return 0;
    int is_new = (flags & O_CREAT) && syscall(SYS_faccessat, at, path, F_OK) != 0;
    return fate(at, path, "open", is_new, 0);
}

#define MODE(flags, last) \
    mode_t permissions = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, last); \
        permissions = va_arg(list, mode_t); \
        va_end(list); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        ORIGINAL(name); \
        MODE(flags, flags) \
        return fate_of_open(AT_FDCWD, path, flags) ? -1 : original(path, flags, permissions); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        ORIGINAL(name); \
        MODE(flags, flags) \
        return fate_of_open(at, path, flags) ? -1 : original(at, path, flags, permissions); \
    }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(name) \
    int name(const char *path, mode_t permissions) { \
        ORIGINAL(name); \
        return fate_of_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC) ? -1 \
                                                                         : original(path, permissions); \
    }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *kind) { \
        ORIGINAL(name); \
        int flags = kind[0] == 'r' && !strchr(kind, '+') ? O_RDONLY : O_WRONLY | O_CREAT; \
        return fate_of_open(AT_FDCWD, path, flags) ? NULL : original(path, kind); \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* ------------------------------------------------------------------------------------------ write */

ssize_t write(int number, const void *data, size_t bytes) {
    ORIGINAL(write);
    switch (fate_of_file(number, "write", bytes)) {
    case 0:
        return original(number, data, bytes);
    case TORN:
        syscall(SYS_write, number, data, bytes / 2);
        die();
    }
    return -1;
}

#define PWRITE(name, offset_type) \
    ssize_t name(int number, const void *data, size_t bytes, offset_type offset) { \
        ORIGINAL(name); \
        switch (fate_of_file(number, "write", bytes)) { \
        case 0: \
            return original(number, data, bytes, offset); \
        case TORN: \
            original(number, data, bytes / 2, offset); \
            die(); \
        } \
        return -1; \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int number, const struct iovec *parts, int count) {
    ORIGINAL(writev);
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += parts[i].iov_len;
    switch (fate_of_file(number, "write", bytes)) {
    case 0:
        return original(number, parts, count);
    case TORN:
        original(number, parts, count / 2);
        die();
    }
    return -1;
}

#define SENDFILE(name, offset_type) \
    ssize_t name(int to, int from, offset_type *offset, size_t bytes) { \
        ORIGINAL(name); \
        switch (fate_of_file(to, "write", 0)) { \
        case 0: \
            return original(to, from, offset, bytes); \
        case TORN: \
            die(); \
        } \
        return -1; \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *end, size_t bytes, unsigned flags) {
    ORIGINAL(copy_file_range);
    switch (fate_of_file(to, "write", 0)) {
    case 0:
        return original(from, start, to, end, bytes, flags);
    case TORN:
        die();
    }
    return -1;
}

int fsync(int number) {
    ORIGINAL(fsync);
    return fate_of_file(number, "fsync", 0) ? -1 : original(number);
}

int fdatasync(int number) {
    ORIGINAL(fdatasync);
    return fate_of_file(number, "fsync", 0) ? -1 : original(number);
}

#define FTRUNCATE(name, size_type) \
    int name(int number, size_type size) { \
        ORIGINAL(name); \
        return fate_of_file(number, "truncate", 0) ? -1 : original(number, size); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

/* Reserving room; these two return the error itself or set errno. */
#define FALLOCATE(name, size_type) \
    int name(int number, size_type start, size_type size) { \
        ORIGINAL(name); \
        return fate_of_file(number, "truncate", 0) ? errno : original(number, start, size); \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

/* ------------------------------------------------------------------------------------------ names */

#define NAME(call, declaration, at, path, room, arguments) \
    int call declaration { \
        ORIGINAL(call); \
        return fate(at, path, #call, room, 0) ? -1 : original arguments; \
    }
NAME(rename, (const char *from, const char *to), AT_FDCWD, to, 0, (from, to))
NAME(renameat, (int a, const char *from, int b, const char *to), b, to, 0, (a, from, b, to))
NAME(renameat2, (int a, const char *from, int b, const char *to, unsigned flags), b, to, 0,
     (a, from, b, to, flags))
NAME(mkdir, (const char *path, mode_t permissions), AT_FDCWD, path, 1, (path, permissions))
NAME(mkdirat, (int at, const char *path, mode_t permissions), at, path, 1, (at, path, permissions))
NAME(unlink, (const char *path), AT_FDCWD, path, 0, (path))
NAME(unlinkat, (int at, const char *path, int flags), at, path, 0, (at, path, flags))
NAME(rmdir, (const char *path), AT_FDCWD, path, 0, (path))
NAME(truncate, (const char *path, off_t size), AT_FDCWD, path, 0, (path, size))
NAME(link, (const char *from, const char *to), AT_FDCWD, to, 1, (from, to))
NAME(linkat, (int a, const char *from, int b, const char *to, int flags), b, to, 1,
     (a, from, b, to, flags))
NAME(symlink, (const char *from, const char *to), AT_FDCWD, to, 1, (from, to))
NAME(symlinkat, (const char *from, int at, const char *to), at, to, 1, (from, at, to))

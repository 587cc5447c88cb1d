/* Numbers the file operations of a process below one folder, and lets one of them fail.
 *
 * Loaded with LD_PRELOAD, it stands between every library of the process and libc, so that it sees
 * what Python, pyarrow, FAISS and safetensors do alike. `fault_arm` starts it; before that each call
 * passes straight through. Operations are counted over all threads.
 *
 * fault_arm(folder, kinds, nth, error, mode, log)
 *   kinds  the kinds of operation that count, as a set of bits in the order of KINDS
 *   nth    the first operation to fail, from 1; 0 for none
 *   mode   0: only that one fails; 1: it and all after it; 2: the process is killed right before it,
 *          after half of the bytes where it writes
 *   log    file descriptor that gets a line for each operation that counts, or -1
 */
#define _GNU_SOURCE
#include <dirent.h>
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
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, LIST, LOOK, READ, WRITE, FSYNC, RENAME, UNLINK, MKDIR, LINK, LOCK, MAP, SEEK, CLOSE, KINDS };
static const char *const names[KINDS] = {"open",   "create", "list",  "look", "read", "write", "fsync",
                                         "rename", "unlink", "mkdir", "link", "lock", "map", "seek", "close"};
enum { ONCE, STAYS, KILL };

static char folder[PATH_MAX];
static size_t folder_length;
static unsigned armed_kinds;
static long target;
static int error_number, fault_mode, log_descriptor = -1;
static atomic_long count;

void fault_arm(const char *where, unsigned kinds, long nth, int error, int mode, int log) {
    strncpy(folder, where, sizeof folder - 1);
    folder_length = strlen(folder);
    target = nth, error_number = error, fault_mode = mode, log_descriptor = log;
    atomic_store(&count, 0);
    armed_kinds = kinds;
}

long fault_count(void) { return atomic_load(&count); }

static int below(const char *path) {
    return strncmp(path, folder, folder_length) == 0 &&
           (path[folder_length] == '/' || path[folder_length] == 0);
}

static void path_of_descriptor(int descriptor, char *found) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlink, link, found, PATH_MAX - 1);
    found[length < 0 ? 0 : length] = 0;
}

static void whole_path(int at, const char *path, char *found) {
    found[0] = 0;
    if (path == NULL) return;
    if (path[0] != '/') {
        if (at == AT_FDCWD) {
            if (syscall(SYS_getcwd, found, PATH_MAX) < 0) found[0] = 0;
        } else {
            path_of_descriptor(at, found);
        }
        if (path[0]) strncat(found, "/", PATH_MAX - strlen(found) - 1);
    }
    strncat(found, path, PATH_MAX - strlen(found) - 1);
}

/* Return 1 if the operation is to fail. */
static int hit(int kind, const char *path) {
    if (!(armed_kinds >> kind & 1) || !below(path)) return 0;
    long number = atomic_fetch_add(&count, 1) + 1;
    if (log_descriptor >= 0) {
        char line[PATH_MAX + 32];
        int length = snprintf(line, sizeof line, "%s %s\n", names[kind], path);
        syscall(SYS_write, log_descriptor, line, length);
    }
    if (target == 0 || (fault_mode == STAYS ? number < target : number != target)) return 0;
    if (fault_mode == KILL && kind != WRITE) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return 1;
}

static int fails(int kind, int at, const char *path) {
    if (!armed_kinds) return 0;
    int before = errno;
    char whole[PATH_MAX];
    whole_path(at, path, whole);
    int failed = hit(kind, whole);
    errno = failed ? error_number : before;
    return failed;
}

static int fails_on(int kind, int descriptor) {
    if (!armed_kinds) return 0;
    int before = errno;
    char whole[PATH_MAX];
    path_of_descriptor(descriptor, whole);
    int failed = hit(kind, whole);
    errno = failed ? error_number : before;
    return failed;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int kind_of_open(int at, const char *path, int flags) {
    struct stat found;
    if (!(flags & O_CREAT)) return OPEN;
    return syscall(SYS_newfstatat, at, path, &found, 0) == 0 ? OPEN : CREATE;
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (armed_kinds && fails(kind_of_open(AT_FDCWD, path, flags), AT_FDCWD, path)) return -1; \
        return real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (armed_kinds && fails(kind_of_open(at, path, flags), at, path)) return -1; \
        return real(at, path, flags, mode); \
    }
OPENS_AT(openat)
OPENS_AT(openat64)
#define OPENS_STREAM(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(name); \
        int flags = how[0] == 'r' ? 0 : O_CREAT; \
        if (armed_kinds && fails(kind_of_open(AT_FDCWD, path, flags), AT_FDCWD, path)) return NULL; \
        return real(path, how); \
    }
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails(LIST, AT_FDCWD, path) ? NULL : real(path);
}
#define READS_FOLDER(name, entry) \
    struct entry *name(DIR *opened) { \
        REAL(name); \
        return armed_kinds && fails_on(LIST, dirfd(opened)) ? NULL : real(opened); \
    }
READS_FOLDER(readdir, dirent)
READS_FOLDER(readdir64, dirent64)

#define LOOKS(name, buffer) \
    int name(const char *path, struct buffer *found) { \
        REAL(name); \
        return fails(LOOK, AT_FDCWD, path) ? -1 : real(path, found); \
    }
LOOKS(stat, stat)
LOOKS(lstat, stat)
LOOKS(stat64, stat64)
LOOKS(lstat64, stat64)
#define LOOKS_AT(name, buffer) \
    int name(int at, const char *path, struct buffer *found, int flags) { \
        REAL(name); \
        return fails(LOOK, at, path) ? -1 : real(at, path, found, flags); \
    }
LOOKS_AT(fstatat, stat)
LOOKS_AT(fstatat64, stat64)
#define LOOKS_ON(name, buffer) \
    int name(int descriptor, struct buffer *found) { \
        REAL(name); \
        return fails_on(LOOK, descriptor) ? -1 : real(descriptor, found); \
    }
LOOKS_ON(fstat, stat)
LOOKS_ON(fstat64, stat64)
int access(const char *path, int mode) {
    REAL(access);
    return fails(LOOK, AT_FDCWD, path) ? -1 : real(path, mode);
}

ssize_t read(int descriptor, void *data, size_t size) {
    REAL(read);
    return fails_on(READ, descriptor) ? -1 : real(descriptor, data, size);
}
#define READS_FROM(name, offset) \
    ssize_t name(int descriptor, void *data, size_t size, offset from) { \
        REAL(name); \
        return fails_on(READ, descriptor) ? -1 : real(descriptor, data, size, from); \
    }
READS_FROM(pread, off_t)
READS_FROM(pread64, off64_t)
#define SEEKS(name, offset) \
    offset name(int descriptor, offset to, int from) { \
        REAL(name); \
        return fails_on(SEEK, descriptor) ? -1 : real(descriptor, to, from); \
    }
SEEKS(lseek, off_t)
SEEKS(lseek64, off64_t)
int close(int descriptor) {
    REAL(close);
    /* It is closed all the same, as on a file server. */
    int failed = fails_on(CLOSE, descriptor), closed = real(descriptor);
    if (failed) errno = error_number;
    return failed ? -1 : closed;
}
size_t fread(void *data, size_t size, size_t times, FILE *file) {
    REAL(fread);
    return armed_kinds && fails_on(READ, fileno(file)) ? 0 : real(data, size, times, file);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    if (!fails_on(WRITE, descriptor)) return real(descriptor, data, size);
    size_t half = size / 2;
    if (half) syscall(SYS_write, descriptor, data, half);
    if (fault_mode == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return -1;
}
#define WRITES_TO(name, offset) \
    ssize_t name(int descriptor, const void *data, size_t size, offset to) { \
        REAL(name); \
        if (!fails_on(WRITE, descriptor)) return real(descriptor, data, size, to); \
        if (fault_mode == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); \
        return -1; \
    }
WRITES_TO(pwrite, off_t)
WRITES_TO(pwrite64, off64_t)
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    REAL(writev);
    if (!fails_on(WRITE, descriptor)) return real(descriptor, parts, number);
    if (fault_mode == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return -1;
}
size_t fwrite(const void *data, size_t size, size_t times, FILE *file) {
    REAL(fwrite);
    if (!armed_kinds || !fails_on(WRITE, fileno(file))) return real(data, size, times, file);
    if (fault_mode == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return 0;
}
#define ALLOCATES(name, offset) \
    int name(int descriptor, offset size) { \
        REAL(name); \
        if (!fails_on(WRITE, descriptor)) return real(descriptor, size); \
        if (fault_mode == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); \
        return -1; \
    }
ALLOCATES(ftruncate, off_t)
ALLOCATES(ftruncate64, off64_t)

int fsync(int descriptor) {
    REAL(fsync);
    return fails_on(FSYNC, descriptor) ? -1 : real(descriptor);
}
int fdatasync(int descriptor) {
    REAL(fdatasync);
    return fails_on(FSYNC, descriptor) ? -1 : real(descriptor);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return fails(RENAME, AT_FDCWD, to) ? -1 : real(from, to);
}
int renameat(int at, const char *from, int other, const char *to) {
    REAL(renameat);
    return fails(RENAME, other, to) ? -1 : real(at, from, other, to);
}
int renameat2(int at, const char *from, int other, const char *to, unsigned flags) {
    REAL(renameat2);
    return fails(RENAME, other, to) ? -1 : real(at, from, other, to, flags);
}

#define CHANGES(name, kind) \
    int name(const char *path) { \
        REAL(name); \
        return fails(kind, AT_FDCWD, path) ? -1 : real(path); \
    }
CHANGES(unlink, UNLINK)
CHANGES(rmdir, UNLINK)
CHANGES(remove, UNLINK)
int unlinkat(int at, const char *path, int flags) {
    REAL(unlinkat);
    return fails(UNLINK, at, path) ? -1 : real(at, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return fails(MKDIR, AT_FDCWD, path) ? -1 : real(path, mode);
}
int mkdirat(int at, const char *path, mode_t mode) {
    REAL(mkdirat);
    return fails(MKDIR, at, path) ? -1 : real(at, path, mode);
}
int link(const char *from, const char *to) {
    REAL(link);
    return fails(LINK, AT_FDCWD, to) ? -1 : real(from, to);
}
int linkat(int at, const char *from, int other, const char *to, int flags) {
    REAL(linkat);
    return fails(LINK, other, to) ? -1 : real(at, from, other, to, flags);
}
int flock(int descriptor, int operation) {
    REAL(flock);
    return fails_on(LOCK, descriptor) ? -1 : real(descriptor, operation);
}
#define MAPS(name, offset) \
    void *name(void *at, size_t size, int may, int flags, int descriptor, offset from) { \
        REAL(name); \
        if (descriptor >= 0 && fails_on(MAP, descriptor)) return MAP_FAILED; \
        return real(at, size, may, flags, descriptor, from); \
    }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

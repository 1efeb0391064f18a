/* Stands between a process and its disk: loaded ahead of libc (LD_PRELOAD), it counts the calls that change files
 * below one folder, and at the n-th of them kills the process, lets the call fail, does half of it, or holds it until
 * the test releases it. It can also log each call, for what a power cut may leave of them to be worked out.
 *
 * All that it knows lies in a control block, a small file mapped by every process of the tree and by the test, which
 * may change its mind at any time. The layout and the numbers are those of shim.py.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum op { CREATE, WRITE, TRUNCATE, ALLOCATE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, CHMOD, UTIME, OPEN, READ };
enum action { COUNT, KILL_BEFORE, KILL_AFTER, KILL_HALF, FAIL, SHORT, HOLD };

#define HELD_US 1000 /* between two looks of a call that is held */

struct control {
    int64_t seen;      /* matching calls since it was armed */
    int64_t acted;     /* how many of them were acted upon */
    int64_t at;        /* the first to be acted upon, from 1; 0: none */
    int64_t times;     /* how many from there on */
    uint64_t ops;      /* bits of the calls that match */
    int32_t action;
    int32_t error;     /* errno of FAIL */
    int32_t victim;    /* dies beside the process that made the call */
    int32_t holder;    /* who logs now */
    int32_t logging;
    int32_t last_op;   /* of the call that was acted upon last */
    char root[512];    /* only calls below this folder match */
    char match[128];   /* and only where the path holds this */
    char log[512];     /* file of the log */
};

struct record {
    uint32_t op, path_bytes, path2_bytes, data_bytes;
    int64_t offset, length, flags;
};

struct step {
    enum op op;
    int act; /* what is to be done to this call, COUNT: nothing */
    int logs;
    const char *path, *path2;
};

static struct control *control;

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
#define DECLARE(name) static void *real_##name

static void *real(void **known, const char *name)
{
    if (!*known)
        *known = dlsym(RTLD_NEXT, name);
    return *known;
}

/* Let this process be ruled by another control block, and die first when it is to kill. */
int shim_use(const char *path)
{
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped == MAP_FAILED)
        return -1;
    control = mapped;
    setenv("SHIM_CONTROL", path, 1);
    return 0;
}

void shim_be_victim(void)
{
    control->victim = getpid();
    setenv("SHIM_CHILD", "1", 1);
}

__attribute__((constructor)) static void begin_process(void)
{
    const char *path = getenv("SHIM_CONTROL");
    if (path && shim_use(path) == 0 && !getenv("SHIM_CHILD"))
        shim_be_victim();
}

static const char *path_of_fd(int fd, char *buffer)
{
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, buffer, PATH_MAX - 1);
    buffer[size < 0 ? 0 : size] = 0;
    return buffer;
}

static const char *path_at(int dir, const char *path, char *buffer)
{
    if (!path || path[0] == '/')
        return path;
    if (dir != AT_FDCWD)
        path_of_fd(dir, buffer);
    else if (!getcwd(buffer, PATH_MAX))
        buffer[0] = 0;
    size_t size = strlen(buffer);
    snprintf(buffer + size, PATH_MAX - size, "/%s", path);
    return buffer;
}

static int below(const char *path)
{
    size_t size = strlen(control->root);
    return path && size && !strncmp(path, control->root, size) && (path[size] == '/' || !path[size]);
}

/* Wait until calls are no longer held; return what is to be done to this one. */
static int held(void)
{
    int32_t action;
    while ((action = __atomic_load_n(&control->action, __ATOMIC_ACQUIRE)) == HOLD)
        usleep(HELD_US);
    return action;
}

static void die(void)
{
    __atomic_store_n(&control->holder, 0, __ATOMIC_RELEASE); /* for the next process under this block */
    if (control->victim && control->victim != getpid())
        kill(control->victim, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static int watched(enum op op)
{
    return control && control->ops >> op & 1;
}

/* Count the call and say what is to become of it. */
static struct step begin(enum op op, const char *path, const char *path2)
{
    struct step step = {op, COUNT, 0, path, path2};
    if (!watched(op) || !(below(path) || below(path2)))
        return step;
    if (control->logging) {
        int nobody = 0;
        while (!__atomic_compare_exchange_n(&control->holder, &nobody, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            nobody = 0;
            sched_yield();
        }
        step.logs = 1;
    }
    if (control->match[0] && !(strstr(path, control->match) || (path2 && strstr(path2, control->match))))
        return step;
    int64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    if (control->action == COUNT || control->at == 0 || number < control->at || number - control->at >= control->times)
        return step;
    control->last_op = op;
    __atomic_add_fetch(&control->acted, 1, __ATOMIC_SEQ_CST);
    step.act = control->action == HOLD ? held() : control->action;
    if (step.act == KILL_BEFORE || (step.act == KILL_HALF && op != WRITE && op != ALLOCATE))
        die();
    return step;
}

static int64_t share(const struct step *step, int64_t count)
{
    return step->act == KILL_HALF || (step->act == SHORT && count > 1) ? count / 2 : count;
}

static void put_record(const struct step *step, int64_t offset, int64_t length, int64_t flags, const void *data)
{
    const char *path2 = step->path2 ? step->path2 : "";
    struct record head = {step->op,  strlen(step->path), strlen(path2), data ? (uint32_t)length : 0,
                          offset, length, flags};
    struct iovec parts[] = {{&head, sizeof head},
                            {(void *)step->path, head.path_bytes},
                            {(void *)path2, head.path2_bytes},
                            {(void *)data, head.data_bytes}};
    int fd = syscall(SYS_openat, AT_FDCWD, control->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    syscall(SYS_writev, fd, parts, 4);
    syscall(SYS_close, fd);
}

static void finish(const struct step *step, int done, int64_t offset, int64_t length, int64_t flags, const void *data)
{
    int saved = errno;
    if (step->act == KILL_AFTER || step->act == KILL_HALF)
        die();
    if (step->logs) {
        if (done)
            put_record(step, offset, length, flags, data);
        __atomic_store_n(&control->holder, 0, __ATOMIC_RELEASE);
    }
    errno = saved;
}

/* A call that says by a negative answer that it failed. */
#define SIMPLE(OP, PATH, PATH2, LENGTH, FLAGS, CALL)                                                                   \
    ({                                                                                                                 \
        struct step step = begin(OP, PATH, PATH2);                                                                     \
        int result = step.act == FAIL ? (errno = control->error, -1) : (int)(CALL);                                    \
        finish(&step, result >= 0, 0, LENGTH, FLAGS, NULL);                                                            \
        result;                                                                                                        \
    })

DECLARE(open);
DECLARE(open64);
DECLARE(openat);
DECLARE(openat64);

static enum op opening(int flags)
{
    return flags & (O_CREAT | O_TRUNC) ? CREATE : OPEN;
}

#define OPENING(name, DIR, ...)                                                                                        \
    {                                                                                                                  \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        char buffer[PATH_MAX];                                                                                         \
        if (!watched(opening(flags)))                                                                                  \
            return REAL(name)(__VA_ARGS__, flags, mode);                                                               \
        return SIMPLE(opening(flags), path_at(DIR, path, buffer), NULL, 0, flags,                                      \
                      REAL(name)(__VA_ARGS__, flags, mode));                                                           \
    }

int open(const char *path, int flags, ...) OPENING(open, AT_FDCWD, path)
int open64(const char *path, int flags, ...) OPENING(open64, AT_FDCWD, path)
int openat(int dir, const char *path, int flags, ...) OPENING(openat, dir, dir, path)
int openat64(int dir, const char *path, int flags, ...) OPENING(openat64, dir, dir, path)

DECLARE(write);
DECLARE(pwrite);
DECLARE(pwrite64);
DECLARE(read);
DECLARE(pread);
DECLARE(pread64);

#define MOVING(OP, name, OFFSET, ...)                                                                                  \
    {                                                                                                                  \
        if (!watched(OP))                                                                                              \
            return REAL(name)(fd, data, count __VA_ARGS__);                                                            \
        char buffer[PATH_MAX];                                                                                         \
        struct step step = begin(OP, path_of_fd(fd, buffer), NULL);                                                    \
        int64_t wanted = share(&step, count);                                                                          \
        ssize_t result = step.act == FAIL ? (errno = control->error, -1)                                               \
                                          : ((count = wanted), REAL(name)(fd, data, count __VA_ARGS__));               \
        int error = errno; /* which OFFSET may set */                                                                  \
        int64_t at = OFFSET;                                                                                           \
        errno = error;                                                                                                 \
        finish(&step, result >= 0, at, result, 0, OP == WRITE ? data : NULL);                                          \
        return result;                                                                                                 \
    }
#define COMMA ,

ssize_t write(int fd, const void *data, size_t count) MOVING(WRITE, write, lseek(fd, 0, SEEK_CUR) - result)
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) MOVING(WRITE, pwrite, offset, COMMA offset)
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) MOVING(WRITE, pwrite64, offset, COMMA offset)
ssize_t read(int fd, void *data, size_t count) MOVING(READ, read, 0)
ssize_t pread(int fd, void *data, size_t count, off_t offset) MOVING(READ, pread, offset, COMMA offset)
ssize_t pread64(int fd, void *data, size_t count, off64_t offset) MOVING(READ, pread64, offset, COMMA offset)

DECLARE(writev);

/* One piece at a time: a caller has to cope with a short answer anyway. */
ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char buffer[PATH_MAX];
    if (!watched(WRITE) || count < 1 || !below(path_of_fd(fd, buffer)))
        return REAL(writev)(fd, parts, count);
    return write(fd, parts[0].iov_base, parts[0].iov_len);
}

DECLARE(preadv64v2);

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    char buffer[PATH_MAX];
    if (!watched(READ) || count < 1 || !below(path_of_fd(fd, buffer)))
        return REAL(preadv64v2)(fd, parts, count, offset, flags);
    return pread64(fd, parts[0].iov_base, parts[0].iov_len, offset);
}

DECLARE(fallocate);
DECLARE(fallocate64);
DECLARE(posix_fallocate);
DECLARE(posix_fallocate64);

#define ALLOCATING(name, FAILED, OKAY, MODE, ...)                                                                      \
    {                                                                                                                  \
        if (!watched(ALLOCATE))                                                                                        \
            return REAL(name)(__VA_ARGS__ offset, length);                                                             \
        char buffer[PATH_MAX];                                                                                         \
        struct step step = begin(ALLOCATE, path_of_fd(fd, buffer), NULL);                                              \
        length = step.act == KILL_HALF ? length / 2 : length;                                                          \
        int result = step.act == FAIL ? (errno = control->error, FAILED) : REAL(name)(__VA_ARGS__ offset, length);     \
        finish(&step, OKAY, offset, length, MODE, NULL);                                                               \
        return result;                                                                                                 \
    }

int fallocate(int fd, int mode, off_t offset, off_t length)
    ALLOCATING(fallocate, -1, result == 0, mode, fd COMMA mode COMMA)
int fallocate64(int fd, int mode, off64_t offset, off64_t length)
    ALLOCATING(fallocate64, -1, result == 0, mode, fd COMMA mode COMMA)
int posix_fallocate(int fd, off_t offset, off_t length)
    ALLOCATING(posix_fallocate, control->error, result == 0, 0, fd COMMA)
int posix_fallocate64(int fd, off64_t offset, off64_t length)
    ALLOCATING(posix_fallocate64, control->error, result == 0, 0, fd COMMA)

/* What remains is all alike: a path, or what a descriptor stands for, and an answer of 0 or -1. */
#define ON_FD(OP, name, LENGTH, PARAMETERS, ...)                                                                       \
    DECLARE(name);                                                                                                     \
    int name PARAMETERS                                                                                                \
    {                                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        if (!watched(OP))                                                                                              \
            return REAL(name)(__VA_ARGS__);                                                                            \
        return SIMPLE(OP, path_of_fd(fd, buffer), NULL, LENGTH, 0, REAL(name)(__VA_ARGS__));                           \
    }
#define ON_PATH(OP, name, DIR, LENGTH, PARAMETERS, ...)                                                                \
    DECLARE(name);                                                                                                     \
    int name PARAMETERS                                                                                                \
    {                                                                                                                  \
        char buffer[PATH_MAX];                                                                                         \
        if (!watched(OP))                                                                                              \
            return REAL(name)(__VA_ARGS__);                                                                            \
        return SIMPLE(OP, path_at(DIR, path, buffer), NULL, LENGTH, 0, REAL(name)(__VA_ARGS__));                       \
    }
#define ON_TWO(name, DIR1, DIR2, PARAMETERS, ...)                                                                      \
    DECLARE(name);                                                                                                     \
    int name PARAMETERS                                                                                                \
    {                                                                                                                  \
        char buffer[PATH_MAX], buffer2[PATH_MAX];                                                                      \
        if (!watched(RENAME))                                                                                          \
            return REAL(name)(__VA_ARGS__);                                                                            \
        return SIMPLE(RENAME, path_at(DIR1, from, buffer), path_at(DIR2, to, buffer2), 0, 0, REAL(name)(__VA_ARGS__)); \
    }

ON_FD(FSYNC, fsync, 0, (int fd), fd)
ON_FD(FSYNC, fdatasync, 0, (int fd), fd)
ON_FD(TRUNCATE, ftruncate, length, (int fd, off_t length), fd, length)
ON_FD(TRUNCATE, ftruncate64, length, (int fd, off64_t length), fd, length)
ON_FD(CHMOD, fchmod, 0, (int fd, mode_t mode), fd, mode)
ON_FD(UTIME, futimens, 0, (int fd, const struct timespec times[2]), fd, times)
ON_PATH(TRUNCATE, truncate, AT_FDCWD, length, (const char *path, off_t length), path, length)
ON_PATH(TRUNCATE, truncate64, AT_FDCWD, length, (const char *path, off64_t length), path, length)
ON_PATH(UNLINK, unlink, AT_FDCWD, 0, (const char *path), path)
ON_PATH(flags & AT_REMOVEDIR ? RMDIR : UNLINK, unlinkat, dir, 0, (int dir, const char *path, int flags), dir, path, flags)
ON_PATH(RMDIR, rmdir, AT_FDCWD, 0, (const char *path), path)
ON_PATH(MKDIR, mkdir, AT_FDCWD, 0, (const char *path, mode_t mode), path, mode)
ON_PATH(MKDIR, mkdirat, dir, 0, (int dir, const char *path, mode_t mode), dir, path, mode)
ON_PATH(CHMOD, chmod, AT_FDCWD, 0, (const char *path, mode_t mode), path, mode)
ON_PATH(CHMOD, fchmodat, dir, 0, (int dir, const char *path, mode_t mode, int flags), dir, path, mode, flags)
ON_PATH(UTIME, utimensat, dir, 0, (int dir, const char *path, const struct timespec times[2], int flags), dir, path,
        times, flags)
ON_TWO(rename, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), from, to)
ON_TWO(renameat, dir, dir2, (int dir, const char *from, int dir2, const char *to), dir, from, dir2, to)

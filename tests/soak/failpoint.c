/* Let the n-th allocation of the core, or the n-th call on files of a folder, and some more fail. For LD_PRELOAD.
 *
 * An allocation counts if the call comes from the mapped core. A call on a file counts if its path lies in the folder,
 * or its file was opened there. `failpoint` arms it: 0 only counts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static uintptr_t low, high;
static char folder[4096];
static long fail_at = -1, many;
static atomic_long seen;
static unsigned char ours[65536];

void failpoint(uintptr_t from, uintptr_t to, const char *place, long n, long more) {
    low = from; high = to; fail_at = n; many = more;
    strncpy(folder, place, sizeof folder - 1);
    atomic_store(&seen, 0);
}
long failpoint_seen(void) { return atomic_load(&seen); }

static int now(int error) {
    if (fail_at < 0) return 0;
    long number = atomic_fetch_add(&seen, 1) + 1;
    if (!fail_at || number < fail_at || number - fail_at >= many) return 0;
    errno = error;
    return 1;
}
#define CORE ((uintptr_t)__builtin_return_address(0) >= low && (uintptr_t)__builtin_return_address(0) < high)
#define NO_MEMORY (high && CORE && now(ENOMEM))
static int within(const char *path) { return folder[0] && path && strstr(path, folder) != NULL; }
static int known(int fd) { return folder[0] && fd >= 0 && fd < 65536 && ours[fd]; }

void *malloc(size_t n) { return NO_MEMORY ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return NO_MEMORY ? NULL : __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return NO_MEMORY ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n) { return NO_MEMORY ? NULL : __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) {
    if (NO_MEMORY || !(*p = __libc_memalign(a, n))) return ENOMEM;
    return 0;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPENS(name, head, args, path) \
    int name head { \
        NEXT(name); mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        int in = within(path); \
        if (in && now(flags & (O_WRONLY | O_RDWR) ? ENOSPC : EIO)) return -1; \
        int fd = next args; \
        if (fd >= 0 && fd < 65536) ours[fd] = in; \
        return fd; \
    }
OPENS(open, (const char *path, int flags, ...), (path, flags, mode), path)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), path)
OPENS(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), path)
OPENS(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), path)

#define ON_FILE(kind, name, head, args, error) kind name head { NEXT(name); return known(fd) && now(error) ? -1 : next args; }
ON_FILE(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), EIO)
ON_FILE(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), EIO)
ON_FILE(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), EIO)
ON_FILE(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n), ENOSPC)
ON_FILE(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at), ENOSPC)
ON_FILE(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), ENOSPC)
ON_FILE(int, fsync, (int fd), (fd), EIO)
ON_FILE(int, ftruncate, (int fd, off_t n), (fd, n), ENOSPC)
ON_FILE(int, ftruncate64, (int fd, off64_t n), (fd, n), ENOSPC)
#define ON_PATH(name, head, args, error) int name head { NEXT(name); return within(path) && now(error) ? -1 : next args; }
ON_PATH(rename, (const char *path, const char *to), (path, to), ENOSPC)
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC)
ON_PATH(unlink, (const char *path), (path), EIO)
ON_PATH(rmdir, (const char *path), (path), EIO)

#define MAPS(name, offset) \
    void *name(void *at, size_t n, int prot, int flags, int fd, offset from) { \
        NEXT(name); \
        if ((known(fd) || (fd == -1 && high && CORE)) && now(ENOMEM)) return MAP_FAILED; \
        return next(at, n, prot, flags, fd, from); \
    }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

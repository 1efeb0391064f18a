/* Loaded ahead of libc (LD_PRELOAD): lets the name $LEAD_NAME lead to $LEAD_FIRST, then to $LEAD_SECOND, for any
 * resolver that asks libc, and appends a byte to the file $LEAD_COUNT at each attempt to connect to the first.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    __typeof__(&getaddrinfo) real = dlsym(RTLD_NEXT, "getaddrinfo");
    const char *name = getenv("LEAD_NAME");
    if (!node || !name || strcmp(node, name))
        return real(node, service, hints, found);
    int failed = real(getenv("LEAD_FIRST"), service, hints, found);
    if (failed)
        return failed;
    struct addrinfo *last = *found;
    while (last->ai_next)
        last = last->ai_next;
    return real(getenv("LEAD_SECOND"), service, hints, &last->ai_next); /* glibc frees each entry by itself */
}

int connect(int fd, const struct sockaddr *address, socklen_t length)
{
    __typeof__(&connect) real = dlsym(RTLD_NEXT, "connect");
    const char *first = getenv("LEAD_FIRST");
    if (first && address->sa_family == AF_INET &&
        ((const struct sockaddr_in *)address)->sin_addr.s_addr == inet_addr(first)) {
        int count = open(getenv("LEAD_COUNT"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (count >= 0) {
            (void)!write(count, "", 1);
            close(count);
        }
    }
    return real(fd, address, length);
}

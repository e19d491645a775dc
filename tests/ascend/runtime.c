/* What an object made from Ascend's linalg IR calls besides libmlir and libm.

   Buffers of one program come from an arena that is filled with a chosen byte, so that a lane which no load has
   written differs between two runs with different bytes, and that is emptied when the program is done. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 26 };

struct chunk {
    struct chunk *next;
    size_t size, used;
    unsigned char bytes[];
};

static struct chunk *chunks;
static int fill_byte;

void ascend_arena_reset(int byte) {
    fill_byte = byte;
    while (chunks && chunks->next) {
        struct chunk *rest = chunks->next;
        free(chunks);
        chunks = rest;
    }
    if (chunks) chunks->used = 0;
}

void *ascend_arena_alloc(uint64_t size) {
    size = (size + 63) & ~(uint64_t)63;
    if (!chunks || chunks->size - chunks->used < size) {
        size_t room = size > CHUNK ? size : CHUNK;
        struct chunk *fresh = malloc(sizeof(struct chunk) + room);
        if (!fresh) abort();
        fresh->next = chunks;
        fresh->size = room;
        fresh->used = 0;
        chunks = fresh;
    }
    void *bytes = chunks->bytes + chunks->used;
    chunks->used += size;
    memset(bytes, fill_byte, size);
    return bytes;
}

/* float to bfloat16, round to nearest even, as the compiler's own helper would; the compiler expects it in xmm0. */
typedef float bf16_carrier;
bf16_carrier __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        bits |= 0x00400000;
    else
        bits += 0x7fff + ((bits >> 16) & 1);
    bits >>= 16;
    memcpy(&value, &bits, 4);
    return value;
}
